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
    const SHOWN: usize = 20;
    let some = names.iter().take(SHOWN).map(|name| format!("\"{name}\""));
    let some = some.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}
