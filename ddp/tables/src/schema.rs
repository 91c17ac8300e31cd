//! Which columns of a table are features and labels: by the settings, the model, the files before
//! it, and their names.

use std::collections::HashSet;
use std::path::Path;

use ddp_data::files::io::refuse;
use ddp_data::resolve::{FoundFiles, LabelPlace};
use ddp_data::setting::{CATEGORICAL, DROP};
use ddp_data::tables::{KnownColumns, WantedColumns};
use ddp_data::words::{difference, listed};
use ddp_data::{AUTO, COMMON, ColumnPlan, Error, LabelName, Missing, Result, bail, ensure};
use ddp_kernels::setting::SettingName;

use crate::columns::{Columns, TableRequest, has_label, label_names};
use crate::plan::TablePlan;
use crate::source::Table;
use crate::{flat, guess, plan};

/// What the columns of a table are.
pub(crate) struct Schema {
    pub(crate) request: TableRequest,
    /// The columns that are neither features nor labels.
    pub(crate) left_out: Vec<String>,
    /// What was chosen, for people.
    pub(crate) notes: Vec<String>,
    /// The columns that features come from, by the settings or the model; `None` if these leave
    /// them as they are.
    pub(crate) plan: Option<Vec<ColumnPlan>>,
}

impl Schema {
    /// What is wanted of `table`.
    pub(crate) fn of(table: &Table, wanted: &WantedColumns<'_>) -> Result<Schema> {
        let settling = Settling {
            path: &table.path,
            names: table.rows.names(),
            files: wanted.files,
            known: wanted.known,
        };
        match wanted.labels_alone {
            None => settling.rows(),
            Some(part) => settling.labels(part),
        }
    }
}

/// A table whose columns are settled.
struct Settling<'a> {
    path: &'a Path,
    /// The names of its columns.
    names: &'a [String],
    files: &'a FoundFiles<'a>,
    known: &'a KnownColumns,
}

