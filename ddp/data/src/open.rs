//! Opens the files that were found: files of one kind, as one run of rows of features and one of
//! labels.
//!
//! The label of a table is a column, that of a file with several arrays one of them; a file with
//! one array needs a second file, which IDX files have beside them. All files use the names of
//! columns and of the label of the first one.

mod names;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::mapped::{Identity, Mapped};
use ddp_kernels::setting::SettingName;

use crate::dataset::RowSpec;
use crate::error::{Error, Result, bail, ensure};
use crate::features::ColumnPlan;
use crate::files::array::Rows;
use crate::files::table::{self, TableRequest};
use crate::files::{self, Array, Contents, DataFile, OddCells};
use crate::labels::{FileLabels, Labels};
use crate::ranks::{Ranks, must_be_alike};
use crate::request::Trained;
use crate::resolve::{FoundFiles, LabelPlace, mismatched};
use crate::setting::{DATA, VAL_DATA};
use crate::task::LabelName;

/// Open files of features and labels.
#[derive(Debug)]
pub(crate) struct Source {
    /// The setting that names them, and what it says.
    pub(crate) setting: SettingName<'static>,
    pub(crate) path: String,
    pub(crate) features: Rows,
    pub(crate) labels: Option<Labels>,
    /// The name of the labels in their first file.
    pub(crate) label: Option<LabelName>,
    /// The files of the features.
    paths: Vec<PathBuf>,
    /// The names of the features.
    pub(crate) columns: Option<Vec<String>>,
    /// The columns or arrays of the first file that are neither features nor the label.
    pub(crate) left_out: Vec<String>,
    /// The columns of a table that they come from, unless each is a column of numbers.
    pub(crate) plan: Option<Vec<ColumnPlan>>,
    /// Cells of tables that were missing or had an unknown category, by column.
    pub(crate) odd_cells: Vec<OddCells>,
    /// Whether the user named files that hold only labels.
    pub(crate) has_label_files: bool,
    /// The user's files that are read in place: if one changes, the data change.
    pub(crate) watched: Vec<Arc<Mapped>>,
}

impl Source {
    /// Whether the files are tables.
    pub(crate) fn is_table(&self) -> bool {
        files::is_table(&self.paths[0])
    }

    /// The name of the first file of features, for messages.
    pub(crate) fn place(&self) -> &str {
        self.features.arrays[0].name()
    }

    /// The name of a feature, for messages.
    pub(crate) fn feature(&self, index: usize) -> String {
        let name = self.columns.as_ref().map(|names| names[index].clone());
        name.unwrap_or_else(|| index.to_string())
    }

    /// The first file of `self` that `other` has as well.
    pub(crate) fn shared_with(&self, other: &Source) -> Option<&str> {
        let real = |path: &PathBuf| fs::canonicalize(path).ok();
        let others: Vec<_> = other.paths.iter().map(real).collect();
        let mut files = self.paths.iter().zip(&self.features.arrays);
        // Each model has its own copy of a table.
        let shared = files.find(|(path, array)| match self.is_table() {
            true => others.contains(&real(path)),
            false => other.features.has(array),
        });
        shared.map(|(_, array)| array.name())
    }

    /// An error unless these rows have the shape of those to train on.
    pub(crate) fn check_shape(&self, train: &Source) -> Result<()> {
        let [expected, got] = [train, self].map(|source| source.features.arrays[0].row_shape());
        ensure!(
            !RowSpec::images_differ(expected, got),
            "{}: expected rows of shape {expected:?}, as those to train on, got {got:?}; help: give {VAL_DATA} of the same shape",
            self.place()
        );
        Ok(())
    }

    /// Identifies the open files: equal on ranks that have the same ones open.
    pub(crate) fn identity(&self) -> String {
        let labels = self.labels.iter();
        let labels = labels.flat_map(|labels| &labels.rows.arrays);
        identity_of(self.features.arrays.iter().chain(labels))
    }

