//! Opens the files of features and of labels: files of one kind, as one stack of features and one
//! of labels.
//!
//! The label of a table is a column, that of a file with several arrays one of them; a file with
//! one array needs a second file, which IDX files have beside them. All files use the names of
//! columns and of the label of the first one.

mod ask;
mod labels;
mod plan;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::mapped::Mapped;

pub(crate) use self::ask::{Ask, LabelSource};
use self::ask::{LabelPlace, Labelled, array_of};
use super::choose::{self, WantedArrays};
use super::files::table::{self, TableRequest};
use super::files::{self, Array, Contents, OddCells};
use super::labels::FileLabels;
use super::plan::ColumnPlan;
use super::stack::Stack;
use super::task::LabelName;
use crate::error::{Error, Result};

/// Files that are open.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) features: Stack,
    pub(crate) labels: Option<Vec<FileLabels>>,
    /// The files of the features.
    pub(crate) paths: Vec<PathBuf>,
    /// The names of the features.
    pub(crate) columns: Option<Vec<String>>,
    /// The columns or arrays of the first file that are neither features nor the label.
    pub(crate) left_out: Vec<String>,
    /// The columns of a table that they come from, unless each is a column of numbers.
    pub(crate) plan: Option<Vec<ColumnPlan>>,
    /// Cells of tables without a number or category of their own, by column.
    pub(crate) odd_cells: Vec<OddCells>,
    /// The name of the labels in their first file.
    pub(crate) label: Option<LabelName>,
    /// Whether the user named files that hold only labels.
    pub(crate) has_given_label_files: bool,
    /// The user's files that are read in place: if one changes, the data change.
    pub(crate) watched: Vec<Arc<Mapped>>,
}

impl Opened {
    /// Whether the files are tables.
    pub(crate) fn is_table(&self) -> bool {
        choose::is_table(&self.paths[0])
    }

    /// A file whose rows are among these, too.
    pub(crate) fn shared_with(&self, other: &Opened) -> Option<&str> {
        let real = |path: &PathBuf| fs::canonicalize(path).ok();
        let others: Vec<_> = other.paths.iter().map(real).collect();
        // Each model has its own copy of a table.
        let is_in = |index: usize, array: &Array| match self.is_table() {
            true => others.contains(&real(&self.paths[index])),
            false => other.features.arrays().iter().any(|own| own.is_same(array)),
        };
        let mut arrays = self.features.arrays().iter().enumerate();
        let shared = arrays.find(|(index, array)| is_in(*index, array));
        shared.map(|(_, array)| array.name())
    }
}

/// One file of the data.
struct Part {
    features: Array,
    labels: Option<Labelled>,
    columns: Option<Vec<String>>,
    left_out: Vec<String>,
    odd_cells: Vec<OddCells>,
}

