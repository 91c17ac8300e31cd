//! Where the labels are: in a column or array, or in files of their own, and whether these fit the
//! features.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::ask::{Ask, LabelPlace, LabelSource, Labelled};
use crate::choose;
use crate::error::{Error, Result};
use crate::files::table::{self, TableRequest};
use crate::files::{self, Array, listed};
use crate::spec::FilesSpec;
use crate::task::LabelName;

/// Where labels are.
pub(super) fn source(ask: &Ask<'_>, paths: &[PathBuf]) -> Result<LabelPlace> {
    match &ask.labels {
        LabelSource::Unwanted => Ok(LabelPlace::Unwanted),
        LabelSource::Default => {
            let beside = paths.iter().map(|path| choose::labels_beside(path));
            let beside: Option<Vec<PathBuf>> = beside.collect();
            Ok(beside.map_or(LabelPlace::Default, LabelPlace::Beside))
        }
        LabelSource::Given(text) => match text.strip_prefix('#') {
            Some(name) => Ok(LabelPlace::Named(name.to_string())),
            None => named_or_files(ask, text, paths),
        },
    }
}

/// What `text` means. A column or an array of this name comes before a folder, since folders have
/// many words as names.
fn named_or_files(ask: &Ask<'_>, text: &str, paths: &[PathBuf]) -> Result<LabelPlace> {
    let FilesSpec { path, part } = FilesSpec::split(text);
    let is_file = choose::has_ending(&path) || Path::new(&path).exists();
    if !is_file || !choose::has_ending(&path) && has_part(ask, &paths[0], text)? {
        return Ok(LabelPlace::Named(text.to_string()));
    }
    let files = choose::files(&path, ask.labels_setting)?;
    // The table of the features itself: its other columns are the features.
    let real = |paths: &[PathBuf]| -> Option<Vec<PathBuf>> {
        paths
            .iter()
            .map(|path| fs::canonicalize(path).ok())
            .collect()
    };
    if choose::is_table(&paths[0]) && real(&files) == real(paths) {
        return Ok(part.map_or(LabelPlace::Default, LabelPlace::Named));
    }
    Ok(LabelPlace::Files(files, part))
}

/// Whether the file has a column or an array of this name.
fn has_part(ask: &Ask<'_>, path: &Path, name: &str) -> Result<bool> {
    if choose::is_table(path) {
        return Ok(table::columns(path)?.iter().any(|column| column == name));
    }
    let arrays = files::open(path, ask.cache_dir)?.arrays;
    Ok(arrays.iter().any(|array| array.key() == name))
}

/// The column of labels if none is given: the one of the other files, else the last column that is
/// not a feature.
pub(super) fn default_column(
    ask: &Ask<'_>,
    path: &Path,
    features: Option<&[String]>,
) -> Result<String> {
    let columns = table::columns(path)?;
    match &ask.label {
        Some(LabelName::Column(name)) if table::has_label(&columns, name) => {
            return Ok(name.clone());
        }
        // Only if the features have names as well, this table should have the same ones.
        Some(LabelName::Column(name)) if ask.columns.is_some() => {
            return Err(missing(ask, path, name, &columns));
        }
        _ => {}
    }
    let others = features.into_iter().flatten().chain(&ask.table.drop);
    let others: HashSet<&String> = others.collect();
    let is_left = |name: &String| !others.contains(name);
    let mut last_first = columns.into_iter().rev();
    last_first.find(is_left).ok_or_else(|| {
        let (path, setting) = (path.display(), ask.labels_setting);
        Error::Data(format!(
            "{path}: expected a column of labels besides the features, got none; help: give `{setting}` FILE"
        ))
    })
}

