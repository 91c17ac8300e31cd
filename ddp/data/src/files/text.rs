//! Texts, whose bytes are tokens.

use super::format::{DataFile, Format, Holds, PLAIN, TokenFile, whole_file};
use crate::element::Element;
use crate::error::Result;

pub(super) static TEXT: Format = Format {
    name: "a text",
    endings: &[".txt"],
    holds: Holds::Tokens(open),
    ..PLAIN
};

/// What some editors write before a text: U+FEFF in UTF-8.
pub(crate) const BYTE_ORDER_MARK: [u8; 3] = *b"\xef\xbb\xbf";

/// The bytes of a text.
fn open(file: &DataFile<'_>) -> Result<TokenFile> {
    let mapped = &file.map()?;
    let mut start = BYTE_ORDER_MARK;
    let is_longer = mapped.len() > start.len() as u64 && mapped.read(0, &mut start).is_ok();
    let has_mark = is_longer && start == BYTE_ORDER_MARK;
    let offset = if has_mark { start.len() as u64 } else { 0 };
    let tokens = whole_file(file.path, mapped, Element::U8, offset)?;
    let mut text = TokenFile::new(tokens, "bytes of a text", Some(256));
    text.coding.are_bytes = true;
    Ok(text)
}
