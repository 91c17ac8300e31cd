//! Parquet tables, with the cargo feature `parquet`. Without it an error says how to build with it.

use std::path::Path;

use ddp_data::Result;
use ddp_data::files::io::refuse;
use ddp_data::setting::FIELD;
use ddp_data::tables::RecordSink;
use ddp_data::text::TextSink;

use crate::table::{TableReader, Value};

/// The table at `path`.
pub(crate) fn open(path: &Path) -> Result<Box<dyn TableReader>> {
    #[cfg(feature = "parquet")]
    return Ok(Box::new(reading::ParquetTable::open(path)?));
    #[cfg(not(feature = "parquet"))]
    Err(refuse(
        path,
        "this program was built without Parquet; help: build it with `cargo build --release -p ddp --features parquet`, \
         or save the table as CSV (pandas: to_csv(path, index=False))",
    ))
}

/// Gives each row to `each`, as an object of JSON without nulls.
#[cfg_attr(not(feature = "parquet"), expect(unused_variables))]
pub(crate) fn records(path: &Path, each: RecordSink<'_>) -> Result<()> {
    #[cfg(feature = "parquet")]
    return reading::records(path, each);
    #[cfg(not(feature = "parquet"))]
    open(path).map(drop)
}

/// Gives the texts of the column `name` to `each`. A null is an empty text.
pub fn texts(path: &Path, name: &str, each: TextSink<'_>) -> Result<()> {
    let mut table = open(path)?;
    let names = table.names();
    let Some(column) = names.iter().position(|known| known == name) else {
        let got = names.join(", ");
        let why = format!("expected a column {name:?}, got [{got}]; help: name one as {FIELD}");
        return Err(refuse(path, why));
    };
    table.select(&[column])?;
    while table.advance()? {
        let text = match table.value(column) {
            Value::Text(text) => text,
            Value::Null => b"",
            _ => {
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

#[cfg(feature = "parquet")]
mod reading;
