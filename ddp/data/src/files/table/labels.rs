//! The labels of a table. What they are follows from all of them: whole numbers are i64, other
//! numbers f64, and if one is a text, all are: i64 codes of the texts sorted by their bytes, which
//! are the classes. A whole number that does not fit i64 is a text. Until the last row is known,
//! they are kept in a file, one a line.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Seek, Write};
use std::num::IntErrorKind;
use std::path::{Path, PathBuf};

use super::super::cell::number;
use super::super::flat;
use super::super::io::writing;
use super::super::shown::shown;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::task::CLASSES_MAX;

/// The longest name of a class, and of all together in a flat file's header.
const TEXT_BYTES_MAX: usize = 4 << 10;
const TEXTS_BYTES_MAX: usize = 16 << 20;

const WRONG_COLUMN: &str = "help: is this column the label?";

pub(super) struct LabelColumn {
    aside: BufWriter<File>,
    path: PathBuf,
    /// The different texts; `None` once there are too many for classes.
    texts: Option<HashSet<Box<[u8]>>>,
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
            texts: (width == 1).then(HashSet::new),
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
        let is_whole = self.all_whole && whole(cell).is_some();
        let is_long = self.all_whole && !is_whole && is_long(cell);
        self.any_long |= is_long;
        self.all_whole = is_whole || is_long;
        let noted = check(cell, value).and_then(|()| self.note(cell));
        noted.map_err(bad)?;
        let written = self.aside.write_all(cell);
        let written = written.and_then(|()| self.aside.write_all(b"\n"));
        written.map_err(writing(&self.path))
    }

    /// Whether the labels so far are texts. A later fraction makes numbers of long whole ones.
    fn are_texts(&self) -> bool {
        self.any_text || self.all_whole && self.any_long
    }

    /// Notes a text that may be a class, or says why it cannot be a label.
    fn note(&mut self, text: &[u8]) -> Result<(), String> {
        let are_texts = self.are_texts();
        let Some(texts) = &mut self.texts else {
            return match are_texts {
                true if self.width > 1 => Err(format!(
                    "expected a number, as each of several labels is, got \"{}\"; help: correct it or remove the row",
                    shown(text)
                )),
                true => Err(format!(
                    "expected a number as label, got \"{}\"; more than {CLASSES_MAX} different numbers came before",
                    shown(text)
                )),
                false => Ok(()),
            };
        };
        if texts.contains(text) {
            return Ok(());
        }
        if text.len() > TEXT_BYTES_MAX {
            return Err(format!(
                "expected a label of at most {TEXT_BYTES_MAX} bytes, got {}; {WRONG_COLUMN}",
                text.len()
            ));
        }
        self.texts_bytes += flat::text_bytes(&String::from_utf8_lossy(text));
        if texts.len() < CLASSES_MAX && self.texts_bytes <= TEXTS_BYTES_MAX {
            texts.insert(text.into());
            return Ok(());
        }
        if !are_texts {
            self.texts = None;
            return Ok(());
        }
        Err(match texts.len() {
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
        let are_values = !are_texts && !self.all_whole;
        let element = if are_values {
            Element::F64
        } else {
            Element::I64
        };
        let several = [self.width];
        out.begin(
            "labels",
            element,
            if self.width > 1 { &several } else { &[] },
        )?;
        let mut texts: Vec<Box<[u8]>> = match are_texts {
            true => self.texts.into_iter().flatten().collect(),
            false => Vec::new(),
        };
        texts.sort();
        let classes: HashMap<&[u8], i64> = texts.iter().map(|text| &**text).zip(0..).collect();
        for line in BufReader::with_capacity(1 << 18, file).split(b'\n') {
            let line = line.map_err(writing(&self.path))?;
            out.write(&match (are_values, are_texts) {
                (true, _) => number(&line).unwrap_or(f64::NAN).to_le_bytes(),
                (_, true) => classes[&*line].to_le_bytes(),
                _ => whole(&line).unwrap_or_default().to_le_bytes(),
            })?;
        }
        let names = texts.iter();
        let names = names.map(|text| String::from_utf8_lossy(text).into_owned());
        Ok(are_texts.then(|| names.collect()))
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
