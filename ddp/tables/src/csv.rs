//! Tables of text: `.csv` with commas, semicolons or tabs, and `.tsv`; both also `.gz`. The crate
//! `csv-core` splits a stream into records; the bounds on their size are ours.
//!
//! As in RFC 4180, a cell that begins with a quote may contain delimiters, line ends and `""` for a
//! quote. Lines end in LF, CRLF or CR; empty lines and a byte-order mark are skipped. Spaces around
//! a cell are dropped, except those of a text in quotes. Lines are counted from 1. A record has at
//! most `RECORD_BYTES_MAX` bytes, so that an unclosed quote does not read in the whole file, and at
//! most `CELLS_MAX` cells, since gzip packs a thousand commas into a byte.

use std::io::{self, BufRead, BufReader, Chain, Cursor, ErrorKind, Read};
use std::path::{Path, PathBuf};

use csv_core::ReadFieldResult::{End, Field, InputEmpty, OutputFull};
use ddp_kernels::heartbeat::{self, Work};

use ddp_data::files::io::{other_encoding, reader, refuse, unreadable};
use ddp_data::words::{is_missing, number};
use ddp_data::{Result, bail, ensure};

use crate::guess;
use crate::table::{TableReader, Value, shown};

/// What to do about a table without a header.
const HEADER_HELP: &str = "help: put a line with names above it (pandas: read_csv(path, header=None).add_prefix(\"x\")\
     .to_csv(other, index=False)); if numbers are names, put a letter before each";

/// A table of text that is being read.
struct CsvTable {
    names: Vec<String>,
    records: Records<Box<dyn Read>>,
}

/// The table at `path`, after its line of names.
pub(crate) fn open(path: &Path) -> Result<Box<dyn TableReader>> {
    let mut records = Records::new(path, reader(path)?, (BUFFER_BYTES, RECORD_BYTES_MAX))?;
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
        "line {line}: expected UTF-8, got NUL bytes, as UTF-16 has; help: save the file as UTF-8 (iconv -f UTF-16 -t UTF-8)"
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
        Ok(name) => Ok(name.trim_ascii().to_string()),
        Err(_) => Err(format!(
            "the name of column {} is not UTF-8; help: save the file as UTF-8 (iconv -f latin1 -t utf8)",
            column + 1
        )),
    };
    (0..cells).map(name).collect()
}

/// The longest record. A row of a million numbers has about 20 MB.
const RECORD_BYTES_MAX: usize = 64 << 20;
/// The most cells of a record.
const CELLS_MAX: usize = 4 << 20;
const BUFFER_BYTES: usize = 1 << 20;

/// The refusal of a file in which several delimiters fit.
const AMBIGUOUS: &str = "expected one delimiter, got a header with several: several delimiters give every row the same \
     number of cells; help: put quotes around names and cells that contain a delimiter (\"a,b\"), or rename columns";

/// The records of a stream, one after another.
pub(super) struct Records<R> {
    /// The file, for messages.
    pub(super) path: PathBuf,
    input: BufReader<Chain<Cursor<Vec<u8>>, R>>,
    parser: csv_core::Reader,
    /// The text of all cells of the current record, and where each cell ends in it.
    text: Vec<u8>,
    ends: Vec<usize>,
    /// Which cells of the current record begin with a quote.
    are_quoted: Vec<bool>,
    /// The line on which the next record begins, unless empty lines come first.
    line: u64,
    /// Whether the byte before the next one is a CR, so that an LF belongs to it.
    after_cr: bool,
    record_bytes_max: usize,
    /// Of the current record: its first line, and whether no cell has a line end.
    first_line: u64,
    is_one_line: bool,
}

impl<R: Read> Records<R> {
    /// Reads a stream with tabs as delimiters if the name says so, else with the delimiter that its
    /// first lines show. `sizes` are those of the buffer and of the longest record.
    fn new(path: &Path, mut reader: R, sizes: (usize, usize)) -> Result<Records<R>> {
        let buffer_bytes = sizes.0;
        let mut start = Vec::new();
        let mut first = reader.by_ref().take(buffer_bytes as u64);
        let read = first.read_to_end(&mut start);
        read.map_err(|error| unreadable(path, error))?;
        if let Some(encoding) = other_encoding(&start) {
            let what = format!(
                "line 1: expected UTF-8, got {encoding}; help: save the file as UTF-8 (iconv -f {encoding} -t UTF-8)"
            );
            return Err(refuse(path, what));
        }
        let is_cut = start.len() == buffer_bytes;
        if start.starts_with(b"\xef\xbb\xbf") {
            start.drain(..3);
        }
        let name = path.to_string_lossy().to_ascii_lowercase();
        let delimiter = if name.trim_end_matches(".gz").ends_with(".tsv") {
            b'\t'
        } else {
            delimiter_of(&start, is_cut).map_err(|why| refuse(path, why))?
        };
        Ok(Records::split_at(path, delimiter, start, reader, sizes))
    }

    /// The records of `start` and then of `reader`.
    fn split_at(
        path: &Path,
        delimiter: u8,
        start: Vec<u8>,
        reader: R,
        (buffer_bytes, record_bytes_max): (usize, usize),
    ) -> Records<R> {
        Records {
            path: path.into(),
            input: BufReader::with_capacity(buffer_bytes, Cursor::new(start).chain(reader)),
            parser: csv_core::ReaderBuilder::new().delimiter(delimiter).build(),
            text: vec![0; buffer_bytes],
            ends: Vec::new(),
            are_quoted: Vec::new(),
            line: 1,
            after_cr: false,
            record_bytes_max,
            first_line: 1,
            is_one_line: true,
        }
    }

