//! Converts a table once into a flat file, which is mapped. Memory holds a piece of the table and
//! the distinct labels.

use std::path::{Path, PathBuf};

use super::super::cell::TableReader;
use super::super::format::{Contents, DataFile, OpenTable};
use super::super::{cache, flat};
use super::columns::{Columns, TableRequest};
use super::rows::RowWriter;
use super::survey::Survey;
use crate::error::Result;
use crate::feature_plan::ColumnPlan;

/// A file that is a table as arrays: `file` says what is wanted of it.
pub(in super::super) fn open(file: &DataFile<'_>, table: OpenTable) -> Result<Contents> {
    let request = file.table.copied().unwrap_or_default();
    // What is no table is not looked for in the cache.
    table(file.path)?;
    let asked = serde_json::json!({
        "label": request.label,
        "features": request.features,
        "allows missing": request.allows_missing,
        "labels are texts": request.labels_are_texts,
    });
    let made = converted(file.path, file.cache_dir, &asked, |to| {
        flat::write(to, |out| convert(file.path, table, &request, to, out))
    })?;
    flat::open(&made, file.name)
}

/// The copy of a table that `make` makes. The ending of a name may say how a table is read.
fn converted(
    path: &Path,
    cache_dir: Option<&Path>,
    asked: &serde_json::Value,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    let stem = path.file_stem().map(Path::new).and_then(Path::extension);
    let asked = format!("table 3 {stem:?} {ending:?} {asked}");
    cache::converted(path, cache_dir, &asked, make)
}

/// What the cells of these columns are. Values are kept of `categorical` columns and of texts. The
/// result is kept in the cache.
pub(crate) fn survey(
    path: &Path,
    open: OpenTable,
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
        let mut table = open(path)?;
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
    open: OpenTable,
    request: &TableRequest<'_>,
    to: &Path,
    out: &mut flat::Writer,
) -> Result<flat::About> {
    let mut table = open(path)?;
    let columns = Columns::choose(path, request, table.names())?;
    table.select(&columns.all())?;
    let mut rows = RowWriter::new(&columns, to, out)?;
    while table.advance()? {
        match rows.add(&*table) {
            // There may be more such columns: all are named at once.
            Err(first) if rows.refused_cell => {
                let survey = survey_of(&columns, &mut *open(path)?, &[])?;
                return Err(survey.refusal(&columns).unwrap_or(first));
            }
            added => added?,
        }
    }
    rows.finish()
}
