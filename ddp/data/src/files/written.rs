//! Texts that people read as numbers and programs do not: `1,000`, `3,5`, `$12`, `45 %`; and dates,
//! which have to become numbers.

use serde::{Deserialize, Serialize};

use super::cell::number;

/// What keeps a text from being a number. Of several in one column, the greatest is what to mend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Written {
    /// Spaces within it.
    Spaces,
    Percent,
    Currency,
    /// Commas, each before three digits.
    Thousands,
    /// A comma for the point.
    DecimalComma,
    /// `2026-11-22` or `22.11.2026`, perhaps with a time of day.
    Date,
}

impl Written {
    /// How such a text writes a number; `None` if it is a number, or none in these ways either.
    pub(crate) fn of(text: &str) -> Option<Written> {
        let is_currency = |character: char| "$€£¥₹".contains(character);
        let is_sign = |character: char| {
            is_currency(character) || character == '%' || character.is_whitespace()
        };
        let begins = |character: char| {
            character.is_ascii_digit() || "+-.,".contains(character) || is_sign(character)
        };
        // Most texts begin otherwise, and a table may have millions.
        if !text.starts_with(begins) {
            return None;
        }
        if is_date(text) {
            return Some(Written::Date);
        }
        let plain = text.replace(is_sign, "");
        let is_number = |text: &str| {
            text.contains(|digit: char| digit.is_ascii_digit()) && number(text.as_bytes()).is_some()
        };
        let sign = match text {
            _ if text.contains(is_currency) => Written::Currency,
            _ if text.contains('%') => Written::Percent,
            _ => Written::Spaces,
        };
        match plain.matches(',').count() {
            0 => (plain != text && is_number(&plain)).then_some(sign),
            _ if are_thousands(&plain) && is_number(&plain.replace(',', "")) => {
                Some(Written::Thousands)
            }
            1 => is_number(&plain.replace(',', ".")).then_some(Written::DecimalComma),
            _ => None,
        }
    }

    /// What such texts have.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Written::Spaces => "spaces in numbers",
            Written::Percent => "percent signs",
            Written::Currency => "currency signs",
            Written::Thousands => "thousands separators",
            Written::DecimalComma => "decimal commas",
            Written::Date => "dates",
        }
    }

    /// What to do about it.
    pub(crate) fn help(self) -> &'static str {
        match self {
            Written::Spaces => "write numbers without spaces in them",
            Written::Percent => "write numbers without percent signs",
            Written::Currency => "write numbers without currency signs",
            Written::Thousands => {
                "write numbers without thousands separators (pandas: read_csv(…, thousands=\",\"))"
            }
            Written::DecimalComma => {
                "write decimals with a point (pandas: read_csv(…, decimal=\",\"))"
            }
            Written::Date => {
                "turn dates into numbers: the day, counted from the first one, or year, month and weekday (pandas: \
                 d = pandas.to_datetime(dates); (d - d.min()).dt.days, d.dt.year, d.dt.month, d.dt.weekday)"
            }
        }
    }
}

/// Whether a text is a date by its digits: year, month and day, or the other way round.
fn is_date(text: &str) -> bool {
    let date = text.split(['T', ' ']).next().unwrap_or_default();
    let parts: Vec<&str> = date.split(['-', '/', '.']).collect();
    let are_digits = parts
        .iter()
        .all(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
    let digits: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    are_digits && matches!(digits[..], [4, 1..=2, 1..=2] | [1..=2, 1..=2, 4])
}

/// Whether every comma is followed by exactly three digits, and the first comes after one to three.
fn are_thousands(text: &str) -> bool {
    let whole = text.split('.').next().unwrap_or_default();
    let mut groups = whole.trim_start_matches(['-', '+']).split(',');
    let are_digits = |group: &str| group.bytes().all(|byte| byte.is_ascii_digit());
    let first = groups.next().unwrap_or_default();
    let begins = (1..=3).contains(&first.len()) && are_digits(first) && !first.starts_with('0');
    begins && groups.all(|group| group.len() == 3 && are_digits(group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_dates_are_known_by_their_characters() {
        let cases = [
            ("1,000", Some(Written::Thousands)),
            ("-12,037.25", Some(Written::Thousands)),
            ("$1,000,000", Some(Written::Thousands)),
            ("0,125", Some(Written::DecimalComma)),
            ("2,5", Some(Written::DecimalComma)),
            ("1234,567", Some(Written::DecimalComma)),
            ("$12", Some(Written::Currency)),
            ("45 %", Some(Written::Percent)),
            ("12 000", Some(Written::Spaces)),
            ("2026-11-22", Some(Written::Date)),
            ("22.11.2026 10:00", Some(Written::Date)),
            ("2026-11-22T10:00:00Z", Some(Written::Date)),
            ("1.10.2", None),
            ("555-12-3456", None),
            ("--2026", None),
            ("12", None),
            ("1,00,0", None),
            ("$", None),
            ("Bern", None),
            ("1,x", None),
        ];
        for (text, expected) in cases {
            assert_eq!(Written::of(text), expected, "{text}");
        }
    }
}
