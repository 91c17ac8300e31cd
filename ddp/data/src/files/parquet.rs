//! Parquet tables, with the cargo feature `parquet`. Without it an error says how to build with it.

#[cfg(feature = "parquet")]
mod reading;

#[cfg(feature = "parquet")]
pub(super) use reading::{columns, convert};

#[cfg(not(feature = "parquet"))]
pub(super) use not_built::{columns, convert};

#[cfg(not(feature = "parquet"))]
mod not_built {
    use std::path::Path;

    use super::super::conversion::TableRequest;
    use super::super::flat::{About, Writer};
    use super::super::io::refuse;
    use crate::error::Result;

    const WHY: &str = "this program was built without Parquet; help: build it with `cargo build \
         --release -p ddp --features parquet`, or save the table as CSV (pandas: to_csv(path, index=False))";

    pub(in super::super) fn convert(
        path: &Path,
        _request: &TableRequest<'_>,
        _to: &Path,
        _out: &mut Writer,
    ) -> Result<About> {
        Err(refuse(path, WHY))
    }

    pub(in super::super) fn columns(path: &Path) -> Result<Vec<String>> {
        Err(refuse(path, WHY))
    }
}
