//! Cells of CSV files.

use std::io::Write;

use ddp_data::files::kept::put_cell;

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

/// A text as a cell: in quotes if it needs them, or if it is empty and would be taken for missing.
pub fn cell(text: &str) -> String {
    let mut cell = Vec::new();
    put_cell(text.as_bytes(), &mut cell);
    match text {
        "" => "\"\"".into(),
        _ => String::from_utf8(cell).expect("quotes are added to the text"),
    }
}
