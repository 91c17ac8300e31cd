//! Where the labels of files are: which column or array, or which files of their own, and whether these go with the features.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Ask, LabelSource, Source, array_name, array_of};
use crate::data::LabelName;
use crate::data::choose;
use crate::data::files::table::{self, TableRequest};
use crate::data::files::{self, Array};
use crate::data::labels::FileLabels;
use crate::data::spec::FilesSpec;
use crate::error::{Error, Result};

/// The labels of one file, and where they were found.
pub(super) struct Labelled {
    pub(super) of_file: FileLabels,
    pub(super) path: PathBuf,
    pub(super) name: Option<LabelName>,
}

/// Where labels are.
pub(super) fn source(ask: &Ask<'_>, paths: &[PathBuf]) -> Result<Source> {
    match &ask.labels {
        LabelSource::Unwanted => Ok(Source::Unwanted),
        LabelSource::Default => {
            let beside: Vec<_> = paths.iter().filter_map(|path| choose::labels_beside(path)).collect();
            Ok(if beside.len() == paths.len() { Source::Beside(beside) } else { Source::Default })
        }
        LabelSource::Given(text) => match text.strip_prefix('#') {
            Some(name) => Ok(Source::Named(name.to_string())),
            None => named_or_files(ask, text, paths),
        },
    }
}

/// What `text` means: a column or an array of that name comes before a folder, which many words are the name of.
fn named_or_files(ask: &Ask<'_>, text: &str, paths: &[PathBuf]) -> Result<Source> {
    let FilesSpec { path, part } = FilesSpec::split(text);
    let is_file = choose::has_ending(&path) || Path::new(&path).exists();
    if !is_file || !choose::has_ending(&path) && has_part(ask, &paths[0], text)? {
        return Ok(Source::Named(text.to_string()));
    }
    let files = choose::files(&path, ask.labels_flag)?;
    // A table that is named twice: its other columns are the features.
    let is_same = |pair: (&PathBuf, &PathBuf)| fs::canonicalize(pair.0).ok() == fs::canonicalize(pair.1).ok();
    if choose::is_table(&paths[0]) && files.len() == paths.len() && files.iter().zip(paths).all(is_same) {
        return Ok(part.map_or(Source::Default, Source::Named));
    }
    Ok(Source::Files(files, part))
}

/// Whether the file has a column or an array of this name.
fn has_part(ask: &Ask<'_>, path: &Path, name: &str) -> Result<bool> {
    if choose::is_table(path) {
        return Ok(table::columns(path)?.iter().any(|column| column == name));
    }
    Ok(files::open(path, ask.cache_dir)?.arrays.iter().any(|array| array.key() == name))
}

/// The column of labels where nobody names one: as in other files, else the last that is no feature.
pub(super) fn default_column(ask: &Ask<'_>, path: &Path, features: Option<&[String]>) -> Result<String> {
    let columns = table::columns(path)?;
    match &ask.label {
        Some(LabelName::Column(name)) if columns.contains(name) => return Ok(name.clone()),
        // Where no features have names, nothing says that this table has the names of those before.
        Some(LabelName::Column(name)) if ask.columns.is_some() => {
            return Err(Error::Data(format!(
                "{}: expected labels in a column {name:?}, as the other files for this model have, and it has none. Its columns are {}. Give {} \
                 COLUMN",
                path.display(),
                listed(&columns),
                ask.labels_flag
            )));
        }
        _ => {}
    }
    let is_feature = |name: &String| features.iter().copied().flatten().any(|feature| feature == name);
    columns.into_iter().rev().find(|name| !is_feature(name)).ok_or_else(|| {
        Error::Data(format!(
            "{}: expected a column with labels beside the features, and it has none. Give {} FILE",
            path.display(),
            ask.labels_flag
        ))
    })
}

/// Files of labels alone; what they are called in the first one they are called in all.
pub(super) fn of_files(ask: &mut Ask<'_>, files: &[PathBuf], part: Option<&str>) -> Result<Vec<Labelled>> {
    let mut all = Vec::with_capacity(files.len());
    for path in files {
        let labels = of_file(ask, path, part)?;
        ask.label = labels.name.clone().or(ask.label.take());
        all.push(labels);
    }
    Ok(all)
}

fn of_file(ask: &Ask<'_>, path: &Path, part: Option<&str>) -> Result<Labelled> {
    if choose::is_table(path) {
        let column = match part {
            Some(name) => name.to_string(),
            None => only_column(ask, path)?,
        };
        return of_column(ask, path, column, false);
    }
    let contents = files::open(path, ask.cache_dir)?;
    let index = choose::labels_alone(&contents, path, part, ask.to_evaluate)?;
    let array = contents.arrays[index].clone();
    let name = array_name(&array);
    Ok(Labelled { of_file: FileLabels { array, names: contents.classes }, path: path.into(), name })
}

/// The column of a table of labels alone where nobody names it: as in other files, else the last.
fn only_column(ask: &Ask<'_>, path: &Path) -> Result<String> {
    let columns = table::columns(path)?;
    match &ask.label {
        Some(LabelName::Column(name)) if columns.contains(name) => Ok(name.clone()),
        Some(LabelName::Column(name)) if columns.len() > 1 => Err(Error::Data(format!(
            "{0}: expected labels in a column {name:?}, as the other files for this model have, and it has none. Its columns are {1}. Give {2} \
             {0}#COLUMN",
            path.display(),
            listed(&columns),
            ask.labels_flag
        ))),
        _ => columns.into_iter().next_back().ok_or_else(|| Error::Internal("a table without columns".into())),
    }
}

