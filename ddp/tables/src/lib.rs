//! Tables to train on: CSV and Parquet, with their categories, missing cells and dates. A table is
//! turned once into arrays in a flat file, which `ddp-data` reads.
//!
//! [`READER`] does it where a [`DataRequest`](ddp_data::DataRequest) names tables. A file is opened
//! as a `table`, read by `csv` or `parquet`. Its `schema` says which columns are features and
//! labels; where these may be categories a `survey` reads all cells of all files. `columns` are the
//! places of the schema in one file, whose cells become `flat`. What is guessed on the way stands in
//! `guess`.

#![forbid(unsafe_code)]

mod columns;
mod csv;
mod flat;
mod guess;
mod kept;
mod parquet;
mod schema;
mod survey;
mod table;

use std::path::Path;

use ddp_data::files::Contents;
use ddp_data::tables::{FileParts, TableColumn, Tables, TextSink, WantedColumns};
use ddp_data::{Alone, Data, DataRequest, DataSpec, FileLabels, Result, bail};

pub use crate::columns::TableRequest;
pub use crate::kept::{KeptCells, keep};
use crate::schema::Schema;
use crate::table::Table;

/// What reads tables, for a `DataRequest`.
pub static READER: &dyn Tables = &Reader;

/// Opens the data of `spec` as they are, in one process, also if they are tables.
pub fn open(spec: &DataSpec) -> Result<Data> {
    let tables = Some(READER);
    let request = DataRequest {
        tables,
        ..DataRequest::new(spec.clone())
    };
    ddp_data::prepare(&request, &Alone)
}

/// The table at `path` as a mapped file of arrays.
pub fn open_table(
    path: &Path,
    request: &TableRequest,
    cache_dir: Option<&Path>,
) -> Result<Contents> {
    flat::open(Table::open(path)?, request, cache_dir)
}

#[derive(Debug)]
struct Reader;

impl Tables for Reader {
    fn columns(&self, path: &Path) -> Result<Vec<String>> {
        Ok(Table::open(path)?.rows.names().to_vec())
    }

    fn flatten(&self, path: &Path, wanted: &WantedColumns<'_>) -> Result<FileParts> {
        let table = Table::open(path)?;
        let schema = Schema::of(&table, wanted)?;
        let cache_dir = wanted.files.request.cache_dir.as_deref();
        let contents = flat::open(table, &schema.request, cache_dir)?;
        let array_of = |key: &str| -> Result<_> {
            match contents.find(key) {
                Ok(Some(array)) => Ok(array.clone()),
                Ok(None) => bail!(
                    "{}: no columns of {key} are left; help: leave out fewer columns",
                    path.display()
                ),
                Err(why) => bail!("{}: {why}", path.display()),
            }
        };
        let has_features = wanted.labels_alone.is_none();
        let labels = schema.request.label.map(|name| -> Result<_> {
            Ok(FileLabels {
                array: array_of("labels")?,
                names: contents.about.classes.clone(),
                column: Some(TableColumn {
                    name,
                    path: path.into(),
                    tables: READER,
                }),
            })
        });
        Ok(FileParts {
            features: has_features.then(|| array_of("features")).transpose()?,
            labels: labels.transpose()?,
            columns: contents.about.columns.filter(|_| has_features),
            left_out: schema.left_out,
            plan: schema.plan,
            odd_cells: contents.about.odd_cells,
        })
    }

    fn place(&self, path: &Path, column: &str, row: u64) -> String {
        let line = || -> Result<Option<String>> {
            let mut rows = Table::open(path)?.rows;
            let index = rows.names().iter().position(|name| name == column);
            let Some(index) = index else { return Ok(None) };
            rows.select(&[index])?;
            for _ in 0..=row {
                rows.advance()?;
            }
            Ok(Some(rows.place(index)))
        };
        let place = match line() {
            Ok(Some(place)) if place.starts_with("line") => place,
            _ => format!("row {row} (counted from 0)"),
        };
        format!("{}, {place}, column \"{column}\"", path.display())
    }

    fn texts(&self, path: &Path, name: &str, each: TextSink<'_>) -> Result<()> {
        parquet::texts(path, name, each)
    }
}

#[cfg(test)]
mod tests;
