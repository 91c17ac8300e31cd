//! What each column of a table becomes, by the cells of all files: features, or nothing, which is
//! said; or one error that lists all columns that cannot be features as they are.

use std::cmp::Reverse;

use ddp_data::setting::{CATEGORICAL, DROP, MISSING};
use ddp_data::words::listed_up_to;
use ddp_data::{AUTO, COMMON, ColumnPlan, Missing, MoreFeatures, Result, TableSettings, bail};

use crate::guess::{
    self, AUTO_VALUES_MAX, COMMON_ROWS, COMMON_VALUES_MAX, MIXED_NUMBERS_MAX, TABLE_BYTES_MAX,
};
use crate::survey::{NAMED_VALUES_MAX, Survey, SurveyedColumn, described, help, list};

/// The columns that become features, and what was chosen.
#[derive(Debug, Default)]
pub(crate) struct TablePlan {
    pub(crate) columns: Vec<ColumnPlan>,
    /// For people.
    pub(crate) notes: Vec<String>,
}

/// What becomes of a column.
enum Fate {
    Features(Option<Vec<String>>, MoreFeatures),
    /// Nothing, because of this.
    LeftOut(String),
    Refused,
}

/// Names of columns, that are shown.
const SHOWN: usize = 8;

/// The plan of surveyed columns, as `settings` say.
pub(crate) fn plan(survey: &Survey, settings: &TableSettings, path: &str) -> Result<TablePlan> {
    let has = |word: &str| settings.categorical.iter().any(|name| name == word);
    let (is_auto, is_common) = (has(AUTO), has(COMMON));
    let (mut plan, mut refused) = (TablePlan::default(), Vec::new());
    let [mut categories, mut dates, mut left_out, mut gaps] = [const { Vec::new() }; 4];
    for column in &survey.columns {
        let fate = match column {
            column if column.is_named => match &column.values {
                Some(values) => {
                    Fate::Features(Some(values.keys().cloned().collect()), MoreFeatures::None)
                }
                None => Fate::Refused,
            },
            column if is_common => column.common(),
            column if is_auto && column.texts > 0 => match column.all_values() {
                Some(values) if column.may_be_categories() => {
                    Fate::Features(Some(values.into_keys().collect()), MoreFeatures::None)
                }
                _ => Fate::Refused,
            },
            _ => Fate::Features(None, MoreFeatures::None),
        };
        let name = &column.name;
        if column.is_label {
            plan.notes.push(format!(
                "the column {name:?} holds the label of every row: what is learned from it says nothing \
                 ({DROP} {} leaves it out)",
                list(&[column])
            ));
        }
        let (values, mut more) = match fate {
            Fate::Features(values, more) => (values, more),
            Fate::LeftOut(why) => {
                left_out.push(format!("{name:?} ({why})"));
                continue;
            }
            Fate::Refused => {
                refused.push(column);
                continue;
            }
        };
        match &values {
            Some(values) if is_common => categories.push(column.describe_values(values.len())),
            None if more != MoreFeatures::None => dates.push(name.clone()),
            None if column.missing > 0 && settings.missing == Missing::Indicator => {
                gaps.push(format!("{name:?} {}", column.missing));
                more = MoreFeatures::Missing;
            }
            _ => {}
        }
        let name = name.clone();
        plan.columns.push(ColumnPlan { name, values, more });
    }
    ensure_features(&refused, [is_auto, is_common], path)?;
    check_size(survey, &plan.columns, path)?;
    let mut say = |names: Vec<String>, text: &str, how: &str| {
        if !names.is_empty() {
            let more = if names.len() > SHOWN { ", …" } else { "" };
            let some = names[..names.len().min(SHOWN)].join(", ");
            plan.notes.push(format!("{text}: {some}{more} ({how})"));
        }
    };
    let how = format!("{DROP} COLUMN leaves one out");
    say(
        categories,
        "text columns whose values become features",
        &how,
    );
    say(dates, "dates that become days, month and weekday", &how);
    let how = format!("{CATEGORICAL} {COMMON},COLUMN makes features of all its texts");
    say(left_out, "columns that are left out", &how);
    let how = format!("{MISSING} mean leaves that feature out");
    let text = "missing numbers, which become the mean, and another feature says where";
    say(gaps, text, &how);
    Ok(plan)
}

/// Refuses columns, with how to keep them.
fn ensure_features(
    refused: &[&SurveyedColumn],
    [is_auto, is_common]: [bool; 2],
    path: &str,
) -> Result<()> {
    if refused.is_empty() {
        return Ok(());
    }
    let what = described(refused, SurveyedColumn::describe_texts);
    let mut help = help(refused, false);
    let word = if is_common { COMMON } else { AUTO };
    if (is_auto || is_common) && refused.iter().all(|it| it.bad_value.is_none()) {
        help += &format!(
            "; to encode their texts as they are: {CATEGORICAL} {word},{}",
            list(refused)
        );
    }
    let expected = match is_common {
        true => {
            "plain numbers, dates such as 2026-11-22, or texts without numbers among them".into()
        }
        false => format!(
            "categories: at most {AUTO_VALUES_MAX} different texts ({NAMED_VALUES_MAX} in a column that {CATEGORICAL} \
             names), no numbers or dates, and not a different text in nearly every row"
        ),
    };
    bail!("{path}: expected {expected}; got {what}\n  help: {help}")
}

