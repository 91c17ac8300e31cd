//! Numbers, dates and missing values as people write them in cells, and how messages show names
//! and numbers.

/// What people write for a missing value besides an empty cell and NaN, in any case.
const MISSING: [&str; 8] = ["na", "n/a", "#n/a", "null", "nil", "none", "?", "-"];

/// Whether a cell that is not a number says that its value is missing.
pub fn is_missing(text: &[u8]) -> bool {
    let says = |word: &&str| text.eq_ignore_ascii_case(word.as_bytes());
    text.is_empty() || MISSING.iter().any(says)
}

/// The number in a cell, rounded to the nearest f64. Spelled-out NaN and infinity are numbers here.
pub fn number(cell: &[u8]) -> Option<f64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

/// A name on one line, that drives no terminal.
pub fn printable(name: &str) -> String {
    let is_plain = |character| "'\"\\".contains(character);
    let shown = |character: char| {
        if is_plain(character) {
            character.to_string()
        } else {
            character.escape_debug().to_string()
        }
    };
    name.chars().map(shown).collect()
}

/// Names, for a message: the first ones if there are many.
pub fn listed(names: &[String]) -> String {
    listed_up_to(20, names)
}

/// Up to `most` names, and how many more there are.
pub fn listed_up_to(most: usize, names: &[String]) -> String {
    let some = names.iter().take(most);
    let some = some.map(|name| format!("\"{}\"", printable(name)));
    let some = some.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(most) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}

/// Names as a value to paste in a shell: `id,town`, and in quotes where a shell needs them.
pub fn pasted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let is_plain = |character: char| character.is_alphanumeric() || "_-.,/".contains(character);
    match names.join(",") {
        text if names != [""] && text.chars().all(is_plain) => text,
        text => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// How two lists of columns differ.
pub fn difference(expected: &[String], got: &[String]) -> String {
    let mut pairs = expected.iter().zip(got);
    match pairs.position(|(expected, got)| expected != got) {
        Some(index) => {
            let (expected, got) = (&expected[index], &got[index]);
            format!("column {}: expected {expected:?}, got {got:?}", index + 1)
        }
        None => format!("expected {} columns, got {}", expected.len(), got.len()),
    }
}

/// A number, for a message: in scientific notation if it would be long.
pub fn shown_number(number: f64) -> String {
    let is_long = number.is_finite() && number != 0.0 && !(1e-6..1e15).contains(&number.abs());
    if is_long {
        format!("{number:e}")
    } else {
        number.to_string()
    }
}

/// Up to `most` of these; `None` if there are none.
pub fn some_of(most: usize, all: impl Iterator<Item = String>) -> Option<String> {
    let all: Vec<String> = all.collect();
    let more = if all.len() > most { ", …" } else { "" };
    (!all.is_empty()).then(|| all[..all.len().min(most)].join(", ") + more)
}

/// What to do about texts that people read as numbers or dates.
pub const PLAIN_HELP: &str = "write plain numbers with a point, as 1234.5, and dates as numbers: days from the first one, or year, \
     month and weekday (pandas: read_csv(…, decimal=\",\"), or thousands=\",\"; d.dt.year, d.dt.weekday)";

/// Whether a text is not a number for programs but is one for people, with signs, spaces or commas,
/// or is a date: `2026-11-22` or `22.11.2026`, perhaps with a time of day.
pub fn is_written_otherwise(text: &str) -> bool {
    let is_sign = |character: char| "$€£¥₹%,".contains(character) || character.is_whitespace();
    let begins = |character: char| {
        character.is_ascii_digit() || "+-.".contains(character) || is_sign(character)
    };
    // Most texts begin otherwise, and a table may have millions.
    if !text.starts_with(begins) || is_date(text) {
        return text.starts_with(begins);
    }
    let plain = text.replace(is_sign, "");
    let has_digit = plain.contains(|digit: char| digit.is_ascii_digit());
    plain != text && has_digit && number(plain.as_bytes()).is_some()
}

/// Names of months, of which at least three letters are written.
const MONTHS: &str =
    "january february march april may june july august september october november december";

/// Whether a text is a date: year, month and day in digits, or the other way round, or with the
/// month's name.
pub fn is_date(text: &str) -> bool {
    // Most texts are none, and a table may have millions.
    if text.len() > 40 || !text.bytes().any(|byte| byte.is_ascii_digit()) {
        return false;
    }
    let words: Vec<&str> = text
        .split([' ', '-', ',', '.', '/'])
        .filter(|it| !it.is_empty())
        .take(3)
        .collect();
    let is_month = |word: &&&str| {
        let word = word.to_ascii_lowercase();
        word.len() >= 3 && MONTHS.split(' ').any(|month| month.starts_with(&word))
    };
    let is_number = |word: &&&str| word.len() <= 4 && word.bytes().all(|it| it.is_ascii_digit());
    let (months, numbers) = (
        words.iter().filter(is_month),
        words.iter().filter(is_number),
    );
    if months.count() == 1 && numbers.count() == 2 {
        return true;
    }
    let date = text.split(['T', ' ']).next().unwrap_or_default();
    let parts = date.split(['-', '/', '.']);
    let digits = parts.map(|part| {
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            part.len()
        } else {
            0
        }
    });
    let digits: Vec<usize> = digits.collect();
    let is_short = matches!(digits[..], [1..=2, 1..=2, 2]) && date.contains('/');
    is_short || matches!(digits[..], [4, 1..=2, 1..=2] | [1..=2, 1..=2, 4])
}

/// Whether a cell is a name of digits, as post codes are: a number would lose its leading zeros.
pub fn has_leading_zeros(cell: &[u8]) -> bool {
    cell.len() > 1 && cell[0] == b'0' && cell.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pasted_names_are_one_word_of_a_shell() {
        for (names, value) in [
            (
                &["id", "home-town_2.5", "größe"][..],
                "id,home-town_2.5,größe",
            ),
            (&["first id", "b"], "'first id,b'"),
            (&["it's \"$(x)`"], r#"'it'\''s "$(x)`'"#),
            (&[""], "''"),
        ] {
            assert_eq!(pasted(names.iter().copied()), value);
            let echo = format!("printf %s {value}");
            let shell = std::process::Command::new("sh")
                .args(["-c", &echo])
                .output();
            assert_eq!(shell.unwrap().stdout, names.join(",").as_bytes());
        }
    }

    #[test]
    fn dates_are_told_by_digits_and_names_of_months() {
        let dates = "2026-11-22 22.11.2026 2026-11-22T08:00 03/02/08".split(' ');
        let with_names = ["Mar 02, 2008", "2-Mar-08", "22 November 2026"];
        assert!(dates.chain(with_names).all(is_date));
        let others = [
            "1.2.10",
            "12-10-14",
            "marble",
            "march",
            "May 3",
            "Mayer 3 12",
            "3 12",
            "",
        ];
        assert!(!others.into_iter().any(is_date));
    }

    #[test]
    fn whole_numbers_with_leading_zeros_are_names_of_digits() {
        assert!(
            ["01067", "00"]
                .iter()
                .all(|cell| has_leading_zeros(cell.as_bytes()))
        );
        let numbers = ["0", "10", "0.5", "0e1", "-01", ""];
        assert!(
            !numbers
                .iter()
                .any(|cell| has_leading_zeros(cell.as_bytes()))
        );
    }
}