/// One column of a table as labels.
fn of_column(ask: &Ask<'_>, path: &Path, column: String, labels_are_texts: bool) -> Result<Labelled> {
    let request =
        TableRequest { label: Some(&column), features: Some(&[]), labels_are_texts, cache_dir: ask.cache_dir };
    let mut contents = table::open(path, &request)?;
    let of_file = FileLabels { array: array_of(&contents, path, "labels")?, names: contents.classes.take() };
    Ok(Labelled { of_file, path: path.into(), name: Some(LabelName::Column(column)) })
}

/// Where the labels of one table are texts, those of all are: as in one file, where a single text makes texts of all numbers.
pub(super) fn agree_on_texts(ask: &Ask<'_>, labels: &mut [Labelled]) -> Result<()> {
    if !ask.labels_are_texts && labels.iter().all(|labels| labels.of_file.names.is_none()) {
        return Ok(());
    }
    for labels in labels.iter_mut().filter(|labels| labels.of_file.names.is_none()) {
        if let (Some(LabelName::Column(column)), true) = (labels.name.clone(), choose::is_table(&labels.path)) {
            *labels = of_column(ask, &labels.path, column, true)?;
        }
    }
    Ok(())
}

/// As many labels as rows: in all where one file has them, else file by file.
pub(super) fn check_rows(ask: &Ask<'_>, source: &Source, features: &[Array], labels: &[Labelled]) -> Result<()> {
    let wrong = |labels: &str, got: u64, features: &str, rows: u64| {
        Error::Data(format!(
            "{labels}: expected a label for each of the {rows} rows of {features}, got {got}. Give the labels of these rows, in \
             their order"
        ))
    };
    let Some(first) = labels.first() else { return Ok(()) };
    let given = format!("{} {}", ask.flag, ask.spec.path);
    if labels.len() == 1 {
        // More rows than can be counted are refused where they are counted.
        let rows = features.iter().fold(0u64, |rows, array| rows.saturating_add(array.rows()));
        let name = if features.len() == 1 { features[0].name() } else { &given };
        let got = first.of_file.array.rows();
        return if got == rows { Ok(()) } else { Err(wrong(first.of_file.array.name(), got, name, rows)) };
    }
    if labels.len() != features.len() {
        return Err(Error::Data(format!(
            "{}: expected one file of labels, or one for each of the {} files of {given}, got {}. Give as many, of the same names",
            ask.labels_flag,
            features.len(),
            labels.len()
        )));
    }
    for (labels, features) in labels.iter().zip(features) {
        if labels.of_file.array.rows() != features.rows() {
            return Err(wrong(
                labels.of_file.array.name(),
                labels.of_file.array.rows(),
                features.name(),
                features.rows(),
            ));
        }
    }
    match source {
        Source::Files(files, _) => check_numbers(ask, features, files),
        _ => Ok(()),
    }
}

/// Refuses files whose numbers do not go together: by their names `x-02` would have the labels of `y-10`.
fn check_numbers(ask: &Ask<'_>, features: &[Array], labels: &[PathBuf]) -> Result<()> {
    let names = |paths: Vec<String>| (differing_numbers(&paths), paths);
    let (of_features, features) = names(features.iter().map(|array| array.name().to_string()).collect());
    let (of_labels, labels) = names(labels.iter().map(|path| path.display().to_string()).collect());
    let is_wrong = |index: &usize| {
        let (one, other) = (&of_features[*index], &of_labels[*index]);
        one.len() == other.len() && one != other
    };
    match (0..features.len()).find(is_wrong) {
        None => Ok(()),
        Some(index) => Err(Error::Data(format!(
            "{} {}: expected labels whose number is that of the features, {}. Files are taken in the order of their names as texts: number both \
             alike, with zeros before short numbers",
            ask.labels_flag, labels[index], features[index]
        ))),
    }
}

/// The numbers in each of these names, but for those that are the same in all. None where names are not alike.
fn differing_numbers(names: &[String]) -> Vec<Vec<u64>> {
    let numbers = |name: &String| -> Vec<u64> {
        let digits = name.split(|character: char| !character.is_ascii_digit());
        digits.filter(|digits| !digits.is_empty()).map(|digits| digits.parse().unwrap_or(u64::MAX)).collect()
    };
    let all: Vec<Vec<u64>> = names.iter().map(numbers).collect();
    let first = &all[0];
    if all.iter().any(|numbers| numbers.len() != first.len()) {
        return vec![Vec::new(); all.len()];
    }
    let differs: Vec<bool> = (0..first.len()).map(|at| all.iter().any(|numbers| numbers[at] != first[at])).collect();
    let kept = |numbers: &Vec<u64>| numbers.iter().zip(&differs).filter(|pair| *pair.1).map(|pair| *pair.0).collect();
    all.iter().map(kept).collect()
}

/// Names, for a message: not all, where there are many.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 20;
    let more = if names.len() > SHOWN { " …" } else { "" };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}
