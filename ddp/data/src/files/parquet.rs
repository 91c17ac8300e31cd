//! Parquet tables, with the cargo feature `parquet`. Without it an error says how to build with it.

#[cfg(feature = "parquet")]
mod reading;

#[cfg(feature = "parquet")]
pub(super) use reading::{columns, read};

#[cfg(not(feature = "parquet"))]
pub(super) use not_built::{columns, read};

#[cfg(not(feature = "parquet"))]
mod not_built {
    use std::path::Path;

    use super::super::cell::CellSink;
    use super::super::conversion::Columns;
    use super::super::io::refuse;
    use crate::error::Result;

    const WHY: &str = "this program was built without Parquet; help: build it with `cargo build \
         --release -p ddp --features parquet`, or save the table as CSV (pandas: to_csv(path, index=False))";

    pub(in super::super) fn read(columns: &Columns<'_>, _: &mut impl CellSink) -> Result<()> {
        Err(refuse(columns.path, WHY))
    }

    pub(in super::super) fn columns(path: &Path) -> Result<Vec<String>> {
        Err(refuse(path, WHY))
    }
}
