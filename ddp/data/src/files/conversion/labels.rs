//! The labels of a table. What they are follows from all of them: whole numbers are i64, other
//! numbers f64, and if one is a text, all are: i64 codes of the texts sorted by their bytes, which
//! are the classes. A whole number that does not fit i64 is a text. Until the last row is known,
//! each is kept in a file: as an f64, as an i64 and as a code for its text.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, Write};
use std::num::IntErrorKind;
use std::path::{Path, PathBuf};

use super::super::array::Element;
use super::super::csv::number;
use super::super::flat;
use super::super::io::writing;
use super::super::shown::shown;
use crate::error::{Error, Result};
use crate::task::CLASSES_MAX;

/// The longest name of a class, and of all together in a flat file's header.
const TEXT_BYTES_MAX: usize = 4 << 10;
const TEXTS_BYTES_MAX: usize = 16 << 20;
/// The code of a label that is only kept as a number.
const NO_CODE: u32 = u32::MAX;
/// A label in the file: its number as f64, as i64, and its code, in eight bytes each.
const ROW_BYTES: usize = 24;

const WRONG_COLUMN: &str = "help: is this column the label?";

pub(super) struct LabelColumn {
    aside: BufWriter<File>,
    path: PathBuf,
    rows: u64,
    /// The code of each text, in the order of their first rows; `None` once there are too many for
    /// classes.
    codes: Option<HashMap<Box<[u8]>, u32>>,
    texts_bytes: usize,
    any_text: bool,
    /// Whole numbers, also those that do not fit i64.
    all_whole: bool,
    any_long: bool,
    /// Labels of a row: several are numbers.
    width: usize,
}

impl LabelColumn {
    /// No labels yet. They are kept in a file beside `to`. `are_texts`: whatever they look like.
    pub(super) fn beside(to: &Path, are_texts: bool, width: usize) -> Result<LabelColumn> {
        let path = to.with_extension("labels");
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(writing(&path))?;
        // The file exists as long as it is open.
        std::fs::remove_file(&path).map_err(writing(&path))?;
        Ok(LabelColumn {
            aside: BufWriter::with_capacity(1 << 18, file),
            path,
            rows: 0,
            codes: (width == 1).then(HashMap::new),
            texts_bytes: 0,
            any_text: are_texts,
            all_whole: width == 1,
            any_long: false,
            width,
        })
    }

    /// Adds the label of the next row. `bad` makes an error of what is wrong with it.
    /// `is_text`: a text even if it looks like a number.
    pub(super) fn push(
        &mut self,
        cell: &[u8],
        is_text: bool,
        bad: impl Fn(String) -> Error,
    ) -> Result<()> {
        let value = number(cell);
        self.any_text |= is_text || value.is_none();
        let whole = self.all_whole.then(|| whole(cell)).flatten();
        let is_long = self.all_whole && whole.is_none() && is_long(cell);
        self.any_long |= is_long;
        self.all_whole = whole.is_some() || is_long;
        let code = check(cell, value).and_then(|()| self.code(cell));
        let code = code.map_err(bad)?;
        let whole = whole.unwrap_or_default().cast_unsigned();
        let value = value.unwrap_or(f64::NAN).to_bits();
        let row = [value, whole, u64::from(code)].map(u64::to_le_bytes);
        self.rows += 1;
        let row = row.as_flattened();
        self.aside.write_all(row).map_err(writing(&self.path))
    }

    /// Whether the labels so far are texts. A later fraction makes numbers of long whole ones.
    fn are_texts(&self) -> bool {
        self.any_text || self.all_whole && self.any_long
    }

    /// The code of a text, or why it cannot be a label.
    fn code(&mut self, text: &[u8]) -> Result<u32, String> {
        let are_texts = self.are_texts();
        let Some(codes) = &mut self.codes else {
            return match are_texts {
                true if self.width > 1 => Err(format!(
                    "expected a number, as each of several labels is, got \"{}\"; help: correct it or remove the row",
                    shown(text)
                )),
                true => Err(format!(
                    "expected a number as label, got \"{}\"; more than {CLASSES_MAX} different numbers came before",
                    shown(text)
                )),
                false => Ok(NO_CODE),
            };
        };
        if let Some(&code) = codes.get(text) {
            return Ok(code);
        }
        if text.len() > TEXT_BYTES_MAX {
            return Err(format!(
                "expected a label of at most {TEXT_BYTES_MAX} bytes, got {}; {WRONG_COLUMN}",
                text.len()
            ));
        }
        self.texts_bytes += flat::text_bytes(&String::from_utf8_lossy(text));
        if codes.len() < CLASSES_MAX && self.texts_bytes <= TEXTS_BYTES_MAX {
            let code = codes.len() as u32;
            codes.insert(text.into(), code);
            return Ok(code);
        }
        if !are_texts {
            self.codes = None;
            return Ok(NO_CODE);
        }
        Err(match codes.len() {
            CLASSES_MAX => format!(
                "expected at most {CLASSES_MAX} different texts as labels, got \"{}\" after as many; {WRONG_COLUMN}",
                shown(text)
            ),
            _ => format!(
                "expected different labels of at most {TEXTS_BYTES_MAX} bytes together, got more; {WRONG_COLUMN}"
            ),
        })
    }

