//! Surveys the cells of a table's columns: numbers, texts, missing ones, and the different values
//! of columns that may be categorical. The result is the plan of the features, or one error that
//! names all columns that cannot be features as they are.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use ddp_data::files::io::{reading, refuse, writing};
use ddp_data::setting::{CATEGORICAL, DROP, LABELS, MISSING};
use ddp_data::words::{PLAIN_HELP, has_leading_zeros, is_date, is_written_otherwise, pasted};
use ddp_data::{AUTO, COMMON, ColumnPlan, Error, MoreFeatures, Result};

use crate::columns::Columns;
use crate::dates;
use crate::guess::{self, AUTO_VALUES_MAX};
use crate::table::{Cell, TableReader, shown};

/// The most different values of a column that is named as categorical.
pub(crate) const NAMED_VALUES_MAX: usize = 1 << 16;
/// The longest value.
const VALUE_BYTES_MAX: usize = 4 << 10;

/// What the cells of some columns are.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Survey {
    pub(crate) columns: Vec<SurveyedColumn>,
}

/// What the cells of a column are.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct SurveyedColumn {
    pub(crate) name: String,
    pub(crate) numbers: u64,
    pub(crate) texts: u64,
    pub(crate) missing: u64,
    /// The first text and the first missing cell, with their places.
    first_text: Option<String>,
    first_missing: Option<String>,
    /// Texts that people read as numbers or dates.
    written_texts: u64,
    /// Texts that are whole numbers with leading zeros.
    pub(crate) leading_zeros: u64,
    /// Texts that are dates, and those of them as ISO 8601 writes them, with the first day.
    pub(crate) dates: u64,
    pub(crate) iso_dates: u64,
    pub(crate) first_day: Option<i64>,
    /// The bytes of all texts.
    pub(crate) text_bytes: u64,
    /// Whether every cell is the label of its row.
    pub(crate) is_label: bool,
    /// The different texts, of a named column also numbers, and in how many rows each is; `None`
    /// if they cannot all be categories.
    pub(crate) values: Option<BTreeMap<String, u64>>,
    /// The different numbers of a column that is not named; `None` if there are many.
    pub(crate) number_values: Option<BTreeMap<String, u64>>,
    /// Why they cannot, if not because there are more than `values_max`.
    pub(crate) bad_value: Option<String>,
    values_max: usize,
    /// Whether it is named as categorical.
    pub(crate) is_named: bool,
}

impl Survey {
    /// Reads all rows of a table.
    pub(crate) fn of(
        columns: &Columns<'_>,
        rows: &mut dyn TableReader,
        categorical: &[String],
    ) -> Result<Survey> {
        rows.select(&columns.all())?;
        let categorical: HashSet<&String> = categorical.iter().collect();
        let is_common = categorical.iter().any(|name| *name == COMMON);
        // A column may be called as the words of the setting are.
        let is_named =
            |name: &String| categorical.contains(name) && ![AUTO, COMMON].contains(&&**name);
        let column = |plan: &ColumnPlan| SurveyedColumn {
            name: plan.name.clone(),
            values: Some(BTreeMap::new()),
            number_values: Some(BTreeMap::new()),
            is_label: columns.labels.len() == 1,
            is_named: is_named(&plan.name),
            values_max: if is_common || is_named(&plan.name) {
                NAMED_VALUES_MAX
            } else {
                AUTO_VALUES_MAX
            },
            ..SurveyedColumn::default()
        };
        let mut survey = Survey {
            columns: columns.request.features.iter().map(column).collect(),
        };
        while rows.advance()? {
            survey.add(columns, rows);
        }
        Ok(survey)
    }

    /// Adds the current row of `table`.
    fn add(&mut self, columns: &Columns<'_>, table: &dyn TableReader) {
        let label = match &columns.labels[..] {
            [label] => Some(table.value(*label)),
            _ => None,
        };
        // Rows without a label are left out, or refused later.
        if label.is_some_and(|label| label.is_no_label()) {
            return;
        }
        for (column, &index) in self.columns.iter_mut().zip(&columns.features) {
            let value = table.value(index);
            let place = || table.place(index);
            column.is_label &= label.is_none_or(|label| label.category() == value.category());
            let cell = value.cell();
            match cell {
                Cell::Number(_) => column.numbers += 1,
                Cell::Text(text) => {
                    if column.texts == 0 {
                        column.first_text = Some(format!("{}: \"{}\"", place(), shown(text)));
                    }
                    let lossy = String::from_utf8_lossy(text);
                    column.written_texts += u64::from(is_written_otherwise(&lossy));
                    column.dates += u64::from(is_date(&lossy));
                    if let Some(day) = dates::day(&lossy) {
                        column.iso_dates += 1;
                        let first = column.first_day.unwrap_or(day);
                        column.first_day = Some(first.min(day));
                    }
                    column.text_bytes += text.len() as u64;
                    column.leading_zeros += u64::from(has_leading_zeros(text));
                    column.texts += 1;
                }
                Cell::Missing => {
                    if column.missing == 0 {
                        column.first_missing = Some(place());
                    }
                    column.missing += 1;
                    continue;
                }
            }
            let is_number = matches!(cell, Cell::Number(_));
            column.add_value(&value.category(), is_number, &place);
        }
    }

