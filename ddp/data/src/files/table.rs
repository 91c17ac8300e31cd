//! Tables of any format: their columns, their cells, and the arrays that they become.

mod columns;
pub(super) mod convert;
mod rows;
mod survey;

use std::path::Path;

pub use self::columns::TableRequest;
pub(crate) use self::columns::label_names;
pub(crate) use self::convert::survey;
pub(crate) use self::survey::plan;
use super::cell::TableReader;
use super::format::{Contents, DataFile, OpenTable};
use super::formats::format;
use super::gzip::GZIP;
use super::io::refuse;
use crate::error::Result;

/// What opens the table at `path`.
pub(crate) fn opener(path: &Path) -> Result<OpenTable> {
    let format = format(path)?;
    let why = match format.is(&GZIP) {
        true => "it is compressed with gzip, but its name does not end in .gz; help: rename it, as in table.csv.gz".into(),
        false => format!("expected a table, got {}", format.name),
    };
    format.table.ok_or_else(|| refuse(path, why))
}

/// The table at `path`, before its first row.
fn reader(path: &Path) -> Result<Box<dyn TableReader>> {
    opener(path)?(path)
}

/// The table at `path` as a mapped file of arrays.
pub fn open(path: &Path, request: &TableRequest<'_>) -> Result<Contents> {
    let name = path.display().to_string();
    let mut file = DataFile::new(path, &name, request.cache_dir);
    file.table = Some(request);
    convert::open(&file, opener(path)?)
}

/// The names of the columns of the table at `path`. Reads only its header.
pub fn columns(path: &Path) -> Result<Vec<String>> {
    Ok(reader(path)?.names().to_vec())
}

/// Whether a table with these columns has the label `name`, or all labels that it means.
pub(crate) fn has_label(columns: &[String], name: &str) -> bool {
    let mut names = label_names(columns, name).into_iter();
    names.all(|name| columns.iter().any(|column| column == name))
}

/// The place of a cell, for messages: by its line in a text, which is read again up to there.
pub(crate) fn place(path: &Path, column: &str, row: u64) -> String {
    let line = || -> Result<Option<String>> {
        let mut table = reader(path)?;
        let index = table.names().iter().position(|name| name == column);
        let Some(index) = index else { return Ok(None) };
        table.select(&[index])?;
        for _ in 0..=row {
            table.advance()?;
        }
        Ok(Some(table.place(index)))
    };
    let place = match line() {
        Ok(Some(place)) if place.starts_with("line") => place,
        _ => format!("row {row} (counted from 0)"),
    };
    format!("{}, {place}, column \"{column}\"", path.display())
}

#[cfg(test)]
mod tests;
