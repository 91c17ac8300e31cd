//! The cells of a table of any format, what reads them row after row, and how messages show them.

use std::borrow::Cow;

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

/// Whether a cell that is not a number says that its value is missing.
pub(crate) fn is_missing(text: &[u8]) -> bool {
    let says = |word: &&str| text.eq_ignore_ascii_case(word.as_bytes());
    text.is_empty() || MISSING.iter().any(says)
}

/// The number in a cell, rounded to the nearest f64. Spelled-out NaN and infinity are numbers here.
pub(crate) fn number(cell: &[u8]) -> Option<f64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

/// How much of a cell an error shows.
const SHOWN_CHARACTERS: usize = 40;

/// The beginning of a cell, printable.
pub(super) fn shown(cell: &[u8]) -> String {
    let text = String::from_utf8_lossy(cell);
    let mut characters = text.chars().flat_map(char::escape_debug);
    let start: String = characters.by_ref().take(SHOWN_CHARACTERS).collect();
    match characters.next() {
        Some(_) => start + "…",
        None => start,
    }
}

/// Names, for a message: the first ones if there are many.
pub(crate) fn listed(names: &[String]) -> String {
    listed_up_to(20, names)
}

/// Up to `most` names, and how many more there are.
pub(crate) fn listed_up_to(most: usize, names: &[String]) -> String {
    let some = names.iter().take(most).map(|name| format!("\"{name}\""));
    let some = some.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(most) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}

/// A number, for a message: in scientific notation if it would be long.
pub(crate) fn shown_number(number: f64) -> String {
    let is_long = number.is_finite() && number != 0.0 && !(1e-6..1e15).contains(&number.abs());
    match is_long {
        true => format!("{number:e}"),
        false => number.to_string(),
    }
}

/// Up to `most` of these; `None` if there are none.
pub(crate) fn some_of(most: usize, all: impl Iterator<Item = String>) -> Option<String> {
    let all: Vec<String> = all.collect();
    let more = if all.len() > most { ", …" } else { "" };
    (!all.is_empty()).then(|| all[..all.len().min(most)].join(", ") + more)
}

/// What to do about texts that are numbers or dates to people.
pub(crate) const PLAIN_HELP: &str = "write plain numbers with a point, as 1234.5, and dates as numbers: days from the first one, or year, \
     month and weekday (pandas: read_csv(…, thousands=\",\", decimal=\".\"); d.dt.year, d.dt.month, d.dt.weekday)";

/// Whether a text is not a number for programs but is one for people, with signs, spaces or commas,
/// or is a date: `2026-11-22` or `22.11.2026`, perhaps with a time of day.
pub(crate) fn is_written_otherwise(text: &str) -> bool {
    let is_sign = |character: char| "$€£¥₹%,".contains(character) || character.is_whitespace();
    let begins = |character: char| {
        character.is_ascii_digit() || "+-.".contains(character) || is_sign(character)
    };
    // Most texts begin otherwise, and a table may have millions.
    if !text.starts_with(begins) || is_date(text) {
        return text.starts_with(begins);
    }
    let plain = text.replace(is_sign, "");
    let has_digit = plain.contains(|digit: char| digit.is_ascii_digit());
    plain != text && has_digit && number(plain.as_bytes()).is_some()
}

/// Whether a text is a date by its digits: year, month and day, or the other way round.
fn is_date(text: &str) -> bool {
    let date = text.split(['T', ' ']).next().unwrap_or_default();
    let parts = date.split(['-', '/', '.']);
    let digits = parts.map(
        |part| match part.bytes().all(|byte| byte.is_ascii_digit()) {
            true => part.len(),
            false => 0,
        },
    );
    let digits: Vec<usize> = digits.collect();
    matches!(digits[..], [4, 1..=2, 1..=2] | [1..=2, 1..=2, 4])
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

    #[test]
    fn numbers_and_dates_are_known_by_their_characters() {
        for text in [
            "1,000",
            "-12,037.25",
            "$1,000,000",
            "0,125",
            "2,5",
            "1234,567",
            "$12",
            "45 %",
            "12 000",
            "2026-11-22",
            "22.11.2026 10:00",
            "2026-11-22T10:00:00Z",
        ] {
            assert!(is_written_otherwise(text), "{text}");
        }
        for text in ["1.10.2", "555-12-3456", "--2026", "12", "$", "Bern", "1,x"] {
            assert!(!is_written_otherwise(text), "{text}");
        }
    }
}