    /// Writes the file `to`. Values of columns without texts are kept: other files may have texts.
    pub(crate) fn write(&self, to: &Path) -> Result<()> {
        let json = serde_json::to_vec(self).map_err(|error| Error::Internal(error.to_string()))?;
        let write = |mut file: File| file.write_all(&json).and_then(|()| file.sync_all());
        File::create_new(to).and_then(write).map_err(writing(to))
    }

    /// Reads the file that `write` has written.
    pub(crate) fn open(path: &Path) -> Result<Survey> {
        let json = fs::read(path).map_err(reading(path))?;
        serde_json::from_slice(&json).map_err(|error| refuse(path, error))
    }

    /// Adds the same columns of another table.
    pub(crate) fn merge(&mut self, later: Survey) {
        for (column, later) in self.columns.iter_mut().zip(later.columns) {
            for (sum, more) in [
                (&mut column.numbers, later.numbers),
                (&mut column.texts, later.texts),
                (&mut column.missing, later.missing),
                (&mut column.written_texts, later.written_texts),
                (&mut column.leading_zeros, later.leading_zeros),
                (&mut column.dates, later.dates),
                (&mut column.iso_dates, later.iso_dates),
                (&mut column.text_bytes, later.text_bytes),
            ] {
                *sum = sum.saturating_add(more);
            }
            column.first_text = column.first_text.take().or(later.first_text);
            column.first_missing = column.first_missing.take().or(later.first_missing);
            column.bad_value = column.bad_value.take().or(later.bad_value);
            let days = column.first_day.into_iter().chain(later.first_day);
            column.first_day = days.min();
            column.is_label &= later.is_label;
            let most = column.values_max;
            column.values = together(column.values.take(), later.values, most);
            let numbers = (column.number_values.take(), later.number_values);
            column.number_values = together(numbers.0, numbers.1, AUTO_VALUES_MAX);
        }
    }

    /// The error of a table with texts or missing cells in columns of numbers; `None` if it has
    /// none.
    pub(crate) fn refusal(&self, columns: &Columns<'_>) -> Option<Error> {
        let request = columns.request;
        let (mut texts, mut missing, mut problems) = (Vec::new(), Vec::new(), Vec::new());
        for (column, plan) in self.columns.iter().zip(&request.features) {
            let is_date = matches!(plan.more, MoreFeatures::Date { .. });
            if column.texts > 0 && !plan.is_categorical() && !is_date {
                texts.push(column);
            }
            if column.missing > 0 && !request.allows_missing {
                missing.push(column);
            }
        }
        if !texts.is_empty() {
            let what = described(&texts, SurveyedColumn::describe_texts);
            problems.push(format!("expected numbers, got texts in {what}"));
        }
        if !missing.is_empty() {
            let what = described(&missing, SurveyedColumn::describe_missing);
            problems.push(format!("missing cells in {what}"));
        }
        let help = if request.is_for_model {
            let written = texts.iter().any(|column| column.are_written());
            let plain = if written { PLAIN_HELP } else { "" };
            let text = "the model was trained on rows without such cells";
            format!(
                "{plain}{}correct these cells: {text}",
                if written { "; " } else { "" }
            )
        } else {
            help(&texts, !missing.is_empty())
        };
        let problems = (!problems.is_empty()).then(|| problems.join("\n  "))?;
        Some(columns.bad(format!("{problems}\n  help: {help}")))
    }
}

/// Both values, if there are at most so many.
fn together(
    first: Option<BTreeMap<String, u64>>,
    more: Option<BTreeMap<String, u64>>,
    most: usize,
) -> Option<BTreeMap<String, u64>> {
    let mut all = first?;
    for (value, rows) in more? {
        let sum = all.entry(value).or_default();
        *sum = sum.saturating_add(rows);
    }
    Some(all).filter(|all| all.len() <= most)
}

/// What to do about columns of texts and missing cells, with the settings to paste.
pub(crate) fn help(texts: &[&SurveyedColumn], any_missing: bool) -> String {
    let texts = texts.iter().copied();
    let (few, many): (Vec<_>, Vec<_>) = texts.partition(|column| column.may_be_categories());
    let how = if any_missing { "mean" } else { "" };
    let settings = [
        (CATEGORICAL, list(&few)),
        (DROP, list(&many)),
        (MISSING, how.into()),
    ];
    let settings = settings.iter().filter(|(_, value)| !value.is_empty());
    let settings = settings.map(|(setting, value)| format!("{setting} {value}"));
    let settings = settings.collect::<Vec<_>>().join(" ");
    let written = many.iter().find(|column| column.are_written());
    let mut help: Vec<String> = written.iter().map(|_| PLAIN_HELP.into()).collect();
    help.push(format!("correct these cells, or give {settings}"));
    if !(few.is_empty() && many.is_empty()) {
        help.push(format!(
            "if one of these columns is the label, name it in {LABELS}"
        ));
    }
    help.join("; ")
}