/// Refuses features that take many times the table's space, before they are written.
fn check_size(survey: &Survey, columns: &[ColumnPlan], path: &str) -> Result<()> {
    let cells = |column: &SurveyedColumn| column.cells().saturating_add(column.missing);
    let rows = survey.columns.first().map_or(0, cells);
    let width: usize = columns.iter().map(ColumnPlan::width).sum();
    let bytes = rows.saturating_mul(4 * width as u64);
    if bytes <= TABLE_BYTES_MAX || width < 2 * columns.len() {
        return Ok(());
    }
    let mut widest: Vec<&ColumnPlan> = columns.iter().collect();
    widest.sort_by_key(|column| Reverse(column.width()));
    let widest: Vec<String> = widest.iter().map(|column| column.name.clone()).collect();
    bail!(
        "{path}: expected at most {} GB of features, got {rows} rows of {width} features, {} GB, most of them of the \
         columns {}; help: leave out such columns with {DROP}, or give {CATEGORICAL} {COMMON}, which makes features of \
         at most {COMMON_VALUES_MAX} values of a column",
        TABLE_BYTES_MAX >> 30,
        bytes >> 30,
        listed_up_to(3, &widest)
    )
}

impl SurveyedColumn {
    /// What it becomes if no setting names it.
    fn common(&self) -> Fate {
        let cells = self.cells();
        if self.texts == 0 {
            return match cells {
                0 => Fate::LeftOut("no cell has a value".into()),
                _ => Fate::Features(None, MoreFeatures::None),
            };
        }
        if let Some(first) = self.first_day
            && self.iso_dates == cells
        {
            return Fate::Features(None, MoreFeatures::Date { first });
        }
        if 2 * self.iso_dates > self.texts {
            let others = cells - self.iso_dates.min(cells);
            return Fate::LeftOut(format!(
                "dates, but {others} of {cells} cells hold something else"
            ));
        }
        if 2 * self.dates > self.texts {
            let form = "dates in a form that may mean several days; write them as 2026-11-22";
            return Fate::LeftOut(form.into());
        }
        if self.bad_value.is_some() || self.are_written() {
            return Fate::Refused;
        }
        // A few texts among numbers are probably mistakes; numbers with leading zeros are names.
        let are_mixed = self.numbers > self.texts && self.leading_zeros == 0;
        let numbers = self.number_values.as_ref();
        if are_mixed && numbers.is_none_or(|numbers| numbers.len() > MIXED_NUMBERS_MAX) {
            return Fate::Refused;
        }
        // Where numbers are many, all of them share `(other)`.
        let Some(values) = self.all_values().or_else(|| self.values.clone()) else {
            return Fate::LeftOut(format!("more than {NAMED_VALUES_MAX} different texts"));
        };
        let (different, mut common) = (values.len() as u64, Vec::from_iter(&values));
        // The commonest first, of equal ones in the order of their texts.
        common.sort_by_key(|(_, rows)| Reverse(**rows));
        common.truncate(COMMON_VALUES_MAX);
        let rows = common.iter().map(|(_, rows)| **rows);
        let common_cells = rows.fold(0, u64::saturating_add);
        let are_many = guess::are_identifiers(different, common_cells, cells, self.text_bytes);
        common.retain(|(_, rows)| **rows >= COMMON_ROWS);
        if are_many || self.is_nearly_unique() || common.is_empty() {
            let what = "free text or identifiers";
            return Fate::LeftOut(format!("{what}, {different} different in {cells} cells"));
        }
        let more = match common.len() as u64 == different && numbers.is_some() {
            true => MoreFeatures::None,
            false => MoreFeatures::Other,
        };
        let mut kept: Vec<String> = common.into_iter().map(|(value, _)| value.clone()).collect();
        kept.sort_unstable();
        Fate::Features(Some(kept), more)
    }

    /// Its name and how many of its values become features.
    fn describe_values(&self, kept: usize) -> String {
        let values = self.all_values().or_else(|| self.values.clone());
        let different = values.map_or(0, |values| values.len());
        match different.saturating_sub(kept) {
            0 => format!("{:?} {kept}", self.name),
            _ => format!("{:?} {kept} of {different} and (other)", self.name),
        }
    }
}

/// The columns without names, of an index or of a delimiter at the end of lines, which are left
/// out.
pub(crate) fn unnamed(names: &[String]) -> Vec<&String> {
    let is_index = |name: &&String| {
        let number = name.strip_prefix("Unnamed: ");
        name.is_empty() || number.is_some_and(|digits| digits.parse::<u32>().is_ok())
    };
    names.iter().filter(is_index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of 2 GB made 13 GB of features, without a word.
    #[test]
    fn features_that_take_many_times_the_tables_space_are_refused() {
        let mut column = SurveyedColumn::default();
        column.texts = 1 << 24;
        let survey = Survey {
            columns: vec![column],
        };
        let towns = |count: usize| ColumnPlan {
            values: Some((0..count).map(|town| town.to_string()).collect()),
            ..ColumnPlan::number("town")
        };
        check_size(&survey, &[towns(40)], "t.csv").unwrap();
        let text = check_size(&survey, &[towns(200)], "t.csv")
            .unwrap_err()
            .to_string();
        for part in [
            "at most 8 GB",
            "12 GB",
            "columns \"town\"",
            "`categorical` common",
        ] {
            assert!(text.contains(part), "{text} lacks {part}");
        }
        // As many numbers are what the table itself has.
        let numbers: Vec<_> = (0..200)
            .map(|at| ColumnPlan::number(&at.to_string()))
            .collect();
        check_size(&survey, &numbers, "t.csv").unwrap();
    }
}
