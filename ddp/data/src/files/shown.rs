//! Cells and names in messages.

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
