//! Opens the files that were found: files of one kind, as one sequence of feature rows and one of
//! labels.
//!
//! The label of a table is a column, that of a file with several arrays is one of them; a file with
//! one array needs a second file, which for IDX is found beside it. All files use the column and
//! label names of the first one.

mod names;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_kernels::mapped::{Identity, Mapped};
use ddp_kernels::setting::SettingName;

use crate::dataset::RowSpec;
use crate::error::{Result, bail, ensure};
use crate::features::{ColumnPlan, Missing};
use crate::files::array::Rows;
use crate::files::io::refuse;
use crate::files::{self, Array, Contents, OddCells};
use crate::labels::{FileLabels, Labels};
use crate::ranks::{Ranks, must_be_alike};
use crate::request::Trained;
use crate::resolve::{self, FoundFiles, LabelPlace, mismatched};
use crate::setting::{CATEGORICAL, DATA, DROP, MISSING, VAL_DATA};
use crate::spec::FilesSpec;
use crate::tables::{FileParts, KnownColumns, Tables, WantedColumns};
use crate::task::LabelName;
use crate::words::{difference, printable};

/// Open files of features and labels.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    /// The setting that names them, and what it says.
    pub(crate) setting: SettingName<'static>,
    pub(crate) path: String,
    pub(crate) features: Rows,
    pub(crate) labels: Option<Labels>,
    /// The name of the labels in their first file.
    pub(crate) label: Option<LabelName>,
    /// The files of the features, and whether they are tables.
    paths: Vec<PathBuf>,
    pub(crate) is_table: bool,
    /// The names of the features.
    pub(crate) columns: Option<Vec<String>>,
    /// The columns or arrays of the first file that are neither features nor the label.
    pub(crate) left_out: Vec<String>,
    /// The columns of a table that they come from, unless each is a column of numbers.
    pub(crate) plan: Option<Vec<ColumnPlan>>,
    /// Cells of tables that were missing or had an unknown category, by column.
    pub(crate) odd_cells: Vec<OddCells>,
    /// What was chosen for tables, for people.
    pub(crate) notes: Vec<String>,
    /// Whether the user named files that hold only labels.
    pub(crate) has_label_files: bool,
    /// The user's files that are read in place: if one changes, the data change.
    pub(crate) watched: Vec<Arc<Mapped>>,
}

impl OpenFiles {
    /// The name of the first file of features, for messages.
    pub(crate) fn place(&self) -> &str {
        self.features.arrays[0].name()
    }

    /// The name of a feature, for messages.
    pub(crate) fn feature(&self, index: usize) -> String {
        let name = self.columns.as_ref().map(|names| printable(&names[index]));
        name.unwrap_or_else(|| index.to_string())
    }

    /// The first file of `self` that `other` has as well.
    pub(crate) fn shared_with(&self, other: &OpenFiles) -> Option<&str> {
        let file = |path: &PathBuf| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
        let others: Vec<_> = other.paths.iter().filter_map(file).collect();
        let mut files = self.paths.iter().zip(&self.features.arrays);
        // Each model has its own copy of a table.
        let shared = files.find(|(path, array)| {
            if self.is_table {
                file(path).is_some_and(|it| others.contains(&it))
            } else {
                other.features.has(array)
            }
        });
        shared.map(|(_, array)| array.name())
    }

