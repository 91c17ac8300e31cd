//! Which files a name means, and which arrays of a file are features and labels where nobody says: by their names.

use std::fs;
use std::path::{Path, PathBuf};

use glob::MatchOptions;

use super::files::Contents;
use crate::error::{Error, Result};

/// The endings of files that can be read; `.gz` may follow some.
const ENDINGS: [&str; 9] = ["npy", "npz", "csv", "tsv", "parquet", "safetensors", "bin", "idx", "ubyte"];

/// What helps where nothing is found.
const WAY_OUT: &str = "Give a file, a folder of files or a pattern, or one of the built-in data: glyphs, \
                       synthetic:classification, synthetic:regression";

/// Words in names that say what rows are for: of files with words of two kinds not all are for the same.
const PURPOSES: [&[&str]; 3] =
    [&["train", "training"], &["test", "testing", "t10k"], &["val", "valid", "validation", "dev", "eval"]];

/// The files that `path` means, sorted by name: one file, those of a folder, or those that match a pattern.
pub(crate) fn files(path: &str, flag: &str) -> Result<Vec<PathBuf>> {
    let found = any_files(path, flag)?;
    let is_packed_too = |packed: &&PathBuf| unpacked(packed).is_some_and(|plain| found.binary_search(&plain).is_ok());
    match found.iter().find(is_packed_too) {
        None => Ok(found),
        Some(packed) => Err(Error::Data(format!(
            "{flag} {path}: expected every row once, got {} beside {}, which differ by .gz alone: most likely one is the other, packed. \
             Remove one of them, or give a pattern that only one matches",
            name_of(&packed.with_extension("")),
            packed.display()
        ))),
    }
}

/// The name of a packed file without its `.gz`.
fn unpacked(path: &Path) -> Option<PathBuf> {
    let is_packed = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gz"));
    is_packed.then(|| path.with_extension(""))
}

/// As `files`, whether or not some have the same rows.
fn any_files(path: &str, flag: &str) -> Result<Vec<PathBuf>> {
    let failed = |source| Error::Io {
        action: "open",
        path: path.into(),
        source,
        way_out: format!("It was given as {flag}. {WAY_OUT}"),
    };
    match fs::metadata(path) {
        Ok(about) if about.is_dir() => in_folder(Path::new(path), flag),
        Ok(_) => Ok(vec![path.into()]),
        Err(error) if !path.contains(['*', '?', '[']) => Err(failed(error)),
        Err(_) => {
            // As in a shell: what is hidden has to be asked for.
            let options = MatchOptions { require_literal_leading_dot: true, ..MatchOptions::new() };
            let names = glob::glob_with(path, options).map_err(|error| {
                Error::Usage(format!("{flag} {path}: the pattern cannot be read: {error}. {WAY_OUT}"))
            })?;
            let mut found = Vec::new();
            for name in names {
                let name = name.map_err(|error| failed(error.into()))?;
                if !name.is_dir() {
                    found.push(name);
                }
            }
            if found.is_empty() {
                return Err(failed(std::io::Error::new(std::io::ErrorKind::NotFound, "no file matches it")));
            }
            found.sort_unstable();
            Ok(found)
        }
    }
}

/// The files in a folder that are of one kind that can be read. Others, and those whose names begin with a dot, are passed over.
fn in_folder(folder: &Path, flag: &str) -> Result<Vec<PathBuf>> {
    let failed = |source| Error::Io {
        action: "list the folder",
        path: folder.into(),
        source,
        way_out: format!("It was given as {flag}"),
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && !path.is_dir() && ending(&path).is_some() {
            found.push(path);
        }
    }
    found.sort_unstable();
    // Labels of IDX files are found from the images.
    if found.iter().any(|path| is_idx(path)) {
        found.retain(|path| !is_idx(path) || !name_of(path).contains("labels"));
    }
    let Some(first) = found.first() else {
        let named = format!(", or '#{}' if it is the name of a column or an array", folder.display());
        return Err(Error::Data(format!(
            "{flag} {}: expected files that end in one of .{}, and the folder has none. Give another folder{}",
            folder.display(),
            ENDINGS.join(", ."),
            if flag.ends_with("labels") { named } else { String::new() }
        )));
    };
    if let Some(other) = found.iter().find(|path| ending(path) != ending(first)) {
        return Err(Error::Data(format!(
            "{flag} {}: expected files of one kind in the folder, got {} and {}. Give a pattern, as in {}/*.npy",
            folder.display(),
            name_of(first),
            name_of(other),
            folder.display()
        )));
    }
    match different_purposes(&found) {
        None => Ok(found),
        Some((one, other)) => Err(Error::Usage(format!(
            "{flag} {}: expected files that are all for the same, got {} beside {}. Give {flag} {}{}, or a pattern that takes both",
            folder.display(),
            name_of(other),
            name_of(one),
            one.display(),
            match flag {
                "--data" | "--labels" => format!(" (in training with --val-{} {})", &flag[2..], other.display()),
                _ => String::new(),
            }
        ))),
    }
}

