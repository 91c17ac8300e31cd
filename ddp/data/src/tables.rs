//! Tables: what this crate asks of the one that reads them, `ddp-tables`, and what it gets: each
//! table as a flat file, and which of its columns are what.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::{Result, bail};
use crate::features::ColumnPlan;
use crate::files::{Array, OddCells};
use crate::labels::FileLabels;
use crate::request::DataRequest;
use crate::resolve::FoundFiles;
use crate::task::LabelName;

/// What takes the texts of a column, with the place of each for messages.
pub type TextSink<'a> = &'a mut dyn FnMut(&[u8], &dyn Fn() -> String) -> Result<()>;

/// A reader of tables.
pub trait Tables: fmt::Debug + Sync {
    /// The names of the columns of the table at `path`.
    fn columns(&self, path: &Path) -> Result<Vec<String>>;

    /// The table at `path` as a flat file in the cache.
    fn flatten(&self, path: &Path, wanted: &WantedColumns<'_>) -> Result<FileParts>;

    /// The place of a cell, for messages.
    fn place(&self, path: &Path, column: &str, row: u64) -> String;

    /// Gives the texts of the column `name` to `each`. A null is an empty text.
    fn texts(&self, path: &Path, name: &str, each: TextSink<'_>) -> Result<()>;
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
}

/// A column of a table, for messages.
#[derive(Clone, Debug)]
pub struct TableColumn {
    /// Its name, or several with commas between.
    pub name: String,
    /// The table.
    pub path: PathBuf,
    /// What reads the table.
    pub tables: &'static dyn Tables,
}

impl DataRequest {
    /// What reads the table at `path`.
    pub(crate) fn tables(&self, path: &Path) -> Result<&'static dyn Tables> {
        match self.tables {
            Some(tables) => Ok(tables),
            None => bail!(
                "{}: expected arrays or tokens, got a table, which this program does not read; help: give its rows as .npy",
                path.display()
            ),
        }
    }
}
