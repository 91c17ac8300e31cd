//! From tokens to text while they are made: whole characters as soon as they are known.

use super::Encoder;

/// What stands for bytes that are not UTF-8, and so at the end of text that ends in a character.
const REPLACED: char = '\u{fffd}';
/// Tokens before a new one that its text may depend on, as the space before a word does.
const AROUND: usize = 8;

/// Turns tokens into text that is made as a stream.
#[derive(Debug)]
pub struct TextStream<'a> {
    encoder: &'a Encoder,
    /// The tokens whose text is not given out yet, and some before them.
    tokens: Vec<u32>,
    /// How many of them are before.
    before: usize,
}

impl<'a> TextStream<'a> {
    /// The text after these tokens.
    pub fn after(encoder: &'a Encoder, tokens: &[u32]) -> TextStream<'a> {
        let tokens = tokens[tokens.len().saturating_sub(AROUND)..].to_vec();
        TextStream {
            encoder,
            before: tokens.len(),
            tokens,
        }
    }

    /// The text that is known with one more token: empty in the middle of a character.
    pub fn push(&mut self, token: u32) -> Result<String, String> {
        self.tokens.push(token);
        let text = self.text()?;
        if text.ends_with(REPLACED) {
            return Ok(String::new());
        }
        if !text.is_empty() {
            self.tokens
                .drain(..self.tokens.len().saturating_sub(AROUND));
            self.before = self.tokens.len();
        }
        Ok(text)
    }

    /// The rest of the text. What is not a character is replaced.
    pub fn finish(self) -> Result<String, String> {
        self.text()
    }

    /// The text of the new tokens.
    fn text(&self) -> Result<String, String> {
        let before = self.encoder.decode(&self.tokens[..self.before])?;
        let whole = self.encoder.decode(&self.tokens)?;
        // A decoder may change what is before, as the space before a full stop.
        let start = whole.floor_char_boundary(before.len());
        Ok(whole[start..].to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
