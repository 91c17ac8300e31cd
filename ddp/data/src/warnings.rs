//! What is logged of data that can be trained on.

use crate::error::Result;
use crate::facts::Facts;
use crate::files::{Element, listed, some_of};
use crate::guess;
use crate::normalize::{Normalization, Normalize};
use crate::open::Source;
use crate::request::DataRequest;
use crate::scan::{self, Moments};
use crate::setting::{DATA, LABELS, NORMALIZE, SEED, VAL_SPLIT};
use crate::task::TaskSpec;

/// Logs which columns of tables are categorical, and which cells had no number or category.
pub(crate) fn log_table(source: &Source) {
    let Source { setting, path, .. } = source;
    let plans = source.plan.iter().flatten();
    let categorical = plans.filter(|plan| plan.is_categorical());
    let categorical: Vec<String> = categorical.map(|plan| plan.name.clone()).collect();
    if !categorical.is_empty() {
        let names = listed(&categorical);
        tracing::info!("{setting} {path}: categorical columns: {names}");
    }
    let missing = source.odd_cells.iter().filter(|odd| odd.missing > 0);
    let missing = missing.map(|odd| format!("\"{}\" {}", odd.column, odd.missing));
    if let Some(missing) = some_of(20, missing) {
        tracing::info!("{setting} {path}: missing cells, which are filled in: {missing}");
    }
    let odd = source.odd_cells.iter().filter(|odd| odd.unseen > 0);
    let unseen = odd.map(|odd| {
        let examples = listed(&odd.examples);
        format!("\"{}\" {} ({examples})", odd.column, odd.unseen)
    });
    if let Some(unseen) = some_of(20, unseen) {
        tracing::warn!(
            "{setting} {path}: cells with values that were not trained on, which count as none of the categories: {unseen}"
        );
    }
}

/// Warns of files to evaluate on that are trained on.
pub(crate) fn warn_of_shared(val: &Source, train: &Source) {
    if let Some(name) = val.shared_with(train) {
        let Source { setting, path, .. } = val;
        tracing::warn!(
            "{setting} {path}: {name} is trained on too: it says nothing about new rows"
        );
    }
}

/// The columns whose least and greatest numbers satisfy `are_so`.
fn columns_with(moments: &Moments, are_so: fn(f32, f32) -> bool) -> impl Iterator<Item = usize> {
    let ends = moments.least.iter().zip(&moments.greatest).enumerate();
    let found = ends.filter(move |(_, (least, greatest))| are_so(**least, **greatest));
    found.map(|(column, _)| column)
}

/// Warns of columns of `what`, with these moments, that f32 makes nearly constant.
fn warn_of_rounding(what: &str, moments: &Moments, name: impl Fn(usize) -> String) {
    let close = columns_with(moments, guess::are_too_close).map(name);
    if let Some(close) = some_of(8, close) {
        tracing::warn!(
            "{what}: f32 rounds nearly all differences between the numbers of {close}; help: subtract an offset before \
             saving them, as in x - x.min()"
        );
    }
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
            "{DATA} {data}: features are bytes up to 255, and models learn better from 0 to 1; help: set {NORMALIZE} to unit"
        );
    }
    if let Some(found) = &facts.features {
        let constant = columns_with(&found.moments, |least, greatest| least == greatest);
        let constant: Vec<String> = constant.map(|index| source.feature(index)).collect();
        if request.normalize == Normalize::Standard && !constant.is_empty() {
            let names = listed(&constant);
            tracing::warn!(
                "{DATA} {data}: features that are the same in all rows that are trained on, and say nothing: {names}"
            );
        }
        let name = |index| format!("feature {}", source.feature(index));
        warn_of_rounding(&format!("{DATA} {data}"), &found.moments, name);
        if !found.is_complete {
            tracing::warn!(
                "{DATA} {data}: more than {} GB of features: {} rows spread over all were checked before training, the others \
                 are checked when they are trained on",
                scan::BYTES_MAX >> 30,
                found.moments.count
            );
        }
    }
    warn_of_labels(request, source, facts);
    warn_of_classes(request, source, facts, task);
    Ok(())
}

/// Says how numeric targets are standardized, and warns of those that are hard to learn.
fn warn_of_labels(request: &DataRequest, source: &Source, facts: &Facts) {
    let (Some(labels), Some(moments)) = (&source.labels, &facts.targets) else {
        return;
    };
    let name = labels.name();
    let column = |index| format!("column {index} (counted from 0)");
    warn_of_rounding(&format!("{LABELS} {name}"), moments, column);
    let Normalization { shift, scale } = Normalization::standard(moments);
    let targets = shift.iter().zip(scale.iter().map(|scale| 1.0 / scale));
    let described = |(mean, deviation)| format!("mean {mean:?}, standard deviation {deviation:?}");
    let described: Vec<String> = targets.clone().take(8).map(described).collect();
    let described = described.join("; ");
    let mut targets = targets;
    if request.normalize != Normalize::Standard {
        if targets.any(|(mean, deviation)| guess::are_large_targets(*mean, deviation)) {
            tracing::warn!(
                "{LABELS} {name}: {described}: expected numbers of a size near 1, which models learn; help: set {NORMALIZE} \
                 to standard, which scales features and labels"
            );
        }
    } else if request.normalizes_targets {
        tracing::info!(
            "{LABELS} {name}: standardized ({described}): losses are in these units, and 1 is the loss of predicting the mean"
        );
    }
    let constant = columns_with(moments, |least, greatest| least == greatest);
    let constant = constant.map(|column| column.to_string());
    if let Some(columns) = some_of(usize::MAX, constant) {
        tracing::warn!(
            "{LABELS} {name}: the same number in all rows that were looked at, in column {columns} (counted from 0)"
        );
    }
}

/// Warns of classes that cannot be learned or that have no rows.
fn warn_of_classes(request: &DataRequest, source: &Source, facts: &Facts, task: &TaskSpec) {
    let (Some(classes), Some(labels)) = (task.classes(), &source.labels) else {
        return;
    };
    let counts = &facts.labels.counts;
    let rows = counts.iter().zip(&facts.labels.trained).enumerate();
    let unseen = rows.filter(|(_, (all, trained))| **all > 0 && **trained == 0);
    let unseen: Vec<_> = unseen.map(|(class, _)| classes.name(class)).collect();
    if !unseen.is_empty() {
        tracing::warn!(
            "{VAL_SPLIT} {}: only held-out rows have these classes, which the model cannot learn: {}; help: give more \
             rows of them, or another {SEED}",
            request.val_split,
            listed(&unseen)
        );
    }
    if labels.class_names().is_none() {
        let absent = counts.iter().enumerate().filter(|(_, count)| **count == 0);
        let absent: Vec<String> = absent.map(|(class, _)| class.to_string()).collect();
        if let Some(shown) = some_of(8, absent.iter().cloned()) {
            tracing::warn!(
                "{DATA} {}: of {} classes {} have no rows: {shown}; help: number classes consecutively from 0",
                request.data,
                classes.count(),
                absent.len()
            );
        }
    }
}
