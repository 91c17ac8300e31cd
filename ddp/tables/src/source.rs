//! Opens a table, of whatever format.

use std::path::{Path, PathBuf};

use ddp_data::Result;
use ddp_data::files::{TableFormat, table_format};

use crate::table::TableReader;
use crate::{csv, parquet};

/// A table before its first row.
pub(crate) struct Table {
    pub(crate) path: PathBuf,
    pub(crate) rows: Box<dyn TableReader>,
}

impl Table {
    /// Opens the table at `path`. Only its header is read.
    pub(crate) fn open(path: &Path) -> Result<Table> {
        let rows = match table_format(path)? {
            TableFormat::Csv => csv::open(path)?,
            TableFormat::Parquet => parquet::open(path)?,
        };
        let path = path.to_path_buf();
        Ok(Table { path, rows })
    }
}
