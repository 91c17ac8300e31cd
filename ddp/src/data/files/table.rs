//! Tables, which are converted once into the flat format and mapped: `features`, f32 of all columns but the label's, and `labels`.
//!
//! What a label is follows from all its cells: whole numbers are i64, other numbers f64, and where one is a text all are: i64 codes of
//! the texts sorted by their bytes, which are the classes. What is not known before the last row lies aside until then; memory holds a piece
//! of the table and the distinct labels.

mod labels;

use std::io;
use std::path::Path;

use self::labels::Labels;
use super::cache;
use super::csv::{Problem, Record, Records, number};
use super::{Contents, Element, Kind, flat, gzip, kind, parquet, refuse};
use crate::data::rounding::{self, Ends};
use crate::error::{Error, Result};

/// So many numbers are written at once.
const PIECE_COUNT: usize = 1 << 18;
/// The disk is asked for its room before so many bytes are written, and has to have as many, unless fewer are to come.
const ROOM_BYTES: u64 = 64 << 20;
/// The names of all features are at most so long together, as JSON has them: they have to go into a flat file's header.
const NAMES_BYTES_MAX: usize = 40 << 20;
/// How much of a cell an error repeats.
const SHOWN_CHARACTERS: usize = 40;

/// Which columns of a table are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TableRequest<'a> {
    /// The column of labels.
    pub(crate) label: Option<&'a str>,
    /// The columns of features, in this order; `None`: all others, as they stand.
    pub(crate) features: Option<&'a [String]>,
    /// Whether labels are texts even where all could be numbers.
    pub(crate) labels_are_texts: bool,
    /// Where the converted table is kept, if not in the usual place.
    pub(crate) cache_dir: Option<&'a Path>,
}

/// What a file of a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// The delimiter is a tab, or is to be seen in the header.
    Csv {
        tabs: bool,
    },
    Parquet,
}

/// The table at `path` (.csv, .tsv, both also .gz; .parquet), as a mapped file of arrays.
pub(crate) fn open(path: &Path, request: &TableRequest<'_>) -> Result<Contents> {
    let format = Format::of(path)?;
    // What the text says decides what is made: the columns in their order.
    let mut asked =
        serde_json::json!({ "label": request.label, "features": request.features, "format": format!("{format:?}") });
    if request.labels_are_texts {
        asked["labels are texts"] = true.into();
    }
    let made = cache::converted(path, request.cache_dir, &format!("table {asked}"), |to| {
        flat::write(to, |out| {
            let mut columns = Columns::none(path, to, request);
            match format {
                Format::Csv { tabs } => convert_csv(&mut columns, tabs, out),
                Format::Parquet => parquet::convert(&mut columns, out),
            }
        })
    })?;
    flat::open_as(&made, &path.display().to_string())
}

/// What the columns of the table at `path` are called, in their order. Reads its header alone.
pub(crate) fn columns(path: &Path) -> Result<Vec<String>> {
    match Format::of(path)? {
        Format::Csv { tabs } => {
            let mut records = Records::new(gzip::table(path)?, tabs).map_err(|problem| problem_in(path, problem))?;
            header(path, &mut records)
        }
        Format::Parquet => parquet::columns(path),
    }
}

impl Format {
    fn of(path: &Path) -> Result<Format> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        match kind(path)? {
            Kind::Csv => Ok(Format::Csv { tabs: name.strip_suffix(".gz").unwrap_or(&name).ends_with(".tsv") }),
            Kind::Parquet => Ok(Format::Parquet),
            other => Err(refuse(path, format!("expected a table, got {}", other.name()))),
        }
    }
}

/// A table that is being converted: its columns, and which of them are wanted.
pub(super) struct Columns<'a> {
    pub(super) path: &'a Path,
    /// The file that is written.
    to: &'a Path,
    request: &'a TableRequest<'a>,
    pub(super) names: Vec<String>,
    /// Which columns the features are.
    pub(super) features: Vec<usize>,
    /// Which column the label is.
    pub(super) label: Option<usize>,
    /// Whether some names are numbers, as cells of rows are.
    any_number: bool,
}

