//! From names to files: which files a name means, and where the labels of their rows are.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use ddp_kernels::files::FileError;
use ddp_kernels::setting::SettingName;
use glob::MatchOptions;

use crate::error::{Error, Result, bail, ensure};
use crate::features::{COMMON, Missing};
use crate::files;
use crate::files::io::is_packed;
use crate::request::{DataRequest, Trained};
use crate::setting::{DATA, LABELS, VAL_DATA, VAL_LABELS};
use crate::spec::FilesSpec;

const HELP: &str = "give a file, a folder of files, a pattern, or built-in data: glyphs, synthetic:classification, \
                    synthetic:regression";

/// Words in names that say what rows are for.
const PURPOSES: [&[&str]; 3] = [
    &["train", "training"],
    &["test", "testing", "t10k"],
    &["val", "valid", "validation", "dev", "eval"],
];

/// Files that were found, and what is wanted of their rows.
#[derive(Debug)]
pub struct FoundFiles<'a> {
    /// The setting that names the files, for messages.
    pub setting: SettingName<'static>,
    /// The names of the files, as they were given.
    pub spec: &'a FilesSpec,
    /// The files of features.
    pub paths: Vec<PathBuf>,
    /// Where their labels are.
    pub labels: LabelPlace,
    /// The model that the rows are for, or what was learned from the rows that are trained on.
    pub model: Option<&'a Trained>,
    /// What else the user asks for.
    pub request: &'a DataRequest,
}

impl FoundFiles<'_> {
    /// The setting that names the labels.
    pub fn labels_setting(&self) -> SettingName<'static> {
        if self.setting == DATA {
            LABELS
        } else {
            VAL_LABELS
        }
    }

    /// Whether the model has learned texts as classes: then labels are texts, even if all could be
    /// numbers.
    pub fn has_text_classes(&self) -> bool {
        let classes = self.model.and_then(|model| model.task.classes());
        classes.is_some_and(|classes| classes.texts().is_some() && classes.whole_names().is_none())
    }

    /// The columns of tables that are left out; a model says itself what it reads.
    pub fn dropped(&self) -> &[String] {
        self.model.map_or(&self.request.table.drop, |_| &[])
    }

    /// Whether numbers in tables may be missing.
    pub fn allows_missing(&self) -> bool {
        let asked = self.request.table.missing != Missing::Error;
        self.model.map_or(asked, |model| model.plan.fill.is_some())
    }

    /// Whether columns of tables are chosen by what they hold.
    pub fn chooses_columns(&self) -> bool {
        let categorical = &self.request.table.categorical;
        self.model.is_none() && categorical.iter().any(|name| name == COMMON)
    }

    /// The columns that the name of the data has: `table.csv#a,b`.
    pub fn named_columns(&self) -> Option<Vec<String>> {
        let part = self.spec.part.as_ref()?;
        let names = part.split(',').map(|name| name.trim().to_string());
        Some(names.collect())
    }
}

/// Where labels are.
#[derive(Clone, Debug, PartialEq)]
pub enum LabelPlace {
    /// In the usual place of the format.
    Default,
    /// In the column or array of this name.
    Named(String),
    /// In files that the user names; the second is the array or column in each.
    Files(Vec<PathBuf>, Option<String>),
    /// In files beside those of the features, one each.
    Beside(Vec<PathBuf>),
    /// In a column or array of this name or in these files: the first file says which.
    Given(String),
    /// They are not needed.
    Unwanted,
}

impl LabelPlace {
    /// The files that hold only labels, and the array or column in each.
    pub fn files(&self) -> (&[PathBuf], Option<&str>) {
        match self {
            LabelPlace::Files(files, part) => (files, part.as_deref()),
            LabelPlace::Beside(files) => (files, None),
            LabelPlace::Default
            | LabelPlace::Named(_)
            | LabelPlace::Given(_)
            | LabelPlace::Unwanted => (&[], None),
        }
    }
}