    /// An error unless these rows have the shape of those to train on.
    pub(crate) fn check_shape(&self, train: &OpenFiles) -> Result<()> {
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

    /// An error on all ranks unless they have opened the same files: from here on they share the
    /// work.
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

/// What the model or the first file says about columns and label, and what was opened.
struct Opening<'a> {
    files: &'a FoundFiles<'a>,
    tables: Option<&'static dyn Tables>,
    known: KnownColumns,
    features: Vec<Array>,
    labels: Vec<FileLabels>,
    /// Of the first file, the names of its features, and the columns or arrays that are left out.
    first: Option<(Option<Vec<String>>, Vec<String>)>,
    odd_cells: Vec<OddCells>,
    notes: Vec<String>,
}

/// Opens all of it, `tables` those that are tables. Only headers are read, unless files have to be
/// converted first.
pub(crate) fn open_files(
    mut files: FoundFiles<'_>,
    tables: Option<&'static dyn Tables>,
) -> Result<OpenFiles> {
    let model = files.model;
    let are_tables: Vec<bool> = files
        .paths
        .iter()
        .map(|path| files::is_table(path))
        .collect();
    check_settings(&files, &are_tables)?;
    if let LabelPlace::Given(text) = &files.labels {
        files.labels = place_of(text, &files, are_tables[0], tables)?;
    }
    let files = &files;
    let mut opening = Opening {
        files,
        tables,
        known: model.map_or_else(KnownColumns::default, |model| KnownColumns {
            columns: model.columns.clone(),
            plan: model.plan.columns.clone(),
            label: model.label.clone(),
        }),
        features: Vec::new(),
        labels: Vec::new(),
        first: None,
        odd_cells: Vec::new(),
        notes: Vec::new(),
    };
    let cache_dir = files.request.cache_dir.as_deref();
    for (path, &is_table) in files.paths.iter().zip(&are_tables) {
        opening.add(if is_table {
            opening.table(path, None)?
        } else {
            opening.arrays_of(path, files::open(path, cache_dir)?)?
        });
    }
    let (label_files, part) = files.labels.files();
    for path in label_files {
        opening.add(if files::is_table(path) {
            opening.table(path, Some(part))?
        } else {
            opening.labels_of(path, files::open(path, cache_dir)?, part)?
        });
    }
    opening.check_labels()?;
    let given = files.paths.iter().chain(label_files);
    let given: HashSet<&Path> = given.map(|path| &**path).collect();
    let labels = opening.labels.iter().map(|labels| &labels.array);
    let arrays = opening.features.iter().chain(labels);
    let watched = arrays.map(|array| &array.mapped);
    let watched = watched.filter(|file| given.contains(file.path())).cloned();
    let (columns, left_out) = opening.first.take().unwrap_or_default();
    let has_more = |plan: &Vec<ColumnPlan>| !plan.iter().all(ColumnPlan::is_number);
    let is_open = are_tables[0] && files.request.left_open.task;
    let source = OpenFiles {
        setting: files.setting,
        path: files.spec.path.clone(),
        watched: watched.collect(),
        features: Rows::new(opening.features)?,
        label: opening.labels.first().and_then(FileLabels::name),
        labels: match (&files.labels, model) {
            (LabelPlace::Unwanted, _) => None,
            (_, Some(model)) => Some(Labels::of_task(opening.labels, &model.task)?),
            (_, None) => {
                let labels = Labels::new(opening.labels, files.request.task, is_open)?;
                opening.notes.extend(labels.choice.clone());
                Some(labels)
            }
        },
        paths: files.paths.clone(),
        is_table: are_tables[0],
        columns,
        left_out,
        plan: opening.known.plan.filter(has_more),
        odd_cells: opening.odd_cells,
        notes: opening.notes,
        has_label_files: matches!(files.labels, LabelPlace::Files(..)),
    };
    source.features.element()?;
    model.map_or(Ok(()), |model| check_width(&source, model))?;
    Ok(source)
}

/// What reads the table at `path`.
fn reader(tables: Option<&'static dyn Tables>, path: &Path) -> Result<&'static dyn Tables> {
    tables.ok_or_else(|| {
        refuse(
            path,
            "expected arrays or tokens, got a table, which this program does not read; help: save its rows as .npy",
        )
    })
}

/// An error if settings of tables are given for other files.
fn check_settings(files: &FoundFiles<'_>, are_tables: &[bool]) -> Result<()> {
    let (table, all) = (
        &files.request.table,
        are_tables.iter().all(|is_table| *is_table),
    );
    for (setting, names) in [(DROP, &table.drop), (CATEGORICAL, &table.categorical)] {
        ensure!(
            all || names.is_empty() || files.model.is_some(),
            Usage,
            "{setting} {}: expected tables (.csv, .tsv, .parquet) as {}, got {}; help: leave out {setting}",
            names.join(","),
            files.setting,
            files.spec.path
        );
    }
    ensure!(
        all || table.missing != Missing::Indicator || files.model.is_some(),
        Usage,
        "{MISSING} indicator: expected tables (.csv, .tsv, .parquet) as {}, got {}; help: give {MISSING} mean",
        files.setting,
        files.spec.path
    );
    Ok(())
}

/// What `text` means as labels. A column or an array of this name takes precedence over a folder,
/// since many words are names of folders.
fn place_of(
    text: &str,
    found: &FoundFiles<'_>,
    is_table: bool,
    tables: Option<&'static dyn Tables>,
) -> Result<LabelPlace> {
    let FilesSpec { path, part } = FilesSpec::split(text);
    let first = &found.paths[0];
    let has_part = || -> Result<bool> {
        if is_table {
            let columns = reader(tables, first)?.columns(first)?;
            return Ok(columns.iter().any(|column| column == text));
        }
        let arrays = files::open(first, found.request.cache_dir.as_deref())?.arrays;
        Ok(arrays.iter().any(|array| array.key == text))
    };
    let ends_as_data = resolve::ends_as_data(Path::new(&path));
    let is_file = ends_as_data || Path::new(&path).exists();
    if !is_file || !ends_as_data && has_part()? {
        return Ok(LabelPlace::Named(text.to_string()));
    }
    let files = resolve::files(&path, found.labels_setting())?;
    // The table of the features itself: its other columns are the features.
    let real = |paths: &[PathBuf]| -> Option<Vec<PathBuf>> {
        let real = paths.iter().map(|path| fs::canonicalize(path).ok());
        real.collect()
    };
    if is_table && real(&files) == real(&found.paths) {
        return Ok(part.map_or(LabelPlace::Default, LabelPlace::Named));
    }
    Ok(LabelPlace::Files(files, part))
}

/// An error if the model cannot take these rows.
fn check_width(source: &OpenFiles, model: &Trained) -> Result<()> {
    let expected = model.row_shape.iter().product::<usize>();
    let (place, got) = (source.place(), source.features.width);
    let (like, help) = if source.setting == DATA {
        ("as the model was trained on", String::new())
    } else {
        (
            "as those to train on have",
            format!("; help: give rows of the same shape as {VAL_DATA}"),
        )
    };
    ensure!(
        expected == got,
        "{place}: expected {expected} features a row, {like}, got {got}{help}"
    );
    Ok(())
}

impl Opening<'_> {
    /// Adds a file. The names of columns and label in the first file are then expected in the
    /// others.
    fn add(&mut self, file: FileParts) {
        let known = &mut self.known;
        known.columns = known.columns.take().or_else(|| file.columns.clone());
        known.plan = known.plan.take().or(file.plan);
        let name = file.labels.as_ref().and_then(FileLabels::name);
        known.label = name.or(known.label.take());
        self.features.extend(file.features);
        self.labels.extend(file.labels);
        self.first.get_or_insert((file.columns, file.left_out));
        OddCells::add(file.odd_cells, &mut self.odd_cells);
        self.notes.extend(file.notes);
    }

    /// A table, as the crate that reads it gives it.
    fn table(&self, path: &Path, labels_alone: Option<Option<&str>>) -> Result<FileParts> {
        let wanted = WantedColumns {
            files: self.files,
            known: &self.known,
            labels_alone,
        };
        reader(self.tables, path)?.flatten(path, &wanted)
    }

    /// The features and labels in a file of arrays.
    fn arrays_of(&self, path: &Path, mut contents: Contents) -> Result<FileParts> {
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
        if let (Some(expected), Some(got)) = (&self.known.columns, &columns) {
            ensure!(
                expected == got,
                "{}: expected the columns that the model was trained on, in their order: {}; help: save them in that order, or \
                 give a table, whose columns are found by their names",
                path.display(),
                difference(expected, got)
            );
        }
        Ok(FileParts {
            features: Some(features),
            labels,
            columns,
            left_out,
            ..FileParts::default()
        })
    }

    /// The labels in a file of arrays that holds only labels.
    fn labels_of(&self, path: &Path, contents: Contents, part: Option<&str>) -> Result<FileParts> {
        let index = self.labels_alone(&contents, path, part)?;
        Ok(FileParts {
            labels: Some(FileLabels::new(
                &contents.arrays[index],
                contents.about.classes,
            )),
            ..FileParts::default()
        })
    }

    /// Checks that there are as many labels as rows, in all if one file has them, else file by
    /// file, and that no array is both.
    fn check_labels(&self) -> Result<()> {
        let (features, labels) = (&self.features[..], &self.labels[..]);
        let given = format!("{} {}", self.files.setting, self.files.spec.path);
        let setting = self.files.labels_setting();
        ensure!(
            labels.len() <= 1 || labels.len() == features.len(),
            "{setting}: expected one file of labels, or one for each of the {} files of {given}, got {}; help: give as many",
            features.len(),
            labels.len()
        );
        // `Rows::new` refuses a sum that does not fit.
        let all = features.iter().map(Array::rows);
        let all = all.fold(0, u64::saturating_add);
        for (index, labels) in labels.iter().map(|labels| &labels.array).enumerate() {
            let (name, rows) = if self.labels.len() == features.len() {
                (features[index].name(), features[index].rows())
            } else {
                (&*given, all)
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
