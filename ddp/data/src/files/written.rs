//! Texts that people read as numbers and programs do not: `1,000`, `3,5`, `$12`, `45 %`.

use super::csv::number;

/// What keeps a text from being a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// Commas, each before three digits.
    Thousands,
    /// A comma for the point.
    DecimalComma,
    /// Currency signs, percent signs or spaces.
    Signs,
}

impl Written {
    /// How such a text writes a number; `None` if it is a number, or none in these ways either.
    pub(crate) fn of(text: &str) -> Option<Written> {
        let is_sign = |character: char| "$€£¥%".contains(character) || character.is_whitespace();
        let plain = text.replace(is_sign, "");
        let is_number = |text: &str| {
            text.contains(|digit: char| digit.is_ascii_digit()) && number(text.as_bytes()).is_some()
        };
        match plain.matches(',').count() {
            0 => (plain != text && is_number(&plain)).then_some(Written::Signs),
            _ if are_thousands(&plain) && is_number(&plain.replace(',', "")) => {
                Some(Written::Thousands)
            }
            1 => is_number(&plain.replace(',', ".")).then_some(Written::DecimalComma),
            _ => None,
        }
    }

    /// What to do about it.
    pub(crate) fn help(self) -> &'static str {
        match self {
            Written::Thousands => {
                "write numbers without thousands separators (pandas: read_csv(…, thousands=\",\"))"
            }
            Written::DecimalComma => {
                "write decimals with a point (pandas: read_csv(…, decimal=\",\"))"
            }
            Written::Signs => "write numbers without currency signs, percent signs and spaces",
        }
    }
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
    fn a_comma_before_three_digits_separates_thousands() {
        let cases = [
            ("1,000", Some(Written::Thousands)),
            ("-12,037.25", Some(Written::Thousands)),
            ("$1,000,000", Some(Written::Thousands)),
            ("0,125", Some(Written::DecimalComma)),
            ("2,5", Some(Written::DecimalComma)),
            ("1234,567", Some(Written::DecimalComma)),
            ("$12", Some(Written::Signs)),
            ("45 %", Some(Written::Signs)),
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
