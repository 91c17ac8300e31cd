//! What `inspect` prints: a title, then one line for each fact, with its name.

use std::fmt;

use serde_json::Value;

use crate::error::Error;
use crate::shown::{self, shown, shown_lines};

/// The result of an inspection, for people and as JSON, and the damage if there is any.
#[derive(Debug)]
pub(super) struct Inspected(pub(super) Sheet, pub(super) Value, pub(super) Option<Error>);

/// A title and facts.
#[derive(Debug, Default)]
pub(super) struct Sheet(String);

/// The column in which facts start.
const INDENT: usize = 12;

impl Sheet {
    /// The title is one line.
    pub(super) fn new(title: impl AsRef<str>) -> Sheet {
        Sheet(shown(title.as_ref()))
    }

    /// Adds a fact of one or more lines. Names in it must be `shown`, or they could forge a line.
    pub(super) fn add(&mut self, word: &str, fact: impl Into<String>) {
        let words = std::iter::once(word).chain(std::iter::repeat(""));
        for (word, line) in words.zip(shown_lines(&fact.into()).lines()) {
            self.0 += &format!("\n{word:INDENT$}{line}");
        }
    }
}

impl fmt::Display for Sheet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Up to eight names, and how many more there are.
pub(super) fn some_of(names: &[String]) -> String {
    shown::some_of(names, 8)
}

/// Columns of equal width, without control characters.
pub(super) fn table(rows: &[Vec<String>]) -> String {
    let shown_cells = |row: &Vec<String>| row.iter().map(|cell| shown(cell)).collect();
    shown::table(&rows.iter().map(shown_cells).collect::<Vec<_>>(), 1).join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_multiline_fact_stays_in_its_column() {
        let mut sheet = Sheet::new("a title");
        let row = |cells: [&str; 2]| cells.map(String::from).to_vec();
        sheet.add(
            "model",
            table(&[row(["0.weight", "12"]), row(["1", "3456"])]),
        );
        sheet.add("step", "7");
        assert_eq!(
            sheet.to_string(),
            "a title\nmodel       0.weight    12\n            1         3456\nstep        7"
        );
    }

    #[test]
    fn hostile_names_cannot_break_the_sheet_layout() {
        let mut sheet = Sheet::new("data a\nb\u{1b}[2J");
        sheet.add(
            "labels",
            table(&[vec![
                "one\ntraining    would take them".to_string(),
                "3 rows".to_string(),
            ]]),
        );
        sheet.add(
            "columns",
            some_of(&["x\u{1b}[31m".to_string(), "y\nz".to_string()]),
        );
        sheet.add("training", "would refuse them: \u{1b}[31m");
        let text = sheet.to_string();
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "data a\\nb\\u{1b}[2J",
                "labels      one\\ntraining    would take them  3 rows",
                "columns     x\\u{1b}[31m, y\\nz",
                "training    would refuse them: \\u{1b}[31m"
            ]
        );
    }

    #[test]
    fn of_many_names_some_are_shown() {
        let names: Vec<String> = (0..12).map(|name| name.to_string()).collect();
        assert_eq!(some_of(&names[..8]), "0, 1, 2, 3, 4, 5, 6, 7");
        assert_eq!(some_of(&names), "0, 1, 2, 3, 4, 5, 6 and 5 more");
    }
}
