//! Which columns of tables are features and which is the label, by the settings, the model and the
//! first file.

use std::collections::HashSet;
use std::path::Path;

use super::{Opening, difference};
use crate::error::{Error, Result};
use crate::feature_plan::{AUTO, ColumnPlan};
use crate::files::{self, listed, table};
use crate::guess;
use crate::resolve::LabelPlace;
use crate::task::LabelName;

impl Opening<'_> {
    /// The columns of a table that are features, in their order; `None` for all except the label.
    pub(super) fn feature_columns(&self) -> Result<Option<Vec<ColumnPlan>>> {
        let numbers = |names: &Vec<String>| -> Vec<ColumnPlan> {
            names.iter().map(|name| ColumnPlan::number(name)).collect()
        };
        let known = self.plan.clone().or(self.columns.as_ref().map(numbers));
        let named = self.wanted.named_columns();
        let (Some(plan), Some(named)) = (&known, &named) else {
            return Ok(known.or(named.as_ref().map(numbers)));
        };
        let known: Vec<String> = plan.iter().map(|plan| plan.name.clone()).collect();
        let (mut a, mut b) = (known.clone(), named.clone());
        a.sort_unstable();
        b.sort_unstable();
        // The settings leave out some of those that are named.
        let is_part = || a.iter().all(|name| b.binary_search(name).is_ok());
        if a == b || self.wanted.model.is_none() && is_part() {
            return Ok(Some(plan.clone()));
        }
        let (path, part) = (&self.wanted.spec.path, named.join(","));
        Err(Error::Usage(format!(
            "`{}` {path}#{part}: expected the columns that the model was trained on: {}; help: leave out #{part}: columns are \
             found by their names",
            self.wanted.setting,
            difference(&known, named)
        )))
    }

    /// The column of labels if none is given: the one of the other files, else the last column that
    /// is no feature and not left out.
    pub(super) fn label_column(
        &self,
        path: &Path,
        columns: &[String],
        features: &HashSet<&str>,
    ) -> Result<String> {
        match &self.label {
            Some(LabelName::Column(name)) if table::has_label(columns, name) => {
                return Ok(name.clone());
            }
            // Only if the features have names as well, this table should have the same ones.
            Some(LabelName::Column(name)) if self.columns.is_some() => {
                return Err(self.no_label(path, name, columns));
            }
            _ => {}
        }
        let drop = &self.wanted.table.drop;
        let is_other = |name: &str| features.contains(name) || drop.iter().any(|one| one == name);
        let last = guess::label_column(columns, is_other);
        last.cloned().ok_or_else(|| {
            Error::Data(format!(
                "{}: expected a column of labels besides the features, got none; help: give `{}` FILE",
                path.display(),
                self.wanted.labels_setting()
            ))
        })
    }

    /// The column of a table that holds only labels, if none is given: the one of the other files,
    /// else the last.
    pub(super) fn only_column(&self, path: &Path) -> Result<String> {
        let columns = table::columns(path)?;
        match &self.label {
            Some(LabelName::Column(name)) if table::has_label(&columns, name) => Ok(name.clone()),
            Some(LabelName::Column(name)) if columns.len() > 1 => {
                Err(self.no_label(path, name, &columns))
            }
            _ => guess::label_column(&columns, |_| false)
                .cloned()
                .ok_or_else(|| Error::Internal("a table without columns".into())),
        }
    }

    /// The plan that the settings ask for; `None` if they leave columns as they are.
    pub(super) fn plan_of_settings(&self) -> Result<Option<Vec<ColumnPlan>>> {
        let (settings, paths) = (self.wanted.table, &self.files.paths);
        let asked = [
            ("drop", &settings.drop),
            ("categorical", &settings.categorical),
        ];
        let Some((setting, names)) = asked.into_iter().find(|(_, names)| !names.is_empty()) else {
            return Ok(None);
        };
        if !paths.iter().all(|path| files::is_table(path)) {
            return Err(Error::Usage(format!(
                "`{setting}` {}: expected tables (.csv, .tsv, .parquet) as `{}`, got {}; help: leave out `{setting}`",
                names.join(","),
                self.wanted.setting,
                self.wanted.spec.path
            )));
        }
        let features = self.kept_columns(&paths[0])?;
        if settings.categorical.is_empty() {
            return Ok(Some(features));
        }
        let names: Vec<String> = features.iter().map(|plan| plan.name.clone()).collect();
        let known: HashSet<&String> = names.iter().collect();
        let is_known = |name: &&String| *name == AUTO || known.contains(name);
        if let Some(name) = settings.categorical.iter().find(|name| !is_known(name)) {
            let what = "feature";
            return Err(not_a_column("categorical", name, &paths[0], what, &names));
        }
        let survey_of = |path| {
            table::survey(
                path,
                &features,
                &settings.categorical,
                self.wanted.cache_dir,
            )
        };
        let mut all = survey_of(&paths[0])?;
        for path in &paths[1..] {
            all.merge(survey_of(path)?);
        }
        table::plan(&all, &settings.categorical, &self.wanted.spec.path).map(Some)
    }

    /// The columns of the first table that are features, as numbers.
    fn kept_columns(&self, path: &Path) -> Result<Vec<ColumnPlan>> {
        let (columns, drop) = (table::columns(path)?, &self.wanted.table.drop);
        if let Some(name) = drop.iter().find(|name| !columns.contains(name)) {
            return Err(not_a_column("drop", name, path, "column", &columns));
        }
        let named = self.wanted.named_columns();
        let features = named.iter().flatten().map(String::as_str).collect();
        let label = match &self.files.labels {
            LabelPlace::Named(name) => Some(name.clone()),
            LabelPlace::Default => Some(self.label_column(path, &columns, &features)?),
            _ => None,
        };
        let labels = label
            .iter()
            .flat_map(|label| table::label_names(&columns, label));
        let labels: HashSet<&str> = labels.collect();
        if let Some(label) = drop.iter().find(|name| labels.contains(&***name)) {
            return Err(Error::Usage(format!(
                "`drop` {label}: expected columns of features, got the label; help: leave it out of `drop`"
            )));
        }
        let drop: HashSet<&String> = drop.iter().collect();
        let is_kept = |name: &&String| !drop.contains(name) && !labels.contains(&***name);
        let kept = named.as_ref().unwrap_or(&columns).iter().filter(is_kept);
        Ok(kept.map(|name| ColumnPlan::number(name)).collect())
    }
}

fn not_a_column(setting: &str, name: &str, path: &Path, what: &str, columns: &[String]) -> Error {
    let help = match columns.iter().any(|column| column.contains(',')) {
        true => {
            "give one of these; commas separate names, so a column with a comma in its name has to be renamed"
        }
        false => "give one of these",
    };
    Error::Usage(format!(
        "`{setting}` {name}: no such {what}: {} has {}; help: {help}",
        path.display(),
        listed(columns)
    ))
}