    /// An error on all ranks unless they have opened the same: from here on they share the work.
    pub(crate) fn check_alike(&self, ranks: &dyn Ranks) -> Result<()> {
        let labels = self.labels.as_ref();
        let names = labels.and_then(|labels| labels.class_names.as_deref());
        let labels = match (&self.labels, names) {
            (None, _) => "none".to_string(),
            (Some(_), Some(_)) => "texts".into(),
            (Some(labels), None) if labels.are_classes() => "classes".into(),
            (Some(labels), None) => format!("{} numbers a row", labels.rows.width),
        };
        let name = match &self.label {
            Some(LabelName::Column(name) | LabelName::Array(name)) => name,
            None => "without a name",
        };
        let (features, columns) = (&self.features, self.columns.as_deref().unwrap_or_default());
        let files: Vec<&str> = features.arrays.iter().map(Array::name).collect();
        let values = [
            ("the number of files", files.len().to_string()),
            ("the files", files.join("\n")),
            ("the number of rows", features.rows().to_string()),
            ("the number of features", features.width.to_string()),
            ("the type of features", features.element()?.to_string()),
            ("the columns", columns.join("\n")),
            ("the label", name.to_string()),
            ("the labels", labels),
            ("the classes", names.unwrap_or_default().join("\n")),
        ];
        must_be_alike(ranks, &format!("{} {}", self.setting, self.path), &values)
    }
}

/// Identifies the files of these arrays. The number of a file system is left out, since it differs
/// between hosts that share it.
pub(crate) fn identity_of<'a>(arrays: impl Iterator<Item = &'a Array>) -> String {
    let identities = arrays.map(|array| Identity {
        device: 0,
        ..array.mapped.identity()
    });
    identities.map(|identity| format!("{identity:?}")).collect()
}

/// The columns of a table that are read.
struct TableColumns {
    label: Option<String>,
    /// `None` for all but the label.
    features: Option<Vec<ColumnPlan>>,
    /// The columns that are neither.
    left_out: Vec<String>,
}

/// What is known of columns and label, by the model or by the first file, and what was opened.
struct Opening<'a> {
    files: &'a FoundFiles<'a>,
    /// The names of the features, in this order.
    columns: Option<Vec<String>>,
    /// The columns of tables that they come from.
    plan: Option<Vec<ColumnPlan>>,
    label: Option<LabelName>,
    features: Vec<Array>,
    labels: Vec<FileLabels>,
    /// Of the first file, the names of its features, and the columns or arrays that are left out.
    first: Option<(Option<Vec<String>>, Vec<String>)>,
    odd_cells: Vec<OddCells>,
}

/// Opens all of it. Only headers are read, unless files have to be converted first.
pub(crate) fn open_files(files: &FoundFiles<'_>) -> Result<Source> {
    let model = files.model;
    let mut opening = Opening {
        files,
        columns: model.and_then(|model| model.columns.clone()),
        plan: model.and_then(|model| model.plan.columns.clone()),
        label: model.and_then(|model| model.label.clone()),
        features: Vec::new(),
        labels: Vec::new(),
        first: None,
        odd_cells: Vec::new(),
    };
    if model.is_none() {
        opening.plan = opening.plan_of_settings()?;
    }
    let (label_files, part) = files.labels.files();
    let features = files.paths.iter().map(|path| (path, false));
    for (path, is_labels) in features.chain(label_files.iter().map(|path| (path, true))) {
        let columns = match (files::is_table(path), is_labels) {
            (true, false) => Some(opening.columns_of(path)?),
            (true, true) => Some(TableColumns {
                label: Some(
                    part.map_or_else(|| opening.only_column(path), |part| Ok(part.into()))?,
                ),
                features: Some(Vec::new()),
                left_out: Vec::new(),
            }),
            (false, _) => None,
        };
        let name = path.display().to_string();
        let file = DataFile::new(path, &name, files.request.cache_dir.as_deref());
        let request = columns.as_ref().map(|columns| opening.request(columns));
        let contents = files::read(&file, request.as_ref())?;
        match (columns, is_labels) {
            (Some(columns), _) => opening.add_table(path, contents, columns)?,
            (None, false) => opening.add_arrays(path, contents)?,
            (None, true) => opening.add_labels(path, contents, part)?,
        }
    }
    opening.check_labels()?;
    let given = files.paths.iter().chain(label_files);
    let given: HashSet<&Path> = given.map(|path| &**path).collect();
    let labels = opening.labels.iter().map(|labels| &labels.array);
    let arrays = opening.features.iter().chain(labels);
    let watched = arrays.map(|array| &array.mapped);
    let watched = watched.filter(|file| given.contains(file.path())).cloned();
    let (columns, left_out) = opening.first.take().unwrap_or_default();
    let is_categorical = |plan: &Vec<ColumnPlan>| plan.iter().any(ColumnPlan::is_categorical);
    let source = Source {
        setting: files.setting,
        path: files.spec.path.clone(),
        watched: watched.collect(),
        features: Rows::new(opening.features)?,
        label: opening.labels.first().and_then(FileLabels::name),
        labels: match (&files.labels, model) {
            (LabelPlace::Unwanted, _) => None,
            (_, Some(model)) => Some(Labels::of_task(opening.labels, &model.task)?),
            (_, None) => Some(Labels::new(opening.labels, files.request.task)?),
        },
        paths: files.paths.clone(),
        columns,
        left_out,
        plan: opening.plan.filter(is_categorical),
        odd_cells: opening.odd_cells,
        has_label_files: matches!(files.labels, LabelPlace::Files(..)),
    };
    source.features.element()?;
    model.map_or(Ok(()), |model| check_width(&source, model))?;
    Ok(source)
}

