//! Tables to train on: CSV and Parquet, with their categories, missing cells and dates. A table is
//! turned once into arrays in a flat file, which `ddp-data` reads.
//!
//! [`READER`] does it for `ddp_data::prepare`. `source` opens a file as a `table`, read by `csv` or
//! `parquet`. Its `schema` says which columns are features and labels; where these may be
//! categories, a `survey` reads all cells of all files. `columns` finds the columns of the schema
//! in one file, and `flat` stores their cells. All guesses are in `guess`.

#![forbid(unsafe_code)]

mod columns;
mod csv;
mod dates;
mod flat;
mod guess;
mod kept;
mod parquet;
mod plan;
mod schema;
mod source;
mod survey;
mod table;

use std::collections::BTreeSet;
use std::path::Path;

use ddp_data::files::{Array, Contents};
use ddp_data::tables::{FileParts, RecordSink, Tables, WantedColumns};
use ddp_data::{Error, FileLabels, Result, TableColumn};

pub use crate::columns::TableRequest;
pub use crate::kept::{KeptCells, keep};
use crate::schema::Schema;
use crate::source::Table;
pub use crate::source::texts;
use crate::table::Cell;

/// What reads tables, for `ddp_data::prepare`.
pub static READER: &dyn Tables = &Reader;

/// The table at `path` as a mapped file of arrays.
pub fn open_table(
    path: &Path,
    request: &TableRequest,
    cache_dir: Option<&Path>,
) -> Result<Contents> {
    flat::open(Table::open(path)?, request, cache_dir)
}

/// How many rows show which columns could be labels.
const LABEL_ROWS: usize = 1000;

/// The columns of the table at `path` that could be labels, by its first rows: not those with one
/// value, nor texts and whole numbers that name rows.
pub fn possible_labels(path: &Path) -> Result<Vec<String>> {
    let mut table = Table::open(path)?.rows;
    let names = table.names().to_vec();
    table.select(&(0..names.len()).collect::<Vec<_>>())?;
    let mut found = vec![(BTreeSet::new(), 0, true); names.len()];
    for _ in 0..LABEL_ROWS {
        if !table.advance()? {
            break;
        }
        for (column, (values, cells, are_names)) in found.iter_mut().enumerate() {
            let value = table.value(column);
            let is_fraction = matches!(value.cell(), Cell::Number(number) if number.fract() != 0.0);
            *are_names &= !is_fraction;
            if value.cell() != Cell::Missing {
                *cells += 1;
                values.insert(value.text().into_owned());
            }
        }
    }
    let could_be = |(values, cells, are_names): &(BTreeSet<Vec<u8>>, u64, bool)| {
        let name_rows = *are_names && guess::are_nearly_unique(values.len() as u64, *cells);
        values.len() > 1 && !name_rows
    };
    let columns = names.into_iter().zip(&found);
    let columns = columns.filter(|(name, found)| !name.is_empty() && could_be(found));
    Ok(columns.map(|(name, _)| name).collect())
}

#[derive(Debug)]
struct Reader;

impl Tables for Reader {
    fn columns(&self, path: &Path) -> Result<Vec<String>> {
        Ok(Table::open(path)?.rows.names().to_vec())
    }

    fn records(&self, path: &Path, each: RecordSink<'_>) -> Result<()> {
        parquet::records(path, each)
    }

    fn flatten(&self, path: &Path, wanted: &WantedColumns<'_>) -> Result<FileParts> {
        let table = Table::open(path)?;
        let schema = Schema::of(&table, wanted)?;
        let cache_dir = wanted.files.request.cache_dir.as_deref();
        let contents = flat::open(table, &schema.request, cache_dir)?;
        let mut notes = schema.notes;
        let why: String = notes.iter().map(|it| format!("\n  {it}")).collect();
        let array_of = |key: &str| -> Result<Array, String> {
            let none = format!("no columns of {key} are left; help: leave out fewer columns{why}");
            contents.find(key)?.cloned().ok_or(none)
        };
        let bad = |why| Error::Data(format!("{}: {why}", path.display()));
        if let Some(rows) = contents.about.unlabelled {
            let name = path.display();
            notes.push(format!(
                "{rows} rows without a label are left out of {name}"
            ));
        }
        let has_features = wanted.labels_alone.is_none();
        let labels = schema.request.label.clone().map(|name| -> Result<_> {
            Ok(FileLabels {
                array: array_of("labels").map_err(bad)?,
                names: contents.about.classes.clone(),
                column: Some(TableColumn {
                    name,
                    path: path.into(),
                    place,
                    leaves_out: schema.request.leaves_out,
                }),
            })
        });
        let features = has_features.then(|| array_of("features").map_err(bad));
        Ok(FileParts {
            features: features.transpose()?,
            labels: labels.transpose()?,
            columns: contents.about.columns.filter(|_| has_features),
            left_out: schema.left_out,
            plan: schema.plan,
            odd_cells: contents.about.odd_cells,
            notes,
        })
    }
}

/// The place of a label, for messages: by its line in a text, which is read again up to there.
fn place(column: &TableColumn, row: u64) -> String {
    let line = || -> Result<String> {
        let (mut rows, columns) = kept::select(&column.path, std::slice::from_ref(&column.name))?;
        let mut before = 0;
        while rows.advance()? {
            let is_left_out = column.leaves_out && rows.value(columns[0]).is_no_label();
            if before == row && !is_left_out {
                break;
            }
            before += u64::from(!is_left_out);
        }
        Ok(rows.place(columns[0]))
    };
    let place = line().ok().filter(|place| place.starts_with("line"));
    let place = place.unwrap_or_else(|| format!("row {row} (counted from 0)"));
    format!(
        "{}, {place}, column \"{}\"",
        column.path.display(),
        column.name
    )
}

#[cfg(test)]
mod tests;
