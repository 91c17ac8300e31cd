//! What is logged of data that can be trained on.

use std::collections::{BTreeMap, HashSet};

use crate::error::Result;
use crate::facts::Facts;
use crate::files::{Element, OddCells, listed, some_of};
use crate::guess::{self, Ends};
use crate::normalize::{Normalization, Normalize};
use crate::open::Source;
use crate::request::DataRequest;
use crate::rows::Rows;
use crate::scan::{self, LabelsFound, Moments};
use crate::task::TaskSpec;

/// Rows that are read to find columns that f32 rounds, and numbers of them if rows are wide.
const ROWS: u64 = 1024;
const NUMBERS: usize = 1 << 22;

/// Logs which columns of tables are categorical, and which cells had no number or category.
pub(crate) fn log_table(source: &Source) {
    let Source { setting, path, .. } = source;
    let plans = source.plan.iter().flatten();
    let categorical = plans.filter(|plan| plan.is_categorical());
    let categorical: Vec<String> = categorical.map(|plan| plan.name.clone()).collect();
    if !categorical.is_empty() {
        let names = listed(&categorical);
        tracing::info!("`{setting}` {path}: categorical columns: {names}");
    }
    let is_categorical: HashSet<&String> = categorical.iter().collect();
    let missing = source.odd_cells.iter().filter(|odd| odd.missing > 0);
    let (of_categories, of_numbers): (Vec<&OddCells>, Vec<_>) =
        missing.partition(|odd| is_categorical.contains(&odd.column));
    for (odd, what) in [
        (of_numbers, "which are filled in"),
        (
            of_categories,
            "of categorical columns, whose features are all 0",
        ),
    ] {
        let missing = odd
            .iter()
            .map(|odd| format!("\"{}\" {}", odd.column, odd.missing));
        if let Some(missing) = some_of(20, missing) {
            let comma = if what.starts_with("of") { "" } else { "," };
            tracing::info!("`{setting}` {path}: missing cells{comma} {what}: {missing}");
        }
    }
    let odd = source.odd_cells.iter().filter(|odd| odd.unseen > 0);
    let unseen = odd.map(|odd| {
        let examples = listed(&odd.examples);
        format!("\"{}\" {} ({examples})", odd.column, odd.unseen)
    });
    if let Some(unseen) = some_of(20, unseen) {
        tracing::warn!(
            "`{setting}` {path}: cells with values that were not trained on, which count as none of the categories: {unseen}"
        );
    }
}

/// The columns with the same number in all rows.
fn constant(moments: &Moments) -> impl Iterator<Item = usize> {
    let ends = moments.least.iter().zip(&moments.greatest).enumerate();
    let constant = ends.filter(|(_, (least, greatest))| least == greatest);
    constant.map(|(column, _)| column)
}

/// Logs what a user should know of these data.
pub(crate) fn warn(
    request: &DataRequest,
    source: &Source,
    facts: &Facts,
    task: &TaskSpec,
) -> Result<()> {
    let (data, features) = (&request.data, &source.features);
    if features.element()? == Element::U8 && request.normalize == Normalize::None {
        tracing::warn!(
            "`data` {data}: features are bytes up to 255, and models learn better from 0 to 1; help: set `normalize` to unit"
        );
    }
    if let Some(found) = &facts.features {
        let constant = constant(&found.moments).map(|index| source.feature(index));
        let constant: Vec<String> = constant.collect();
        if request.normalize == Normalize::Standard && !constant.is_empty() {
            let names = listed(&constant);
            tracing::warn!(
                "`data` {data}: features that are the same in all rows that are trained on, and say nothing: {names}"
            );
        }
        // Tables are checked when they are converted.
        let close = columns_too_close(features)?;
        let name = |(column, ends)| (format!("{column} (counted from 0)"), ends);
        let close: Vec<_> = close.into_iter().map(name).collect();
        if let Some(warning) = guess::rounding_warning(&close) {
            tracing::warn!("`data` {data}: {warning}");
        }
        if !found.is_complete {
            tracing::warn!(
                "`data` {data}: more than {} GB of features: {} rows spread over all were checked before training, the others \
                 are checked when they are trained on",
                scan::BYTES_MAX >> 30,
                found.moments.count
            );
        }
    }
    warn_of_labels(request, source, facts)?;
    warn_of_classes(request, source, facts, task);
    Ok(())
}

