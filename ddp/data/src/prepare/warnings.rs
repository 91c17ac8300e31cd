//! Warnings about data that can be trained on.

use std::collections::{BTreeMap, HashSet};

use super::look::Findings;
use super::source::OpenFiles;
use crate::error::Result;
use crate::files::listed;
use crate::files::{Element, OddCells};
use crate::fill::Present;
use crate::normalize::{Normalization, Normalize};
use crate::request::DataRequest;
use crate::rounding::{self, Ends, STEPS_MIN};
use crate::scan::{self, LabelsFound, Moments};
use crate::stack::Stack;
use crate::task::TaskSpec;

/// Rows that are read to find columns that f32 rounds, and numbers of them if rows are wide.
const ROWS: u64 = 1024;
const NUMBERS: usize = 1 << 22;
/// Means and deviations of targets above this are warned of.
const TARGETS_MAX: f32 = 100.0;

/// Logs which columns of tables are categorical, and which cells had no number or category.
pub(super) fn log_table(source: &OpenFiles, path: &str) {
    let (setting, opened) = (source.setting, &source.opened);
    let plans = opened
        .plan
        .iter()
        .flatten()
        .filter(|plan| plan.is_categorical());
    let categorical: Vec<_> = plans.map(|plan| plan.name.clone()).collect();
    if !categorical.is_empty() {
        tracing::info!(
            "`{setting}` {path}: categorical columns: {}",
            listed(&categorical)
        );
    }
    let of_columns = |describe: &dyn Fn(&OddCells) -> Option<String>| {
        let all: Vec<_> = opened.odd_cells.iter().filter_map(describe).collect();
        let more = if all.len() > 20 { ", …" } else { "" };
        (!all.is_empty()).then(|| all[..all.len().min(20)].join(", ") + more)
    };
    let is_categorical: HashSet<&String> = categorical.iter().collect();
    let missing = |are_categorical: bool| {
        of_columns(&|odd: &OddCells| {
            let is_one = odd.missing > 0 && is_categorical.contains(&odd.column) == are_categorical;
            is_one.then(|| format!("\"{}\" {}", odd.column, odd.missing))
        })
    };
    if let Some(missing) = missing(false) {
        tracing::info!("`{setting}` {path}: missing cells, which are filled in: {missing}");
    }
    if let Some(missing) = missing(true) {
        tracing::info!(
            "`{setting}` {path}: missing cells of categorical columns, whose features are all 0: {missing}"
        );
    }
    let unseen = |odd: &OddCells| {
        let (column, count, examples) = (&odd.column, odd.unseen, listed(&odd.examples));
        (count > 0).then(|| format!("\"{column}\" {count} ({examples})"))
    };
    if let Some(unseen) = of_columns(&unseen) {
        tracing::warn!(
            "`{setting}` {path}: cells with values that were not trained on, which count as none of the categories: {unseen}"
        );
    }
}

/// Logs how many numbers of each feature are missing in rows that are called `of_rows`.
pub(super) fn log_missing(source: &OpenFiles, path: &str, present: &Present, of_rows: &str) {
    let columns = source.opened.columns.as_ref();
    let name = |index: usize| {
        columns.map_or_else(
            || format!("{index}"),
            |names| format!("\"{}\"", names[index]),
        )
    };
    let missing = present.missing();
    let some = missing.iter().enumerate().filter(|(_, count)| **count > 0);
    let some: Vec<_> = some
        .map(|(index, count)| format!("{} {count}", name(index)))
        .collect();
    if some.is_empty() {
        return;
    }
    let at_least = if present.is_complete { "" } else { "at least " };
    let more = if some.len() > 20 { ", …" } else { "" };
    tracing::info!(
        "`{}` {path}: {at_least}{} missing numbers{of_rows}, which are filled in, by feature: {}{more}",
        source.setting,
        missing.iter().sum::<u64>(),
        some[..some.len().min(20)].join(", ")
    );
}

