//! Comma-separated values: records out of a stream of bytes, and numbers out of cells.
//!
//! Cells may be quoted, with `""` for a quote, delimiters and line ends inside. Lines end in LF, CRLF or CR, empty ones are passed over, a byte-order mark
//! at the beginning too. Spaces around a cell or its quotes do not count. Lines are counted from 1 as an editor counts them. A record is kept
//! in memory and has at most `RECORD_BYTES_MAX`, so that a quote that is never closed does not read in the whole file, and at most `CELLS_MAX`
//! cells, so that a line of nothing but commas, of which gzip packs a thousand into a byte, takes no more memory than one of numbers.

use std::io::{self, ErrorKind, Read};
use std::ops::Range;

/// The longest record. A row of a million numbers has about 20 MB.
const RECORD_BYTES_MAX: usize = 64 << 20;
/// The most cells of a record. In the longest each of them has 16 bytes.
const CELLS_MAX: usize = 4 << 20;
const BUFFER_BYTES: usize = 1 << 20;

/// What is wrong with the file as a table, or what the system said.
#[derive(Debug)]
pub(crate) enum Problem {
    /// On this line of the file.
    Malformed(u64, String),
    /// The system could not read it.
    Unreadable(io::Error),
}

/// Gives a stream's records, one after another.
pub(crate) struct Records<R> {
    reader: R,
    delimiter: u8,
    buffer: Vec<u8>,
    /// The part of the buffer that has been read and not given out.
    filled: Range<usize>,
    at_end: bool,
    /// The line on which the next record begins.
    line: u64,
    record_bytes_max: usize,
    cells: Cells,
}

/// Where the cells of a record are.
#[derive(Default)]
struct Cells {
    places: Vec<Place>,
    /// What stood in quotes, without them.
    unquoted: Vec<u8>,
    /// How many ends of lines the record has, with its own.
    lines: u64,
}

#[derive(Clone, Copy)]
struct Place {
    /// Records are not much longer than `RECORD_BYTES_MAX`.
    start: u32,
    end: u32,
    /// Whether it is a place in `unquoted`.
    quoted: bool,
}

impl Cells {
    /// Refuses more than a row can have, with the number of line ends before it.
    fn add(&mut self, start: usize, end: usize, quoted: bool) -> Result<(), (u64, String)> {
        if self.places.len() == CELLS_MAX {
            let what = format!("the row that begins here has more than {CELLS_MAX} cells, which is more than are read");
            return Err((0, what));
        }
        let (start, end) = (start as u32, end as u32);
        self.places.push(Place { start, end, quoted });
        Ok(())
    }
}

impl Place {
    fn of(self, bytes: &[u8]) -> &[u8] {
        &bytes[self.start as usize..self.end as usize]
    }
}

/// One record.
#[derive(Clone, Copy)]
pub(crate) struct Record<'a> {
    bytes: &'a [u8],
    cells: &'a Cells,
    line: u64,
}

impl<R: Read> Records<R> {
    /// Over a stream whose beginning tells the delimiter: tabs where `tabs` says so; else semicolons or tabs where the first line has those and no
    /// commas.
    pub(crate) fn new(reader: R, tabs: bool) -> Result<Records<R>, Problem> {
        Records::with_buffer(reader, tabs, BUFFER_BYTES, RECORD_BYTES_MAX)
    }