/// Opens all of it. Only headers are read, unless files have to be converted first.
pub(crate) fn open(ask: &Ask<'_>) -> Result<Opened> {
    let paths = choose::files(&ask.spec.path, ask.setting)?;
    let source = labels::source(ask, &paths)?;
    labels::check_order(ask, &source, &paths)?;
    let mut ask = ask.clone();
    let mut features = Vec::with_capacity(paths.len());
    let mut labels: Vec<Labelled> = Vec::new();
    let (mut columns, mut left_out) = (None, Vec::new());
    let mut odd_cells: Vec<OddCells> = Vec::new();
    if !ask.is_for_model && ask.plan.is_none() {
        ask.plan = plan::of_settings(&ask, &paths, &source)?;
    }
    for (index, path) in paths.iter().enumerate() {
        let part = match choose::is_table(path) {
            true => open_table(&ask, path, &source)?,
            false => open_arrays(&ask, path, &source)?,
        };
        if index == 0 {
            columns.clone_from(&part.columns);
            left_out = part.left_out;
        }
        ask.columns = ask.columns.or(part.columns);
        let name = part.labels.as_ref().and_then(|labels| labels.name.clone());
        ask.label = name.or(ask.label);
        features.push(part.features);
        OddCells::add(part.odd_cells, &mut odd_cells);
        labels.extend(part.labels);
    }
    match &source {
        LabelPlace::Files(files, part) => {
            labels = labels::of_files(&mut ask, files, part.as_deref())?;
        }
        LabelPlace::Beside(files) => labels = labels::of_files(&mut ask, files, None)?,
        _ => {}
    }
    labels::check_rows(&ask, &source, &features, &labels)?;
    labels::check_differ(&ask, &features, &labels)?;
    labels::agree_on_texts(&ask, &mut labels)?;
    let label_arrays = labels.iter().map(|labels| &labels.of_file.array);
    let is_given = |mapped: &&Arc<Mapped>| {
        let mut given = paths.iter().chain(source.files());
        given.any(|path| path == mapped.path())
    };
    let arrays = features.iter().chain(label_arrays);
    let watched = arrays
        .map(Array::mapped)
        .filter(is_given)
        .cloned()
        .collect();
    let label = labels.first().and_then(|labels| labels.name.clone());
    let labels = labels.into_iter().map(|labels| labels.of_file).collect();
    Ok(Opened {
        features: Stack::new(features)?,
        paths,
        labels: (source != LabelPlace::Unwanted).then_some(labels),
        columns,
        left_out,
        plan: ask
            .plan
            .filter(|plan| plan.iter().any(ColumnPlan::is_categorical)),
        odd_cells,
        label,
        has_given_label_files: matches!(source, LabelPlace::Files(..)),
        watched,
    })
}

/// A table: its columns except the label.
fn open_table(ask: &Ask<'_>, path: &Path, source: &LabelPlace) -> Result<Part> {
    let features = feature_columns(ask)?;
    let names = features.as_ref();
    let names = names.map(|features| features.iter().map(|plan| plan.name.clone()).collect());
    let names: Option<Vec<String>> = names;
    let label = match source {
        LabelPlace::Named(name) => Some(name.clone()),
        LabelPlace::Default => Some(labels::default_column(ask, path, names.as_deref())?),
        _ => None,
    };
    let mut left_out = table::columns(path)?;
    let labels = label.as_ref();
    let labels = labels.map_or(Vec::new(), |label| table::label_names(&left_out, label));
    let wanted: HashSet<&str> = names.iter().flatten().map(String::as_str).collect();
    let is_feature = |name: &str| wanted.contains(name);
    if let Some(label) = labels.iter().find(|label| is_feature(label)) {
        return Err(Error::Usage(format!(
            "`{}` {label}: the label must not be a feature of {} as well: a model that sees it learns \
             nothing; help: give another label, or other features as in `{}` {}#a,b",
            ask.labels_setting,
            path.display(),
            ask.setting,
            ask.spec.path
        )));
    }
    left_out.retain(|name| !labels.contains(&name.as_str()) && !is_feature(name));
    let may_hold_label = features.is_none() && *source == LabelPlace::Unwanted;
    let count = features.as_ref().map_or(left_out.len(), Vec::len);
    check_unnamed(ask, path, count, may_hold_label)?;
    let request = TableRequest {
        label: label.as_deref(),
        features: features.as_deref(),
        allows_missing: ask.allows_missing,
        labels_are_texts: false,
        is_for_model: ask.is_for_model,
        cache_dir: ask.cache_dir,
    };
    let contents = table::open(path, &request)?;
    let labels = label.map(|label| Labelled::of_column(path, &contents, label));
    if features.is_none() {
        left_out.clear();
    }
    Ok(Part {
        features: array_of(&contents, path, "features")?,
        labels: labels.transpose()?,
        columns: contents.columns,
        left_out,
        odd_cells: contents.odd_cells,
    })
}

/// An error if `count` columns of a table are not the features of a model that was trained on rows
/// without names, or may be something else.
fn check_unnamed(ask: &Ask<'_>, path: &Path, count: usize, may_hold_label: bool) -> Result<()> {
    let (Some(width), None) = (ask.width, &ask.columns) else {
        return Ok(());
    };
    let what = match may_hold_label {
        _ if count != width => {
            format!("{width} columns of features, as many as the model was trained on, got {count}")
        }
        true => "the names of the features, since the model was trained on rows without names, got a table that may hold \
             the label as well"
            .into(),
        false => return Ok(()),
    };
    let (path, setting) = (path.display(), ask.setting);
    Err(Error::Data(format!(
        "`{setting}` {path}: expected {what}; help: name the columns in the model's order, as in {path}#a,b"
    )))
}

