//! Texts that others wrote (names of classes and columns, of files), as a terminal may have them.
//!
//! A control character in a name could move the cursor, colour what follows or forge a line of ours, and some characters turn the direction of
//! writing, so that another name is read than there is. The rule which they are stands here and nowhere else.

use std::fmt::Write;

/// Whether a screen shows nothing for it, or more than a character: control characters, and what turns the direction of writing.
pub fn is_unseen(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// A text on one line: a line break in it is shown as `\n`, an escape as `\u{1b}`.
pub fn shown(text: &str) -> String {
    escaped(text, is_unseen)
}

/// A text of several lines: its line breaks are its own.
pub fn shown_lines(text: &str) -> String {
    escaped(text, |character| character != '\n' && is_unseen(character))
}

fn escaped(text: &str, is_to_be: impl Fn(char) -> bool) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if is_to_be(character) {
            write!(line, "{}", character.escape_default()).expect("a text takes all");
        } else {
            line.push(character);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_drive_a_terminal_is_seen() {
        let text = "a\u{1b}[2Jb\nc\rd\u{202e}e\u{9b}f é 字 \\n";
        assert_eq!(
            shown(text),
            "a\\u{1b}[2Jb\\nc\\rd\\u{202e}e\\u{9b}f é 字 \\n"
        );
        assert_eq!(
            shown_lines(text),
            "a\\u{1b}[2Jb\nc\\rd\\u{202e}e\\u{9b}f é 字 \\n"
        );
        assert_eq!(shown("petal length"), "petal length");
    }
}
