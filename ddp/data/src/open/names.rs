//! Which columns of a table, or which arrays of a file, are features and labels: by the settings,
//! the model, the first file, and their names.

use std::collections::HashSet;
use std::path::Path;

use ddp_kernels::setting::SettingName;

use crate::error::{Error, Result, bail, ensure};
use crate::features::{AUTO, ColumnPlan};
use crate::files::table::{self, convert, listed, survey};
use crate::files::{self, Contents};
use crate::guess;
use crate::open::{Opening, difference};
use crate::resolve::{FoundFiles, LabelPlace};
use crate::setting::{CATEGORICAL, DATA, DROP, LABELS};
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
        let columns = files::columns(path)?;
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
        let cache_dir = self.files.request.cache_dir.as_deref();
        let survey_of = |path: &Path| {
            let open = files::opener(path)?;
            convert::survey(path, open, &features, categorical, cache_dir)
        };
        let mut all = survey_of(&paths[0])?;
        for path in &paths[1..] {
            all.merge(survey_of(path)?);
        }
        survey::plan(&all, categorical, &self.files.spec.path).map(Some)
    }

    /// The columns of the first table that are features, as numbers.
    fn kept_columns(&self, path: &Path) -> Result<Vec<ColumnPlan>> {
        let (columns, drop) = (files::columns(path)?, self.files.dropped());
        if let Some(name) = drop.iter().find(|name| !columns.contains(name)) {
            return Err(not_a_column(DROP, name, path, "column", &columns));
        }
        let named = self.files.named_columns();
        let features = named.iter().flatten().map(String::as_str).collect();
        let label = self.label_of(path, &columns, &features)?;
        let labels = label.iter();
        let labels = labels.flat_map(|label| table::label_names(&columns, label));
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

/// Names of features and of their labels. Case does not matter; the same suffix may follow both.
const PAIRS: [(&str, &str); 8] = [
    ("x", "y"),
    ("features", "labels"),
    ("features", "targets"),
    ("data", "target"),
    ("data", "labels"),
    ("images", "labels"),
    ("inputs", "targets"),
    ("inputs", "labels"),
];
/// Suffixes in the order in which they are looked for to train, and to evaluate.
const TRAIN: [&str; 3] = ["", "_train", "_training"];
const EVALUATE: [&str; 4] = ["_val", "_valid", "_validation", "_test"];

fn suffixes(to_evaluate: bool) -> impl Iterator<Item = &'static str> {
    let (first, second): (&[&str], &[&str]) = match to_evaluate {
        true => (&EVALUATE, &TRAIN),
        false => (&TRAIN, &EVALUATE),
    };
    first.iter().chain(second).copied()
}

impl Opening<'_> {
    /// The indices of the arrays of features and labels: by the names given, else by the names in
    /// `PAIRS`.
    pub(super) fn arrays(
        &self,
        contents: &Contents,
        path: &Path,
    ) -> Result<(usize, Option<usize>)> {
        let files = self.files;
        let keys = keys(contents);
        let to_evaluate = files.model.is_some();
        let looks_for_labels = files.labels == LabelPlace::Default;
        let pairs = || pairs(&keys, to_evaluate);
        let like_elsewhere = |features: usize| match &self.label {
            Some(LabelName::Array(name)) => like_elsewhere(&keys, keys[features], name),
            _ => None,
        };
        check_usable(contents, path, files)?;
        let features = match &files.spec.part {
            Some(name) => named(contents, path, name)?,
            None if keys.len() == 1 => 0,
            None => {
                let first = pairs().find_map(|(features, _)| features);
                let labelled = pairs().find_map(|(features, labels)| labels.and(features));
                let first = first.ok_or_else(|| unclear(contents, path))?;
                // Rows to train on, unless others are wanted, even if only the others have labels.
                let is_like_first =
                    |index: &usize| is_held_out(keys[*index]) == is_held_out(keys[first]);
                labelled.filter(is_like_first).unwrap_or(first)
            }
        };
        if let LabelPlace::Named(name) = &files.labels {
            return Ok((features, Some(named(contents, path, name)?)));
        }
        if !looks_for_labels {
            return Ok((features, None));
        }
        let of_features = |pair: &(Option<usize>, _)| pair.0 == Some(features);
        let beside = || pairs().filter(of_features).find_map(|(_, labels)| labels);
        let labels = like_elsewhere(features).or_else(beside);
        ensure!(
            labels.is_some(),
            Usage,
            "{} {}: expected labels of {} in the file, got {}; help: give {} FILE{}",
            files.setting,
            path.display(),
            match keys[features] {
                "" => "its rows",
                key => key,
            },
            listed_arrays(contents),
            files.labels_setting(),
            match keys.len() {
                1 => "",
                _ => ", or '#NAME' for an array of this file",
            }
        );
        Ok((features, labels))
    }

    /// The index of the labels in a file that is given for them alone.
    pub(super) fn labels_alone(
        &self,
        contents: &Contents,
        file: &Path,
        name: Option<&str>,
    ) -> Result<usize> {
        match name {
            Some(name) => named(contents, file, name),
            None if contents.arrays.len() == 1 => Ok(0),
            None => pairs(&keys(contents), self.files.model.is_some())
                .find_map(|(_, labels)| labels)
                .ok_or_else(|| unclear(contents, file)),
        }
    }
}

