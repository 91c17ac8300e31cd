//! Which arrays of a file are features and labels: by the settings, the model, the first file, and
//! their names.

use std::path::Path;

use crate::error::{Error, Result, ensure};
use crate::files::Contents;
use crate::open::Opening;
use crate::resolve::{FoundFiles, LabelPlace};
use crate::setting::{DATA, LABELS};
use crate::task::LabelName;

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
    let (first, second): (&[&str], &[&str]) = if to_evaluate {
        (&EVALUATE, &TRAIN)
    } else {
        (&TRAIN, &EVALUATE)
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
        let like_elsewhere = |features: usize| match &self.known.label {
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
