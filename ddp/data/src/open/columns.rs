//! Which columns of tables are features and which is the label, by the settings, the model and the
//! first file.

use std::collections::HashSet;
use std::path::Path;

use ddp_kernels::setting::SettingName;

use super::{Opening, difference};
use crate::error::{Error, Result, bail, ensure};
use crate::feature_plan::{AUTO, ColumnPlan};
use crate::files::{self, listed, table};
use crate::guess;
use crate::resolve::LabelPlace;
use crate::setting::{CATEGORICAL, DROP};
use crate::task::LabelName;

impl Opening<'_> {
    /// The columns of a table that are features, in their order; `None` for all except the label.
    pub(super) fn feature_columns(&self) -> Result<Option<Vec<ColumnPlan>>> {
        let numbers = |names: &Vec<String>| -> Vec<ColumnPlan> {
            names.iter().map(|name| ColumnPlan::number(name)).collect()
        };
        let known = self.plan.clone().or(self.columns.as_ref().map(numbers));
        let named = self.files.named_columns();
        let (Some(plan), Some(named)) = (&known, &named) else {
            return Ok(known.or(named.as_ref().map(numbers)));
        };
        let known: Vec<String> = plan.iter().map(|plan| plan.name.clone()).collect();
        // The settings leave out some of those that are named.
        let is_part = known.iter().all(|name| named.contains(name));
        let is_whole = known.len() == named.len() || self.files.model.is_none();
        ensure!(
            is_part && is_whole,
            Usage,
            "{} {}#{}: expected the columns that the model was trained on: {}; help: leave out #{}: columns are \
             found by their names",
            self.files.setting,
            self.files.spec.path,
            named.join(","),
            difference(&known, named),
            named.join(",")
        );
        Ok(Some(plan.clone()))
    }

    /// The column of labels in a table with these columns, if it has one: the one that is named,
    /// else the one of the other files, else the last column that is neither a feature nor left
    /// out.
    pub(super) fn label_of(
        &self,
        path: &Path,
        columns: &[String],
        features: &HashSet<&str>,
    ) -> Result<Option<String>> {
        match (&self.files.labels, &self.label) {
            (LabelPlace::Named(name), _) => return Ok(Some(name.clone())),
            (LabelPlace::Default, Some(LabelName::Column(name))) => {
                if table::has_label(columns, name) {
                    return Ok(Some(name.clone()));
                }
                // Only if the features have names as well, this table should have the same ones.
                if self.columns.is_some() {
                    return Err(self.no_label(path, name, columns));
                }
            }
            (LabelPlace::Default, _) => {}
            _ => return Ok(None),
        }
        let drop = self.files.dropped();
        let is_other = |name: &str| features.contains(name) || drop.iter().any(|one| one == name);
        let last = guess::label_column(columns, is_other).cloned();
        ensure!(
            last.is_some(),
            "{}: expected a column of labels besides the features, got none; help: give {} FILE",
            path.display(),
            self.files.labels_setting()
        );
        Ok(last)
    }

    /// The column of a table that holds only labels, if none is given: the one of the other files,
    /// else the last.
    pub(super) fn only_column(&self, path: &Path) -> Result<String> {
        let columns = table::columns(path)?;
        if let Some(LabelName::Column(name)) = &self.label {
            if table::has_label(&columns, name) {
                return Ok(name.clone());
            }
            if columns.len() > 1 {
                return Err(self.no_label(path, name, &columns));
            }
        }
        let last = guess::label_column(&columns, |_| false).cloned();
        last.ok_or_else(|| Error::Internal("a table without columns".into()))
    }

    /// The plan that the settings ask for; `None` if they leave columns as they are.
    pub(super) fn plan_of_settings(&self) -> Result<Option<Vec<ColumnPlan>>> {
        let (settings, paths) = (&self.files.request.table, &self.files.paths);
        let (drop, categorical) = (&settings.drop[..], &settings.categorical[..]);
        let (setting, names) = match (drop, categorical) {
            ([], []) => return Ok(None),
            ([], names) => (CATEGORICAL, names),
            (names, _) => (DROP, names),
        };
        ensure!(
            paths.iter().all(|path| files::is_table(path)),
            Usage,
            "{setting} {}: expected tables (.csv, .tsv, .parquet) as {}, got {}; help: leave out {setting}",
            names.join(","),
            self.files.setting,
            self.files.spec.path
        );
        let features = self.kept_columns(&paths[0])?;
        if categorical.is_empty() {
            return Ok(Some(features));
        }
        let names: Vec<String> = features.iter().map(|plan| plan.name.clone()).collect();
        let known: HashSet<&String> = names.iter().collect();
        let is_known = |name: &&String| *name == AUTO || known.contains(name);
        if let Some(name) = categorical.iter().find(|name| !is_known(name)) {
            return Err(not_a_column(
                CATEGORICAL,
                name,
                &paths[0],
                "feature",
                &names,
            ));
        }
        let survey = |path: &Path| {
            let open = table::opener(path)?;
            table::survey(
                path,
                open,
                &features,
                categorical,
                self.files.request.cache_dir.as_deref(),
            )
        };
        let mut all = survey(&paths[0])?;
        for path in &paths[1..] {
            all.merge(survey(path)?);
        }
        table::plan(&all, categorical, &self.files.spec.path).map(Some)
    }

    /// The columns of the first table that are features, as numbers.
    fn kept_columns(&self, path: &Path) -> Result<Vec<ColumnPlan>> {
        let (columns, drop) = (table::columns(path)?, self.files.dropped());
        if let Some(name) = drop.iter().find(|name| !columns.contains(name)) {
            return Err(not_a_column(DROP, name, path, "column", &columns));
        }
        let named = self.files.named_columns();
        let features = named.iter().flatten().map(String::as_str).collect();
        let label = self.label_of(path, &columns, &features)?;
        let labels = label
            .iter()
            .flat_map(|label| table::label_names(&columns, label));
        let labels: HashSet<&str> = labels.collect();
        if let Some(label) = drop.iter().find(|name| labels.contains(&***name)) {
            bail!(
                Usage,
                "{DROP} {label}: expected columns of features, got the label; help: leave it out of {DROP}"
            );
        }
        let drop: HashSet<&String> = drop.iter().collect();
        let is_kept = |name: &&String| !drop.contains(name) && !labels.contains(&***name);
        let kept = named.as_ref().unwrap_or(&columns).iter().filter(is_kept);
        Ok(kept.map(|name| ColumnPlan::number(name)).collect())
    }

    /// The error of a table without the label of the other files.
    fn no_label(&self, path: &Path, name: &str, columns: &[String]) -> Error {
        Error::Data(format!(
            "{}: expected labels in a column \"{name}\", as in the other files for this model, got the columns {}; \
             help: if they have another name, give {} '#COLUMN' or FILE#COLUMN; a file without labels can only be \
             predicted",
            path.display(),
            listed(columns),
            self.files.labels_setting()
        ))
    }
}

fn not_a_column(
    setting: SettingName<'_>,
    name: &str,
    path: &Path,
    what: &str,
    columns: &[String],
) -> Error {
    Error::Usage(format!(
        "{setting} {name}: no such {what}: {} has {}; help: give one of these, without commas in their names",
        path.display(),
        listed(columns)
    ))
}