/// Finds the files of features and of labels that `setting` names. `model` is that of the rows, or
/// what was learned from other rows.
pub(crate) fn resolve<'a>(
    request: &'a DataRequest,
    setting: SettingName<'static>,
    spec: &'a FilesSpec,
    model: Option<&'a Trained>,
) -> Result<FoundFiles<'a>> {
    let mut found = FoundFiles {
        setting,
        spec,
        paths: files(&spec.path, setting)?,
        labels: LabelPlace::Default,
        model,
        request,
    };
    let labels = if setting == DATA {
        &request.labels
    } else {
        &request.val_labels
    };
    found.labels = match labels {
        _ if model.is_some_and(|model| !model.needs_labels) => LabelPlace::Unwanted,
        None => {
            let beside = found.paths.iter().map(|path| labels_beside(path));
            let beside: Option<Vec<PathBuf>> = beside.collect();
            beside.map_or(LabelPlace::Default, LabelPlace::Beside)
        }
        Some(text) => match text.strip_prefix('#') {
            Some(name) => LabelPlace::Named(name.to_string()),
            None => LabelPlace::Given(text.clone()),
        },
    };
    Ok(found)
}

/// The key by which files are sorted: their names, in which numbers count as numbers.
fn in_order(path: &Path) -> (Vec<(char, u64)>, PathBuf) {
    let mut key: Vec<(char, u64)> = Vec::new();
    for character in path.to_string_lossy().chars() {
        match (character.to_digit(10), key.last_mut()) {
            (Some(digit), Some(('0', number))) => {
                *number = number.saturating_mul(10).saturating_add(digit.into());
            }
            (Some(digit), _) => key.push(('0', digit.into())),
            (None, _) => key.push((character, 0)),
        }
    }
    (key, path.to_path_buf())
}

/// The numbers in a name.
fn numbers(name: &str) -> Vec<u64> {
    let (key, _) = in_order(Path::new(name));
    let numbers = key.into_iter().filter(|(kind, _)| *kind == '0');
    numbers.map(|(_, number)| number).collect()
}

/// The first file of labels whose number is not that of its features. Numbers that are the same in
/// all names do not count.
pub(crate) fn mismatched(features: &[String], labels: &[String]) -> Option<usize> {
    let differing = |names: &[String]| -> Vec<Vec<u64>> {
        let all: Vec<Vec<u64>> = names.iter().map(|name| numbers(name)).collect();
        if all.iter().any(|numbers| numbers.len() != all[0].len()) {
            return Vec::new();
        }
        let differs = |at: &usize| all.iter().any(|numbers| numbers[*at] != all[0][*at]);
        let places: Vec<usize> = (0..all[0].len()).filter(differs).collect();
        let of_name = |numbers: &Vec<u64>| places.iter().map(|&at| numbers[at]).collect();
        all.iter().map(of_name).collect()
    };
    let (features, labels) = (differing(features), differing(labels));
    let mut pairs = features.iter().zip(&labels);
    pairs.position(|(one, other)| one.len() == other.len() && one != other)
}

/// The files that `path` means, sorted by name. `setting` is where it was given: `data`, `labels` …
pub fn files(path: &str, setting: SettingName<'_>) -> Result<Vec<PathBuf>> {
    let found = match fs::metadata(path) {
        Ok(about) if about.is_dir() => in_folder(Path::new(path), setting)?,
        Ok(_) => vec![path.into()],
        Err(_) if path == "-" || path.contains("://") => bail!(
            Usage,
            "{setting} {path}: expected a file, got a pipe or a URL; help: download or save it as a file first"
        ),
        Err(_) if path.contains(['*', '?', '[']) => matching(path, setting)?,
        Err(error) => return Err(failed("open", path, setting, error)),
    };
    for packed in found.iter().filter(|path| is_packed(path)) {
        let plain = packed.with_extension("");
        ensure!(
            !found.contains(&plain),
            "{setting} {path}: expected every row once, got {} and {}; help: remove one, or give a pattern that \
             matches only one",
            name_of(&plain),
            packed.display()
        );
    }
    Ok(found)
}

fn failed(action: &'static str, path: &str, setting: SettingName<'_>, source: io::Error) -> Error {
    Error::Io(FileError {
        action,
        path: path.into(),
        source,
        help: format!("it was given as {setting}: {HELP}"),
    })
}

