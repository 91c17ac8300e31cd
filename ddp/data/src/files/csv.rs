//! Tables of text: `.csv` with commas, semicolons or tabs, and `.tsv`; both also `.gz`.

mod records;

use std::io::Read;
use std::path::{Path, PathBuf};

use self::records::{CsvProblem, Record, Records};
use super::cell::{TableReader, Value, number};
use super::format::{Format, Holds};
use super::gzip;
use super::io::refuse;
use super::shown::shown;
use crate::error::{Error, Result};
use crate::guess;

pub(super) static CSV: Format = Format {
    name: "a table of text (.csv, .tsv)",
    endings: &[".csv"],
    begins: |_| false,
    must_begin: None,
    holds: Holds::Table(|path| open(path, false)),
};

pub(super) static TSV: Format = Format {
    name: CSV.name,
    endings: &[".tsv"],
    begins: |_| false,
    must_begin: None,
    holds: Holds::Table(|path| open(path, true)),
};

/// What to do about a table without a header.
pub(super) const HEADER_HELP: &str = "help: put a line with names above it (pandas: read_csv(path, header=None).add_prefix(\"x\")\
     .to_csv(other, index=False)); if numbers are names, put a letter before each";

/// A table of text that is being read.
struct CsvTable {
    path: PathBuf,
    names: Vec<String>,
    records: Records<Box<dyn Read>>,
}

/// The table at `path`, after its line of names.
fn open(path: &Path, has_tabs: bool) -> Result<Box<dyn TableReader>> {
    let records = Records::new(gzip::reader(path)?, has_tabs);
    let mut records = records.map_err(problem_in(path))?;
    let first = records.next().map_err(problem_in(path))?;
    let first =
        first.ok_or_else(|| refuse(path, "it is empty: expected a line with names, then rows"))?;
    let names = names(&first).map_err(|why| refuse(path, why))?;
    Ok(Box::new(CsvTable {
        path: path.into(),
        names,
        records,
    }))
}

impl TableReader for CsvTable {
    fn names(&self) -> &[String] {
        &self.names
    }

    fn select(&mut self, _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn advance(&mut self) -> Result<bool> {
        let next = self.records.next().map_err(problem_in(&self.path))?;
        let why = next.as_ref().map(|row| check_row(&self.names, row));
        why.unwrap_or(Ok(()))
            .map_err(|why| refuse(&self.path, why))?;
        Ok(next.is_some())
    }

    fn value(&self, column: usize) -> Value<'_> {
        Value::Written(self.records.current().cell(column))
    }

    fn place(&self, column: usize) -> String {
        format!("line {}", self.records.current().line_of(column))
    }
}

fn problem_in(path: &Path) -> impl FnOnce(CsvProblem) -> Error {
    move |problem| match problem {
        CsvProblem::Malformed(line, what) => refuse(path, format!("line {line}: {what}")),
        CsvProblem::Unreadable(error) => gzip::unreadable(path, error),
    }
}

/// Refuses a row with more or fewer cells than there are names, and a second line of names.
fn check_row(names: &[String], row: &Record<'_>) -> Result<(), String> {
    let (got, expected, line) = (row.len(), names.len(), row.line());
    if got != expected {
        let help = match row.cell(0).first() {
            Some(b'#') => "remove this line if it is a comment",
            Some(_) if got == 1 && line == 2 => {
                "put the delimiter of the header between the cells of each row"
            }
            _ => "complete the row, or quote texts that hold delimiters",
        };
        return Err(format!(
            "line {line}: expected {expected} cells, as in the header, got {got}; help: {help}"
        ));
    }
    // The header of another file that was appended may begin with a byte-order mark.
    let first = row.cell(0);
    let first = first.strip_prefix(b"\xef\xbb\xbf").unwrap_or(first);
    let mut others = names.iter().enumerate().skip(1);
    // A table of one column may have a class of its name.
    let is_header = expected > 1
        && first == names[0].as_bytes()
        && others.all(|(column, name)| row.cell(column) == name.as_bytes());
    match is_header {
        false => Ok(()),
        true => Err(format!(
            "line {line}: expected a row, got the names of the columns again; help: remove this line, or if line 1 is a \
             row, put a line with names above it"
        )),
    }
}

/// The names in the first line, or why it is no line of names.
fn names(first: &Record<'_>) -> Result<Vec<String>, String> {
    let (cells, line) = (first.len(), first.line());
    if let Some(why) = suspicious(first) {
        return Err(format!("line {line}: {why}"));
    }
    let numbers = (0..cells).filter_map(|column| number(first.cell(column)));
    let numbers: Vec<f64> = numbers.collect();
    if guess::looks_like_a_row(&numbers, cells) {
        return Err(format!(
            "line {line}: expected the names of columns, got {} numbers in {cells} cells, as in a row; {HEADER_HELP}",
            numbers.len()
        ));
    }
    let name = |column: usize| {
        String::from_utf8(first.cell(column).to_vec()).map_err(|_| {
            let column = column + 1;
            format!("the name of column {column} is not UTF-8; help: save the file as UTF-8")
        })
    };
    (0..cells).map(name).collect()
}

/// Why a first line is no line of names, if it looks like a comment or has another delimiter.
fn suspicious(first: &Record<'_>) -> Option<String> {
    let (name, is_alone) = (shown(first.cell(0)), first.len() == 1);
    if name.starts_with("# ") || is_alone && name.starts_with(['#', '%']) {
        return Some(format!(
            "expected the names of columns, got \"{name}\", as a comment begins; help: remove lines of comments, or the \
             sign before the first name"
        ));
    }
    if first.cell(0).contains(&0) {
        let why = "expected UTF-8, got NUL bytes, as UTF-16 has; help: save the file as UTF-8";
        return Some(why.into());
    }
    if name.starts_with("sep=") {
        return Some(format!(
            "expected the names of columns, got \"{name}\", which tells Excel the delimiter; help: remove this line"
        ));
    }
    (is_alone && name.contains('|')).then(|| {
        format!(
            "expected names between commas, semicolons or tabs, got one name \"{name}\"; help: save the table with commas \
             (pandas: to_csv(path, index=False))"
        )
    })
}
