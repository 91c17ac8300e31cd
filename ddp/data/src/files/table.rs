//! Tables of any format: their cells, what reads them row after row, which columns of them are
//! wanted, and how messages show them.

pub(crate) mod convert;
pub(crate) mod survey;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::error::{Error, Result, ensure};
use crate::features::ColumnPlan;
use crate::files::io::refuse;
use crate::guess;

/// A cell as its format types it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    not(feature = "parquet"),
    allow(dead_code, reason = "CSV has written cells only")
)]
pub(crate) enum Value<'a> {
    /// A missing cell, by the format itself.
    Null,
    /// A cell of a text file: a number if it reads as one and has no leading zeros.
    Written(&'a [u8]),
    /// A text, even if it reads as a number.
    Text(&'a [u8]),
    /// A whole number: an f64 would round large ones.
    Whole(i128),
    /// A number with a fraction.
    Float(f64),
}

/// A table that is read row after row.
pub(crate) trait TableReader {
    /// The names of its columns.
    fn names(&self) -> &[String];

    /// Prepares to read these columns, and no others; an error if one cannot be read.
    fn select(&mut self, columns: &[usize]) -> Result<()>;

    /// Goes to the next row, first to row 0; false after the last.
    fn advance(&mut self) -> Result<bool>;

    /// The cell of a selected column in this row.
    fn value(&self, column: usize) -> Value<'_>;

    /// The place of that cell, for messages: its line or row.
    fn place(&self, column: usize) -> String;
}

/// A cell as a feature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cell<'a> {
    Missing,
    /// A number other than NaN.
    Number(f64),
    Text(&'a [u8]),
}

/// What people write for a missing value besides an empty cell and NaN, in any case.
const MISSING: [&str; 8] = ["na", "n/a", "#n/a", "null", "nil", "none", "?", "-"];

/// Whole numbers from here on do not fit i64.
const LONG: f64 = (1u64 << 63) as f64;

impl<'a> Value<'a> {
    /// What it is as a feature.
    #[inline]
    pub(super) fn cell(self) -> Cell<'a> {
        let number_of = |value: f64| match value.is_nan() {
            true => Cell::Missing,
            false => Cell::Number(value),
        };
        match self {
            Value::Null => Cell::Missing,
            Value::Whole(value) => Cell::Number(value as f64),
            Value::Float(value) => number_of(value),
            Value::Written(text) | Value::Text(text) => match (number(text), self) {
                (Some(_), _) if guess::has_leading_zeros(text) => Cell::Text(text),
                (Some(value), Value::Written(_)) => number_of(value),
                (Some(value), _) if value.is_nan() => Cell::Missing,
                (None, _) if is_missing(text) => Cell::Missing,
                _ => Cell::Text(text),
            },
        }
    }

    /// Its text, with all digits of a number; empty if it is missing.
    pub(super) fn text(self) -> Cow<'a, [u8]> {
        match self {
            Value::Written(text) | Value::Text(text) => text.into(),
            Value::Whole(value) => value.to_string().into_bytes().into(),
            Value::Float(value) if value.is_nan() => Cow::default(),
            // With fewer digits the name of a class would be another number's.
            Value::Float(value) if value.fract() == 0.0 && value.abs() < LONG => {
                format!("{value:.0}").into_bytes().into()
            }
            Value::Float(value) => shown_number(value).into_bytes().into(),
            Value::Null => Cow::default(),
        }
    }
}

/// Whether a cell that is not a number says that its value is missing.
pub(crate) fn is_missing(text: &[u8]) -> bool {
    let says = |word: &&str| text.eq_ignore_ascii_case(word.as_bytes());
    text.is_empty() || MISSING.iter().any(says)
}

/// The number in a cell, rounded to the nearest f64. Spelled-out NaN and infinity are numbers here.
pub(crate) fn number(cell: &[u8]) -> Option<f64> {
    std::str::from_utf8(cell).ok()?.parse().ok()
}

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
    listed_up_to(20, names)
}

/// Up to `most` names, and how many more there are.
pub(crate) fn listed_up_to(most: usize, names: &[String]) -> String {
    let some = names.iter().take(most).map(|name| format!("\"{name}\""));
    let some = some.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(most) {
        0 => some,
        more => format!("{some} and {more} more"),
    }
}

