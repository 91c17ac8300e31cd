//! What is read of all rows before training.

use twox_hash::XxHash3_64;

use super::source::OpenFiles;
use crate::error::{Error, Result};
use crate::file_rows::nonfinite;
use crate::files::Element;
use crate::fill::Filled;
use crate::labels::Labels;
use crate::normalize::Normalize;
use crate::ranks::{Ranks, SameFiles, agree};
use crate::scan::{self, Found, LabelsFound, Moments, RowReader};
use crate::split::Split;
use crate::task::{Classes, TaskSpec};

/// The most bytes of targets that are read only to see how large they are.
const SAMPLED_BYTES_MAX: u64 = 1 << 20;

/// What was found in rows.
pub(super) struct Findings {
    /// In labels.
    pub(super) labels: LabelsFound,
    /// In features, if they were read.
    pub(super) features: Option<Found>,
    /// Of the numeric targets that are trained on.
    pub(super) targets: Option<Moments>,
    /// Whether features that may be wrong were not read.
    pub(super) has_unread_features: bool,
    /// A hash of labels and features, if they were read.
    pub(super) content: Option<String>,
}

impl Findings {
    /// Of rows that were not read.
    pub(super) fn unread(has_unread_features: bool) -> Findings {
        Findings {
            labels: LabelsFound::default(),
            features: None,
            targets: None,
            has_unread_features,
            content: None,
        }
    }
}

/// Reads all labels and features, and compares their content between ranks with different files.
/// `known` is the task that was learned from other rows, `fill` what stands for
/// missing numbers.
pub(super) fn look(
    source: &OpenFiles,
    known: Option<&TaskSpec>,
    split: Option<&Split>,
    fill: Option<&[f32]>,
    normalize: Normalize,
    ranks: &dyn Ranks,
) -> Result<Findings> {
    let element = source.features().element()?;
    let needs_moments = known.is_none()
        && match normalize {
            Normalize::None => false,
            Normalize::Unit => element != Element::U8,
            Normalize::Standard => true,
        };
    let needs_moments = needs_moments || element.is_float() || element == Element::Bool;
    let mut findings = Findings::unread(false);
    findings.labels = look_at_labels(source, known, split, ranks)?;
    let ranks = SameFiles::of(ranks, &source.identity())?;
    let is_trained_on = |row| split.is_none_or(|split| split.is_trained_on(row));
    let numbers = source.labels.iter().filter(|labels| !labels.are_classes());
    if let (Some(labels), None) = (numbers.map(Labels::stack).next(), known) {
        let bytes_max = match normalize {
            Normalize::Standard => scan::BYTES_MAX,
            _ => SAMPLED_BYTES_MAX,
        };
        let found = scan::features(labels, &is_trained_on, &ranks, bytes_max)?;
        findings.targets = Some(found.moments);
    }
    // Without rows to train on only the content is hashed.
    let is_trained_on = |row| needs_moments && is_trained_on(row);
    let bytes_max = match needs_moments {
        true => scan::BYTES_MAX,
        false => scan::HASHED_BYTES_MAX,
    };
    let rows = source.features();
    let filled = Filled { rows, fill };
    let rows: &dyn RowReader = if fill.is_some() { &filled } else { rows };
    let found = scan::features(rows, &is_trained_on, &ranks, bytes_max)?;
    // From a rank that sees it, should files differ between hosts.
    let bad = found
        .bad
        .map(|(row, column)| bad_feature(source, row, column as usize));
    agree(&ranks, bad.map_or(Ok(()), Err))?;
    must_match(source, "features", found.hash, &ranks)?;
    let part = match found.is_complete {
        true => "",
        false => " (features in part)",
    };
    let hashes = [findings.labels.hash, found.hash].map(u64::to_le_bytes);
    let hash = XxHash3_64::oneshot(hashes.as_flattened());
    findings.content = Some(format!("{hash:016x}{part}"));
    if needs_moments {
        findings.has_unread_features = !found.is_complete;
        findings.features = Some(found);
    }
    Ok(findings)
}

/// Reads all labels.
pub(super) fn look_at_labels(
    source: &OpenFiles,
    known: Option<&TaskSpec>,
    split: Option<&Split>,
    ranks: &dyn Ranks,
) -> Result<LabelsFound> {
    let labels = source.labels.as_ref();
    let labels = labels.ok_or_else(|| Error::Internal("training without labels".into()))?;
    let ranks = SameFiles::of(ranks, &source.identity())?;
    let classes = known.and_then(TaskSpec::classes).map(Classes::count);
    let is_trained_on = |row| split.is_none_or(|split| split.is_trained_on(row));
    let mut found = scan::labels(labels, classes, &is_trained_on, &ranks)?;
    let bad = found.bad.take().map(Error::Data);
    agree(&ranks, bad.map_or(Ok(()), Err))?;
    must_match(source, "labels", found.hash, &ranks)?;
    Ok(found)
}

/// An error on all ranks unless this hash is the same on all of them.
fn must_match(source: &OpenFiles, what: &str, hash: u64, ranks: &dyn Ranks) -> Result<()> {
    let file = source.features().arrays()[0].name();
    let field = format!("the content of the {what} of `{}` ({file})", source.setting);
    let help = "give every rank the same data: compare the files on the hosts";
    ranks.must_match(&[(field, format!("{hash:016x}"))], help)
}

/// The error of a non-finite feature.
fn bad_feature(source: &OpenFiles, row: u64, column: usize) -> Error {
    let features = source.features();
    match features.number(row, column) {
        Ok(number) if (number as f32).is_finite() => Error::Data(format!(
            "{}: it changed while it was read; help: start again",
            features.place(row)
        )),
        Ok(_) => nonfinite(features, row, column, source.opened.columns.as_deref()),
        Err(error) => error,
    }
}
