//! Every rule that guesses something about tables, with its threshold and the reason for it. The
//! rules are pure: callers count, and write the messages.

/// The most different texts of a column that is categorical without being named: each becomes a
/// feature.
pub(crate) const AUTO_VALUES_MAX: usize = 256;
/// Of a column with more different texts only so many, the commonest, become a feature each.
pub(crate) const COMMON_VALUES_MAX: usize = 40;
/// A few texts among more different numbers than this are mistakes, not categories.
pub(crate) const MIXED_NUMBERS_MAX: usize = 10;
/// A value in fewer rows says nothing about others.
pub(crate) const COMMON_ROWS: u64 = 2;
/// Texts of more bytes than this on average are sentences.
const SENTENCE_BYTES: u64 = 40;
/// The most bytes of a table whose columns become many features: `f32`s of all rows.
pub(crate) const TABLE_BYTES_MAX: u64 = 8 << 30;
/// A column with at most this many different values may be categorical, however few cells it has.
const DIFFERENT_MIN: u64 = 20;

/// The label among the columns of a table: the last one that is nothing else.
pub(crate) fn label_column(columns: &[String], is_other: impl Fn(&str) -> bool) -> Option<&String> {
    columns.iter().rev().find(|name| !is_other(name))
}

/// Whether so many values of so many cells are different that categories say nothing: nine of ten.
pub(crate) fn are_nearly_unique(different: u64, cells: u64) -> bool {
    different > DIFFERENT_MIN && different * 10 > 9 * cells
}

/// Whether more than `COMMON_VALUES_MAX` different texts in so many cells name things rather than
/// kinds of things, even if they repeat: the commonest are in less than half of the cells, and each
/// is in fewer than ten; or they are sentences.
pub(crate) fn are_identifiers(different: u64, common_cells: u64, cells: u64, bytes: u64) -> bool {
    different > COMMON_VALUES_MAX as u64
        && (2 * common_cells < cells && 10 * different > cells || bytes > SENTENCE_BYTES * cells)
}

/// Whether the first line of a table, with these numbers in this many cells, is a row rather than
/// names, so that a row would be lost: half of it are numbers. Numbers in even steps beside a text
/// are names: 0, 1, 2 … as pandas writes them, years, wavelengths.
pub(crate) fn looks_like_a_row(numbers: &[f64], cells: usize) -> bool {
    if numbers.is_empty() || 2 * numbers.len() < cells {
        return false;
    }
    let step = (numbers[numbers.len() - 1] - numbers[0]) / (numbers.len() as f64 - 1.0);
    let is_even = |pair: &[f64]| (pair[1] - pair[0] - step).abs() <= 0.01 * step;
    let has_text = numbers.len() < cells;
    !(numbers.len() >= 3 && has_text && step > 0.0 && numbers.windows(2).all(is_even))
}