fn is_held_out(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    EVALUATE.iter().any(|suffix| key.ends_with(suffix))
}

/// An error if an array cannot be used that its name says is wanted.
fn check_usable(contents: &Contents, path: &Path, files: &FoundFiles<'_>) -> Result<()> {
    let others = contents.others.iter().map(|(key, _)| key.as_str());
    let others: Vec<&str> = others.collect();
    let mut pairs = pairs(&others, files.model.is_some());
    let is_wanted = |(features, labels): (Option<usize>, Option<usize>)| {
        let features = features.filter(|_| files.spec.part.is_none());
        features.or(labels.filter(|_| files.labels == LabelPlace::Default))
    };
    match pairs.find_map(is_wanted) {
        Some(index) => Err(missing(contents, path, others[index])),
        None => Ok(()),
    }
}

fn keys(contents: &Contents) -> Vec<&str> {
    contents.arrays.iter().map(|array| &*array.key).collect()
}

fn named(contents: &Contents, file: &Path, name: &str) -> Result<usize> {
    let position = keys(contents).iter().position(|key| *key == name);
    position.ok_or_else(|| missing(contents, file, name))
}

/// For each suffix and pair of names, the indices of the features and of the labels among `keys`.
fn pairs<'a>(
    keys: &'a [&str],
    to_evaluate: bool,
) -> impl Iterator<Item = (Option<usize>, Option<usize>)> + 'a {
    suffixes(to_evaluate).flat_map(move |suffix| {
        let find = move |name: &str| {
            let is = |key: &&str| key.to_ascii_lowercase().strip_prefix(name) == Some(suffix);
            keys.iter().position(is)
        };
        PAIRS
            .into_iter()
            .map(move |(features, labels)| (find(features), find(labels)))
    })
}

/// The labels of these features where those of other files are called `name`: `count_test` goes
/// with `x_test` as `count_train` does with `x_train`.
fn like_elsewhere(keys: &[&str], features: &str, name: &str) -> Option<usize> {
    let suffix = |key: &str| {
        let key = key.to_ascii_lowercase();
        let fitting = suffixes(false).filter(|suffix| key.ends_with(suffix));
        fitting.max_by_key(|suffix| suffix.len())
    };
    let (own, of_features) = (suffix(name)?, suffix(features)?);
    let wanted = format!("{}{of_features}", &name[..name.len() - own.len()]);
    let position = |wanted: &str| keys.iter().position(|key| key.eq_ignore_ascii_case(wanted));
    position(&wanted).or_else(|| position(name).filter(|_| own.is_empty()))
}

/// The arrays of a file, for messages: names with the shape of a row.
fn listed_arrays(contents: &Contents) -> String {
    let arrays = contents.arrays.iter();
    let arrays = arrays.map(|array| match &*array.key {
        "" => format!("one array with rows of shape {:?}", array.row_shape()),
        key => format!("{key} {:?}", array.row_shape()),
    });
    let others = contents.others.iter();
    let others = others.map(|(key, why)| format!("{key} (which cannot be used: {why})"));
    arrays.chain(others).collect::<Vec<_>>().join(", ")
}

fn missing(contents: &Contents, file: &Path, name: &str) -> Error {
    let (file, has) = (file.display(), listed_arrays(contents));
    match contents.find(name) {
        Err(why) => Error::Data(format!("{file}: the array {name:?} cannot be used: {why}")),
        Ok(_) => Error::Data(format!(
            "{file}: expected an array {name:?}, got {has}; help: give one of these names after #"
        )),
    }
}

fn unclear(contents: &Contents, file: &Path) -> Error {
    let (file, has) = (file.display(), listed_arrays(contents));
    Error::Data(format!(
        "{file}: expected arrays called x and y, features and labels or similar, got {has}; help: say which: \
         {DATA} {file}#NAME, {LABELS} '#NAME'"
    ))
}
