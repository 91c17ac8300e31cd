//! Text as a stream.

use crate::text::{Encoder, TextStream};

/// What a stream of bytes gives out, piece by piece.
fn pieces(bytes: &[u8]) -> Vec<String> {
    let mut stream = TextStream::after(&Encoder::Bytes, &[]);
    let push = |byte: &u8| stream.push(u32::from(*byte)).unwrap();
    let mut pieces: Vec<String> = bytes.iter().map(push).collect();
    pieces.push(stream.finish().unwrap());
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

#[test]
fn no_piece_has_half_a_character_and_all_of_them_are_the_text() {
    let text = "a€ß😀 long enough that the first tokens are dropped 😀.";
    let made = pieces(text.as_bytes());
    assert_eq!(made[..4], ["a", "€", "ß", "😀"]);
    assert_eq!(made.concat(), text);
}

#[test]
fn what_is_no_character_is_replaced_once_that_is_known() {
    assert_eq!(pieces(b"a\xe2\x82"), ["a", "\u{fffd}"]);
    assert_eq!(pieces(b"\xffb\xe2\x82c"), ["\u{fffd}b", "\u{fffd}c"]);
}

#[test]
fn the_end_of_a_document_has_no_text() {
    let mut stream = TextStream::after(&Encoder::Bytes, &[104, 105]);
    assert_eq!(stream.push(256).unwrap(), "");
    assert_eq!(stream.push(33).unwrap(), "!");
}
