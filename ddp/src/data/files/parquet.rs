//! Parquet tables. The reader is the cargo feature `parquet`; without it an error says how to build with it.

#[cfg(feature = "parquet")]
mod reading;

#[cfg(not(feature = "parquet"))]
use std::path::Path;

#[cfg(not(feature = "parquet"))]
use super::{flat, refuse, table::Columns};
#[cfg(not(feature = "parquet"))]
use crate::error::{Error, Result};

#[cfg(feature = "parquet")]
pub(super) use reading::{columns, convert};

#[cfg(not(feature = "parquet"))]
pub(super) fn convert(columns: &mut Columns<'_>, _out: &mut flat::Writer) -> Result<flat::About> {
    Err(not_built(columns.path))
}

#[cfg(not(feature = "parquet"))]
pub(super) fn columns(path: &Path) -> Result<Vec<String>> {
    Err(not_built(path))
}

#[cfg(not(feature = "parquet"))]
fn not_built(path: &Path) -> Error {
    let text = "this ddp-train was built without Parquet. Build it with: cargo build --release --features parquet; or save the table as CSV \
         (pandas: to_csv(path, index=False))";
    refuse(path, text)
}