impl<'a> Columns<'a> {
    /// Before it is known what there is.
    fn none(path: &'a Path, to: &'a Path, request: &'a TableRequest<'a>) -> Columns<'a> {
        Columns { path, to, request, names: Vec::new(), features: Vec::new(), label: None, any_number: false }
    }

    /// Finds what was asked for among the names that the table has.
    pub(super) fn choose(&mut self, names: Vec<String>) -> Result<()> {
        self.names = names;
        self.check_names_differ()?;
        self.label = self.request.label.map(|name| self.position(name)).transpose()?;
        self.features = match self.request.features {
            Some(wanted) => wanted.iter().map(|name| self.position(name)).collect::<Result<_>>()?,
            None => (0..self.names.len()).filter(|&column| Some(column) != self.label).collect(),
        };
        if let Some(&column) = self.features.iter().find(|&&column| self.names[column].is_empty()) {
            return Err(self.bad(format!(
                "column {} of {} has no name. If it is an index that pandas wrote, save without: to_csv(path, index=False)",
                column + 1,
                self.names.len()
            )));
        }
        if self.features.is_empty() && self.request.features.is_none() {
            return Err(self.bad(format!("it has no column of features besides the label \"{}\"", self.names[0])));
        }
        self.any_number = self.names.iter().any(|name| number(name.as_bytes()).is_some());
        self.check_names_fit()
    }

    fn check_names_fit(&self) -> Result<()> {
        let bytes: usize = self.features.iter().map(|&column| flat::text_bytes(&self.names[column])).sum();
        if bytes > NAMES_BYTES_MAX {
            return Err(self.bad(format!(
                "the names of its columns have {bytes} bytes together: at most {NAMES_BYTES_MAX} are read. Give them shorter names"
            )));
        }
        Ok(())
    }

    fn position(&self, name: &str) -> Result<usize> {
        self.names
            .iter()
            .position(|has| has == name)
            .ok_or_else(|| self.bad(format!("it has no column \"{name}\". Its columns are {}", listed(&self.names))))
    }

    fn check_names_differ(&self) -> Result<()> {
        let mut seen = std::collections::HashMap::new();
        for (column, name) in self.names.iter().enumerate() {
            if let Some(first) = seen.insert(name, column).filter(|_| !name.is_empty()) {
                return Err(self.bad(format!(
                    "its columns {} and {} are both called \"{name}\": give each its own name",
                    first + 1,
                    column + 1
                )));
            }
        }
        Ok(())
    }

    pub(super) fn bad(&self, what: String) -> Error {
        refuse(self.path, what)
    }

    /// What is wrong with a cell of a column of features, at a place that `place` names: a text that is no number, or a number that is not
    /// finite as f32.
    pub(super) fn bad_feature(&self, place: &str, column: usize, shown: &str, value: Option<f64>) -> Error {
        let what = match value {
            _ if shown.is_empty() => {
                "the cell is empty: expected a number. Fill it in, or remove the row (pandas: dropna) or the column"
                    .into()
            }
            None => format!(
                "expected a number, got \"{shown}\". If this column is the label, say --labels \"{}\"; else turn its texts into \
                 numbers (pandas: get_dummies) or remove the column",
                self.names[column]
            ),
            Some(value) if value.is_finite() => {
                format!("{shown} is beyond the largest f32, {:e}. Give the column a larger unit", f32::MAX)
            }
            Some(_) => format!("expected a finite number, got {shown}. Remove the row or the column, or fill it in"),
        };
        self.bad(format!("{place}, column \"{}\": {what}", self.names[column]))
    }
}

/// Writes rows: features at once, labels aside until all are known.
pub(super) struct Rows<'a> {
    out: &'a mut flat::Writer,
    to: &'a Path,
    features: Vec<f32>,
    /// As they were before they were rounded, of each column.
    ends: Vec<Ends>,
    labels: Option<Labels>,
    rows: u64,
    bytes_before_asking: u64,
    /// So many more bytes of features may come.
    bytes_at_most: u64,
}

