//! Opening what `--data` and `--labels` name: files of one kind, one after another, as one stack of features and one of labels.
//!
//! Of tables (csv, tsv, parquet) a column is the label; of files with several arrays one of them is; a file of one array needs a
//! second file, which IDX files have beside them. What columns and the label are called in the first file they are called in all.

mod labels;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

use self::labels::Labelled;
use super::LabelName;
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
    /// Where the format has them.
    Default,
    /// Where this says, as people write it: `#NAME`, the name of a column or an array, or files.
    Given(String),
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
    /// What labels are called where nobody says, where that is known.
    pub(crate) label: Option<LabelName>,
    /// Whether labels are texts where they are in a table, even where all could be numbers.
    pub(crate) labels_are_texts: bool,
    pub(crate) cache_dir: Option<&'a Path>,
    pub(crate) to_evaluate: bool,
}

/// Files that are open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) features: Stack,
    pub(crate) labels: Option<Vec<FileLabels>>,
    pub(crate) columns: Option<Vec<String>>,
    /// What labels are called in the first file of them.
    pub(crate) label: Option<LabelName>,
    /// Whether `--labels` names files of their own.
    pub(crate) has_given_label_files: bool,
    /// The files that people gave and that are read in place: their change is everybody's business.
    pub(crate) watched: Vec<Arc<Mapped>>,
    /// The first of them, for whatever is kept beside them.
    pub(crate) first: PathBuf,
}

/// Where labels are, once it is known whether a name is that of files.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    Default,
    /// In the column or array of this name.
    Named(String),
    /// In files of their own; the second: which array or column of each.
    Files(Vec<PathBuf>, Option<String>),
    /// In files beside those of the features, one each.
    Beside(Vec<PathBuf>),
    Unwanted,
}

/// One file of `--data`.
struct Part {
    features: Array,
    labels: Option<Labelled>,
    columns: Option<Vec<String>>,
}

/// Opens all of it. Nothing but headers is read, unless files have to be converted first.
pub(crate) fn open(ask: &Ask<'_>) -> Result<Opened> {
    let paths = choose::files(&ask.spec.path, ask.flag)?;
    let source = labels::source(ask, &paths)?;
    let mut ask = ask.clone();
    let mut features = Vec::with_capacity(paths.len());
    let mut labels: Vec<Labelled> = Vec::new();
    let mut columns = None;
    for (index, path) in paths.iter().enumerate() {
        let part = match choose::is_table(path) {
            true => of_table(&ask, path, &source)?,
            false => of_arrays(&ask, path, &source)?,
        };
        if index == 0 {
            columns.clone_from(&part.columns);
        }
        // The columns of the first file are those of all, and so is the label.
        ask.columns = ask.columns.or(part.columns);
        ask.label = part.labels.as_ref().and_then(|labels| labels.name.clone()).or(ask.label);
        features.push(part.features);
        labels.extend(part.labels);
    }
    if let Source::Files(files, part) = &source {
        labels = labels::of_files(&mut ask, files, part.as_deref())?;
    } else if let Source::Beside(files) = &source {
        labels = labels::of_files(&mut ask, files, None)?;
    }
    labels::check_rows(&ask, &source, &features, &labels)?;
    labels::agree_on_texts(&ask, &mut labels)?;
    let arrays = features.iter().chain(labels.iter().map(|labels| &labels.of_file.array));
    let given = |array: &&Array| paths.iter().chain(source.files()).any(|path| path == array.mapped().path());
    let watched = arrays.filter(given).map(|array| array.mapped().clone()).collect();
    let label = labels.first().and_then(|labels| labels.name.clone());
    let labels = labels.into_iter().map(|labels| labels.of_file).collect();
    Ok(Opened {
        features: Stack::new(features)?,
        labels: (source != Source::Unwanted).then_some(labels),
        columns,
        label,
        has_given_label_files: matches!(source, Source::Files(..)),
        watched,
        first: paths[0].clone(),
    })
}

impl Source {
    /// The files of labels alone.
    fn files(&self) -> &[PathBuf] {
        match self {
            Source::Files(files, _) | Source::Beside(files) => files,
            _ => &[],
        }
    }
}