impl Settling<'_> {
    /// Of a table that holds only labels.
    fn labels(&self, part: Option<&str>) -> Result<Schema> {
        let label = part.map_or_else(|| self.only_column(), |part| Ok(part.into()))?;
        Ok(Schema {
            request: TableRequest {
                label: Some(label),
                labels_are_texts: self.files.has_text_classes(),
                ..TableRequest::default()
            },
            left_out: Vec::new(),
            notes: Vec::new(),
            plan: None,
        })
    }

    /// Of a table with features, and perhaps the label.
    fn rows(&self) -> Result<Schema> {
        let (files, known) = (self.files, &self.known.plan);
        let planned = match (known, files.model) {
            (None, None) => self.plan_of_settings()?,
            _ => None,
        };
        let (chosen, notes) = planned.map(|it| (it.columns, it.notes)).unzip();
        let plan: Option<Vec<ColumnPlan>> = chosen.or(known.clone());
        let features = self.feature_columns(plan.as_ref())?;
        let names: HashSet<&str> = features.iter().flatten().map(|plan| &*plan.name).collect();
        let label = self.label_of(&names)?;
        let labels = label.as_ref();
        let labels = labels.map_or(Vec::new(), |label| label_names(self.names, label));
        if let Some(label) = labels.iter().find(|label| names.contains(**label)) {
            bail!(
                Usage,
                "{} {label}: the label must not be a feature of {} as well: a model that sees it learns \
                 nothing; help: give another label, or other features as in {} {}#a,b",
                files.labels_setting(),
                self.path.display(),
                files.setting,
                files.spec.path
            );
        }
        let is_other = |name: &&String| !labels.contains(&&***name) && !names.contains(&***name);
        let mut left_out: Vec<String> = self.names.iter().filter(is_other).cloned().collect();
        let count = features.as_ref().map_or(left_out.len(), Vec::len);
        let may_hold_label = features.is_none() && files.labels == LabelPlace::Unwanted;
        self.check_unnamed(count, may_hold_label)?;
        let all = || {
            left_out
                .drain(..)
                .map(|name| ColumnPlan::number(&name))
                .collect()
        };
        let features: Vec<ColumnPlan> = features.unwrap_or_else(all);
        if features.is_empty() && plan.is_none() {
            return Err(refuse(
                self.path,
                format!(
                    "it has no column besides the label \"{}\"; help: if this line holds several names, put commas \
                     between them",
                    self.names[0]
                ),
            ));
        }
        Ok(Schema {
            request: TableRequest {
                label,
                features,
                allows_missing: files.allows_missing(),
                labels_are_texts: files.has_text_classes(),
                leaves_out: (files.model.is_some() || files.chooses_columns())
                    && !files.has_text_classes(),
                is_for_model: files.model.is_some(),
                is_kept: false,
            },
            left_out,
            notes: notes.unwrap_or_default(),
            plan,
        })
    }

    /// An error if `count` columns of a table are not the features of a model that was trained on
    /// rows without names, or may be something else.
    fn check_unnamed(&self, count: usize, may_hold_label: bool) -> Result<()> {
        let (Some(model), None) = (self.files.model, &self.known.columns) else {
            return Ok(());
        };
        let width: usize = model.row_shape.iter().product();
        let what = if count != width {
            format!("{width} columns of features, as many as the model was trained on, got {count}")
        } else if may_hold_label {
            "the names of the features, since the model was trained on rows without names, got a table that may hold the \
             label as well"
                .into()
        } else {
            return Ok(());
        };
        let (path, setting) = (self.path.display(), self.files.setting);
        bail!(
            "{setting} {path}: expected {what}; help: name the columns in the model's order, as in {path}#a,b"
        )
    }

    /// The columns that are features, in their order; `None` for all except the label.
    fn feature_columns(&self, plan: Option<&Vec<ColumnPlan>>) -> Result<Option<Vec<ColumnPlan>>> {
        let files = self.files;
        let numbers = |names: &Vec<String>| -> Vec<ColumnPlan> {
            names.iter().map(|name| ColumnPlan::number(name)).collect()
        };
        let known = plan.cloned().or(self.known.columns.as_ref().map(numbers));
        let named = files.named_columns();
        let (Some(plan), Some(named)) = (&known, &named) else {
            return Ok(known.or(named.as_ref().map(numbers)));
        };
        let names: Vec<String> = plan.iter().map(|plan| plan.name.clone()).collect();
        // The settings leave out some of those that are named.
        let is_part = names.iter().all(|name| named.contains(name));
        let is_whole = names.len() == named.len() || files.model.is_none();
        ensure!(
            is_part && is_whole,
            Usage,
            "{} {}#{}: expected the columns that the model was trained on: {}; help: leave out #{}: columns are \
             found by their names",
            files.setting,
            files.spec.path,
            named.join(","),
            difference(&names, named),
            named.join(",")
        );
        Ok(known)
    }

    /// The column of labels, if there is one: the one that is named, else the one of the other
    /// files, else the last column that is neither a feature nor left out.
    fn label_of(&self, features: &HashSet<&str>) -> Result<Option<String>> {
        match &self.files.labels {
            LabelPlace::Named(name) => return Ok(Some(name.clone())),
            LabelPlace::Default => {}
            LabelPlace::Files(..)
            | LabelPlace::Beside(_)
            | LabelPlace::Given(_)
            | LabelPlace::Unwanted => return Ok(None),
        }
        // Only if the features have names as well, this table should have the same ones.
        let known = self.known_label(self.known.columns.is_some())?;
        if known.is_some() {
            return Ok(known);
        }
        let drop = self.files.dropped();
        let is_other = |name: &str| features.contains(name) || drop.iter().any(|one| one == name);
        let last = guess::label_column(self.names, is_other).cloned();
        ensure!(
            last.is_some(),
            "{}: expected a column of labels besides the features, got none; help: give {} FILE",
            self.path.display(),
            self.files.labels_setting()
        );
        Ok(last)
    }

    /// The column of a table that holds only labels, if none is given: the one of the other files,
    /// else the last.
    fn only_column(&self) -> Result<String> {
        let known = self.known_label(self.names.len() > 1)?;
        let last = known.or_else(|| self.names.last().cloned());
        last.ok_or_else(|| Error::Internal("a table without columns".into()))
    }

    /// The column of labels in other files, if this table has it, too; an error if it must.
    fn known_label(&self, must_be_there: bool) -> Result<Option<String>> {
        match &self.known.label {
            Some(LabelName::Column(name)) if has_label(self.names, name) => Ok(Some(name.clone())),
            Some(LabelName::Column(name)) if must_be_there => Err(self.no_label(name)),
            _ => Ok(None),
        }
    }

    /// The plan that the settings ask for, by the cells of all files; `None` if they leave columns
    /// as they are.
    fn plan_of_settings(&self) -> Result<Option<TablePlan>> {
        let (request, paths) = (self.files.request, &self.files.paths);
        let (categorical, missing) = (&request.table.categorical, request.table.missing);
        let surveys = !categorical.is_empty() || missing == Missing::Indicator;
        if request.table.drop.is_empty() && !surveys {
            return Ok(None);
        }
        let wanted = self.kept_columns()?;
        if !surveys {
            return Ok(Some(TablePlan {
                columns: wanted.features,
                notes: Vec::new(),
            }));
        }
        let names = wanted.features.iter().map(|plan| plan.name.clone());
        let names: Vec<String> = names.collect();
        let known: HashSet<&String> = names.iter().collect();
        let is_known = |name: &&String| [AUTO, COMMON].contains(&&***name) || known.contains(name);
        if let Some(name) = categorical.iter().find(|name| !is_known(name)) {
            return Err(self.not_a_column(CATEGORICAL, name, "feature", &names));
        }
        let cache_dir = request.cache_dir.as_deref();
        let survey_of = |path| flat::survey(path, &wanted, categorical, cache_dir);
        let mut all = survey_of(&paths[0])?;
        for path in &paths[1..] {
            all.merge(survey_of(path)?);
        }
        let mut planned = plan::plan(&all, &request.table, &self.files.spec.path)?;
        let unnamed = self.unnamed();
        if !unnamed.is_empty() {
            let count = unnamed.len();
            planned.notes.push(format!(
                "columns without a name, as an index has, are left out: {count}"
            ));
        }
        Ok(Some(planned))
    }

    /// The columns without a name that are left out.
    fn unnamed(&self) -> Vec<&String> {
        let is_common = self.files.chooses_columns() && self.files.named_columns().is_none();
        if is_common {
            plan::unnamed(self.names)
        } else {
            Vec::new()
        }
    }

    /// The label, and the columns that are features, as numbers.
    fn kept_columns(&self) -> Result<TableRequest> {
        let drop = self.files.dropped();
        if let Some(name) = drop.iter().find(|name| !self.names.contains(name)) {
            return Err(self.not_a_column(DROP, name, "column", self.names));
        }
        let named = self.files.named_columns();
        let label = self.label_of(&named.iter().flatten().map(String::as_str).collect())?;
        // What the user named is checked before what columns hold.
        let mut wanted = TableRequest {
            label,
            ..TableRequest::default()
        };
        let label = &wanted.label;
        Columns::choose(self.path, &wanted, self.names)?;
        let labels = label.iter();
        let labels = labels.flat_map(|label| label_names(self.names, label));
        let labels: HashSet<&str> = labels.collect();
        if let Some(label) = drop.iter().find(|name| labels.contains(&***name)) {
            bail!(
                Usage,
                "{DROP} {label}: expected columns of features, got the label; help: leave it out of {DROP}"
            );
        }
        let drop: HashSet<&String> = drop.iter().chain(self.unnamed()).collect();
        let is_kept = |name: &&String| !drop.contains(name) && !labels.contains(&***name);
        let kept = named
            .as_deref()
            .unwrap_or(self.names)
            .iter()
            .filter(is_kept);
        wanted.features = kept.map(|name| ColumnPlan::number(name)).collect();
        Ok(wanted)
    }

    /// The error of a table without the label of the other files.
    fn no_label(&self, name: &str) -> Error {
        Error::Data(format!(
            "{}: expected labels in a column \"{name}\", as in the other files for this model, got the columns {}; \
             help: if they have another name, give {} '#COLUMN' or FILE#COLUMN; a file without labels can only be \
             predicted",
            self.path.display(),
            listed(self.names),
            self.files.labels_setting()
        ))
    }

    fn not_a_column(
        &self,
        setting: SettingName<'_>,
        name: &str,
        what: &str,
        columns: &[String],
    ) -> Error {
        Error::Usage(format!(
            "{setting} {name}: no such {what}: {} has {}; help: give one of these, without commas in their names",
            self.path.display(),
            listed(columns)
        ))
    }
}
