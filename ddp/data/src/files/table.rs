//! Tables of any format, converted once into the flat format and mapped. Memory holds a piece of
//! the table and the distinct labels.

mod columns;
mod rows;
mod survey;

use std::path::Path;

use self::columns::Columns;
pub use self::columns::TableRequest;
pub(crate) use self::columns::label_names;
use self::rows::RowWriter;
pub(crate) use self::survey::{Survey, plan};
use super::cache;
use super::cell::TableReader;
use super::flat;
use super::format::{Contents, Holds};
use super::formats::format;
use super::io::refuse;
use crate::error::Result;
use crate::feature_plan::ColumnPlan;

/// The table at `path`, before its first row.
fn reader(path: &Path) -> Result<Box<dyn TableReader>> {
    let format = format(path)?;
    match format.holds {
        Holds::Table(open) => open(path),
        Holds::Packed(_) => Err(refuse(
            path,
            "it is compressed with gzip, but its name does not end in .gz; help: rename it, as in table.csv.gz",
        )),
        _ => Err(refuse(
            path,
            format!("expected a table, got {}", format.name),
        )),
    }
}

/// The copy of a table that `make` makes. The ending of a name may say how a table is read.
fn converted(
    path: &Path,
    cache_dir: Option<&Path>,
    asked: &serde_json::Value,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<std::path::PathBuf> {
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    let stem = path.file_stem().map(Path::new).and_then(Path::extension);
    let asked = format!("table 3 {stem:?} {ending:?} {asked}");
    cache::converted(path, cache_dir, &asked, make)
}

/// The table at `path` as a mapped file of arrays.
pub fn open(path: &Path, request: &TableRequest<'_>) -> Result<Contents> {
    // A file that is not a table is not looked for in the cache.
    reader(path)?;
    let asked = serde_json::json!({
        "label": request.label,
        "features": request.features,
        "allows missing": request.allows_missing,
        "labels are texts": request.labels_are_texts,
    });
    let made = converted(path, request.cache_dir, &asked, |to| {
        flat::write(to, |out| convert(path, request, to, out))
    })?;
    flat::open(&made, &path.display().to_string())
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

/// What the cells of these columns are. Values are kept of `categorical` columns and of texts. The
/// result is kept in the cache.
pub(crate) fn survey(
    path: &Path,
    features: &[ColumnPlan],
    categorical: &[String],
    cache_dir: Option<&Path>,
) -> Result<Survey> {
    let asked = serde_json::json!(["survey 4", features, categorical]);
    let made = converted(path, cache_dir, &asked, |to| {
        let request = TableRequest {
            features: Some(features),
            ..TableRequest::default()
        };
        let mut table = reader(path)?;
        let columns = Columns::choose(path, &request, table.names())?;
        survey_of(&columns, &mut *table, categorical)?.write(to)
    })?;
    Survey::open(&made)
}

fn survey_of(
    columns: &Columns<'_>,
    table: &mut dyn TableReader,
    categorical: &[String],
) -> Result<Survey> {
    table.select(&columns.all())?;
    let mut survey = Survey::of(columns, categorical);
    while table.advance()? {
        survey.add(columns, table);
    }
    Ok(survey)
}

fn convert(
    path: &Path,
    request: &TableRequest<'_>,
    to: &Path,
    out: &mut flat::Writer,
) -> Result<flat::About> {
    let mut table = reader(path)?;
    let columns = Columns::choose(path, request, table.names())?;
    table.select(&columns.all())?;
    let mut rows = RowWriter::new(&columns, to, out)?;
    while table.advance()? {
        match rows.add(&*table) {
            // There may be more such columns: all are named at once.
            Err(first) if rows.refused_cell => {
                let survey = survey_of(&columns, &mut *reader(path)?, &[])?;
                return Err(survey.refusal(&columns).unwrap_or(first));
            }
            added => added?,
        }
    }
    rows.finish()
}

#[cfg(test)]
mod tests;
