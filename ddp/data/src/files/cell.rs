//! The cells of a table of any format, and what reads them row after row.

use std::borrow::Cow;

use super::shown::shown_number;
use crate::error::Result;

/// A cell as its format types it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    not(feature = "parquet"),
    allow(dead_code, reason = "CSV has written cells only")
)]
pub(crate) enum Value<'a> {
    /// A missing cell, by the format itself.
    Null,
    /// A cell of a text file: a number if it reads as one.
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
pub(super) enum Cell<'a> {
    Missing,
    /// A number other than NaN.
    Number(f64),
    Text(&'a [u8]),
}

/// What people write for a missing value besides an empty cell and NaN, in any case.
const MISSING: [&str; 8] = ["na", "n/a", "#n/a", "null", "nil", "none", "?", "-"];

/// Whole numbers from here on do not fit i64.
const LONG: f64 = (1u64 << 63) as f64;

impl<'a> Value<'a> {
    /// What it is as a feature.
    #[inline]
    pub(super) fn cell(self) -> Cell<'a> {
        let number_of = |value: f64| match value.is_nan() {
            true => Cell::Missing,
            false => Cell::Number(value),
        };
        match self {
            Value::Null => Cell::Missing,
            Value::Whole(value) => Cell::Number(value as f64),
            Value::Float(value) => number_of(value),
            Value::Written(text) | Value::Text(text) => match (number(text), self) {
                (Some(value), Value::Written(_)) => number_of(value),
                (Some(value), _) if value.is_nan() => Cell::Missing,
                (None, _) if is_missing(text) => Cell::Missing,
                _ => Cell::Text(text),
            },
        }
    }

    /// Its text, with all digits of a number; empty if it is missing.
    pub(super) fn text(self) -> Cow<'a, [u8]> {
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

/// Whether a cell that is no number says that its value is missing.
pub(crate) fn is_missing(text: &[u8]) -> bool {
    let says = |word: &&str| text.eq_ignore_ascii_case(word.as_bytes());
    text.is_empty() || MISSING.iter().any(says)
}

/// The number in a cell, rounded to the nearest f64. Spelled-out NaN and infinity are numbers here.
pub(crate) fn number(cell: &[u8]) -> Option<f64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_words_for_missing_values_are_recognised() {
        let cell = |text| Value::Written(text).cell();
        for text in [
            "", "NA", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "nil", "None", "?", "-",
        ] {
            assert_eq!(cell(text.as_bytes()), Cell::Missing, "{text:?}");
            assert_eq!(Value::Text(text.as_bytes()).cell(), Cell::Missing);
        }
        for text in ["nana", "--", "none of them", "n.a.", "x"] {
            assert_eq!(cell(text.as_bytes()), Cell::Text(text.as_bytes()));
        }
        assert_eq!(cell(b"-1"), Cell::Number(-1.0));
        assert_eq!(cell(b"inf"), Cell::Number(f64::INFINITY));
        assert_eq!(Value::Text(b"-1").cell(), Cell::Text(b"-1"));
    }
}
