//! Escapes control characters in texts from outside (names of classes, columns and files) before
//! they are printed.
//!
//! A control character in a name could move the cursor, colour what follows or forge a line, and
//! some characters reverse the direction of writing.

/// Whether it is a control character, is invisible, or changes the direction of writing.
pub fn is_unseen(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// A text on one line: a line break becomes `\n`, an escape `\u{1b}`.
pub fn shown(text: &str) -> String {
    escaped(text, is_unseen)
}

/// A text of several lines: line breaks stay.
pub fn shown_lines(text: &str) -> String {
    escaped(text, |character| character != '\n' && is_unseen(character))
}

/// A text of many languages: only control characters are escaped, except line breaks and tabs.
pub fn shown_text(text: &str) -> String {
    escaped(text, |character| {
        character.is_control() && !matches!(character, '\n' | '\t')
    })
}

/// Names, shown: all of at most `most`, else the first and how many more there are.
pub fn some_of<S: AsRef<str>>(names: &[S], most: usize) -> String {
    let count = if names.len() > most { most - 1 } else { most };
    let first = names.iter().take(count);
    let first: Vec<String> = first.map(|name| shown(name.as_ref())).collect();
    match names.len().saturating_sub(count) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// The lines of a table: columns of equal width, the first `left` aligned left, the others right.
pub fn table(rows: &[Vec<String>], left: usize) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let line = |row: &Vec<String>| {
        let cells = row.iter().enumerate();
        let cells = cells.map(|(column, cell)| {
            if column < left {
                return format!("{cell:0$}", width(column));
            }
            format!("{cell:>0$}", width(column))
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect()
}

/// A number with this many significant digits: `0.06312`, `2182`, `2.182e10`.
pub fn significant(value: f64, digits: usize) -> String {
    let scientific = format!("{value:.*e}", digits - 1);
    let exponent = scientific.split_once('e');
    match exponent.and_then(|(_, exponent)| exponent.parse().ok()) {
        Some(exponent @ -4..6) => {
            let decimals = (digits as i32 - 1 - exponent).max(0);
            format!("{value:.*}", decimals as usize)
        }
        _ => scientific,
    }
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if is_escaped(character) {
            line.extend(character.escape_default())
        } else {
            line.push(character)
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_significant_digits() {
        let shown = [
            0.0,
            1.0,
            0.063_123_4,
            2.312_58,
            -99.996,
            63_461.150_72,
            999_999.7,
            2.181_698_5e10,
            3e-7,
        ];
        let texts = [
            "0.000", "1.000", "0.06312", "2.313", "-100.0", "63461", "1.000e6", "2.182e10",
            "3.000e-7",
        ];
        assert_eq!(shown.map(|value| significant(value, 4)), texts);
        assert_eq!(significant(63_461.150_72, 6), "63461.2");
        assert_eq!(significant(f64::NAN, 4), "NaN");
    }

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
        let text = "a\u{1b}[2J\tb\n👩\u{200d}👩\u{9b}\r";
        assert_eq!(shown_text(text), "a\\u{1b}[2J\tb\n👩\u{200d}👩\\u{9b}\\r");
    }
}
