//! Which files a name means, and which arrays of a file are features and labels by default: by
//! their names.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use glob::MatchOptions;

use super::files::{Contents, gzip, tokens};
use crate::error::{Error, Result};

/// The endings of files that can be read; `.gz` may follow some.
const ENDINGS: [&str; 9] = [
    "npy",
    "npz",
    "csv",
    "tsv",
    "parquet",
    "safetensors",
    "bin",
    "idx",
    "ubyte",
];

const HELP: &str = "help: give a file, a folder of files, a pattern, or built-in data: glyphs, synthetic:classification, \
                    synthetic:regression";

/// Words in names that say what rows are for.
const PURPOSES: [&[&str]; 3] = [
    &["train", "training"],
    &["test", "testing", "t10k"],
    &["val", "valid", "validation", "dev", "eval"],
];

/// The files that `path` means, sorted by name. `setting` is where it was given: `data`, `labels` …
pub fn files(path: &str, setting: &str) -> Result<Vec<PathBuf>> {
    let found = match fs::metadata(path) {
        Ok(about) if about.is_dir() => in_folder(Path::new(path), setting)?,
        Ok(_) => vec![path.into()],
        Err(_) if path == "-" || path.contains("://") => {
            return Err(Error::Usage(format!(
                "`{setting}` {path}: expected a file, got a pipe or a URL; help: download or save it as a file first"
            )));
        }
        Err(_) if path.contains(['*', '?', '[']) => matching(path, setting)?,
        Err(error) => return Err(failed("open", path, setting, error)),
    };
    for packed in found.iter().filter(|path| gzip::is_packed(path)) {
        let plain = packed.with_extension("");
        if found.binary_search(&plain).is_ok() {
            return Err(Error::Data(format!(
                "`{setting}` {path}: expected every row once, got {} and {}; help: remove one, or give a pattern that \
                 matches only one",
                name_of(&plain),
                packed.display()
            )));
        }
    }
    Ok(found)
}

fn failed(action: &'static str, path: &str, setting: &str, source: io::Error) -> Error {
    Error::Io {
        action,
        path: path.into(),
        source,
        help: format!(
            "it was given as `{setting}`: {}",
            HELP.trim_start_matches("help: ")
        ),
    }
}

/// The files that match a pattern, as in a shell: hidden files have to be asked for.
fn matching(pattern: &str, setting: &str) -> Result<Vec<PathBuf>> {
    let options = MatchOptions {
        require_literal_leading_dot: true,
        ..MatchOptions::new()
    };
    let paths = glob::glob_with(pattern, options);
    let paths = paths.map_err(|error| {
        Error::Usage(format!(
            "`{setting}` {pattern}: the pattern cannot be read: {error}; {HELP}"
        ))
    })?;
    let mut found: Vec<PathBuf> = paths
        .collect::<Result<_, _>>()
        .map_err(|error| failed("open", pattern, setting, error.into()))?;
    found.retain(|path| !path.is_dir());
    if found.is_empty() {
        let error = io::Error::new(ErrorKind::NotFound, "no file matches it");
        return Err(failed("open", pattern, setting, error));
    }
    found.sort_unstable();
    Ok(found)
}

/// The files in a folder, which have to be of one kind. Other and hidden files are skipped.
fn in_folder(folder: &Path, setting: &str) -> Result<Vec<PathBuf>> {
    let shown = folder.display();
    let failed = |error| failed("list the folder", &shown.to_string(), setting, error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if !name_of(&path).starts_with('.') && !path.is_dir() && ending(&path).is_some() {
            found.push(path);
        }
    }
    found.sort_unstable();
    // Labels of IDX files are found from the images.
    if found.iter().any(|path| is_idx(path)) {
        found.retain(|path| !is_idx(path) || !name_of(path).contains("labels"));
    }
    let Some(first) = found.first() else {
        let as_name = match setting.ends_with("labels") {
            true => format!(", or '#{shown}' if it is the name of a column or an array"),
            false => String::new(),
        };
        return Err(Error::Data(format!(
            "`{setting}` {shown}: expected a folder with files that end in .{}, got none; help: give another folder, or \
             for texts a pattern, as in {shown}/*.txt{as_name}",
            ENDINGS.join(", .")
        )));
    };
    if let Some(other) = found.iter().find(|path| ending(path) != ending(first)) {
        return Err(Error::Data(format!(
            "`{setting}` {shown}: expected files of one kind in the folder, got {} and {}; help: give a pattern, \
             as in {shown}/*.npy",
            name_of(first),
            name_of(other),
        )));
    }
    check_purposes(&found, folder, setting)?;
    Ok(found)
}