    fn with_buffer(reader: R, tabs: bool, buffer_bytes: usize, record_bytes_max: usize) -> Result<Records<R>, Problem> {
        let mut records = Records {
            reader,
            delimiter: b'\t',
            buffer: vec![0; buffer_bytes],
            filled: 0..0,
            at_end: false,
            line: 1,
            record_bytes_max,
            cells: Cells::default(),
        };
        records.fill()?;
        let start = &records.buffer[records.filled.clone()];
        if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
            return Err(Problem::Malformed(1, "it is UTF-16: expected UTF-8. Save it as UTF-8".into()));
        }
        if start.starts_with(b"\xef\xbb\xbf") {
            records.filled.start += 3;
        }
        if !tabs {
            records.delimiter = delimiter_of(&records.buffer[records.filled.clone()]);
        }
        Ok(records)
    }

    /// The next record; `None` at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Record<'_>>, Problem> {
        loop {
            self.pass_empty_lines();
            let bytes = &self.buffer[self.filled.clone()];
            if bytes.is_empty() && self.at_end {
                return Ok(None);
            }
            let consumed = split(bytes, self.at_end, self.delimiter, &mut self.cells)
                .map_err(|(lines, what)| Problem::Malformed(self.line + lines, what))?;
            if let Some(consumed) = consumed {
                let (start, line) = (self.filled.start, self.line);
                self.filled.start += consumed;
                self.line += self.cells.lines;
                let bytes = &self.buffer[start..start + consumed];
                return Ok(Some(Record { bytes, cells: &self.cells, line }));
            }
            if self.filled.len() >= self.record_bytes_max {
                let what = format!(
                    "the row that begins here does not end within {} bytes. Perhaps a quote is not closed",
                    self.record_bytes_max
                );
                return Err(Problem::Malformed(self.line, what));
            }
            self.fill()?;
        }
    }

    fn pass_empty_lines(&mut self) {
        while let Some(&byte @ (b'\n' | b'\r')) = self.buffer[self.filled.clone()].first() {
            let crlf = byte == b'\r' && self.buffer[self.filled.clone()].get(1) == Some(&b'\n');
            if byte == b'\r' && self.filled.len() == 1 && !self.at_end {
                return; // Perhaps half of a CRLF.
            }
            self.filled.start += 1 + usize::from(crlf);
            self.line += 1;
        }
    }

    /// Moves what is left to the front and reads until the buffer is full; one that is full already becomes twice as large.
    fn fill(&mut self) -> Result<(), Problem> {
        self.buffer.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        if self.filled.end == self.buffer.len() {
            self.buffer.resize(2 * self.buffer.len(), 0);
        }
        while !self.at_end && self.filled.end < self.buffer.len() {
            match self.reader.read(&mut self.buffer[self.filled.end..]) {
                Ok(0) => self.at_end = true,
                Ok(count) => self.filled.end += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Problem::Unreadable(error)),
            }
        }
        Ok(())
    }
}

/// What separates the cells of a file that begins so.
fn delimiter_of(start: &[u8]) -> u8 {
    let (mut quoted, mut semicolons, mut tabs) = (false, false, false);
    let begun = start.iter().position(|byte| !b"\r\n".contains(byte)).unwrap_or(0);
    for &byte in &start[begun..] {
        match byte {
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b',' => return b',',
            b';' => semicolons = true,
            b'\t' => tabs = true,
            b'\n' | b'\r' => break,
            _ => {}
        }
    }
    match (semicolons, tabs) {
        (true, _) => b';',
        (false, true) => b'\t',
        (false, false) => b',',
    }
}

/// Finds the cells of the record that `bytes` begin with, and says how many bytes it has with its line's end: `None` where it may go on behind them.
/// What is wrong comes with the number of line ends before it.
fn split(bytes: &[u8], at_end: bool, delimiter: u8, cells: &mut Cells) -> Result<Option<usize>, (u64, String)> {
    cells.places.clear();
    cells.unquoted.clear();
    cells.lines = 0;
    let mut at = 0;
    loop {
        let end = match quote_after_spaces(bytes, at, delimiter) {
            Some(quote) => {
                let start = cells.unquoted.len();
                let Some(end) = unquote(bytes, quote + 1, at_end, cells)? else { return Ok(None) };
                cells.add(start, cells.unquoted.len(), true)?;
                skip_spaces(bytes, end, delimiter)
            }
            None => {
                let ends = |byte: &u8| *byte == delimiter || *byte == b'\n' || *byte == b'\r';
                let end = bytes[at..].iter().position(ends).map_or(bytes.len(), |length| at + length);
                cells.add(at, end, false)?;
                end
            }
        };
        match (bytes.get(end), bytes.get(end + 1)) {
            (Some(&byte), _) if byte == delimiter => at = end + 1,
            (Some(b'\r'), None) | (None, _) if !at_end => return Ok(None),
            (None, _) => return Ok(Some(end)),
            (Some(b'\r'), Some(b'\n')) => {
                cells.lines += 1;
                return Ok(Some(end + 2));
            }
            (Some(b'\n' | b'\r'), _) => {
                cells.lines += 1;
                return Ok(Some(end + 1));
            }
            (Some(&byte), _) => {
                let what = format!(
                    "after the closing quote of cell {} comes \"{}\": expected \"{}\" or the end of the line. A quote inside \
                     quotes is written twice",
                    cells.places.len(),
                    byte.escape_ascii(),
                    delimiter.escape_ascii()
                );
                return Err((cells.lines, what));
            }
        }
    }
}

