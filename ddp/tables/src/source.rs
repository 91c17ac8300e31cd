//! Opens a table, of whatever format.

use std::path::{Path, PathBuf};

use ddp_data::Result;
use ddp_data::files::io::refuse;
use ddp_data::files::{TableFormat, table_format};
use ddp_data::setting::FIELD;
use ddp_data::text::TextSink;

use crate::table::{TableReader, Value};
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

/// Gives the texts of the column `name` to `each`. A null is an empty text.
pub fn texts(path: &Path, name: &str, each: TextSink<'_>) -> Result<()> {
    let mut table = Table::open(path)?.rows;
    let names = table.names();
    let Some(column) = names.iter().position(|known| known == name) else {
        let got = names.join(", ");
        let why = format!("expected a column {name:?}, got [{got}]; help: name one as {FIELD}");
        return Err(refuse(path, why));
    };
    table.select(&[column])?;
    while table.advance()? {
        let text = match table.value(column) {
            Value::Text(text) | Value::Written(text) => text,
            Value::Null => b"",
            Value::Whole(_) | Value::Float(_) => {
                let why = format!(
                    "expected a column of texts, got numbers; help: name another as {FIELD}"
                );
                return Err(refuse(path, why));
            }
        };
        each(text, &|| table.place(column))?;
    }
    Ok(())
}
