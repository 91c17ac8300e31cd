//! Cells of CSV files.

use std::io::Write;

/// Appends text.
pub(super) fn put(into: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    into.write_fmt(text)
        .expect("a Vec takes all that is written");
}

/// Appends each number after a comma, with as few digits as read back as the same number.
pub(super) fn put_numbers(into: &mut Vec<u8>, values: &[f32]) {
    let each = values.iter();
    each.for_each(|value| put(into, format_args!(",{value:?}")));
}

/// A text as a cell: in quotes if it needs them.
pub fn cell(text: &str) -> String {
    let needs = text.is_empty() || text.contains([',', '"', '\n', '\r']) || text.trim() != text;
    if needs {
        return format!("\"{}\"", text.replace('"', "\"\""));
    }
    text.to_string()
}
