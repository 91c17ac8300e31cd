//! Opening what `--data` and `--labels` name: files of one kind, one after another, as one stack of features and one of labels.
//!
//! Of tables (csv, tsv, parquet) a column is the label; of files with several arrays one of them is; a file of one array needs a
//! second file, which IDX files have beside them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use super::choose::{self, Wanted};
use super::files::table::{self, TableRequest};
use super::files::{self, Array, Contents};
use super::labels::FileLabels;
use super::spec::FilesSpec;
use super::stack::Stack;
use crate::error::{Error, Result};

/// Where labels are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LabelSource {
    /// Where the format has them; where it has none, in the array of this name.
    Default { array_else: Option<String> },
    /// In the column or array of this name.
    Named(String),
    /// In other files.
    Files(FilesSpec),
    /// Nobody asks.
    Unwanted,
}

/// What is opened, and for what.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    /// The flag, for messages.
    pub(crate) flag: &'static str,
    pub(crate) spec: &'a FilesSpec,
    /// The flag of the labels.
    pub(crate) labels_flag: &'static str,
    pub(crate) labels: LabelSource,
    /// The columns that are features, in this order, where that is known.
    pub(crate) columns: Option<Vec<String>>,
    pub(crate) cache_dir: Option<&'a Path>,
    pub(crate) to_evaluate: bool,
}

/// Files that are open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) features: Stack,
    pub(crate) labels: Option<Vec<FileLabels>>,
    pub(crate) columns: Option<Vec<String>>,
    /// The files that people gave and that are read in place: their change is everybody's business.
    pub(crate) watched: Vec<Arc<Mapped>>,
    /// The first of them, for whatever is kept beside them.
    pub(crate) first: PathBuf,
}

/// One file of `--data`.
struct Part {
    features: Array,
    labels: Option<FileLabels>,
    columns: Option<Vec<String>>,
}

/// Opens all of it. Nothing but headers is read, unless files have to be converted first.
pub(crate) fn open(ask: &Ask<'_>) -> Result<Opened> {
    let paths = choose::files(&ask.spec.path, ask.flag)?;
    let label_files = label_files(ask, &paths)?;
    let mut ask = ask.clone();
    let mut parts: Vec<Part> = Vec::with_capacity(paths.len());
    for path in &paths {
        let part = match choose::is_table(path) {
            true => of_table(&ask, path, label_files.is_some())?,
            false => of_arrays(&ask, path, label_files.is_some())?,
        };
        // The columns of the first file are those of all.
        if ask.columns.is_none() {
            ask.columns.clone_from(&part.columns);
        }
        parts.push(part);
    }
    let columns = parts[0].columns.clone();
    let mut labels = Vec::new();
    let mut features = Vec::new();
    for part in parts {
        features.push(part.features);
        labels.extend(part.labels);
    }
    let watched = features.iter().filter(|array| paths.iter().any(|path| path == array.mapped().path()));
    let mut watched: Vec<Arc<Mapped>> = watched.map(|array| array.mapped().clone()).collect();
    let features = Stack::new(features)?;
    let has_label_files = label_files.is_some();
    if let Some(files) = label_files {
        labels = files.iter().map(|(path, part)| labels_of(&ask, path, part.as_deref())).collect::<Result<_>>()?;
        let in_place = labels.iter().filter(|labels| files.iter().any(|file| file.0 == labels.array.mapped().path()));
        watched.extend(in_place.map(|labels| labels.array.mapped().clone()));
    }
    check_rows(&ask, &features, &labels, has_label_files)?;
    let labels = (ask.labels != LabelSource::Unwanted).then_some(labels);
    Ok(Opened { features, labels, columns, watched, first: paths[0].clone() })
}

/// A file of labels, and which array or column of it.
type LabelFile = (PathBuf, Option<String>);

/// The files that hold labels alone, each with the array or column: none where labels are in the files of the features.
fn label_files(ask: &Ask<'_>, paths: &[PathBuf]) -> Result<Option<Vec<LabelFile>>> {
    match &ask.labels {
        LabelSource::Files(spec) => {
            let files = choose::files(&spec.path, ask.labels_flag)?;
            Ok(Some(files.into_iter().map(|path| (path, spec.part.clone())).collect()))
        }
        LabelSource::Default { .. } => {
            let beside: Vec<_> = paths.iter().filter_map(|path| Some((choose::labels_beside(path)?, None))).collect();
            Ok((beside.len() == paths.len()).then_some(beside))
        }
        LabelSource::Named(_) | LabelSource::Unwanted => Ok(None),
    }
}

