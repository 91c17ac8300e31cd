//! Tables: CSV, TSV and Parquet, converted once into the flat format and mapped. Memory holds a
//! piece of the table and the distinct labels.

use std::io::Read;
use std::path::Path;

use super::cache;
use super::cell::{Cell, CellSink};
use super::contents::Contents;
use super::conversion::{Columns, RowWriter};
use super::csv::{CsvProblem, Record, Records};
use super::io::refuse;
use super::kind::{FileKind, kind};
use super::shown::shown;
use super::survey::Survey;
use super::{flat, gzip, parquet};
use crate::error::{Error, Result};
use crate::plan::ColumnPlan;

pub(crate) use super::cell::is_missing;
pub use super::conversion::TableRequest;
pub(crate) use super::conversion::label_names;
pub(crate) use super::csv::number;
pub(crate) use super::shown::{listed, listed_up_to};
pub(crate) use super::written::Written;

/// The format of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// `tabs`: the delimiter is a tab; else the header shows it.
    Csv {
        tabs: bool,
    },
    Parquet,
}

impl Format {
    fn of(path: &Path) -> Result<Format> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.to_ascii_lowercase();
        match kind(path)? {
            FileKind::Csv => Ok(Format::Csv {
                tabs: name.trim_end_matches(".gz").ends_with(".tsv"),
            }),
            FileKind::Parquet => Ok(Format::Parquet),
            FileKind::Gzip => Err(refuse(
                path,
                "it is compressed with gzip, but its name does not end in .gz; help: rename it, as in table.csv.gz",
            )),
            other => Err(refuse(
                path,
                format!("expected a table, got {}", other.name()),
            )),
        }
    }
}

/// The table at `path` (.csv, .tsv, both also .gz; .parquet) as a mapped file of arrays.
pub fn open(path: &Path, request: &TableRequest<'_>) -> Result<Contents> {
    let format = Format::of(path)?;
    let asked = serde_json::json!({
        "label": request.label,
        "features": request.features,
        "format": format!("{format:?}"),
        "allows missing": request.allows_missing,
        "labels are texts": request.labels_are_texts,
    });
    let made = cache::converted(path, request.cache_dir, &format!("table 2 {asked}"), |to| {
        flat::write(to, |out| convert(path, request, format, to, out))
    })?;
    flat::open(&made, &path.display().to_string())
}

/// The names of the columns of the table at `path`. Reads only its header.
pub fn columns(path: &Path) -> Result<Vec<String>> {
    names(path, Format::of(path)?)
}

/// Whether a table with these columns has the label `name`, or all labels that it means.
pub(crate) fn has_label(columns: &[String], name: &str) -> bool {
    let mut names = label_names(columns, name).into_iter();
    names.all(|name| columns.iter().any(|column| column == name))
}

fn names(path: &Path, format: Format) -> Result<Vec<String>> {
    match format {
        Format::Csv { tabs } => header(path, &mut records(path, tabs)?),
        Format::Parquet => parquet::columns(path),
    }
}

