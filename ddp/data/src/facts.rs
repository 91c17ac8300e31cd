//! What is found in all rows before training, in one pass that the ranks share: the classes or the
//! range of labels, the moments of features, missing and bad numbers, and a hash of all.

use twox_hash::XxHash3_64;

use crate::error::{Error, Result};
use crate::feature_plan::{ColumnPlan, Missing};
use crate::file_rows::nonfinite;
use crate::files::{Element, some_of};
use crate::fill::{self, Filled, Present};
use crate::normalize::Normalize;
use crate::open::Source;
use crate::ranks::{Ranks, SameFiles, agree};
use crate::request::{DataRequest, Trained};
use crate::scan::{self, Found, LabelsFound, Moments, RowReader};
use crate::split::Split;
use crate::task::Classes;

/// The most bytes of targets that are read only to see how large they are.
const SAMPLED_BYTES_MAX: u64 = 1 << 20;

/// What was found in rows.
pub(crate) struct Facts {
    /// Which rows are held out; `None` if none are.
    pub(crate) split: Option<Split>,
    /// What stands for missing numbers, one for each feature.
    pub(crate) fill: Option<Vec<f32>>,
    pub(crate) labels: LabelsFound,
    /// In features, if their numbers were looked at.
    pub(crate) features: Option<Found>,
    /// Of the numeric targets that are trained on.
    pub(crate) targets: Option<Moments>,
    /// Whether features that may be wrong were not read.
    pub(crate) has_unread_features: bool,
    /// A hash of labels and features, if they were read.
    pub(crate) content: Option<String>,
}

/// Reads all labels and features, and compares their content between ranks with different files.
/// `model` is what was learned from other rows. Of rows for a trained model only labels are read.
pub(crate) fn scan(
    request: &DataRequest,
    source: &Source,
    model: Option<&Trained>,
    ranks: &dyn Ranks,
) -> Result<Facts> {
    let split = match model {
        None => request.split(source.features.rows(), ranks)?,
        Some(_) => None,
    };
    let is_trained_on = |row| split.as_ref().is_none_or(|split| split.is_trained_on(row));
    let same = SameFiles::of(ranks, &source.identity())?;
    let fill = fill_of(request, source, model, &is_trained_on, &same, ranks)?;
    let mut facts = Facts {
        fill,
        labels: labels(source, model, &is_trained_on, &same)?,
        features: None,
        targets: None,
        has_unread_features: source.features.element()?.is_float(),
        content: None,
        split: None,
    };
    if request.trained.is_none() {
        features(&mut facts, request, source, (model, &is_trained_on), &same)?;
    }
    facts.split = split;
    Ok(facts)
}

/// Which rows are trained on.
type IsTrainedOn<'a> = &'a (dyn Fn(u64) -> bool + Sync);

/// What stands for missing numbers, as the model says or as the training rows show. How many are
/// missing in arrays is logged; in tables it is when they are converted.
fn fill_of(
    request: &DataRequest,
    source: &Source,
    model: Option<&Trained>,
    is_trained_on: IsTrainedOn<'_>,
    same: &SameFiles<'_>,
    ranks: &dyn Ranks,
) -> Result<Option<Vec<f32>>> {
    let (how, is_table) = (request.table.missing, source.is_table());
    let (is_searched, of_rows) = match model {
        Some(model) => (model.plan.fill.is_some() && !is_table, ""),
        None => (
            how == Missing::Mean || how == Missing::Zero && !is_table,
            " in the rows that are trained on",
        ),
    };
    let present = match is_searched {
        true => Present::find(&source.features, is_trained_on, same)?,
        false => None,
    };
    if let (Some(present), 0, false) = (&present, ranks.rank(), is_table) {
        log_missing(source, present, of_rows);
    }
    match model {
        Some(model) => Ok(model.plan.fill.clone()),
        None => fill::fit(
            how,
            &source.features,
            source.columns.as_deref(),
            present.as_ref(),
        ),
    }
}

/// Logs how many numbers of each feature are missing in rows that are called `of_rows`.
fn log_missing(source: &Source, present: &Present, of_rows: &str) {
    let missing = present.missing();
    let name = |index: usize| match &source.columns {
        Some(names) => format!("\"{}\"", names[index]),
        None => index.to_string(),
    };
    let some = missing.iter().enumerate().filter(|(_, count)| **count > 0);
    let some = some.map(|(index, count)| format!("{} {count}", name(index)));
    let at_least = if present.is_complete { "" } else { "at least " };
    if let Some(some) = some_of(20, some) {
        tracing::info!(
            "`{}` {}: {at_least}{} missing numbers{of_rows}, which are filled in, by feature: {some}",
            source.setting,
            source.path,
            missing.iter().sum::<u64>()
        );
    }
}