/// The files that match a pattern, as in a shell: hidden files have to be asked for.
fn matching(pattern: &str, setting: SettingName<'_>) -> Result<Vec<PathBuf>> {
    let options = MatchOptions {
        require_literal_leading_dot: true,
        ..MatchOptions::new()
    };
    let paths = glob::glob_with(pattern, options);
    let paths = paths.map_err(|error| {
        Error::Usage(format!(
            "{setting} {pattern}: the pattern cannot be read: {error}; help: {HELP}"
        ))
    })?;
    let found: Result<Vec<PathBuf>, _> = paths.collect();
    let mut found = found.map_err(|error| failed("open", pattern, setting, error.into()))?;
    found.retain(|path| !path.is_dir());
    if found.is_empty() {
        let error = io::Error::new(ErrorKind::NotFound, "no file matches it");
        return Err(failed("open", pattern, setting, error));
    }
    found.sort_by_cached_key(|path| in_order(path));
    Ok(found)
}

/// The files in a folder, which have to be of one kind. Other and hidden files are skipped.
fn in_folder(folder: &Path, setting: SettingName<'_>) -> Result<Vec<PathBuf>> {
    let shown = folder.display();
    let failed = |error| failed("list the folder", &shown.to_string(), setting, error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if !name_of(&path).starts_with('.') && !path.is_dir() && ending(&path).is_some() {
            found.push(path);
        }
    }
    found.sort_by_cached_key(|path| in_order(path));
    // Labels of IDX files are found from the images.
    if found.iter().any(|path| is_idx(path)) {
        found.retain(|path| !is_idx(path) || !name_of(path).contains("labels"));
    }
    let Some(first) = found.first() else {
        let as_name = if setting.0.ends_with("labels") {
            format!(", or '#{shown}' if it is the name of a column or an array")
        } else {
            String::new()
        };
        bail!(
            "{setting} {shown}: expected a folder with files that end in {}, got none; help: give another folder, or \
             for texts a pattern, as in {shown}/*.txt{as_name}",
            files::endings().collect::<Vec<_>>().join(", ")
        );
    };
    if let Some(other) = found.iter().find(|path| ending(path) != ending(first)) {
        bail!(
            "{setting} {shown}: expected files of one kind in the folder, got {} and {}; help: give a pattern, \
             as in {shown}/*.npy",
            name_of(first),
            name_of(other),
        );
    }
    check_purposes(&found, folder, setting)?;
    Ok(found)
}

/// An error if names in a folder say that files are for different things, as `train` and `test` do.
fn check_purposes(found: &[PathBuf], folder: &Path, setting: SettingName<'_>) -> Result<()> {
    let of_purpose = |wanted: usize| found.iter().find(|path| purpose(path) == Some(wanted));
    let mut some = (0..PURPOSES.len()).filter_map(of_purpose);
    let (Some(one), Some(other)) = (some.next(), some.next()) else {
        return Ok(());
    };
    bail!(
        Usage,
        "{setting} {}: expected files for one purpose, got {} beside {}; help: give one as {DATA} and the other as {VAL_DATA}, \
         or a pattern that matches both",
        folder.display(),
        name_of(other),
        name_of(one),
    )
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

/// The ending that shows the kind of a file, without `.gz`; `None` if folders may have others.
fn ending(path: &Path) -> Option<&'static str> {
    let (_, ending) = files::named(path)?;
    let is_read = files::endings().any(|known| known == ending);
    is_read.then(|| ending.trim_start_matches(['.', '-']))
}

/// Whether a name ends as those of data files do.
pub(crate) fn ends_as_data(path: &Path) -> bool {
    ending(path).is_some()
}

fn is_idx(path: &Path) -> bool {
    ending(path).is_some_and(|ending| ending.starts_with("idx") || ending == "ubyte")
}

/// The labels beside images in IDX files: `train-images-idx3-ubyte` has `train-labels-idx1-ubyte`.
fn labels_beside(path: &Path) -> Option<PathBuf> {
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