/// Two files whose names say that they are for different things, to train on if there is one before others.
fn different_purposes(found: &[PathBuf]) -> Option<(&Path, &Path)> {
    let of = |wanted: usize| found.iter().find(|path| purpose(path) == Some(wanted)).map(PathBuf::as_path);
    let mut some = (0..PURPOSES.len()).filter_map(of);
    Some((some.next()?, some.next()?))
}

/// Which of `PURPOSES` a file is for, if its name says so.
fn purpose(path: &Path) -> Option<usize> {
    let name = name_of(path).to_ascii_lowercase();
    let words = name.split(|character: char| !character.is_ascii_alphanumeric());
    let of = |word: &str| PURPOSES.iter().position(|words| words.contains(&word.trim_end_matches(char::is_numeric)));
    let mut purposes = words.filter_map(of);
    let first = purposes.next()?;
    purposes.all(|other| other == first).then_some(first)
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The ending that says of which kind a file is, without a `.gz`.
fn ending(path: &Path) -> Option<&'static str> {
    let name = name_of(path).to_ascii_lowercase();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let known = |ending: &&str| name.strip_suffix(*ending).is_some_and(|rest| rest.ends_with(['.', '-']));
    ENDINGS.into_iter().find(known)
}

fn is_idx(path: &Path) -> bool {
    matches!(ending(path), Some("idx" | "ubyte"))
}

/// Whether a file is a table: columns with names, one of which may be the label.
pub(crate) fn is_table(path: &Path) -> bool {
    matches!(ending(path), Some("csv" | "tsv" | "parquet"))
}

/// Whether this ends as files of data do.
pub(crate) fn has_ending(path: &str) -> bool {
    ending(Path::new(path)).is_some()
}

/// The file of labels beside a file of images, as IDX files are named: `train-images-idx3-ubyte` has `train-labels-idx1-ubyte`.
pub(crate) fn labels_beside(path: &Path) -> Option<PathBuf> {
    if !is_idx(path) {
        return None;
    }
    let name = name_of(path);
    let labels = name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1");
    let packed = |name: &str| match name.strip_suffix(".gz") {
        Some(plain) => plain.to_string(),
        None => format!("{name}.gz"),
    };
    let names = [labels.clone(), packed(&labels)];
    names
        .into_iter()
        .filter(|labels| *labels != name)
        .map(|labels| path.with_file_name(labels))
        .find(|path| path.exists())
}

/// Names that go together: of features, and of their labels. Case does not matter; `_train` and the like may follow both.
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
/// What may follow both where rows are to be trained on.
const TO_TRAIN: [&str; 7] = ["", "_train", "_training", "_val", "_valid", "_validation", "_test"];
/// What may follow both where rows are to be evaluated on.
const TO_EVALUATE: [&str; 7] = ["_val", "_valid", "_validation", "_test", "", "_train", "_training"];

/// What is known of the arrays that are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wanted<'a> {
    /// The name of the features.
    pub(crate) features: Option<&'a str>,
    /// The name of the labels.
    pub(crate) labels: Option<&'a str>,
    /// What labels are called in other files of this kind.
    pub(crate) labels_elsewhere: Option<&'a str>,
    /// Whether labels are looked for without a name.
    pub(crate) looks_for_labels: bool,
    /// Whether the rows are to be evaluated on.
    pub(crate) to_evaluate: bool,
}

