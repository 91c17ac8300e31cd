//! The labels of a table, of which only the last row tells what they are. Each lies aside on the disk as a number and as a code of its text.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::super::cache::writing;
use super::super::csv::number;
use super::super::{Element, flat, refuse};
use crate::error::{Error, Result};

/// More texts than this are no classes.
const CLASSES_MAX: usize = 1 << 16;
/// Nor are texts that are longer than this, or that are so long together, as JSON has them: they go into a flat file's header.
const TEXT_BYTES_MAX: usize = 4 << 10;
const TEXTS_BYTES_MAX: usize = 16 << 20;
/// Above this an f64 cannot tell whole numbers apart.
const WHOLE_MAX: f64 = (1u64 << 53) as f64;
/// The code of a label that is only kept as a number.
const NO_CODE: u32 = u32::MAX;
const ROW_BYTES: usize = 12;

/// What is wrong with a label.
pub(in super::super) enum Problem {
    Empty,
    NotFinite,
    NotUtf8,
    /// There are too many texts for classes.
    TooMany,
    /// The text is longer than the name of a class.
    TooLong(usize),
    /// All of them together are.
    TooLongTogether,
    /// A text, after so many different numbers that they cannot be classes.
    NotANumber,
    Aside(Error),
}

pub(in super::super) struct Labels {
    aside: BufWriter<File>,
    path: PathBuf,
    rows: u64,
    /// The code of each text, in the order in which they came; `None` once there are more than classes can be.
    codes: Option<HashMap<Box<[u8]>, u32>>,
    /// How long these are together.
    texts_bytes: usize,
    any_text: bool,
    all_whole: bool,
}

impl Labels {
    /// None yet; they lie on the disk where `to` is written. `are_texts`: whatever they look like.
    pub(super) fn beside(to: &Path, are_texts: bool) -> Result<Labels> {
        let path = to.with_extension("labels");
        let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(writing(&path))?;
        // It lives as long as it is open.
        std::fs::remove_file(&path).map_err(writing(&path))?;
        let aside = BufWriter::with_capacity(1 << 18, file);
        Ok(Labels {
            aside,
            path,
            rows: 0,
            codes: Some(HashMap::new()),
            texts_bytes: 0,
            any_text: are_texts,
            all_whole: true,
        })
    }

    /// The label of the next row, as a cell.
    pub(in super::super) fn push(&mut self, cell: &[u8]) -> Result<(), Problem> {
        if cell.is_empty() {
            return Err(Problem::Empty);
        }
        let value = number(cell);
        if value.is_some_and(|value| !value.is_finite()) {
            return Err(Problem::NotFinite);
        }
        if value.is_none() {
            self.any_text = true;
            std::str::from_utf8(cell).map_err(|_| Problem::NotUtf8)?;
        }
        let code = self.code(cell)?;
        self.put(value, code)
    }

    /// The label of the next row, of a column of numbers.
    #[cfg(feature = "parquet")]
    pub(in super::super) fn push_number(&mut self, value: f64) -> Result<(), Problem> {
        if !value.is_finite() {
            return Err(Problem::NotFinite);
        }
        let code = if self.any_text { self.code(value.to_string().as_bytes())? } else { NO_CODE };
        self.put(Some(value), code)
    }

    /// The label of the next row, of a column of texts.
    #[cfg(feature = "parquet")]
    pub(in super::super) fn push_text(&mut self, text: &[u8]) -> Result<(), Problem> {
        if text.is_empty() {
            return Err(Problem::Empty);
        }
        std::str::from_utf8(text).map_err(|_| Problem::NotUtf8)?;
        self.any_text = true;
        let code = self.code(text)?;
        self.put(None, code)
    }

    fn put(&mut self, value: Option<f64>, code: u32) -> Result<(), Problem> {
        self.all_whole &= value.is_some_and(|value| value.fract() == 0.0 && value.abs() <= WHOLE_MAX);
        let mut row = [0; ROW_BYTES];
        row[..8].copy_from_slice(&value.unwrap_or(f64::NAN).to_le_bytes());
        row[8..].copy_from_slice(&code.to_le_bytes());
        self.rows += 1;
        self.aside.write_all(&row).map_err(|error| Problem::Aside(writing(&self.path)(error)))
    }