/// The column of a table that holds only labels, if none is given: the one of the other files, else
/// the last.
fn only_column(ask: &Ask<'_>, path: &Path) -> Result<String> {
    let mut columns = table::columns(path)?;
    match &ask.label {
        Some(LabelName::Column(name)) if table::has_label(&columns, name) => Ok(name.clone()),
        Some(LabelName::Column(name)) if columns.len() > 1 => {
            Err(missing(ask, path, name, &columns))
        }
        _ => columns
            .pop()
            .ok_or_else(|| Error::Internal("a table without columns".into())),
    }
}

fn missing(ask: &Ask<'_>, path: &Path, name: &str, columns: &[String]) -> Error {
    Error::Data(format!(
        "{}: expected labels in a column \"{name}\", as in the other files for this model, got the columns {}; \
         help: if they have another name, give `{}` '#COLUMN' or FILE#COLUMN; a file without labels can only be \
         predicted",
        path.display(),
        listed(columns),
        ask.labels_setting
    ))
}

/// Files that hold only labels. All have the name of the first one.
pub(super) fn of_files(
    ask: &mut Ask<'_>,
    files: &[PathBuf],
    part: Option<&str>,
) -> Result<Vec<Labelled>> {
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
    Ok(Labelled::of_array(
        path,
        &contents.arrays[index],
        contents.classes,
    ))
}

/// One column of a table as labels.
fn of_column(
    ask: &Ask<'_>,
    path: &Path,
    column: String,
    labels_are_texts: bool,
) -> Result<Labelled> {
    let request = TableRequest {
        label: Some(&column),
        features: Some(&[]),
        labels_are_texts,
        cache_dir: ask.cache_dir,
        ..TableRequest::default()
    };
    let contents = table::open(path, &request)?;
    Labelled::of_column(path, &contents, column)
}

/// If the labels of one table are texts, those of all tables are, as within one table.
pub(super) fn agree_on_texts(ask: &Ask<'_>, labels: &mut [Labelled]) -> Result<()> {
    let are_numbers = |labels: &Labelled| labels.of_file.names.is_none();
    if !ask.labels_are_texts && labels.iter().all(are_numbers) {
        return Ok(());
    }
    for labels in labels.iter_mut().filter(|labels| are_numbers(labels)) {
        if let (Some(LabelName::Column(column)), true) =
            (labels.name.clone(), choose::is_table(&labels.path))
        {
            *labels = of_column(ask, &labels.path, column, true)?;
        }
    }
    Ok(())
}

/// An error if the order of rows matters and these files, sorted by their names as texts, are not
/// in the order of their numbers: `x-10` comes before `x-2`.
pub(super) fn check_order(ask: &Ask<'_>, source: &LabelPlace, paths: &[PathBuf]) -> Result<()> {
    let why = match source {
        LabelPlace::Files(files, _) if files.len() == 1 => "one file of labels",
        LabelPlace::Unwanted => "rows that are written in this order",
        _ => return Ok(()),
    };
    let numbers = |path: &PathBuf| -> (String, Vec<u64>) {
        let name = path.display().to_string();
        let rest = name.split(|character: char| character.is_ascii_digit());
        let rest: Vec<&str> = rest.filter(|text| !text.is_empty()).collect();
        (rest.join("0"), numbers(&name))
    };
    let is_turned = |pair: &&[PathBuf]| {
        let (one, other) = (numbers(&pair[0]), numbers(&pair[1]));
        one.0 == other.0 && one.1 > other.1
    };
    let Some(pair) = paths.windows(2).find(is_turned) else {
        return Ok(());
    };
    Err(Error::Data(format!(
        "`{}` {}: expected files in the order of their numbers for {why}, got {} before {}; help: files are sorted by their \
         names as texts: number them with leading zeros",
        ask.setting,
        ask.spec.path,
        pair[0].display(),
        pair[1].display()
    )))
}

/// The numbers in a name.
fn numbers(name: &str) -> Vec<u64> {
    let digits = name.split(|character: char| !character.is_ascii_digit());
    let digits = digits.filter(|digits| !digits.is_empty());
    digits
        .map(|digits| digits.parse().unwrap_or(u64::MAX))
        .collect()
}