/// An error if names in a folder say that files are for different things, as `train` and `test` do.
fn check_purposes(found: &[PathBuf], folder: &Path, setting: &str) -> Result<()> {
    let of_purpose = |wanted: usize| found.iter().find(|path| purpose(path) == Some(wanted));
    let mut some = (0..PURPOSES.len()).filter_map(of_purpose);
    let (Some(one), Some(other)) = (some.next(), some.next()) else {
        return Ok(());
    };
    let evaluate = match setting {
        "data" | "labels" => format!(
            " and, for evaluation, `val-{setting}` {}",
            tokens::shown(other)
        ),
        _ => String::new(),
    };
    Err(Error::Usage(format!(
        "`{setting}` {}: expected files for one purpose, got {} beside {}; help: give `{setting}` {}{evaluate}, or a pattern \
         that matches both",
        folder.display(),
        name_of(other),
        name_of(one),
        tokens::shown(one),
    )))
}

/// Which of `PURPOSES` a file is for, if its name says so.
fn purpose(path: &Path) -> Option<usize> {
    let name = name_of(path).to_ascii_lowercase();
    let words = name.split(|character: char| !character.is_ascii_alphanumeric());
    let of_word = |word: &str| {
        let word = word.trim_end_matches(char::is_numeric);
        PURPOSES.iter().position(|words| words.contains(&word))
    };
    let mut purposes = words.filter_map(of_word);
    let first = purposes.next()?;
    purposes.all(|other| other == first).then_some(first)
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The ending that shows the kind of a file, without `.gz`.
fn ending(path: &Path) -> Option<&'static str> {
    let name = name_of(path).to_ascii_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let is_ending = |ending: &&str| {
        let rest = name.strip_suffix(*ending);
        rest.is_some_and(|rest| rest.ends_with(['.', '-']))
    };
    ENDINGS.into_iter().find(is_ending)
}

fn is_idx(path: &Path) -> bool {
    matches!(ending(path), Some("idx" | "ubyte"))
}

/// Whether a file is a table by its name.
pub fn is_table(path: &Path) -> bool {
    matches!(ending(path), Some("csv" | "tsv" | "parquet"))
}

/// Whether this ends as files of data do.
pub fn has_ending(path: &str) -> bool {
    ending(Path::new(path)).is_some()
}

/// The labels beside images in IDX files: `train-images-idx3-ubyte` has `train-labels-idx1-ubyte`.
pub fn labels_beside(path: &Path) -> Option<PathBuf> {
    if !is_idx(path) {
        return None;
    }
    let name = name_of(path);
    let labels = name.replace("images", "labels");
    let labels = labels.replace("idx3", "idx1").replace("idx4", "idx1");
    let other = match labels.strip_suffix(".gz") {
        Some(plain) => plain.to_string(),
        None => format!("{labels}.gz"),
    };
    let mut names = [labels, other].into_iter().filter(|labels| *labels != name);
    names.find_map(|labels| Some(path.with_file_name(labels)).filter(|path| path.exists()))
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

/// What is known of the arrays that are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct WantedArrays<'a> {
    /// The name of the features.
    pub features: Option<&'a str>,
    /// The name of the labels.
    pub labels: Option<&'a str>,
    /// The name of the labels in other files of these data.
    pub labels_elsewhere: Option<&'a str>,
    /// Whether labels without a given name are looked for.
    pub looks_for_labels: bool,
    /// Whether the rows are to be evaluated on.
    pub to_evaluate: bool,
}