    /// Goes to the next record; false at the end.
    pub(super) fn advance(&mut self) -> Result<bool> {
        if !self.skip_line_ends()? {
            return Ok(false);
        }
        let (line, path) = (self.line, &self.path);
        let malformed = |what| Err(refuse(path, format!("line {line}: {what}")));
        let mut bytes = 0;
        self.ends.clear();
        self.are_quoted.clear();
        loop {
            let input = fill(&mut self.input).map_err(|error| unreadable(path, error))?;
            let at_end = input.is_empty();
            if self.are_quoted.len() == self.ends.len() {
                self.are_quoted.push(input.first() == Some(&b'"'));
            }
            // At the end of the file a line end completes the record, unless a quote is open.
            let input_or_end = if at_end { b"\n" } else { input };
            let (result, read, written) = self
                .parser
                .read_field(input_or_end, &mut self.text[bytes..]);
            let ends_record = matches!(result, Field { record_end: true } | End);
            if !at_end {
                self.after_cr = ends_record && read > 0 && input[read - 1] == b'\r';
                let ends = input[..read].iter().filter(|&&byte| byte == b'\n').count();
                self.line += ends as u64 + u64::from(self.after_cr);
                self.input.consume(read);
            }
            bytes += written;
            match result {
                Field { .. } | End => {
                    if self.ends.len() == CELLS_MAX {
                        return malformed(format!(
                            "the row that begins here has more than {CELLS_MAX} cells, the most that are read"
                        ));
                    }
                    self.ends.push(bytes);
                    if ends_record {
                        self.first_line = line;
                        self.is_one_line = self.line - line <= 1;
                        return Ok(true);
                    }
                }
                InputEmpty if at_end => {
                    let cell = self.ends.len() + 1;
                    return malformed(format!("the quote that opens cell {cell} is never closed"));
                }
                InputEmpty => {}
                OutputFull if self.text.len() >= self.record_bytes_max => {
                    return malformed(format!(
                        "the row that begins here does not end within {} bytes; help: look for a quote that is not closed",
                        self.record_bytes_max
                    ));
                }
                OutputFull => self.text.resize(2 * self.text.len(), 0),
            }
        }
    }

    /// How many cells the current record has.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// A cell of the current record, without the spaces around it unless they are a text's, in
    /// quotes.
    pub(super) fn cell(&self, index: usize) -> &[u8] {
        let cell = &self.text[self.start(index)..self.ends[index]];
        let trimmed = cell.trim_ascii();
        let has_spaces = self.are_quoted[index] && trimmed.len() < cell.len();
        let is_text = has_spaces && number(trimmed).is_none() && !is_missing(trimmed);
        if is_text { cell } else { trimmed }
    }

    /// The line on which the current record begins.
    pub(super) fn first_line(&self) -> u64 {
        self.first_line
    }

    /// The line on which a cell of it begins.
    pub(super) fn line_of(&self, index: usize) -> u64 {
        if self.is_one_line {
            return self.first_line;
        }
        let before = &self.text[..self.start(index)];
        self.first_line + before.iter().filter(|&&byte| byte == b'\n').count() as u64
    }

    fn start(&self, index: usize) -> usize {
        index.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// Skips empty lines. Returns whether a record follows.
    fn skip_line_ends(&mut self) -> Result<bool> {
        loop {
            let next = fill(&mut self.input).map_err(|error| unreadable(&self.path, error))?;
            match next.first() {
                None => return Ok(false),
                Some(b'\n') => {
                    self.line += u64::from(!self.after_cr);
                    self.after_cr = false;
                }
                Some(b'\r') => {
                    self.line += 1;
                    self.after_cr = true;
                }
                Some(_) => {
                    self.after_cr = false;
                    return Ok(true);
                }
            }
            self.input.consume(1);
        }
    }
}

/// The next bytes of `input`, none at the end.
fn fill(input: &mut impl BufRead) -> io::Result<&[u8]> {
    heartbeat::beat(Work::ConvertsData);
    while let Err(error) = input.fill_buf() {
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // The buffer is filled by now: this reads nothing. The borrow checker refuses to return it from
    // the loop.
    input.fill_buf()
}

/// The delimiter of a file that begins with these bytes: of those in the first line the one that
/// splits the other lines alike. `is_cut`: the last line may be cut off.
fn delimiter_of(start: &[u8], is_cut: bool) -> Result<u8, String> {
    let splits_header = |delimiter: &u8| cells(*delimiter, start, 1).first() > Some(&1);
    let mut found = [b',', b';', b'\t'].to_vec();
    found.retain(splits_header);
    if found.len() > 1 {
        let splits_alike = |delimiter: &u8| {
            let counts = cells(*delimiter, start, usize::MAX);
            let whole = counts.len() - usize::from(is_cut && counts.len() > 2);
            counts[..whole].iter().all(|count| *count == counts[0])
        };
        let alike: Vec<u8> = found.iter().copied().filter(splits_alike).collect();
        match alike.len() {
            // Whichever is taken, a row will be refused.
            0 => {}
            1 => found = alike,
            _ => bail!("line 1: {AMBIGUOUS}"),
        }
    }
    Ok(found.first().copied().unwrap_or(b','))
}

/// How many cells each record of the first bytes of a file has with this delimiter, of at most
/// `most` records. A malformed record has 0 and is the last.
fn cells(delimiter: u8, start: &[u8], most: usize) -> Vec<usize> {
    let sizes = (1 << 12, RECORD_BYTES_MAX);
    let mut records = Records::split_at(Path::new(""), delimiter, Vec::new(), start, sizes);
    let mut counts = Vec::new();
    while counts.len() < most {
        match records.advance() {
            Ok(true) => counts.push(records.len()),
            Ok(false) => break,
            Err(_) => {
                counts.push(0);
                break;
            }
        }
    }
    counts
}

#[cfg(test)]
mod tests;
