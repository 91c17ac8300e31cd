//! Tables of text: `.csv` with commas, semicolons or tabs, and `.tsv`; both also `.gz`.

mod records;

use std::io::Read;
use std::path::Path;

use self::records::Records;
use super::cell::{TableReader, Value, number, shown};
use super::format::{Format, Holds, OpenTable, PLAIN};
use super::gzip;
use super::io::refuse;
use super::table::convert;
use crate::error::{Result, ensure};
use crate::guess;

pub(super) static CSV: Format = Format {
    name: "a table of text (.csv, .tsv)",
    endings: &[".csv"],
    table: Some(COMMAS),
    holds: Holds::Arrays(|file| convert::open(file, COMMAS)),
    ..PLAIN
};

pub(super) static TSV: Format = Format {
    name: CSV.name,
    endings: &[".tsv"],
    table: Some(TABS),
    holds: Holds::Arrays(|file| convert::open(file, TABS)),
    ..PLAIN
};

const COMMAS: OpenTable = |path| open(path, false);
const TABS: OpenTable = |path| open(path, true);

/// What to do about a table without a header.
const HEADER_HELP: &str = "help: put a line with names above it (pandas: read_csv(path, header=None).add_prefix(\"x\")\
     .to_csv(other, index=False)); if numbers are names, put a letter before each";

/// A table of text that is being read.
struct CsvTable {
    names: Vec<String>,
    records: Records<Box<dyn Read>>,
}

/// The table at `path`, after its line of names.
fn open(path: &Path, has_tabs: bool) -> Result<Box<dyn TableReader>> {
    let mut records = Records::new(path, gzip::reader(path)?, has_tabs)?;
    if !records.advance()? {
        let why = "it is empty: expected a line with names, then rows";
        return Err(refuse(path, why));
    }
    let names = names(&records).map_err(|why| refuse(path, why))?;
    Ok(Box::new(CsvTable { names, records }))
}

impl TableReader for CsvTable {
    fn names(&self) -> &[String] {
        &self.names
    }

    fn select(&mut self, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn advance(&mut self) -> Result<bool> {
        let more = self.records.advance()?;
        if more {
            let checked = check_row(&self.names, &self.records);
            checked.map_err(|why| refuse(&self.records.path, why))?;
        }
        Ok(more)
    }

    fn value(&self, column: usize) -> Value<'_> {
        Value::Written(self.records.cell(column))
    }

    fn place(&self, column: usize) -> String {
        format!("line {}", self.records.line_of(column))
    }
}

/// Refuses a row with more or fewer cells than there are names, and a second line of names.
fn check_row(names: &[String], row: &Records<Box<dyn Read>>) -> Result<(), String> {
    let (got, expected, line) = (row.len(), names.len(), row.first_line());
    let help = match row.cell(0).first() {
        Some(b'#') => "remove this line if it is a comment",
        Some(_) if got == 1 && line == 2 => {
            "put the delimiter of the header between the cells of each row"
        }
        _ => "complete the row, or quote texts that hold delimiters",
    };
    ensure!(
        got == expected,
        "line {line}: expected {expected} cells, as in the header, got {got}; help: {help}"
    );
    Ok(())
}

/// The names in the first line, or why it is not a line of names.
fn names(first: &Records<Box<dyn Read>>) -> Result<Vec<String>, String> {
    let (cells, line) = (first.len(), first.first_line());
    let (name, is_alone) = (shown(first.cell(0)), cells == 1);
    let is_comment = name.starts_with("# ") || is_alone && name.starts_with(['#', '%']);
    ensure!(
        !is_comment && !name.starts_with("sep="),
        "line {line}: expected the names of columns, got \"{name}\"; help: remove lines above the names, or the sign before \
         the first one"
    );
    ensure!(
        !first.cell(0).contains(&0),
        "line {line}: expected UTF-8, got NUL bytes, as UTF-16 has; help: save the file as UTF-8"
    );
    ensure!(
        !is_alone || !name.contains('|'),
        "line {line}: expected names between commas, semicolons or tabs, got one name \"{name}\"; help: save the table \
         with commas (pandas: to_csv(path, index=False))"
    );
    let numbers = (0..cells).filter_map(|column| number(first.cell(column)));
    let numbers: Vec<f64> = numbers.collect();
    ensure!(
        !guess::looks_like_a_row(&numbers, cells),
        "line {line}: expected the names of columns, got {} numbers in {cells} cells, as in a row; {HEADER_HELP}",
        numbers.len()
    );
    let name = |column: usize| match std::str::from_utf8(first.cell(column)) {
        Ok(name) => Ok(name.to_string()),
        Err(_) => Err(format!(
            "the name of column {} is not UTF-8; help: save the file as UTF-8",
            column + 1
        )),
    };
    (0..cells).map(name).collect()
}