/// A number, for a message: in scientific notation if it would be long.
pub(crate) fn shown_number(number: f64) -> String {
    let is_long = number.is_finite() && number != 0.0 && !(1e-6..1e15).contains(&number.abs());
    match is_long {
        true => format!("{number:e}"),
        false => number.to_string(),
    }
}

/// Up to `most` of these; `None` if there are none.
pub(crate) fn some_of(most: usize, all: impl Iterator<Item = String>) -> Option<String> {
    let all: Vec<String> = all.collect();
    let more = if all.len() > most { ", …" } else { "" };
    (!all.is_empty()).then(|| all[..all.len().min(most)].join(", ") + more)
}

/// What to do about texts that are numbers or dates to people.
pub(crate) const PLAIN_HELP: &str = "write plain numbers with a point, as 1234.5, and dates as numbers: days from the first one, or year, \
     month and weekday (pandas: read_csv(…, thousands=\",\", decimal=\".\"); d.dt.year, d.dt.month, d.dt.weekday)";

/// Whether a text is not a number for programs but is one for people, with signs, spaces or commas,
/// or is a date: `2026-11-22` or `22.11.2026`, perhaps with a time of day.
pub(crate) fn is_written_otherwise(text: &str) -> bool {
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

/// Whether a text is a date by its digits: year, month and day, or the other way round.
fn is_date(text: &str) -> bool {
    let date = text.split(['T', ' ']).next().unwrap_or_default();
    let parts = date.split(['-', '/', '.']);
    let digits = parts.map(
        |part| match part.bytes().all(|byte| byte.is_ascii_digit()) {
            true => part.len(),
            false => 0,
        },
    );
    let digits: Vec<usize> = digits.collect();
    matches!(digits[..], [4, 1..=2, 1..=2] | [1..=2, 1..=2, 4])
}

/// Which columns of a table are wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableRequest<'a> {
    /// The column of labels, or several with commas between them: these are numbers.
    pub label: Option<&'a str>,
    /// The columns of features, in this order; `None` for all others, in the order of the table,
    /// as numbers.
    pub features: Option<&'a [ColumnPlan]>,
    /// Whether numbers may be missing: they become NaN.
    pub allows_missing: bool,
    /// Whether labels are texts even if all could be numbers.
    pub labels_are_texts: bool,
    /// Whether a trained model says what the features are.
    pub is_for_model: bool,
}

/// The wanted columns of a table.
pub(super) struct Columns<'a> {
    pub(super) path: &'a Path,
    pub(super) request: &'a TableRequest<'a>,
    pub(super) names: Vec<String>,
    pub(super) features: Vec<Feature>,
    /// The indices of the labels.
    pub(super) labels: Vec<usize>,
}

/// A column of features.
pub(super) struct Feature {
    /// Its index in the table.
    pub(super) column: usize,
    /// The position of each value of a categorical column.
    pub(super) positions: Option<HashMap<Box<[u8]>, usize>>,
}

impl Feature {
    fn of(column: usize, plan: Option<&ColumnPlan>) -> Feature {
        let values = plan.and_then(|plan| plan.values.as_ref());
        let position = |(position, value): (usize, &String)| (value.as_bytes().into(), position);
        Feature {
            column,
            positions: values.map(|values| values.iter().enumerate().map(position).collect()),
        }
    }

    /// How many features it becomes.
    pub(super) fn width(&self) -> usize {
        self.positions.as_ref().map_or(1, HashMap::len)
    }
}

/// The columns that `name` means among `columns`: one of this name, or several with commas between.
pub(crate) fn label_names<'a>(columns: &[String], name: &'a str) -> Vec<&'a str> {
    match columns.iter().any(|column| column == name) {
        true => vec![name],
        false => name.split(',').map(str::trim).collect(),
    }
}

/// Whether a table with these columns has the label `name`, or all labels that it means.
pub(crate) fn has_label(columns: &[String], name: &str) -> bool {
    let mut names = label_names(columns, name).into_iter();
    names.all(|name| columns.iter().any(|column| column == name))
}

