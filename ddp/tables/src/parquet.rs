//! Parquet tables, with the cargo feature `parquet`. Without it an error says how to build with it.

use std::path::Path;

use ddp_data::Result;
use ddp_data::tables::RecordSink;

use crate::table::TableReader;

/// The table at `path`.
pub(crate) fn open(path: &Path) -> Result<Box<dyn TableReader>> {
    #[cfg(feature = "parquet")]
    return Ok(Box::new(reading::ParquetTable::open(path)?));
    #[cfg(not(feature = "parquet"))]
    Err(ddp_data::files::io::refuse(
        path,
        "this program was built without Parquet; help: build it with `cargo build --release -p ddp --features parquet`, \
         or save the table as CSV (pandas: to_csv(path, index=False))",
    ))
}

/// Gives each row of the file at `path` to `each`, as an object of JSON without nulls: whole rows,
/// of any depth, which a [`TableReader`] does not have.
#[cfg_attr(not(feature = "parquet"), expect(unused_variables))]
pub(crate) fn records(path: &Path, each: RecordSink<'_>) -> Result<()> {
    #[cfg(feature = "parquet")]
    return reading::records(path, each);
    #[cfg(not(feature = "parquet"))]
    open(path).map(drop)
}

#[cfg(feature = "parquet")]
mod reading;
