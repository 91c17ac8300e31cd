//! Tables of any format, read row after row: names, cells, and their values as features.

use std::borrow::Cow;

use ddp_data::Result;
use ddp_data::words::{has_leading_zeros, is_missing, number, shown_number};

/// A cell as its format types it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    not(feature = "parquet"),
    allow(dead_code, reason = "CSV has written cells only")
)]
pub(crate) enum Value<'a> {
    /// A missing cell, by the format itself.
    Null,
    /// A cell of a text file: a number if it reads as one and has no leading zeros.
    Written(&'a [u8]),
    /// A text, even if it reads as a number.
    Text(&'a [u8]),
    /// A whole number: an f64 would round large ones.
    Whole(i128),
    /// A number with a fraction.
    Float(f64),
}

/// A table that is read row after row.
pub(crate) trait TableReader {
    /// The names of its columns.
    fn names(&self) -> &[String];

    /// Prepares to read these columns, and no others; an error if one cannot be read.
    fn select(&mut self, columns: &[usize]) -> Result<()>;

    /// Goes to the next row, first to row 0; false after the last.
    fn advance(&mut self) -> Result<bool>;

    /// The cell of a selected column in this row.
    fn value(&self, column: usize) -> Value<'_>;

    /// The place of that cell, for messages: its line or row.
    fn place(&self, column: usize) -> String;
}

/// A cell as a feature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cell<'a> {
    Missing,
    /// A number other than NaN.
    Number(f64),
    Text(&'a [u8]),
}

/// Whole numbers from here on do not fit i64.
const LONG: f64 = (1u64 << 63) as f64;

impl<'a> Value<'a> {
    /// What it is as a feature.
    #[inline]
    pub(crate) fn cell(self) -> Cell<'a> {
        let number_of = |value: f64| {
            if value.is_nan() {
                Cell::Missing
            } else {
                Cell::Number(value)
            }
        };
        match self {
            Value::Null => Cell::Missing,
            Value::Whole(value) => Cell::Number(value as f64),
            Value::Float(value) => number_of(value),
            Value::Written(text) | Value::Text(text) => match (number(text), self) {
                (Some(_), _) if has_leading_zeros(text) => Cell::Text(text),
                (Some(value), Value::Written(_)) => number_of(value),
                (Some(value), _) if value.is_nan() => Cell::Missing,
                (None, _) if is_missing(text) => Cell::Missing,
                _ => Cell::Text(text),
            },
        }
    }

    /// Whether a row with this label has none: empty, NA or NaN. Other marks are refused.
    pub(crate) fn is_no_label(self) -> bool {
        let text = self.text();
        ["", "na", "nan"]
            .iter()
            .any(|mark| text.eq_ignore_ascii_case(mark.as_bytes()))
    }

    /// Its text as a category: `10.0` is `10`.
    pub(crate) fn category(self) -> Cow<'a, [u8]> {
        let text = self.text();
        let whole = text.strip_suffix(b".0").filter(|whole| {
            let digits = whole.strip_prefix(b"-").unwrap_or(whole);
            !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
        });
        whole.map(|whole| whole.to_vec().into()).unwrap_or(text)
    }

    /// Its text, with all digits of a number; empty if it is missing.
    pub(crate) fn text(self) -> Cow<'a, [u8]> {
        match self {
            Value::Written(text) | Value::Text(text) => text.into(),
            Value::Whole(value) => value.to_string().into_bytes().into(),
            Value::Float(value) if value.is_nan() => Cow::default(),
            // With fewer digits the name of a class would be another number's.
            Value::Float(value) if value.fract() == 0.0 && value.abs() < LONG => {
                format!("{value:.0}").into_bytes().into()
            }
            Value::Float(value) => shown_number(value).into_bytes().into(),
            Value::Null => Cow::default(),
        }
    }
}

/// How much of a cell an error shows.
const SHOWN_CHARACTERS: usize = 40;

/// The beginning of a cell, printable.
pub(crate) fn shown(cell: &[u8]) -> String {
    let text = String::from_utf8_lossy(cell);
    let mut characters = text.chars().flat_map(char::escape_debug);
    let start: String = characters.by_ref().take(SHOWN_CHARACTERS).collect();
    match characters.next() {
        Some(_) => start + "…",
        None => start,
    }
}
