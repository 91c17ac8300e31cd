//! Tables: the interface to `ddp-tables`, which reads them. It gives each table as a flat file, and
//! says what each column is.

use std::fmt;
use std::path::Path;

use crate::error::Result;
use crate::features::ColumnPlan;
use crate::files::{Array, OddCells};
use crate::labels::FileLabels;
use crate::resolve::FoundFiles;
use crate::task::LabelName;

/// What takes rows with their numbers.
pub type RecordSink<'a> = &'a mut dyn FnMut(u64, &str) -> Result<()>;

/// A reader of tables.
pub trait Tables: fmt::Debug + Sync {
    /// The names of the columns of the table at `path`.
    fn columns(&self, path: &Path) -> Result<Vec<String>>;

    /// Gives the rows of the table at `path` to `each`, as JSON objects with their numbers.
    fn records(&self, path: &Path, each: RecordSink<'_>) -> Result<()>;

    /// The table at `path` as a flat file in the cache.
    fn flatten(&self, path: &Path, wanted: &WantedColumns<'_>) -> Result<FileParts>;
}

/// What is wanted of a table.
#[derive(Clone, Copy, Debug)]
pub struct WantedColumns<'a> {
    /// All files, and what is wanted of their rows.
    pub files: &'a FoundFiles<'a>,
    /// What the model says, or the files before.
    pub known: &'a KnownColumns,
    /// Whether the table holds only labels, and the name of their column, if it is given.
    pub labels_alone: Option<Option<&'a str>>,
}

/// What is known of features and labels before a file is opened.
#[derive(Clone, Debug, Default)]
pub struct KnownColumns {
    /// The names of the features, in this order.
    pub columns: Option<Vec<String>>,
    /// The columns of tables that they come from.
    pub plan: Option<Vec<ColumnPlan>>,
    /// The name of the labels.
    pub label: Option<LabelName>,
}

/// What was wanted of a file.
#[derive(Debug, Default)]
pub struct FileParts {
    /// Its features, unless it holds only labels.
    pub features: Option<Array>,
    /// Its labels, if it has some.
    pub labels: Option<FileLabels>,
    /// The names of the features.
    pub columns: Option<Vec<String>>,
    /// The columns or arrays that are neither.
    pub left_out: Vec<String>,
    /// The columns of a table that the features come from, if settings or the model say so.
    pub plan: Option<Vec<ColumnPlan>>,
    /// Cells of a table that were missing or had an unknown category.
    pub odd_cells: Vec<OddCells>,
    /// What was chosen for a table, for people.
    pub notes: Vec<String>,
}