impl<'a> Rows<'a> {
    /// Features take no more than `bytes_at_most`.
    pub(super) fn new(columns: &Columns<'a>, out: &'a mut flat::Writer, bytes_at_most: u64) -> Result<Rows<'a>> {
        let feature_columns = columns.features.len();
        if feature_columns > 0 {
            out.begin("features", Element::F32, &[feature_columns])?;
        }
        let labels = columns.label.map(|_| Labels::beside(columns.to, columns.request.labels_are_texts)).transpose()?;
        let features = Vec::with_capacity(PIECE_COUNT + feature_columns);
        let ends = vec![Ends::NONE; feature_columns];
        Ok(Rows { out, to: columns.to, features, ends, labels, rows: 0, bytes_before_asking: 0, bytes_at_most })
    }

    /// The next number of the row, which is the feature `index`. It is finite as f32.
    #[inline]
    pub(super) fn feature(&mut self, index: usize, value: f64) {
        self.ends[index].add(value);
        self.features.push(value as f32);
    }

    /// The labels, of a table that has some.
    pub(super) fn labels(&mut self) -> Option<&mut Labels> {
        self.labels.as_mut()
    }

    /// How many rows have ended.
    #[cfg(feature = "parquet")]
    pub(super) fn count(&self) -> u64 {
        self.rows
    }

    /// The row has all it has.
    pub(super) fn end_row(&mut self) -> Result<()> {
        self.rows += 1;
        debug_assert_eq!(self.features.len() % self.ends.len().max(1), 0);
        if self.features.len() >= PIECE_COUNT { self.write_piece() } else { Ok(()) }
    }

    fn write_piece(&mut self) -> Result<()> {
        let bytes = 4 * self.features.len() as u64;
        if self.bytes_before_asking < bytes {
            let wanted = room_wanted(self.bytes_at_most, bytes);
            cache::check_room(self.to, wanted)?;
            self.bytes_before_asking = wanted;
        }
        self.bytes_before_asking -= bytes;
        self.bytes_at_most = self.bytes_at_most.saturating_sub(bytes);
        self.out.write_f32(&self.features)?;
        self.features.clear();
        Ok(())
    }

    /// All rows have ended: writes the labels, and says what is to be known of the table.
    pub(super) fn finish(mut self, columns: &Columns<'_>) -> Result<flat::About> {
        if self.rows == 0 {
            return Err(columns.bad("it has a header and no rows".into()));
        }
        if !self.features.is_empty() {
            self.write_piece()?;
        }
        warn_of_rounding(columns, &self.ends);
        let classes = match self.labels {
            Some(labels) => labels.finish(self.out)?,
            None => None,
        };
        let names = columns.features.iter().map(|&column| columns.names[column].clone()).collect();
        Ok(flat::About { classes, columns: Some(names), source: Some(columns.path.display().to_string()) })
    }
}

/// What the disk has to have before so many bytes are written, of those that may come at most.
fn room_wanted(bytes_at_most: u64, bytes: u64) -> u64 {
    ROOM_BYTES.min(bytes_at_most).max(bytes)
}

/// Says which columns f32 has all but made constant.
fn warn_of_rounding(columns: &Columns<'_>, ends: &[Ends]) {
    let close = columns.features.iter().zip(ends).filter(|(_, ends)| ends.are_too_close());
    let close: Vec<_> = close.map(|(&column, ends)| (format!("\"{}\"", columns.names[column]), *ends)).collect();
    if let Some(warning) = rounding::warning(&close) {
        tracing::warn!("{}: {warning}", columns.path.display());
    }
}

fn convert_csv(columns: &mut Columns<'_>, tabs: bool, out: &mut flat::Writer) -> Result<flat::About> {
    let path = columns.path;
    let mut records = Records::new(gzip::table(path)?, tabs).map_err(|problem| problem_in(path, problem))?;
    columns.choose(header(path, &mut records)?)?;
    // A number of four bytes is a cell of at least one, with what separates it from the next.
    let bytes_at_most = gzip::table_bytes_at_most(path)?.saturating_add(2).saturating_mul(2);
    let mut rows = Rows::new(columns, out, bytes_at_most)?;
    while let Some(record) = records.next().map_err(|problem| problem_in(path, problem))? {
        convert_record(columns, &record, &mut rows)?;
    }
    rows.finish(columns)
}

