//! What the cells of a table's columns are: numbers, texts, missing ones, and the different values
//! of those columns that may be categorical. From this follow the plan of the features, and the
//! message that names all columns at once that cannot be features as they are.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cell::{Cell, CellSink};
use super::conversion::Columns;
use super::csv::number;
use super::io::{reading, refuse, writing};
use super::shown::shown;
use crate::error::{Error, Result};
use crate::plan::{AUTO_VALUES_MAX, ColumnPlan};

/// The most different values of a column that is named as categorical.
const NAMED_VALUES_MAX: usize = 1 << 16;
/// The longest value.
const VALUE_BYTES_MAX: usize = 4 << 10;
/// How many columns a message describes. It names all of them.
const DESCRIBED: usize = 20;

/// What the cells of some columns are.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Survey {
    pub(crate) columns: Vec<SurveyedColumn>,
}

/// What the cells of a column are.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct SurveyedColumn {
    pub(crate) name: String,
    numbers: u64,
    texts: u64,
    missing: u64,
    /// The first text and the first missing cell, with their places.
    first_text: Option<String>,
    first_missing: Option<String>,
    has_decimal_comma: bool,
    /// The different values; `None` if there are more than `values_max`, or longer ones than a
    /// category may have.
    values: Option<HashSet<String>>,
    values_max: usize,
}

impl Survey {
    /// Of no rows yet.
    pub(super) fn of(columns: &Columns<'_>, categorical: &[String]) -> Survey {
        let column = |index| {
            let name = columns.name(index).to_string();
            let values_max = match categorical.contains(&name) {
                true => NAMED_VALUES_MAX,
                false => AUTO_VALUES_MAX,
            };
            SurveyedColumn {
                name,
                values: Some(HashSet::new()),
                values_max,
                ..SurveyedColumn::default()
            }
        };
        Survey {
            columns: (0..columns.features.len()).map(column).collect(),
        }
    }

    /// Writes the file `to`. Values of columns without texts are kept: other files may have texts.
    pub(super) fn write(&self, to: &Path) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|error| Error::Internal(error.to_string()))?;
        let write = |mut file: File| file.write_all(&json).and_then(|()| file.sync_all());
        File::create_new(to).and_then(write).map_err(writing(to))
    }

    /// Reads the file that `write` has written.
    pub(super) fn open(path: &Path) -> Result<Survey> {
        let json = fs::read(path).map_err(reading(path))?;
        serde_json::from_slice(&json).map_err(|error| refuse(path, error))
    }

    /// Adds the same columns of another table.
    pub(crate) fn merge(&mut self, later: Survey) {
        for (column, later) in self.columns.iter_mut().zip(later.columns) {
            column.numbers += later.numbers;
            column.texts += later.texts;
            column.missing += later.missing;
            column.first_text = column.first_text.take().or(later.first_text);
            column.first_missing = column.first_missing.take().or(later.first_missing);
            let both = column.values.take().zip(later.values);
            let all = both.map(|(mut values, more)| {
                values.extend(more);
                values
            });
            column.values = all.filter(|all| all.len() <= column.values_max);
        }
    }

    /// The error of a table with texts or missing cells in columns of numbers; `None` if it has
    /// none.
    pub(super) fn refusal(&self, columns: &Columns<'_>) -> Option<Error> {
        let request = columns.request;
        let is_number = |name: &str| {
            let mut plans = request.features.into_iter().flatten();
            plans.all(|plan| plan.name != name || plan.values.is_none())
        };
        let all = || self.columns.iter();
        let texts: Vec<_> = all()
            .filter(|column| column.texts > 0 && is_number(&column.name))
            .collect();
        let missing: Vec<_> = match request.allows_missing {
            true => Vec::new(),
            false => all().filter(|column| column.missing > 0).collect(),
        };
        let mut problems = Vec::new();
        if !texts.is_empty() {
            let what = described(&texts, SurveyedColumn::describe_texts);
            problems.push(format!("expected numbers, got texts in {what}"));
        }
        if !missing.is_empty() {
            let what = described(&missing, SurveyedColumn::describe_missing);
            problems.push(format!("missing cells in {what}"));
        }
        let problems = (!problems.is_empty()).then(|| problems.join("; "))?;
        let help = match request.is_for_model {
            true => "correct these cells: the model was trained on numbers here (if it was trained with `missing` mean or \
                     zero, it takes missing ones)"
                .to_string(),
            false => help(&texts, !missing.is_empty()),
        };
        Some(columns.bad(format!("{problems}; help: {help}")))
    }
}

/// Whether a cell is a number but for a comma.
fn has_decimal_comma(cell: &[u8]) -> bool {
    let text = String::from_utf8_lossy(cell);
    text.matches(',').count() == 1 && number(text.replace(',', ".").as_bytes()).is_some()
}

/// What to do about columns of texts and missing cells.
fn help(texts: &[&SurveyedColumn], any_missing: bool) -> String {
    let (few, many): (Vec<_>, Vec<_>) = texts.iter().partition(|column| column.has_categories());
    let mut help = Vec::new();
    if texts.iter().any(|column| column.has_decimal_comma) {
        help.push("write decimals with a point (pandas: read_csv(…, decimal=\",\"))".to_string());
    }
    if !few.is_empty() {
        help.push(format!(
            "`categorical` {} makes features of the texts",
            list(&few)
        ));
    }
    if !many.is_empty() {
        help.push(format!(
            "`drop` {} leaves out what has too many different texts or is mostly numbers",
            list(&many)
        ));
    }
    if any_missing {
        help.push("`missing` mean or zero fills in missing cells".to_string());
    }
    if !texts.is_empty() {
        help.push("if one of these columns is the label, name it in `labels`".to_string());
    }
    help.join("; ")
}