/// The array of features and that of labels in `contents`, by the names that are given, else by the names that they have.
pub(crate) fn arrays(contents: &Contents, file: &Path, wanted: Wanted<'_>) -> Result<(usize, Option<usize>)> {
    let sides = if wanted.to_evaluate { TO_EVALUATE } else { TO_TRAIN };
    let keys: Vec<&str> = contents.arrays.iter().map(|array| array.key()).collect();
    let find = |name: &str| keys.iter().position(|key| *key == name).ok_or_else(|| missing(contents, file, name));
    let features = match wanted.features {
        Some(name) => find(name)?,
        None if keys.len() == 1 => 0,
        None => {
            let paired = pairs(&keys, sides).next().map(|(features, _)| features);
            paired.or_else(|| first_of(&keys, sides, |pair| pair.0)).ok_or_else(|| unclear(contents, file))?
        }
    };
    let labels = match wanted.labels {
        Some(name) => Some(find(name)?),
        None if wanted.looks_for_labels => {
            let elsewhere = wanted.labels_elsewhere.and_then(|name| of_name_elsewhere(&keys, keys[features], name));
            elsewhere.or_else(|| pairs(&keys, sides).find(|pair| pair.0 == features).map(|(_, labels)| labels))
        }
        None => None,
    };
    Ok((features, labels))
}

/// The pairs of names among `keys`.
fn pairs<'a>(keys: &'a [&str], sides: [&'static str; 7]) -> impl Iterator<Item = (usize, usize)> + 'a {
    sides.into_iter().flat_map(move |side| {
        PAIRS.into_iter().filter_map(move |(features, labels)| {
            let find = |name| keys.iter().position(|key| is(key, name, side));
            Some((find(features)?, find(labels)?))
        })
    })
}

/// The first name among `keys` that one side of the pairs has.
fn first_of(keys: &[&str], sides: [&str; 7], of: fn((&'static str, &'static str)) -> &'static str) -> Option<usize> {
    let names = sides.iter().flat_map(|side| PAIRS.into_iter().map(move |pair| (of(pair), *side)));
    names.into_iter().find_map(|(name, side)| keys.iter().position(|key| is(key, name, side)))
}

/// The labels of these features in a file of `keys`, where those of other files are called `name`: `count_test` goes with `x_test` as
/// `count_train` does with `x_train`.
fn of_name_elsewhere(keys: &[&str], features: &str, name: &str) -> Option<usize> {
    let side = |key: &str| {
        TO_TRAIN.into_iter().filter(|side| key.to_ascii_lowercase().ends_with(side)).max_by_key(|side| side.len())
    };
    let (own, of_features) = (side(name)?, side(features)?);
    let wanted = format!("{}{of_features}", &name[..name.len() - own.len()]);
    let position = |wanted: &str| keys.iter().position(|key| key.eq_ignore_ascii_case(wanted));
    position(&wanted).or_else(|| position(name).filter(|_| own.is_empty()))
}

fn is(key: &str, name: &str, side: &str) -> bool {
    let key = key.to_ascii_lowercase();
    key.strip_prefix(name).is_some_and(|rest| rest == side)
}

/// The array of labels in a file that is given for them alone.
pub(crate) fn labels_alone(contents: &Contents, file: &Path, name: Option<&str>, to_evaluate: bool) -> Result<usize> {
    let keys: Vec<&str> = contents.arrays.iter().map(|array| array.key()).collect();
    match name {
        Some(name) => keys.iter().position(|key| *key == name).ok_or_else(|| missing(contents, file, name)),
        None if keys.len() == 1 => Ok(0),
        None => {
            let sides = if to_evaluate { TO_EVALUATE } else { TO_TRAIN };
            first_of(&keys, sides, |pair| pair.1).ok_or_else(|| unclear(contents, file))
        }
    }
}

/// What is in a file, for messages.
pub(crate) fn listed(contents: &Contents) -> String {
    let arrays = contents.arrays.iter().map(|array| format!("{} {:?}", array.key(), array.row_shape()));
    let others = contents.others.iter().map(|(key, why)| format!("{key} (which cannot be used: {why})"));
    arrays.chain(others).collect::<Vec<_>>().join(", ")
}

fn missing(contents: &Contents, file: &Path, name: &str) -> Error {
    match contents.others.iter().find(|(key, _)| key == name) {
        Some((_, why)) => Error::Data(format!("{}: its array {name:?} cannot be used: {why}", file.display())),
        None => Error::Data(format!(
            "{}: expected an array called {name:?}, and it has {} (with the shape of a row). Give one of these names behind #",
            file.display(),
            listed(contents)
        )),
    }
}

fn unclear(contents: &Contents, file: &Path) -> Error {
    Error::Data(format!(
        "{0}: expected arrays called x and y, features and labels, or the like, and it has {1} (with the shape of a row). Say which: --data \
         {0}#NAME --labels '#NAME'",
        file.display(),
        listed(contents)
    ))
}