fn convert_record(columns: &Columns<'_>, record: &Record<'_>, rows: &mut Rows<'_>) -> Result<()> {
    if record.len() != columns.names.len() {
        let (line, has, expected) = (record.line(), record.len(), columns.names.len());
        return Err(columns.bad(format!(
            "line {line}: expected {expected} cells, as the header has, got {has}. Texts with delimiters in them have to be quoted"
        )));
    }
    for (index, &column) in columns.features.iter().enumerate() {
        let value = number(record.cell(column));
        match value {
            Some(value) if (value as f32).is_finite() => rows.feature(index, value),
            _ => {
                let place = format!("line {}", record.line_of(column));
                return Err(columns.bad_feature(&place, column, &shown(record.cell(column)), value));
            }
        }
    }
    if let (Some(column), Some(labels)) = (columns.label, rows.labels()) {
        let cell = record.cell(column);
        let place = || format!("line {}, column \"{}\"", record.line_of(column), columns.names[column]);
        if columns.any_number && cell == columns.names[column].as_bytes() && number(cell).is_none() {
            return Err(columns.bad(format!(
                "{}: the label \"{}\" is what the column is called, and other columns are called as numbers: the first line seems to be \
                 a row. {HEADER_WAY_OUT}",
                place(),
                shown(cell)
            )));
        }
        labels.push(cell).map_err(|problem| problem.in_cell(columns.path, &place(), &shown(cell)))?;
    }
    rows.end_row()
}

/// What to do about a table without names.
const HEADER_WAY_OUT: &str = "Put a line with names above it (pandas: read_csv(path, header=None).add_prefix(\"x\").to_csv(other, \
                              index=False)); where numbers are names, put a letter before each";

/// The names of the columns, from the first line.
fn header(path: &Path, records: &mut Records<impl io::Read>) -> Result<Vec<String>> {
    let bad = |what: &str| refuse(path, what);
    let record = records.next().map_err(|problem| problem_in(path, problem))?;
    let record = record.ok_or_else(|| bad("it is empty: expected a line with the columns' names, then rows"))?;
    let cells = record.len();
    let numbers: Vec<f64> = (0..cells).filter_map(|column| number(record.cell(column))).collect();
    if looks_like_a_row(&numbers, cells) {
        return Err(bad(&format!(
            "line {}: {} of its {cells} cells are numbers, as in a row: expected the columns' names. {HEADER_WAY_OUT}",
            record.line(),
            numbers.len()
        )));
    }
    let name = |column: usize| {
        let name = String::from_utf8(record.cell(column).to_vec());
        name.map_err(|_| bad(&format!("the name of column {} is not UTF-8. Save the file as UTF-8", column + 1)))
    };
    (0..cells).map(name).collect()
}

/// Whether a first line of so many cells, of which these are numbers, is rather a row than the columns' names: nobody would miss the row. Numbers
/// that go up in even steps beside a text are names all the same: 0, 1, 2 … as pandas has it, years, wavelengths.
fn looks_like_a_row(numbers: &[f64], cells: usize) -> bool {
    if numbers.is_empty() || 2 * numbers.len() < cells {
        return false;
    }
    let step = (numbers[numbers.len() - 1] - numbers[0]) / (numbers.len() as f64 - 1.0);
    let is_even = |pair: &[f64]| (pair[1] - pair[0] - step).abs() <= 0.01 * step;
    let are_names = numbers.len() >= 3 && numbers.len() < cells && step > 0.0 && numbers.windows(2).all(is_even);
    !are_names
}

fn problem_in(path: &Path, problem: Problem) -> Error {
    match problem {
        Problem::Malformed(line, what) => refuse(path, format!("line {line}: {what}")),
        Problem::Unreadable(error) => gzip::unreadable(path, error),
    }
}

/// The beginning of a cell, printable.
fn shown(cell: &[u8]) -> String {
    let text = String::from_utf8_lossy(cell);
    let mut characters = text.chars().flat_map(|character| character.escape_debug().collect::<Vec<_>>());
    let start: String = characters.by_ref().take(SHOWN_CHARACTERS).collect();
    if characters.next().is_some() { start + "…" } else { start }
}

/// Names, for a message: not all, where there are many.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 20;
    let some: Vec<_> = names.iter().take(SHOWN).map(|name| format!("\"{name}\"")).collect();
    let more = names.len().saturating_sub(SHOWN);
    if more == 0 { some.join(", ") } else { format!("{} and {more} more", some.join(", ")) }
}

#[cfg(test)]
mod limits;
#[cfg(test)]
mod tests;