/// An error if the model cannot take these rows.
fn check_width(source: &Source, model: &Trained) -> Result<()> {
    let expected = model.row_shape.iter().product::<usize>();
    let (place, got) = (source.place(), source.features.width);
    let (like, help) = match source.setting == DATA {
        true => ("as the model was trained on", String::new()),
        false => (
            "as those to train on have",
            format!("; help: give rows of the same shape as {VAL_DATA}"),
        ),
    };
    ensure!(
        expected == got,
        "{place}: expected {expected} features a row, {like}, got {got}{help}"
    );
    Ok(())
}

impl Opening<'_> {
    /// Takes what a file has. What the first one names is known for the others.
    fn add(
        &mut self,
        features: Option<Array>,
        labels: Option<FileLabels>,
        columns: Option<Vec<String>>,
        left_out: Vec<String>,
    ) {
        self.columns = self.columns.take().or_else(|| columns.clone());
        let name = labels.as_ref().and_then(FileLabels::name);
        self.label = name.or(self.label.take());
        self.features.extend(features);
        self.labels.extend(labels);
        self.first.get_or_insert((columns, left_out));
    }

    /// The columns of a table to read: its features and the label.
    fn columns_of(&self, path: &Path) -> Result<TableColumns> {
        let features = self.feature_columns()?;
        let names: HashSet<&str> = features.iter().flatten().map(|plan| &*plan.name).collect();
        let mut left_out = files::columns(path)?;
        let label = self.label_of(path, &left_out, &names)?;
        let labels = label.as_ref();
        let labels = labels.map_or(Vec::new(), |label| table::label_names(&left_out, label));
        if let Some(label) = labels.iter().find(|label| names.contains(**label)) {
            bail!(
                Usage,
                "{} {label}: the label must not be a feature of {} as well: a model that sees it learns \
                 nothing; help: give another label, or other features as in {} {}#a,b",
                self.files.labels_setting(),
                path.display(),
                self.files.setting,
                self.files.spec.path
            );
        }
        left_out.retain(|name| !labels.contains(&&**name) && !names.contains(&**name));
        let count = features.as_ref().map_or(left_out.len(), Vec::len);
        let may_hold_label = features.is_none() && self.files.labels == LabelPlace::Unwanted;
        self.check_unnamed(path, count, may_hold_label)?;
        if features.is_none() {
            left_out.clear();
        }
        Ok(TableColumns {
            label,
            features,
            left_out,
        })
    }

    /// What is wanted of a table.
    fn request<'b>(&self, columns: &'b TableColumns) -> TableRequest<'b> {
        let features = columns.features.as_deref();
        let has_features = features.is_none_or(|features| !features.is_empty());
        TableRequest {
            label: columns.label.as_deref(),
            features,
            allows_missing: self.files.allows_missing() && has_features,
            labels_are_texts: self.files.has_text_classes(),
            is_for_model: self.files.model.is_some() && has_features,
        }
    }

    /// Takes the features and labels of a converted table, or only labels.
    fn add_table(&mut self, path: &Path, contents: Contents, columns: TableColumns) -> Result<()> {
        let array_of = |key: &str| match contents.find(key) {
            Ok(Some(array)) => Ok(array.clone()),
            Ok(None) => Err(format!(
                "{}: no columns of {key} are left; help: leave out fewer columns",
                path.display()
            )),
            Err(why) => Err(format!("{}: {why}", path.display())),
        };
        let labels = columns.label.map(|column| {
            Ok::<_, Error>(FileLabels {
                array: array_of("labels")?,
                names: contents.about.classes.clone(),
                column: Some((path.into(), column)),
            })
        });
        let labels = labels.transpose()?;
        match columns.features.is_some_and(|features| features.is_empty()) {
            true => self.add(None, labels, None, Vec::new()),
            false => {
                let features = array_of("features")?;
                self.add(
                    Some(features),
                    labels,
                    contents.about.columns,
                    columns.left_out,
                );
            }
        }
        OddCells::add(contents.about.odd_cells, &mut self.odd_cells);
        Ok(())
    }

    /// An error if `count` columns of a table are not the features of a model that was trained on
    /// rows without names, or may be something else.
    fn check_unnamed(&self, path: &Path, count: usize, may_hold_label: bool) -> Result<()> {
        let (Some(model), None) = (self.files.model, &self.columns) else {
            return Ok(());
        };
        let width: usize = model.row_shape.iter().product();
        let what = match may_hold_label {
            _ if count != width => format!(
                "{width} columns of features, as many as the model was trained on, got {count}"
            ),
            true => "the names of the features, since the model was trained on rows without names, got a table that may hold \
                 the label as well"
                .into(),
            false => return Ok(()),
        };
        let (path, setting) = (path.display(), self.files.setting);
        bail!(
            "{setting} {path}: expected {what}; help: name the columns in the model's order, as in {path}#a,b"
        )
    }

    /// Takes the features and labels of a file of arrays.
    fn add_arrays(&mut self, path: &Path, mut contents: Contents) -> Result<()> {
        let (features, labels) = self.arrays(&contents, path)?;
        let others = contents.arrays.iter().enumerate();
        let others = others.filter(|(index, _)| *index != features && Some(*index) != labels);
        let left_out = others.map(|(_, array)| array.key.to_string()).collect();
        let names = contents.about.classes.take();
        let labels = labels.map(|index| FileLabels::new(&contents.arrays[index], names));
        let features = contents.arrays.swap_remove(features);
        // They may be the names of another array.
        let is_own = |columns: &Vec<String>| columns.len() == features.row_elements;
        let columns = contents.about.columns.filter(is_own);
        if let (Some(expected), Some(got)) = (&self.columns, &columns) {
            ensure!(
                expected == got,
                "{}: expected the columns that the model was trained on, in their order: {}; help: save them in that order, or \
                 give a table, whose columns are found by their names",
                path.display(),
                difference(expected, got)
            );
        }
        self.add(Some(features), labels, columns, left_out);
        Ok(())
    }

    /// Takes a file of arrays that holds only labels.
    fn add_labels(&mut self, path: &Path, contents: Contents, part: Option<&str>) -> Result<()> {
        let index = self.labels_alone(&contents, path, part)?;
        let labels = FileLabels::new(&contents.arrays[index], contents.about.classes);
        self.add(None, Some(labels), None, Vec::new());
        Ok(())
    }

    /// Checks that there are as many labels as rows, in all if one file has them, else file by
    /// file, and that no array is both.
    fn check_labels(&self) -> Result<()> {
        let (features, labels) = (&self.features[..], &self.labels[..]);
        let given = format!("{} {}", self.files.setting, self.files.spec.path);
        let setting = self.files.labels_setting();
        ensure!(
            labels.len() <= 1 || labels.len() == features.len(),
            "{setting}: expected one file of labels, or one for each of the {} files of {given}, got {}",
            features.len(),
            labels.len()
        );
        // `Rows::new` refuses a sum that does not fit.
        let all = features.iter().map(Array::rows);
        let all = all.fold(0, u64::saturating_add);
        for (index, labels) in labels.iter().map(|labels| &labels.array).enumerate() {
            let (name, rows) = match self.labels.len() == features.len() {
                true => (features[index].name(), features[index].rows()),
                false => (&*given, all),
            };
            ensure!(
                labels.rows() == rows,
                "{}: expected a label for each of the {rows} rows of {name}, got {}; help: give the \
                 labels of these rows, in their order",
                labels.name(),
                labels.rows()
            );
            ensure!(
                !features.iter().any(|array| array.is_same(labels)),
                Usage,
                "{setting} {}: expected other numbers than the features of {}, got the same ones: a model that sees its \
                 labels learns nothing; help: give another file or array",
                labels.name(),
                self.files.setting
            );
        }
        if let (LabelPlace::Files(files, _), [_, _, ..]) = (&self.files.labels, labels) {
            let features = features.iter().map(|array| array.name().to_string());
            let files = files.iter().map(|path| path.display().to_string());
            let (features, files): (Vec<_>, Vec<_>) = (features.collect(), files.collect());
            if let Some(index) = mismatched(&features, &files) {
                bail!(
                    "{setting} {}: expected labels with the number of their features, {}; help: files are sorted by the \
                     numbers in their names: give both the same numbers",
                    files[index],
                    features[index]
                );
            }
        }
        Ok(())
    }
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