    /// Writes all labels as the type they turned out to be, and returns the classes if they are
    /// texts.
    pub(super) fn finish(self, out: &mut flat::Writer) -> Result<Option<Vec<String>>> {
        let (are_texts, failed) = (self.are_texts(), writing(&self.path));
        let file = self.aside.into_inner();
        let mut file = file.map_err(|error| failed(error.into_error()))?;
        file.rewind().map_err(writing(&self.path))?;
        let mut aside = Aside {
            file: BufReader::with_capacity(1 << 18, file),
            path: self.path,
            rows_left: self.rows,
        };
        let write_i64 =
            |out: &mut flat::Writer, values: &[i64]| out.write_numbers(values, i64::to_le_bytes);
        if !are_texts && !self.all_whole {
            let several = [self.width];
            let shape = if self.width > 1 { &several[..] } else { &[] };
            out.begin("labels", Element::F64, shape)?;
            let write = |values: &[f64]| out.write_numbers(values, f64::to_le_bytes);
            aside.convert(|value, _, _| value, write)?;
            return Ok(None);
        }
        out.begin("labels", Element::I64, &[])?;
        if !are_texts {
            aside.convert(|_, whole, _| whole, |values| write_i64(out, values))?;
            return Ok(None);
        }
        let mut texts: Vec<(Box<[u8]>, u32)> = self.codes.into_iter().flatten().collect();
        texts.sort();
        let mut classes = vec![0; texts.len()];
        for ((_, code), class) in texts.iter().zip(0..) {
            classes[*code as usize] = class;
        }
        aside.convert(
            |_, _, code| classes[code as usize],
            |values| write_i64(out, values),
        )?;
        let name = |(text, _): (Box<[u8]>, u32)| String::from_utf8_lossy(&text).into_owned();
        Ok(Some(texts.into_iter().map(name).collect()))
    }
}

/// Whether a cell is a whole number that does not fit i64, with digits only.
fn is_long(cell: &[u8]) -> bool {
    use IntErrorKind::{NegOverflow, PosOverflow};
    let whole = std::str::from_utf8(cell).map(str::parse::<i64>);
    matches!(whole, Ok(Err(error)) if matches!(error.kind(), PosOverflow | NegOverflow))
}

/// The whole number in a cell, by its digits since an f64 would round it: `7`, `-7.0` or `7e2`;
/// `None` if it has a fraction or does not fit i64.
fn whole(cell: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(cell).ok()?;
    // Most are written so, and this allocates nothing.
    if let Ok(whole) = text.parse() {
        return Some(whole);
    }
    let (digits, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (before, after) = digits.split_once('.').unwrap_or((digits, ""));
    let exponent: usize = exponent.parse().ok().filter(|&exponent| exponent < 20)?;
    let after = format!("{after:0<exponent$}");
    let (moved, fraction) = after.split_at_checked(exponent)?;
    // One digit more, since `.0` has none before the point.
    let tenfold: i128 = format!("{before}{moved}0").parse().ok()?;
    let has_fraction = fraction.bytes().any(|digit| digit != b'0');
    i64::try_from(tenfold / 10).ok().filter(|_| !has_fraction)
}

/// Whether a cell can be a label, or why not.
fn check(cell: &[u8], value: Option<f64>) -> Result<(), String> {
    if value.is_some_and(|value| !value.is_finite()) {
        return Err(format!(
            "expected a number or a text as label, got {}; help: remove the row, or give the class another name",
            shown(cell)
        ));
    }
    if std::str::from_utf8(cell).is_err() {
        let got = shown(cell);
        return Err(format!(
            "the label \"{got}\" is not UTF-8; help: save the file as UTF-8"
        ));
    }
    if cell.contains(&b'\n') {
        let got = shown(cell);
        return Err(format!(
            "expected a label of one line, got \"{got}\"; help: look for a quote that is not closed"
        ));
    }
    Ok(())
}

/// Labels that are read again.
struct Aside {
    file: BufReader<File>,
    path: PathBuf,
    rows_left: u64,
}

impl Aside {
    /// Gives `label` of all labels to `write`, in pieces.
    fn convert<T>(
        &mut self,
        label: impl Fn(f64, i64, u32) -> T,
        mut write: impl FnMut(&[T]) -> Result<()>,
    ) -> Result<()> {
        let mut piece = Vec::with_capacity(1 << 16);
        let mut row = [0; ROW_BYTES];
        while self.rows_left > 0 {
            piece.clear();
            let count = self.rows_left.min(1 << 16);
            for _ in 0..count {
                self.file
                    .read_exact(&mut row)
                    .map_err(writing(&self.path))?;
                let word = |index: usize| u64::from_le_bytes(row.as_chunks().0[index]);
                let value = f64::from_bits(word(0));
                piece.push(label(value, word(1).cast_signed(), word(2) as u32));
            }
            write(&piece)?;
            self.rows_left -= count;
        }
        Ok(())
    }
}