impl<'a> Columns<'a> {
    /// Finds the wanted columns among `names`.
    pub(super) fn choose(
        path: &'a Path,
        request: &'a TableRequest<'a>,
        names: &[String],
    ) -> Result<Columns<'a>> {
        let mut columns = Columns {
            path,
            request,
            names: names.to_vec(),
            features: Vec::new(),
            labels: Vec::new(),
        };
        let mut places = HashMap::new();
        for (column, name) in names.iter().enumerate() {
            // Of columns without a name the first counts.
            let first = *places.entry(name.as_str()).or_insert(column);
            if first != column && !name.is_empty() {
                return Err(columns.bad(format!(
                    "its columns {} and {} are both called \"{name}\"; help: give each its own name",
                    first + 1,
                    column + 1
                )));
            }
        }
        let labels = request.label.iter();
        for name in labels.flat_map(|name| label_names(names, name)) {
            let column = columns.place(name, &places)?;
            ensure!(
                !columns.labels.contains(&column),
                Usage,
                "{}: expected several different columns as labels, got \"{name}\" twice; help: name it once",
                path.display()
            );
            columns.labels.push(column);
        }
        let feature = |plan: &ColumnPlan| {
            let column = columns.place(&plan.name, &places)?;
            Ok(Feature::of(column, Some(plan)))
        };
        columns.features = match request.features {
            Some(wanted) => wanted.iter().map(feature).collect::<Result<_>>()?,
            None => (0..names.len())
                .filter(|column| !columns.labels.contains(column))
                .map(|column| Feature::of(column, None))
                .collect(),
        };
        columns.check_features()?;
        Ok(columns)
    }

    /// The indices of all columns that are wanted.
    pub(super) fn all(&self) -> Vec<usize> {
        let features = self.features.iter().map(|feature| feature.column);
        features.chain(self.labels.iter().copied()).collect()
    }

    /// The name of the feature column `index`.
    pub(super) fn name(&self, index: usize) -> &str {
        &self.names[self.features[index].column]
    }

    /// The names of all features.
    pub(super) fn feature_names(&self) -> Vec<String> {
        match self.request.features {
            Some(plans) => plans.iter().flat_map(ColumnPlan::feature_names).collect(),
            None => (0..self.features.len())
                .map(|index| self.name(index).to_string())
                .collect(),
        }
    }

    fn check_features(&self) -> Result<()> {
        let mut used = self.all().into_iter();
        if let Some(column) = used.find(|column| self.names[*column].is_empty()) {
            return Err(self.bad(format!(
                "column {} of {} has no name; help: if it is an index that pandas wrote, save without it: \
                 to_csv(path, index=False); if lines end in a delimiter, remove it",
                column + 1,
                self.names.len()
            )));
        }
        if self.features.is_empty() && self.request.features.is_none() {
            let label = &self.names[0];
            return Err(self.bad(format!(
                "it has no column besides the label \"{label}\"; help: if this line holds several names, put commas \
                 between them"
            )));
        }
        let names = self.feature_names();
        let mut seen = HashSet::new();
        if let Some(name) = names.iter().find(|name| !seen.insert(*name)) {
            return Err(self.bad(format!(
                "two of its features are called \"{name}\"; help: name a column once; if one is a value of a categorical \
                 column, rename the other"
            )));
        }
        Ok(())
    }

    /// The index of the column `name`, which are in `places`.
    fn place(&self, name: &str, places: &HashMap<&str, usize>) -> Result<usize> {
        places.get(name).copied().ok_or_else(|| {
            let help = match nearest(name, &self.names) {
                Some(near) => format!("\"{near}\" was probably meant"),
                None if self.request.is_for_model => {
                    "the model was trained on this column: add it to the table".to_string()
                }
                None => "name one of these".to_string(),
            };
            self.bad(format!(
                "expected a column \"{name}\", got the columns {}; help: {help}",
                listed(&self.names)
            ))
        })
    }

    pub(super) fn bad(&self, what: String) -> Error {
        refuse(self.path, what)
    }
}

/// The name that is most like `wanted`, if at least half of its letters agree.
fn nearest<'a>(wanted: &str, names: &'a [String]) -> Option<&'a String> {
    let likeness = |name: &String| {
        strsim::normalized_damerau_levenshtein(&wanted.to_lowercase(), &name.to_lowercase())
    };
    let near = names.iter().filter(|name| likeness(name) > 0.5);
    near.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
}

#[cfg(test)]
mod tests;
