//! Parquet tables, with the cargo feature `parquet`. Without it an error says how to build with it.

#[cfg(feature = "parquet")]
mod reading;

use std::path::Path;

use crate::error::Result;
use crate::files::format::{Format, Holds};
use crate::files::io::refuse;
use crate::files::table::{TableReader, Value};
use crate::setting::FIELD;

pub(super) static PARQUET: Format = Format {
    name: "a .parquet file",
    endings: &[".parquet", ".pq"],
    // A column may be called PAR1: the end is the length of the metadata and the same letters.
    begins: |file| {
        let [a, b, c, d, letters @ ..] = file.end;
        let metadata_bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
        file.start.starts_with(b"PAR1") && letters == *b"PAR1" && metadata_bytes + 12 <= file.bytes
    },
    must_begin: Some(
        "it does not begin and end as Parquet files do: it is cut short, damaged or of another format; help: write it again",
    ),
    holds: Holds::Table(open),
};

/// What takes the texts of a column, with the place of each for messages.
pub(crate) type TextSink<'a> = &'a mut dyn FnMut(&[u8], &dyn Fn() -> String) -> Result<()>;

/// The table at `path`.
fn open(path: &Path) -> Result<Box<dyn TableReader>> {
    #[cfg(feature = "parquet")]
    return Ok(Box::new(reading::ParquetTable::open(path)?));
    #[cfg(not(feature = "parquet"))]
    Err(refuse(
        path,
        "this program was built without Parquet; help: build it with `cargo build --release -p ddp --features parquet`, \
         or save the table as CSV (pandas: to_csv(path, index=False))",
    ))
}

/// Gives the texts of the column `name` to `each`. A null is an empty text.
pub(crate) fn texts(path: &Path, name: &str, each: TextSink<'_>) -> Result<()> {
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