/// A table: its columns, but for the label.
fn of_table(ask: &Ask<'_>, path: &Path, has_label_files: bool) -> Result<Part> {
    let named = ask.spec.part.as_ref().map(|part| part.split(',').map(|name| name.trim().to_string()).collect());
    let features: Option<Vec<String>> = ask.columns.clone().or(named);
    let label = match &ask.labels {
        LabelSource::Named(name) => Some(name.clone()),
        LabelSource::Default { .. } if !has_label_files => {
            let columns = table::columns(path)?;
            let is_feature = |name: &String| features.iter().flatten().any(|feature| feature == name);
            let last = columns.into_iter().rev().find(|name| !is_feature(name));
            Some(last.ok_or_else(|| {
                Error::Data(format!(
                    "{}: expected a column with labels beside the features, and it has none. Give {} FILE",
                    path.display(),
                    ask.labels_flag
                ))
            })?)
        }
        _ => None,
    };
    let request = TableRequest { label: label.as_deref(), features: features.as_deref(), cache_dir: ask.cache_dir };
    let mut contents = table::open(path, &request)?;
    let labels = match label {
        Some(_) => Some(FileLabels { array: array_of(&contents, path, "labels")?, names: contents.classes.take() }),
        None => None,
    };
    let features = array_of(&contents, path, "features")?;
    Ok(Part { features, labels, columns: contents.columns })
}

/// A file of arrays.
fn of_arrays(ask: &Ask<'_>, path: &Path, has_label_files: bool) -> Result<Part> {
    let contents = files::open(path, ask.cache_dir)?;
    let (labels, labels_else) = match &ask.labels {
        LabelSource::Named(name) => (Some(name.as_str()), None),
        LabelSource::Default { array_else } => (None, array_else.as_deref()),
        _ => (None, None),
    };
    let looks_for_labels = !has_label_files && matches!(ask.labels, LabelSource::Default { .. });
    let features = ask.spec.part.as_deref();
    let wanted = Wanted { features, labels, labels_else, looks_for_labels, to_evaluate: ask.to_evaluate };
    let (features, labels) = choose::arrays(&contents, path, wanted)?;
    if labels.is_none() && looks_for_labels {
        return Err(Error::Usage(format!(
            "{} {}: expected labels, and none were found in this file. Give {} FILE, or '#NAME' for an array in it; it has {}",
            ask.flag,
            path.display(),
            ask.labels_flag,
            choose::listed(&contents)
        )));
    }
    let Contents { arrays, classes, columns, .. } = contents;
    let labels = labels.map(|index| FileLabels { array: arrays[index].clone(), names: classes });
    Ok(Part { features: arrays[features].clone(), labels, columns })
}

/// A file of labels alone.
fn labels_of(ask: &Ask<'_>, path: &Path, part: Option<&str>) -> Result<FileLabels> {
    if !choose::is_table(path) {
        let contents = files::open(path, ask.cache_dir)?;
        let index = choose::labels_alone(&contents, path, part, ask.to_evaluate)?;
        return Ok(FileLabels { array: contents.arrays[index].clone(), names: contents.classes });
    }
    let columns = table::columns(path)?;
    let last = columns.last().map(String::as_str);
    let request = TableRequest { label: part.or(last), features: Some(&[]), cache_dir: ask.cache_dir };
    let contents = table::open(path, &request)?;
    Ok(FileLabels { array: array_of(&contents, path, "labels")?, names: contents.classes })
}

/// The features or labels of a table that was converted.
fn array_of(contents: &Contents, path: &Path, key: &str) -> Result<Array> {
    match contents.find(key) {
        Ok(Some(array)) => Ok(array.clone()),
        Ok(None) => {
            Err(Error::Data(format!("{}: expected columns of {key}, and it has none. Name others", path.display())))
        }
        Err(why) => Err(Error::Data(format!("{}: {why}", path.display()))),
    }
}

/// As many labels as rows: file by file where they are in the same files, else in all.
fn check_rows(ask: &Ask<'_>, features: &Stack, labels: &[FileLabels], has_label_files: bool) -> Result<()> {
    let wrong = |labels: &str, got: u64, features: &str, rows: u64| {
        Error::Data(format!(
            "{labels}: expected a label for each of the {rows} rows of {features}, got {got}. Give the labels of these rows, in \
             their order"
        ))
    };
    if has_label_files {
        let got = labels.iter().map(|labels| labels.array.rows()).sum();
        if got != features.rows() {
            return Err(wrong(
                labels[0].array.name(),
                got,
                &format!("{} {}", ask.flag, ask.spec.path),
                features.rows(),
            ));
        }
        return Ok(());
    }
    for (labels, features) in labels.iter().zip(features.arrays()) {
        if labels.array.rows() != features.rows() {
            return Err(wrong(labels.array.name(), labels.array.rows(), features.name(), features.rows()));
        }
    }
    Ok(())
}