/// Checks that there are as many labels as rows: in all if one file has them, else file by file.
pub(super) fn check_rows(
    ask: &Ask<'_>,
    source: &LabelPlace,
    features: &[Array],
    labels: &[Labelled],
) -> Result<()> {
    let given = format!("`{}` {}", ask.setting, ask.spec.path);
    let check = |labels: &Labelled, name: &str, rows: u64| {
        let array = &labels.of_file.array;
        match array.rows() == rows {
            true => Ok(()),
            false => Err(Error::Data(format!(
                "{}: expected a label for each of the {rows} rows of {name}, got {}; help: give the labels of these \
                 rows, in their order",
                array.name(),
                array.rows()
            ))),
        }
    };
    match (labels, features) {
        ([], _) => return Ok(()),
        ([labels], [features]) => return check(labels, features.name(), features.rows()),
        ([labels], _) => {
            // `Stack::new` refuses a sum that does not fit.
            let rows = features
                .iter()
                .map(Array::rows)
                .fold(0, u64::saturating_add);
            return check(labels, &given, rows);
        }
        _ => {}
    }
    let (expected, got) = (features.len(), labels.len());
    if expected != got {
        return Err(Error::Data(format!(
            "`{}`: expected one file of labels, or one for each of the {expected} files of {given}, got {got}",
            ask.labels_setting
        )));
    }
    for (labels, features) in labels.iter().zip(features) {
        check(labels, features.name(), features.rows())?;
    }
    match source {
        LabelPlace::Files(files, _) => check_numbers(ask, features, files),
        _ => Ok(()),
    }
}

/// An error if an array is both features and labels.
pub(super) fn check_differ(ask: &Ask<'_>, features: &[Array], labels: &[Labelled]) -> Result<()> {
    let mut labels = labels.iter().map(|labels| &labels.of_file.array);
    let is_feature = |label: &&Array| features.iter().any(|array| array.is_same(label));
    let Some(label) = labels.find(is_feature) else {
        return Ok(());
    };
    Err(Error::Usage(format!(
        "`{}` {}: expected other numbers than the features of `{}`, got the same ones: a model that sees its labels learns \
         nothing; help: give another file or array",
        ask.labels_setting,
        label.name(),
        ask.setting
    )))
}

/// An error if the numbers in the names of files do not fit: sorted as texts, `x-02` would have the
/// labels of `y-10`.
fn check_numbers(ask: &Ask<'_>, features: &[Array], labels: &[PathBuf]) -> Result<()> {
    let features: Vec<String> = features
        .iter()
        .map(|array| array.name().to_string())
        .collect();
    let labels: Vec<String> = labels
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let numbers = differing_numbers(&features).zip(differing_numbers(&labels));
    for (index, (one, other)) in numbers.enumerate() {
        if one.len() == other.len() && one != other {
            return Err(Error::Data(format!(
                "`{}` {}: expected labels with the number of their features, {}; help: files are sorted by their names as \
                 texts: number both alike, with leading zeros",
                ask.labels_setting, labels[index], features[index]
            )));
        }
    }
    Ok(())
}

/// The numbers in each of these names, except those that are the same in all. Empty if names differ
/// in how many they have.
fn differing_numbers(names: &[String]) -> impl Iterator<Item = Vec<u64>> {
    let all: Vec<Vec<u64>> = names.iter().map(|name| numbers(name)).collect();
    let is_alike = all.iter().all(|numbers| numbers.len() == all[0].len());
    let differs = |at: usize| all.iter().any(|numbers| numbers[at] != all[0][at]);
    let positions = 0..if is_alike { all[0].len() } else { 0 };
    let differing: Vec<usize> = positions.filter(|&at| differs(at)).collect();
    all.into_iter()
        .map(move |numbers| differing.iter().map(|&at| numbers[at]).collect())
}