/// Reads all labels, if they are needed.
fn labels(
    source: &Source,
    model: Option<&Trained>,
    is_trained_on: IsTrainedOn<'_>,
    same: &SameFiles<'_>,
) -> Result<LabelsFound> {
    let Some(labels) = &source.labels else {
        return Ok(LabelsFound::default());
    };
    let classes = model.and_then(|model| model.task.classes());
    let classes = classes.map(Classes::count);
    let mut found = scan::labels(labels, classes, is_trained_on, same)?;
    let bad = found.bad.take().map(Error::Data);
    agree(same, bad.map_or(Ok(()), Err))?;
    must_match(source, "labels", found.hash, same)?;
    Ok(found)
}

/// Reads all features, and numeric targets that are to be learned.
fn features(
    facts: &mut Facts,
    request: &DataRequest,
    source: &Source,
    (model, is_trained_on): (Option<&Trained>, IsTrainedOn<'_>),
    same: &SameFiles<'_>,
) -> Result<()> {
    let (element, normalize) = (source.features.element()?, request.normalize);
    let is_normalized = match normalize {
        Normalize::None => false,
        Normalize::Unit => element != Element::U8,
        Normalize::Standard => true,
    };
    let may_be_wrong = element.is_float() || element == Element::Bool;
    let needs_moments = model.is_none() && is_normalized || may_be_wrong;
    let numbers = source.labels.iter().find(|labels| !labels.are_classes());
    if let (Some(labels), None) = (numbers, model) {
        let bytes_max = match normalize {
            Normalize::Standard => scan::BYTES_MAX,
            _ => SAMPLED_BYTES_MAX,
        };
        let found = scan::features(labels.rows_of_numbers(), is_trained_on, same, bytes_max)?;
        facts.targets = Some(found.moments);
    }
    // Without rows to train on only the content is hashed.
    let is_trained_on = |row| needs_moments && is_trained_on(row);
    let bytes_max = match needs_moments {
        true => scan::BYTES_MAX,
        false => scan::HASHED_BYTES_MAX,
    };
    let rows = &source.features;
    let fill = facts.fill.as_deref();
    let filled = Filled { rows, fill };
    let rows: &dyn RowReader = if fill.is_some() { &filled } else { rows };
    let found = scan::features(rows, &is_trained_on, same, bytes_max)?;
    // From a rank that sees it, should files differ between hosts.
    let bad = found.bad.map(|place| bad_feature(source, place));
    agree(same, bad.map_or(Ok(()), Err))?;
    must_match(source, "features", found.hash, same)?;
    let part = match found.is_complete {
        true => "",
        false => " (features in part)",
    };
    let hashes = [facts.labels.hash, found.hash].map(u64::to_le_bytes);
    let hash = XxHash3_64::oneshot(hashes.as_flattened());
    facts.content = Some(format!("{hash:016x}{part}"));
    facts.has_unread_features = needs_moments && !found.is_complete;
    facts.features = needs_moments.then_some(found);
    Ok(())
}

/// An error on all ranks unless this hash is the same on all of them.
fn must_match(source: &Source, what: &str, hash: u64, ranks: &dyn Ranks) -> Result<()> {
    let (setting, file) = (source.setting, source.place());
    let field = format!("the content of the {what} of `{setting}` ({file})");
    let help = "give every rank the same data: compare the files on the hosts";
    ranks.must_match(&[(field, format!("{hash:016x}"))], help)
}

/// The error of a non-finite feature.
fn bad_feature(source: &Source, (row, column): (u64, u64)) -> Error {
    let (features, column) = (&source.features, column as usize);
    match features.number(row, column) {
        Ok(number) if (number as f32).is_finite() => Error::Data(format!(
            "{}: it changed while it was read; help: start again",
            features.place(row)
        )),
        Ok(_) => nonfinite(features, row, column, source.columns.as_deref()),
        Err(error) => error,
    }
}

impl Facts {
    /// The columns without the categories that only held-out rows have, whose weights would stay
    /// random; `None` if there are none.
    pub(crate) fn trained_categories(&self, source: &Source) -> Option<Vec<ColumnPlan>> {
        let found = self.features.as_ref().filter(|found| found.is_complete)?;
        let plan = source.plan.as_ref()?;
        let mut greatest = found.moments.greatest.iter();
        let seen = |column: &ColumnPlan| {
            let mine: Vec<&f32> = greatest.by_ref().take(column.width()).collect();
            let values = column.values.as_ref().map(|values| {
                let values = values.iter().zip(mine);
                let seen = values.filter(|(_, greatest)| **greatest > 0.0);
                seen.map(|(value, _)| value.clone()).collect()
            });
            let name = column.name.clone();
            ColumnPlan { name, values }
        };
        let seen: Vec<ColumnPlan> = plan.iter().map(seen).collect();
        (seen != *plan).then_some(seen)
    }
}
