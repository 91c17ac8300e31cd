//! A cell of a table of any format, and what takes cells row after row.

use super::csv::number;
use crate::error::Result;

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cell<'a> {
    Missing,
    /// A number other than NaN, and its text if `CellSink::wants_text`.
    Number(f64, &'a [u8]),
    Text(&'a [u8]),
}

/// What people write for a missing value besides an empty cell and NaN, in any case.
const MISSING: [&str; 8] = ["na", "n/a", "#n/a", "null", "nil", "none", "?", "-"];

impl<'a> Cell<'a> {
    /// The cell with this text.
    #[inline]
    pub(super) fn of(text: &'a [u8]) -> Cell<'a> {
        match number(text) {
            Some(value) if value.is_nan() => Cell::Missing,
            Some(value) => Cell::Number(value, text),
            None if is_missing(text) => Cell::Missing,
            None => Cell::Text(text),
        }
    }
}

/// Whether a cell that is no number says that its value is missing.
pub(crate) fn is_missing(text: &[u8]) -> bool {
    let says = |word: &&str| text.eq_ignore_ascii_case(word.as_bytes());
    text.is_empty() || MISSING.iter().any(says)
}

/// What takes the cells of a table.
pub(super) trait CellSink {
    /// Whether numbers in the feature column `index` need their text.
    #[cfg_attr(
        not(feature = "parquet"),
        allow(dead_code, reason = "numbers of Parquet files alone have no text")
    )]
    fn wants_text(&self, index: usize) -> bool;

    /// The cell of the feature column `index`. `place` is its line or row, for messages.
    fn feature(&mut self, index: usize, cell: Cell<'_>, place: &dyn Fn() -> String) -> Result<()>;

    /// The label number `index`; empty if it is missing. `is_text`: a text even if it looks like a
    /// number.
    fn label(
        &mut self,
        index: usize,
        cell: &[u8],
        is_text: bool,
        place: &dyn Fn() -> String,
    ) -> Result<()>;

    /// The end of the row.
    fn end_row(&mut self) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_words_for_missing_values_are_recognised() {
        for text in [
            "", "NA", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "nil", "None", "?", "-",
        ] {
            assert_eq!(Cell::of(text.as_bytes()), Cell::Missing, "{text:?}");
        }
        for text in ["nana", "--", "none of them", "n.a.", "x"] {
            assert_eq!(Cell::of(text.as_bytes()), Cell::Text(text.as_bytes()));
        }
        assert_eq!(Cell::of(b"-1"), Cell::Number(-1.0, b"-1"));
        assert_eq!(Cell::of(b"inf"), Cell::Number(f64::INFINITY, b"inf"));
    }
}