fn skip_spaces(bytes: &[u8], from: usize, delimiter: u8) -> usize {
    let other = |byte: &u8| *byte == delimiter || (*byte != b' ' && *byte != b'\t');
    bytes[from..].iter().position(other).map_or(bytes.len(), |length| from + length)
}

/// Where a cell's quote opens, if it has one.
fn quote_after_spaces(bytes: &[u8], from: usize, delimiter: u8) -> Option<usize> {
    let at = match bytes.get(from)? {
        b'"' => from,
        b' ' | b'\t' => skip_spaces(bytes, from, delimiter),
        _ => return None,
    };
    (bytes.get(at) == Some(&b'"')).then_some(at)
}

/// Copies what stands in quotes from `from` on, and says where they have ended: `None` where they may go on.
fn unquote(bytes: &[u8], from: usize, at_end: bool, cells: &mut Cells) -> Result<Option<usize>, (u64, String)> {
    let (mut at, lines_before) = (from, cells.lines);
    loop {
        let Some(length) = bytes[at..].iter().position(|&byte| byte == b'"') else {
            if at_end {
                let what = format!("the quote that opens cell {} is never closed", cells.places.len() + 1);
                return Err((lines_before, what));
            }
            return Ok(None);
        };
        let text = &bytes[at..at + length];
        cells.unquoted.extend_from_slice(text);
        cells.lines += text.iter().filter(|&&byte| byte == b'\n').count() as u64;
        at += length + 1;
        match bytes.get(at) {
            Some(b'"') => {
                cells.unquoted.push(b'"');
                at += 1;
            }
            None if !at_end => return Ok(None),
            _ => return Ok(Some(at)),
        }
    }
}

impl<'a> Record<'a> {
    /// How many cells it has.
    pub(crate) fn len(&self) -> usize {
        self.cells.places.len()
    }

    /// A cell, without spaces around it.
    pub(crate) fn cell(&self, index: usize) -> &'a [u8] {
        let place = self.cells.places[index];
        let bytes = if place.quoted { &self.cells.unquoted } else { self.bytes };
        place.of(bytes).trim_ascii()
    }

    /// The line on which it begins.
    pub(crate) fn line(&self) -> u64 {
        self.line
    }

    /// The line on which a cell begins.
    pub(crate) fn line_of(&self, index: usize) -> u64 {
        let before = self.cells.places[..index].iter().filter(|place| place.quoted);
        let ends = before.flat_map(|place| place.of(&self.cells.unquoted)).filter(|&&byte| byte == b'\n');
        self.line + ends.count() as u64
    }
}

/// Powers of ten that are f64.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22,
];

/// The number that a cell is, rounded to the nearest f64. NaN and infinity are given as such where they are spelled out.
pub(crate) fn number(cell: &[u8]) -> Option<f64> {
    short_number(cell).or_else(|| std::str::from_utf8(cell).ok()?.parse().ok())
}

/// Numbers of at most 15 digits without an exponent, which is nearly all of them: digits and power of ten are both f64, and one division rounds once.
fn short_number(cell: &[u8]) -> Option<f64> {
    let (negative, digits) = match cell {
        [b'-', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    let (mut whole, mut point) = (0u64, None);
    for (at, &byte) in digits.iter().enumerate() {
        match byte {
            b'0'..=b'9' => whole = 10 * whole + u64::from(byte - b'0'),
            b'.' if point.is_none() => point = Some(at),
            _ => return None,
        }
    }
    let decimals = point.map_or(0, |point| digits.len() - 1 - point);
    let digits = digits.len() - usize::from(point.is_some());
    if digits == 0 || digits > 15 {
        return None;
    }
    let value = whole as f64 / POWERS[decimals];
    Some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests;