    fn code(&mut self, text: &[u8]) -> Result<u32, Problem> {
        let Some(codes) = &mut self.codes else {
            return if self.any_text { Err(Problem::NotANumber) } else { Ok(NO_CODE) };
        };
        if let Some(&code) = codes.get(text) {
            return Ok(code);
        }
        if text.len() > TEXT_BYTES_MAX {
            return Err(Problem::TooLong(text.len()));
        }
        self.texts_bytes += flat::text_bytes(&String::from_utf8_lossy(text));
        if codes.len() < CLASSES_MAX && self.texts_bytes <= TEXTS_BYTES_MAX {
            let code = codes.len() as u32;
            codes.insert(text.into(), code);
            return Ok(code);
        }
        if self.any_text {
            return Err(if codes.len() == CLASSES_MAX { Problem::TooMany } else { Problem::TooLongTogether });
        }
        self.codes = None;
        Ok(NO_CODE)
    }

    /// Writes the labels as what they are; the classes, where they are texts.
    pub(super) fn finish(self, out: &mut flat::Writer) -> Result<Option<Vec<String>>> {
        let (any_text, all_whole, rows) = (self.any_text, self.all_whole, self.rows);
        let codes = self.codes.unwrap_or_default();
        let failed = writing(&self.path);
        let file = self.aside.into_inner().map_err(|error| failed(error.into_error()))?;
        let mut aside = Aside { file: BufReader::with_capacity(1 << 18, file), path: self.path, rows_left: rows };
        aside.file.rewind().map_err(writing(&aside.path))?;
        if !any_text {
            if all_whole {
                out.begin("labels", Element::I64, &[])?;
                aside.each(|values| out.write_i64(values), |value, _| value as i64)?;
            } else {
                out.begin("labels", Element::F64, &[])?;
                aside.each(|values| out.write_f64(values), |value, _| value)?;
            }
            return Ok(None);
        }
        let mut texts: Vec<(Box<[u8]>, u32)> = codes.into_iter().collect();
        texts.sort();
        let mut classes = vec![0; texts.len()];
        texts.iter().zip(0..).for_each(|((_, code), class)| classes[*code as usize] = class);
        out.begin("labels", Element::I64, &[])?;
        aside.each(|values| out.write_i64(values), |_, code| classes[code as usize])?;
        // They were looked at when they came.
        Ok(Some(texts.into_iter().map(|(text, _)| String::from_utf8_lossy(&text).into_owned()).collect()))
    }
}

/// Labels that are read again.
struct Aside {
    file: BufReader<File>,
    path: PathBuf,
    rows_left: u64,
}

impl Aside {
    /// Turns all labels into what `label` says, and gives them to `write` in pieces.
    fn each<T>(&mut self, mut write: impl FnMut(&[T]) -> Result<()>, label: impl Fn(f64, u32) -> T) -> Result<()> {
        let mut piece = Vec::with_capacity(1 << 16);
        let mut row = [0; ROW_BYTES];
        while self.rows_left > 0 {
            piece.clear();
            let count = self.rows_left.min(1 << 16);
            for _ in 0..count {
                self.file.read_exact(&mut row).map_err(|error| match error.kind() {
                    ErrorKind::UnexpectedEof => Error::Internal("labels that lay aside are gone".into()),
                    _ => writing(&self.path)(error),
                })?;
                let (value, code) = row.split_at(8);
                let value = f64::from_le_bytes(value.try_into().unwrap_or_default());
                let code = u32::from_le_bytes(code.try_into().unwrap_or_default());
                piece.push(label(value, code));
            }
            write(&piece)?;
            self.rows_left -= count;
        }
        Ok(())
    }
}

impl Problem {
    /// The error, with the place of the cell and what stands there.
    pub(in super::super) fn in_cell(self, path: &Path, place: &str, shown: &str) -> Error {
        let what = match self {
            Problem::Empty => {
                "the label is empty: expected a number or a text. Fill it in or remove the row".to_string()
            }
            Problem::NotFinite => format!(
                "expected a number or a text as label, got {shown}. Remove the row; if it is a class, call it something else"
            ),
            Problem::NotUtf8 => format!("the label \"{shown}\" is not UTF-8. Save the file as UTF-8"),
            Problem::TooMany => format!(
                "\"{shown}\" is the label number {} that is a different text: at most {CLASSES_MAX} are classes. Is this column the label?",
                CLASSES_MAX + 1
            ),
            Problem::TooLong(bytes) => format!(
                "the label \"{shown}\" has {bytes} bytes: names of classes have at most {TEXT_BYTES_MAX}. Is this column the label?"
            ),
            Problem::TooLongTogether => format!(
                "with \"{shown}\" the texts of different labels have more than {TEXTS_BYTES_MAX} bytes together, which is more than names of \
                 classes have. Is this column the label?"
            ),
            Problem::NotANumber => format!(
                "expected a number as label, got \"{shown}\": the labels before are more different numbers than there can be classes"
            ),
            Problem::Aside(error) => return error,
        };
        refuse(path, format!("{place}: {what}"))
    }
}