/// Logs what a user should know of these data.
pub(super) fn warn(
    request: &DataRequest,
    source: &OpenFiles,
    findings: &Findings,
    task: &TaskSpec,
) -> Result<()> {
    let data = &request.data;
    let features = source.features();
    if features.element()? == Element::U8 && request.normalize == Normalize::None {
        tracing::warn!(
            "`data` {data}: features are bytes up to 255, and models learn better from 0 to 1; help: set `normalize` to unit"
        );
    }
    if let (Some(labels), Some((least, greatest))) = (&source.labels, findings.labels.range) {
        let width = labels.width();
        let close = columns_too_close(labels.stack(), &vec![least; width], &vec![greatest; width])?;
        let name = |(column, ends)| (format!("{column} of the labels ({})", labels.name()), ends);
        let close: Vec<_> = close.into_iter().map(name).collect();
        if let Some(warning) = rounding::warning(&close) {
            tracing::warn!("`labels`: {warning}");
        }
    }
    if let (Some(moments), Some(labels)) = (&findings.targets, &source.labels) {
        log_targets(request, &labels.name(), moments);
    }
    if let (Some(names), Some(labels)) = (&source.names, &source.labels) {
        warn_of_case(&labels.name(), names);
    }
    if let Some(found) = &findings.features {
        if request.normalize == Normalize::Standard {
            warn_of_constants(request, source, &found.moments);
        }
        // Tables are checked when they are converted.
        let close = columns_too_close(features, &found.moments.least, &found.moments.greatest)?;
        let name = |(column, ends)| (format!("{column} (counted from 0)"), ends);
        let close: Vec<_> = close.into_iter().map(name).collect();
        if let Some(warning) = rounding::warning(&close) {
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
    if let Some(classes) = task.classes() {
        let LabelsFound {
            counts, trained, ..
        } = &findings.labels;
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
    }
    if let (Some(classes), None) = (task.classes(), &source.names) {
        let counts = findings.labels.counts.iter().enumerate();
        let absent = counts.filter(|(_, count)| **count == 0);
        let absent: Vec<usize> = absent.map(|(class, _)| class).collect();
        if !absent.is_empty() {
            let shown = absent.iter().take(8).map(usize::to_string);
            let shown = shown.collect::<Vec<_>>().join(", ");
            let more = if absent.len() > 8 { " …" } else { "" };
            tracing::warn!(
                "`data` {data}: of {} classes {} have no rows: {shown}{more}; help: number classes consecutively from 0",
                classes.count(),
                absent.len()
            );
        }
    }
    Ok(())
}

/// Says how numeric targets are standardized, or warns of those that are hard to learn.
fn log_targets(request: &DataRequest, labels: &str, moments: &Moments) {
    let Normalization { shift, scale } = Normalization::standard(moments);
    let targets = shift.iter().zip(scale.iter().map(|scale| 1.0 / scale));
    let described = |(mean, deviation)| format!("mean {mean:?}, standard deviation {deviation:?}");
    let described: Vec<String> = targets.clone().take(8).map(described).collect();
    let described = described.join("; ");
    if request.normalize != Normalize::Standard {
        if targets
            .into_iter()
            .any(|(mean, deviation)| mean.abs().max(deviation) > TARGETS_MAX)
        {
            tracing::warn!(
                "`labels` {labels}: {described}: expected numbers of a size near 1, which models learn; help: set `normalize` \
                 to standard, which scales features and labels"
            );
        }
    } else if request.normalizes_targets {
        tracing::info!(
            "`labels` {labels}: standardized ({described}): losses are in these units, and 1 is the loss of predicting the mean"
        );
    }
    let ends = moments.least.iter().zip(&moments.greatest);
    let constant = ends
        .enumerate()
        .filter(|(_, (least, greatest))| least == greatest);
    let constant: Vec<String> = constant.map(|(column, _)| column.to_string()).collect();
    if !constant.is_empty() {
        tracing::warn!(
            "`labels` {labels}: the same number in all rows that were looked at, in column {} (counted from 0)",
            constant.join(", ")
        );
    }
}

/// Warns of classes that differ only in upper and lower case, which may be one.
fn warn_of_case(labels: &str, names: &[String]) {
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
            "`labels` {labels}: classes that differ only in upper and lower case: {}",
            alike.join("; ")
        );
    }
}

/// Logs the features that are the same in all rows that are trained on.
fn warn_of_constants(request: &DataRequest, source: &OpenFiles, moments: &Moments) {
    let ends = moments.least.iter().zip(&moments.greatest).enumerate();
    let constant = ends.filter(|(_, (least, greatest))| least == greatest);
    let columns = source.opened.columns.as_ref();
    let name = |(index, _): (usize, _)| {
        columns.map_or_else(|| format!("{index}"), |names| names[index].clone())
    };
    let constant: Vec<String> = constant.map(name).collect();
    if !constant.is_empty() {
        tracing::warn!(
            "`data` {}: features that are the same in all rows that are trained on, and say nothing: {}",
            request.data,
            listed(&constant)
        );
    }
}

/// The columns that f32 makes nearly constant: candidates by their ends, confirmed by some rows
/// as f64.
pub(super) fn columns_too_close(
    features: &Stack,
    least: &[f32],
    greatest: &[f32],
) -> Result<Vec<(usize, Ends)>> {
    let may_round = matches!(
        features.element()?,
        Element::F64 | Element::I64 | Element::U64 | Element::I32 | Element::U32
    );
    let is_close = |(&least, &greatest): (&f32, &f32)| {
        // `Ends` leaves out 0, behind which the other numbers may be close.
        if least == 0.0 || greatest == 0.0 {
            return true;
        }
        let ends = Ends {
            least: f64::from(least),
            greatest: f64::from(greatest),
            any_rounded: true,
        };
        // Either end may have been rounded by a step.
        ends.greatest == ends.least || ends.greatest - ends.least < (STEPS_MIN + 2.0) * ends.step()
    };
    let ranges = least.iter().zip(greatest).enumerate();
    let mut close: Vec<(usize, Ends)> = ranges
        .filter(|(_, range)| may_round && is_close(*range))
        .map(|(column, _)| (column, Ends::NONE))
        .collect();
    if close.is_empty() {
        return Ok(close);
    }
    let (rows, width) = (features.rows(), features.width());
    let count = ROWS.min((NUMBERS / width).max(16) as u64).min(rows);
    let mut numbers = vec![0.0; width];
    for index in 0..count {
        let row = (u128::from(index) * u128::from(rows) / u128::from(count)) as u64;
        features.read_f64(row, &mut numbers)?;
        for (column, ends) in &mut close {
            ends.add(numbers[*column]);
        }
    }
    close.retain(|(_, ends)| ends.are_too_close());
    Ok(close)
}

#[cfg(test)]
mod tests;
