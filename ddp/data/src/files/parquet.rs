//! Parquet tables, with the cargo feature `parquet`. Without it an error says how to build with it.

#[cfg(feature = "parquet")]
mod reading;

#[cfg(feature = "parquet")]
pub(super) use reading::{columns, read};

#[cfg(not(feature = "parquet"))]
pub(super) use not_built::{columns, read};

use std::path::Path;

use super::cell::{Cell, CellSink};
use super::conversion::{Columns, TableRequest};
use super::io::refuse;
use crate::error::Result;

/// What takes the texts of a column, with the place of each for messages.
pub(crate) type TextSink<'a> = &'a mut dyn FnMut(&[u8], &dyn Fn() -> String) -> Result<()>;

/// Gives the texts of the column `name` to `each`. A null is an empty text.
pub(crate) fn texts(path: &Path, name: &str, each: TextSink<'_>) -> Result<()> {
    let names = columns(path)?;
    if !names.iter().any(|known| known == name) {
        let got = names.join(", ");
        let why = format!("expected a column {name:?}, got [{got}]; help: name one as `field`");
        return Err(refuse(path, why));
    }
    let request = TableRequest {
        label: Some(name),
        features: Some(&[]),
        ..TableRequest::default()
    };
    let columns = Columns::choose(path, &request, names)?;
    read(&columns, &mut Texts { path, each })
}

/// Labels are given as they are, while features that look like numbers become numbers.
struct Texts<'a> {
    path: &'a Path,
    each: TextSink<'a>,
}

impl CellSink for Texts<'_> {
    fn wants_text(&self, _: usize) -> bool {
        false
    }

    fn feature(&mut self, _: usize, _: Cell<'_>, _: &dyn Fn() -> String) -> Result<()> {
        Ok(())
    }

    fn label(
        &mut self,
        _: usize,
        cell: &[u8],
        is_text: bool,
        place: &dyn Fn() -> String,
    ) -> Result<()> {
        match is_text {
            true => (self.each)(cell, place),
            false => Err(refuse(
                self.path,
                "expected a column of texts, got numbers; help: name another as `field`",
            )),
        }
    }

    fn end_row(&mut self) -> Result<()> {
        Ok(())
    }
}

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