/// The columns of a table that are features, in their order; `None` for all except the label.
fn feature_columns(ask: &Ask<'_>) -> Result<Option<Vec<ColumnPlan>>> {
    let numbers = |names: &Vec<String>| -> Vec<ColumnPlan> {
        names.iter().map(|name| ColumnPlan::number(name)).collect()
    };
    let known = ask.plan.clone().or(ask.columns.as_ref().map(numbers));
    let named = ask.named_columns();
    let (Some(plan), Some(named)) = (&known, &named) else {
        return Ok(known.or(named.as_ref().map(numbers)));
    };
    let known: Vec<String> = plan.iter().map(|plan| plan.name.clone()).collect();
    let (mut a, mut b) = (known.clone(), named.clone());
    a.sort_unstable();
    b.sort_unstable();
    // The settings leave out some of those that are named.
    if a == b || !ask.is_for_model && a.iter().all(|name| b.binary_search(name).is_ok()) {
        return Ok(Some(plan.clone()));
    }
    let (path, part) = (&ask.spec.path, named.join(","));
    Err(Error::Usage(format!(
        "`{}` {path}#{part}: expected the columns that the model was trained on: {}; help: leave out #{part}: columns are \
         found by their names",
        ask.setting,
        difference(&known, named)
    )))
}

/// How two lists of columns differ.
fn difference(expected: &[String], got: &[String]) -> String {
    let mut pairs = expected.iter().zip(got);
    match pairs.position(|(expected, got)| expected != got) {
        Some(index) => {
            let (expected, got) = (&expected[index], &got[index]);
            format!("column {}: expected {expected:?}, got {got:?}", index + 1)
        }
        None => format!("expected {} columns, got {}", expected.len(), got.len()),
    }
}

/// A file of arrays.
fn open_arrays(ask: &Ask<'_>, path: &Path, source: &LabelPlace) -> Result<Part> {
    let contents = files::open(path, ask.cache_dir)?;
    let wanted = WantedArrays {
        features: ask.spec.part.as_deref(),
        labels: match source {
            LabelPlace::Named(name) => Some(name),
            _ => None,
        },
        labels_elsewhere: match &ask.label {
            Some(LabelName::Array(name)) => Some(name),
            _ => None,
        },
        looks_for_labels: *source == LabelPlace::Default,
        to_evaluate: ask.to_evaluate,
    };
    let (features, labels) = choose::arrays(&contents, path, wanted)?;
    if labels.is_none() && wanted.looks_for_labels {
        let or_name = match contents.arrays.len() {
            1 => "",
            _ => ", or '#NAME' for an array of this file",
        };
        return Err(Error::Usage(format!(
            "`{}` {}: expected labels in the file, got {}; help: give `{}` FILE{or_name}",
            ask.setting,
            path.display(),
            choose::listed(&contents),
            ask.labels_setting
        )));
    }
    let Contents {
        arrays,
        classes,
        columns,
        ..
    } = contents;
    let labels = labels.map(|index| Labelled::of_array(path, &arrays[index], classes));
    let is_used = |name: &str| {
        let label = labels.as_ref().map(|labels| labels.of_file.array.key());
        name == arrays[features].key() || label == Some(name)
    };
    let names = arrays.iter().map(|array| array.key().to_string());
    let left_out = names.filter(|name| !is_used(name)).collect();
    let features = arrays[features].clone();
    // They may be the names of another array.
    let columns = columns.filter(|columns| columns.len() == features.row_elements());
    if let (Some(expected), Some(got)) = (&ask.columns, &columns)
        && expected != got
    {
        return Err(Error::Data(format!(
            "{}: expected the columns that the model was trained on, in their order: {}; help: save them in that order, or \
             give a table, whose columns are found by their names",
            path.display(),
            difference(expected, got)
        )));
    }
    Ok(Part {
        features,
        labels,
        columns,
        left_out,
        odd_cells: Vec::new(),
    })
}