/// The indices of the arrays of features and labels: by the names given, else by the names in
/// `PAIRS`.
pub fn arrays(
    contents: &Contents,
    file: &Path,
    wanted: WantedArrays<'_>,
) -> Result<(usize, Option<usize>)> {
    let keys = keys(contents);
    let pairs = || pairs(&keys, wanted.to_evaluate);
    check_usable(contents, file, wanted)?;
    let features = match wanted.features {
        Some(name) => named(contents, file, name)?,
        None if keys.len() == 1 => 0,
        None => {
            let first = pairs().find_map(|(features, _)| features);
            let labelled = pairs().find_map(|(features, labels)| labels.and(features));
            let first = first.ok_or_else(|| unclear(contents, file))?;
            choose_rows(contents, file, wanted, first, labelled.unwrap_or(first))?
        }
    };
    let labels = match wanted.labels {
        Some(name) => Some(named(contents, file, name)?),
        None if wanted.looks_for_labels => wanted
            .labels_elsewhere
            .and_then(|name| like_elsewhere(&keys, keys[features], name))
            .or_else(|| {
                let of_features = |pair: &(Option<usize>, _)| pair.0 == Some(features);
                pairs().filter(of_features).find_map(|(_, labels)| labels)
            }),
        None => None,
    };
    Ok((features, labels))
}

/// The features among the `first` ones by their name and those that have labels: these, unless only
/// the others are for training (or for evaluation, whichever is wanted).
fn choose_rows(
    contents: &Contents,
    file: &Path,
    wanted: WantedArrays<'_>,
    first: usize,
    labelled: usize,
) -> Result<usize> {
    let keys = keys(contents);
    let is_held_out = |index: usize| {
        let key = keys[index].to_ascii_lowercase();
        EVALUATE.iter().any(|suffix| key.ends_with(suffix))
    };
    let elsewhere = |name| like_elsewhere(&keys, keys[first], name);
    if is_held_out(first) == is_held_out(labelled) {
        return Ok(labelled);
    }
    if !wanted.looks_for_labels || wanted.labels_elsewhere.and_then(elsewhere).is_some() {
        return Ok(first);
    }
    let (file, first, labelled) = (file.display(), keys[first], keys[labelled]);
    Err(Error::Data(format!(
        "{file}: expected labels for {first}, got labels for {labelled} only: {}; help: say which rows are meant: `data` \
         {file}#{first} with `labels`, or `data` {file}#{labelled}",
        listed(contents)
    )))
}

/// An error if an array cannot be used that its name says is wanted.
fn check_usable(contents: &Contents, file: &Path, wanted: WantedArrays<'_>) -> Result<()> {
    let others: Vec<&str> = contents
        .others
        .iter()
        .map(|(key, _)| key.as_str())
        .collect();
    let mut pairs = pairs(&others, wanted.to_evaluate);
    let is_wanted = |(features, labels): (Option<usize>, Option<usize>)| {
        let features = features.filter(|_| wanted.features.is_none());
        features.or(labels.filter(|_| wanted.looks_for_labels))
    };
    match pairs.find_map(is_wanted) {
        Some(index) => Err(missing(contents, file, others[index])),
        None => Ok(()),
    }
}

/// The index of the labels in a file that is given for them alone.
pub fn labels_alone(
    contents: &Contents,
    file: &Path,
    name: Option<&str>,
    to_evaluate: bool,
) -> Result<usize> {
    match name {
        Some(name) => named(contents, file, name),
        None if contents.arrays.len() == 1 => Ok(0),
        None => pairs(&keys(contents), to_evaluate)
            .find_map(|(_, labels)| labels)
            .ok_or_else(|| unclear(contents, file)),
    }
}

fn keys(contents: &Contents) -> Vec<&str> {
    contents.arrays.iter().map(|array| array.key()).collect()
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
pub fn listed(contents: &Contents) -> String {
    let arrays = contents.arrays.iter();
    let arrays = arrays.map(|array| match array.key() {
        "" => format!("one array with rows of shape {:?}", array.row_shape()),
        key => format!("{key} {:?}", array.row_shape()),
    });
    let others = contents.others.iter();
    let others = others.map(|(key, why)| format!("{key} (which cannot be used: {why})"));
    arrays.chain(others).collect::<Vec<_>>().join(", ")
}

fn missing(contents: &Contents, file: &Path, name: &str) -> Error {
    let (file, has) = (file.display(), listed(contents));
    match contents.find(name) {
        Err(why) => Error::Data(format!("{file}: the array {name:?} cannot be used: {why}")),
        Ok(_) => Error::Data(format!(
            "{file}: expected an array {name:?}, got {has}; help: give one of these names after #"
        )),
    }
}

fn unclear(contents: &Contents, file: &Path) -> Error {
    let (file, has) = (file.display(), listed(contents));
    Error::Data(format!(
        "{file}: expected arrays called x and y, features and labels or similar, got {has}; help: say which: \
         `data` {file}#NAME, `labels` '#NAME'"
    ))
}