/// The place of a cell, for messages: by its line in a text, which is read again up to there.
pub(crate) fn place(path: &Path, column: &str, row: u64) -> String {
    let line = || -> Result<Option<u64>> {
        let Format::Csv { tabs } = Format::of(path)? else {
            return Ok(None);
        };
        let mut records = records(path, tabs)?;
        let names = header(path, &mut records)?;
        for _ in 0..row {
            records.next().map_err(problem_in(path))?;
        }
        let record = records.next().map_err(problem_in(path))?;
        let index = names.iter().position(|name| name == column);
        Ok(record
            .zip(index)
            .map(|(record, index)| record.line_of(index)))
    };
    let place = match line() {
        Ok(Some(line)) => format!("line {line}"),
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
    let format = Format::of(path)?;
    let asked = serde_json::json!([features, categorical, format!("{format:?}")]);
    let made = cache::converted(path, cache_dir, &format!("survey 3 {asked}"), |to| {
        let request = TableRequest {
            features: Some(features),
            ..TableRequest::default()
        };
        let columns = Columns::choose(path, &request, names(path, format)?)?;
        let mut survey = Survey::of(&columns, categorical);
        read(format, &columns, &mut survey)?;
        survey.write(to)
    })?;
    Survey::open(&made)
}

fn convert(
    path: &Path,
    request: &TableRequest<'_>,
    format: Format,
    to: &Path,
    out: &mut flat::Writer,
) -> Result<flat::About> {
    let columns = Columns::choose(path, request, names(path, format)?)?;
    let mut rows = RowWriter::new(&columns, to, out)?;
    match read(format, &columns, &mut rows) {
        Ok(()) => rows.finish(),
        Err(first) if rows.refused_cell => {
            // There may be more such columns: all are named at once.
            let mut survey = Survey::of(&columns, &[]);
            read(format, &columns, &mut survey)?;
            Err(survey.refusal(&columns).unwrap_or(first))
        }
        Err(error) => Err(error),
    }
}

/// Gives all cells of the wanted columns to `sink`.
fn read(format: Format, columns: &Columns<'_>, sink: &mut impl CellSink) -> Result<()> {
    match format {
        Format::Csv { tabs } => read_csv(columns, tabs, sink),
        Format::Parquet => parquet::read(columns, sink),
    }
}

fn records(path: &Path, tabs: bool) -> Result<Records<Box<dyn Read>>> {
    Records::new(gzip::reader(path)?, tabs).map_err(problem_in(path))
}

fn read_csv(columns: &Columns<'_>, tabs: bool, sink: &mut impl CellSink) -> Result<()> {
    let path = columns.path;
    let mut records = records(path, tabs)?;
    header(path, &mut records)?;
    let any_number = columns
        .names
        .iter()
        .any(|name| number(name.as_bytes()).is_some());
    while let Some(record) = records.next().map_err(problem_in(path))? {
        read_record(columns, any_number, &record, sink)?;
    }
    Ok(())
}

/// `any_number`: whether some columns are called like numbers.
fn read_record(
    columns: &Columns<'_>,
    any_number: bool,
    record: &Record<'_>,
    sink: &mut impl CellSink,
) -> Result<()> {
    let (got, expected) = (record.len(), columns.names.len());
    if got != expected {
        let line = record.line();
        let help = match record.cell(0).first() {
            Some(b'#') => "remove this line if it is a comment",
            Some(_) if got == 1 && line == 2 => {
                "put the delimiter of the header between the cells of each row"
            }
            _ => "complete the row, or quote texts that hold delimiters",
        };
        return Err(columns.bad(format!(
            "line {line}: expected {expected} cells, as in the header, got {got}; help: {help}"
        )));
    }
    if is_header(columns, record) {
        let line = record.line();
        return Err(columns.bad(format!(
            "line {line}: expected a row, got the names of the columns again; help: remove this line, or if line 1 is a \
             row, put a line with names above it"
        )));
    }
    let place = |column: usize| format!("line {}", record.line_of(column));
    for (index, feature) in columns.features.iter().enumerate() {
        let cell = Cell::of(record.cell(feature.column));
        sink.feature(index, cell, &|| place(feature.column))?;
    }
    for (index, &column) in columns.labels.iter().enumerate() {
        let (cell, name) = (record.cell(column), &columns.names[column]);
        if any_number && cell == name.as_bytes() && number(cell).is_none() {
            let (place, got) = (place(column), shown(cell));
            return Err(columns.bad(format!(
                "{place}, column \"{name}\": the label \"{got}\" is the column's name, and other names are numbers, as if \
                 the first line were a row; {HEADER_HELP}"
            )));
        }
        sink.label(index, cell, false, &|| place(column))?;
    }
    sink.end_row()
}

/// Whether a row is the header of another file that was appended, byte-order mark included.
fn is_header(columns: &Columns<'_>, record: &Record<'_>) -> bool {
    let first = record.cell(0);
    let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
    let mut others = columns.names.iter().enumerate().skip(1);
    // A table of one column may have a class of its name.
    columns.names.len() > 1
        && first == columns.names[0].as_bytes()
        && others.all(|(column, name)| record.cell(column) == name.as_bytes())
}

/// What to do about a table without a header.
const HEADER_HELP: &str = "help: put a line with names above it (pandas: read_csv(path, header=None).add_prefix(\"x\")\
     .to_csv(other, index=False)); if numbers are names, put a letter before each";

/// The names of the columns, from the first line.
fn header(path: &Path, records: &mut Records<impl Read>) -> Result<Vec<String>> {
    let bad = |what: String| refuse(path, what);
    let record = records.next().map_err(problem_in(path))?;
    let Some(record) = record else {
        return Err(bad(
            "it is empty: expected a line with names, then rows".into()
        ));
    };
    let cells = record.len();
    if let Some(why) = suspicious(&record) {
        return Err(bad(format!("line {}: {why}", record.line())));
    }
    let numbers = (0..cells).filter_map(|column| number(record.cell(column)));
    let numbers: Vec<f64> = numbers.collect();
    if looks_like_a_row(&numbers, cells) {
        let (line, count) = (record.line(), numbers.len());
        return Err(bad(format!(
            "line {line}: expected the names of columns, got {count} numbers in {cells} cells, as in a row; {HEADER_HELP}"
        )));
    }
    let name = |column: usize| {
        let name = String::from_utf8(record.cell(column).to_vec());
        name.map_err(|_| {
            let column = column + 1;
            bad(format!(
                "the name of column {column} is not UTF-8; help: save the file as UTF-8"
            ))
        })
    };
    (0..cells).map(name).collect()
}

/// Why a first line is no line of names, if it looks like a comment or has another delimiter.
fn suspicious(record: &Record<'_>) -> Option<String> {
    let first = shown(record.cell(0));
    if first.starts_with("# ") || record.len() == 1 && first.starts_with(['#', '%']) {
        return Some(format!(
            "expected the names of columns, got \"{first}\", as a comment begins; help: remove lines of comments, or the \
             sign before the first name"
        ));
    }
    if record.cell(0).contains(&0) {
        return Some(
            "expected UTF-8, got NUL bytes, as UTF-16 has; help: save the file as UTF-8".into(),
        );
    }
    if first.starts_with("sep=") {
        return Some(
            "expected the names of columns, got a delimiter for Excel; help: remove this line"
                .into(),
        );
    }
    let is_delimited = record.len() == 1 && first.contains('|');
    is_delimited.then(|| {
        format!(
            "expected names between commas, semicolons or tabs, got one name \"{first}\"; help: save the table with commas \
             (pandas: to_csv(path, index=False))"
        )
    })
}

/// Whether a first line of `cells` cells with these numbers is a row rather than names, so that a
/// row would be lost. Numbers in even steps beside a text are names: 0, 1, 2 … as pandas writes
/// them, years, wavelengths.
fn looks_like_a_row(numbers: &[f64], cells: usize) -> bool {
    if numbers.is_empty() || 2 * numbers.len() < cells {
        return false;
    }
    let step = (numbers[numbers.len() - 1] - numbers[0]) / (numbers.len() as f64 - 1.0);
    let is_even = |pair: &[f64]| (pair[1] - pair[0] - step).abs() <= 0.01 * step;
    let are_names = numbers.len() >= 3
        && numbers.len() < cells
        && step > 0.0
        && numbers.windows(2).all(is_even);
    !are_names
}

fn problem_in(path: &Path) -> impl FnOnce(CsvProblem) -> Error {
    move |problem| match problem {
        CsvProblem::Malformed(line, what) => refuse(path, format!("line {line}: {what}")),
        CsvProblem::Unreadable(error) => gzip::unreadable(path, error),
    }
}

#[cfg(test)]
mod tests;