/// The names of columns as a value of a setting.
fn list(columns: &[&&SurveyedColumn]) -> String {
    let names: Vec<_> = columns.iter().map(|column| column.name.as_str()).collect();
    let names = names.join(",");
    let is_plain = |character: char| character.is_alphanumeric() || "_-.,".contains(character);
    match names.chars().all(is_plain) {
        true => names,
        false => format!("'{names}'"),
    }
}

/// A few columns described, and how many more there are.
fn described(columns: &[&SurveyedColumn], describe: impl Fn(&SurveyedColumn) -> String) -> String {
    let some = columns
        .iter()
        .take(DESCRIBED)
        .map(|column| describe(column));
    let some = some.collect::<Vec<_>>().join(", ");
    let (count, more) = (columns.len(), columns.len().saturating_sub(DESCRIBED));
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    format!(
        "{count} column{}: {some}{more}",
        if count == 1 { "" } else { "s" }
    )
}

impl SurveyedColumn {
    /// Whether its texts can be categories without being named.
    fn has_categories(&self) -> bool {
        self.values.is_some() && self.texts >= self.numbers
    }

    fn describe_texts(&self) -> String {
        let first = self.first_text.as_deref().unwrap_or_default();
        let what = match (self.numbers, &self.values) {
            (1.., _) => format!("{} of {} cells", self.texts, self.texts + self.numbers),
            (0, Some(values)) => format!("{} different", values.len()),
            (0, None) => format!("more than {} different, or long ones", self.values_max),
        };
        format!("\"{}\" ({what}, the first in {first})", self.name)
    }

    fn describe_missing(&self) -> String {
        let first = self.first_missing.as_deref().unwrap_or_default();
        format!("\"{}\" ({}, the first in {first})", self.name, self.missing)
    }

    /// The different values, sorted by their bytes.
    fn sorted_values(&self) -> Option<Vec<String>> {
        let mut values: Vec<String> = self.values.iter().flatten().cloned().collect();
        values.sort_unstable();
        self.values.as_ref().and(Some(values))
    }

    fn add_value(&mut self, text: &[u8]) {
        let Some(values) = &mut self.values else {
            return;
        };
        match std::str::from_utf8(text) {
            Ok(text) if values.contains(text) => {}
            Ok(text) if values.len() < self.values_max && text.len() <= VALUE_BYTES_MAX => {
                values.insert(text.to_string());
            }
            _ => self.values = None,
        }
    }
}

impl CellSink for Survey {
    fn wants_text(&self, _: usize) -> bool {
        true
    }

    fn feature(&mut self, index: usize, cell: Cell<'_>, place: &dyn Fn() -> String) -> Result<()> {
        let column = &mut self.columns[index];
        match cell {
            Cell::Number(_, text) => {
                column.numbers += 1;
                column.add_value(text);
            }
            Cell::Text(text) => {
                if column.texts == 0 {
                    column.has_decimal_comma = has_decimal_comma(text);
                    column.first_text = Some(format!("{}: \"{}\"", place(), shown(text)));
                }
                column.texts += 1;
                column.add_value(text);
            }
            Cell::Missing => {
                if column.missing == 0 {
                    column.first_missing = Some(place());
                }
                column.missing += 1;
            }
        }
        Ok(())
    }

    fn label(&mut self, _: usize, _: &[u8], _: bool, _: &dyn Fn() -> String) -> Result<()> {
        Ok(())
    }

    fn end_row(&mut self) -> Result<()> {
        Ok(())
    }
}

/// The plan of surveyed columns: those in `categorical` have categories, and if it has `AUTO`, also
/// those of texts.
pub(crate) fn plan(survey: &Survey, categorical: &[String], path: &str) -> Result<Vec<ColumnPlan>> {
    let is_auto = categorical.iter().any(|name| name == crate::plan::AUTO);
    let mut refused = Vec::new();
    let mut plan = Vec::new();
    for column in &survey.columns {
        let is_named = categorical.contains(&column.name);
        let is_texts = is_auto && column.texts > 0;
        if is_named && column.values.is_none() || !is_named && is_texts && !column.has_categories()
        {
            refused.push(column);
        }
        let values = (is_named || is_texts)
            .then(|| column.sorted_values())
            .flatten();
        plan.push(ColumnPlan {
            name: column.name.clone(),
            values,
        });
    }
    if refused.is_empty() {
        return Ok(plan);
    }
    let what = described(&refused, SurveyedColumn::describe_texts);
    let names = list(&refused.iter().collect::<Vec<_>>());
    Err(Error::Data(format!(
        "{path}: expected categories: at most {AUTO_VALUES_MAX} different texts (or {NAMED_VALUES_MAX} in a column that \
         `categorical` names) of at most {VALUE_BYTES_MAX} bytes each, in UTF-8, got {what}; help: leave these out with `drop` \
         {names}, or correct the texts if these are columns of numbers"
    )))
}