/// A table: its columns, but for the label.
fn of_table(ask: &Ask<'_>, path: &Path, source: &Source) -> Result<Part> {
    let features = feature_columns(ask)?;
    let label = match source {
        Source::Named(name) => Some(name.clone()),
        Source::Default => Some(labels::default_column(ask, path, features.as_deref())?),
        _ => None,
    };
    if let Some(label) = label.as_ref().filter(|&label| features.iter().flatten().any(|feature| feature == label)) {
        return Err(Error::Usage(format!(
            "{} {label}: expected a column that is no feature, got one of the features of {}: whoever sees the label has nothing to learn. Give \
             another label, or leave it out of the features, as in {} {}#a,b",
            ask.labels_flag,
            path.display(),
            ask.flag,
            ask.spec.path
        )));
    }
    let (label_name, features) = (label.as_deref(), features.as_deref());
    let request = TableRequest { label: label_name, features, cache_dir: ask.cache_dir, ..Default::default() };
    let mut contents = table::open(path, &request)?;
    let labels = match label {
        Some(label) => {
            let of_file = FileLabels { array: array_of(&contents, path, "labels")?, names: contents.classes.take() };
            Some(Labelled { of_file, path: path.into(), name: Some(LabelName::Column(label)) })
        }
        None => None,
    };
    let features = array_of(&contents, path, "features")?;
    Ok(Part { features, labels, columns: contents.columns })
}

/// The columns of a table that are features, in their order; nothing where all are but the label.
fn feature_columns(ask: &Ask<'_>) -> Result<Option<Vec<String>>> {
    let named = ask.spec.part.as_ref();
    let named: Option<Vec<String>> = named.map(|part| part.split(',').map(|name| name.trim().to_string()).collect());
    let (Some(known), Some(named)) = (&ask.columns, &named) else { return Ok(ask.columns.clone().or(named)) };
    let sorted = |names: &[String]| {
        let mut names = names.to_vec();
        names.sort_unstable();
        names
    };
    if sorted(known) == sorted(named) {
        return Ok(Some(known.clone()));
    }
    Err(Error::Usage(format!(
        "{} {1}#{2}: expected the columns that the model is trained on, got others: {3}. Leave #{2} out: they are found by their names",
        ask.flag,
        ask.spec.path,
        named.join(","),
        difference(known, named)
    )))
}

/// How two lists of columns differ, of which there may be many.
fn difference(expected: &[String], got: &[String]) -> String {
    match expected.iter().zip(got).position(|(expected, got)| expected != got) {
        Some(index) => format!("column {} is {:?}, expected {:?}", index + 1, got[index], expected[index]),
        None => format!("there are {}, expected {}", got.len(), expected.len()),
    }
}

/// A file of arrays.
fn of_arrays(ask: &Ask<'_>, path: &Path, source: &Source) -> Result<Part> {
    let contents = files::open(path, ask.cache_dir)?;
    let labels = match source {
        Source::Named(name) => Some(name.as_str()),
        _ => None,
    };
    let labels_elsewhere = match &ask.label {
        Some(LabelName::Array(name)) => Some(name.as_str()),
        _ => None,
    };
    let looks_for_labels = *source == Source::Default;
    let features = ask.spec.part.as_deref();
    let wanted = Wanted { features, labels, labels_elsewhere, looks_for_labels, to_evaluate: ask.to_evaluate };
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
    let labels = labels.map(|index| Labelled {
        of_file: FileLabels { array: arrays[index].clone(), names: classes },
        path: path.into(),
        name: array_name(&arrays[index]),
    });
    let features = arrays[features].clone();
    // Of another array they are not the names.
    let columns = columns.filter(|columns| columns.len() == features.row_elements());
    match (&ask.columns, &columns) {
        (Some(expected), Some(got)) if expected != got => Err(Error::Data(format!(
            "{}: expected the columns that the model is trained on, in their order, got others: {}. Columns of a .bin are taken as they lie: \
             save them in that order, or give a table, whose columns are found by their names",
            path.display(),
            difference(expected, got)
        ))),
        _ => Ok(Part { features, labels, columns }),
    }
}

/// What an array is called, if its file has names.
fn array_name(array: &Array) -> Option<LabelName> {
    (!array.key().is_empty()).then(|| LabelName::Array(array.key().to_string()))
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