/// Says how numeric targets are standardized, and warns of those that are hard to learn.
fn warn_of_labels(request: &DataRequest, source: &Source, facts: &Facts) -> Result<()> {
    let Some(labels) = &source.labels else {
        return Ok(());
    };
    let name = labels.name();
    if facts.labels.range.is_some() {
        let close = columns_too_close(&labels.rows)?;
        let name = |(column, ends)| (format!("{column} of the labels ({name})"), ends);
        let close: Vec<_> = close.into_iter().map(name).collect();
        if let Some(warning) = guess::rounding_warning(&close) {
            tracing::warn!("`labels`: {warning}");
        }
    }
    let Some(moments) = &facts.targets else {
        return Ok(());
    };
    let Normalization { shift, scale } = Normalization::standard(moments);
    let targets = shift.iter().zip(scale.iter().map(|scale| 1.0 / scale));
    let described = |(mean, deviation)| format!("mean {mean:?}, standard deviation {deviation:?}");
    let described: Vec<String> = targets.clone().take(8).map(described).collect();
    let described = described.join("; ");
    let mut targets = targets;
    if request.normalize != Normalize::Standard {
        if targets.any(|(mean, deviation)| guess::are_large_targets(*mean, deviation)) {
            tracing::warn!(
                "`labels` {name}: {described}: expected numbers of a size near 1, which models learn; help: set `normalize` \
                 to standard, which scales features and labels"
            );
        }
    } else if request.normalizes_targets {
        tracing::info!(
            "`labels` {name}: standardized ({described}): losses are in these units, and 1 is the loss of predicting the mean"
        );
    }
    let constant = constant(moments).map(|column| column.to_string());
    if let Some(columns) = some_of(usize::MAX, constant) {
        tracing::warn!(
            "`labels` {name}: the same number in all rows that were looked at, in column {columns} (counted from 0)"
        );
    }
    Ok(())
}

/// Warns of classes that cannot be learned, that have no rows, or that may be one.
fn warn_of_classes(request: &DataRequest, source: &Source, facts: &Facts, task: &TaskSpec) {
    let (Some(classes), Some(labels)) = (task.classes(), &source.labels) else {
        return;
    };
    let LabelsFound {
        counts, trained, ..
    } = &facts.labels;
    let rows = counts.iter().zip(trained).enumerate();
    let unseen = rows.filter(|(_, (all, trained))| **all > 0 && **trained == 0);
    let unseen: Vec<_> = unseen.map(|(class, _)| classes.name(class)).collect();
    if !unseen.is_empty() {
        tracing::warn!(
            "`val-split` {}: only held-out rows have these classes, which the model cannot learn: {}; help: give more \
             rows of them, or another `seed`",
            request.val_split,
            listed(&unseen)
        );
    }
    let Some(names) = labels.class_names() else {
        let absent = counts.iter().enumerate().filter(|(_, count)| **count == 0);
        let absent: Vec<String> = absent.map(|(class, _)| class.to_string()).collect();
        if let Some(shown) = some_of(8, absent.iter().cloned()) {
            tracing::warn!(
                "`data` {}: of {} classes {} have no rows: {shown}; help: number classes consecutively from 0",
                request.data,
                classes.count(),
                absent.len()
            );
        }
        return;
    };
    let mut by_lower: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        by_lower
            .entry(name.to_lowercase())
            .or_default()
            .push(name.clone());
    }
    let alike = by_lower.values().filter(|names| names.len() > 1);
    let alike: Vec<String> = alike.take(4).map(|names| listed(names)).collect();
    if !alike.is_empty() {
        tracing::warn!(
            "`labels` {}: classes that differ only in upper and lower case: {}",
            labels.name(),
            alike.join("; ")
        );
    }
}

/// The columns that f32 makes nearly constant, by some rows as f64.
fn columns_too_close(rows: &Rows) -> Result<Vec<(usize, Ends)>> {
    use Element::{F64, I32, I64, U32, U64};
    if !matches!(rows.element()?, F64 | I64 | U64 | I32 | U32) {
        return Ok(Vec::new());
    }
    let (all, width) = (rows.rows(), rows.width());
    let count = ROWS.min((NUMBERS / width).max(16) as u64).min(all);
    let (mut numbers, mut ends) = (vec![0.0; width], vec![Ends::NONE; width]);
    for index in 0..count {
        let row = (u128::from(index) * u128::from(all) / u128::from(count)) as u64;
        rows.read_f64(row, &mut numbers)?;
        for (ends, number) in ends.iter_mut().zip(&numbers) {
            ends.add(*number);
        }
    }
    let close = ends.into_iter().enumerate();
    Ok(close.filter(|(_, ends)| ends.are_too_close()).collect())
}

#[cfg(test)]
mod tests;