/// The names of columns as a value of a setting.
pub(crate) fn list(columns: &[&SurveyedColumn]) -> String {
    pasted(columns.iter().map(|column| column.name.as_str()))
}

/// A few columns described, several of them on a line each.
pub(crate) fn described(
    columns: &[&SurveyedColumn],
    describe: impl Fn(&SurveyedColumn) -> String,
) -> String {
    let (between, plural) = match columns.len() {
        1 => (" ", ""),
        _ => ("\n    ", "s"),
    };
    let (all, count) = (columns.iter().take(20), columns.len());
    let all: String = all
        .map(|column| format!("{between}{}", describe(column)))
        .collect();
    let more = if count > 20 { "\n    …" } else { "" };
    format!("{count} column{plural}:{all}{more}")
}

impl SurveyedColumn {
    /// Whether its texts may be categories without being named.
    pub(crate) fn may_be_categories(&self) -> bool {
        let are_texts = self.texts >= self.numbers || self.have_leading_zeros();
        let values = self.all_values();
        let has_few = values.is_some_and(|all| all.len() <= AUTO_VALUES_MAX) && are_texts;
        has_few && !self.is_nearly_unique() && !self.are_written()
    }

    /// All different values; `None` if there are too many.
    pub(crate) fn all_values(&self) -> Option<BTreeMap<String, u64>> {
        together(self.values.clone(), self.number_values.clone(), usize::MAX)
    }

    /// How many cells have a value.
    pub(crate) fn cells(&self) -> u64 {
        self.texts.saturating_add(self.numbers)
    }

    /// Whether so many of its values are different that categories say nothing.
    pub(crate) fn is_nearly_unique(&self) -> bool {
        let count = |of: &Option<BTreeMap<String, u64>>| of.as_ref().map_or(0, BTreeMap::len);
        let different = count(&self.values) + count(&self.number_values);
        guess::are_nearly_unique(different as u64, self.cells())
    }

    /// Whether most texts are numbers or dates in a form that programs do not read.
    pub(crate) fn are_written(&self) -> bool {
        2 * self.written_texts > self.texts
    }

    /// Whether all texts are whole numbers with leading zeros, so that the numbers are texts, too.
    fn have_leading_zeros(&self) -> bool {
        self.texts > 0 && self.texts == self.leading_zeros
    }

    pub(crate) fn describe_texts(&self) -> String {
        let first = self.first_text.as_deref().unwrap_or_default();
        let cells = self.texts + self.numbers;
        let what = match (&self.bad_value, self.numbers, &self.values) {
            (Some(why), ..) => why.clone(),
            (_, 1.., _) => format!("{} of {cells} cells", self.texts),
            (_, 0, Some(values)) if self.is_nearly_unique() => {
                format!("{} different in {cells} cells", values.len())
            }
            (_, 0, Some(values)) => format!("{} different", values.len()),
            (_, 0, None) => format!("more than {} different", self.values_max),
        };
        let kind = if self.are_written() {
            "formatted numbers or dates, "
        } else if self.have_leading_zeros() {
            "whole numbers with leading zeros, "
        } else {
            ""
        };
        format!("\"{}\" ({kind}{what}, the first in {first})", self.name)
    }

    fn describe_missing(&self) -> String {
        let first = self.first_missing.as_deref().unwrap_or_default();
        format!("\"{}\" ({}, the first in {first})", self.name, self.missing)
    }

    /// Counts a value. Numbers are counted apart, so that the order of rows does not matter.
    fn add_value(&mut self, text: &[u8], is_number: bool, place: &dyn Fn() -> String) {
        let (all, most) = if is_number && !self.is_named {
            (&mut self.number_values, AUTO_VALUES_MAX)
        } else {
            (&mut self.values, self.values_max)
        };
        let Some(values) = all else {
            return;
        };
        match std::str::from_utf8(text) {
            Ok(text) if let Some(rows) = values.get_mut(text) => {
                *rows += 1;
                return;
            }
            Ok(text) if text.len() > VALUE_BYTES_MAX => {
                self.bad_value = Some(format!("more than {VALUE_BYTES_MAX} bytes in {}", place()));
            }
            Ok(text) if values.len() < most => {
                values.insert(text.to_string(), 1);
                return;
            }
            Ok(_) => {}
            Err(_) => {
                let shown: String = text.escape_ascii().take(40).map(char::from).collect();
                self.bad_value = Some(format!(
                    "not UTF-8 (save the file as UTF-8: iconv -f latin1 -t utf8): \"{shown}\" in {}",
                    place()
                ));
            }
        }
        *all = None;
    }
}
