//! What is read of all rows before training.

use super::source::OpenFiles;
use crate::error::{Error, Result};
use crate::file_rows::nonfinite;
use crate::files::Element;
use crate::normalize::Normalize;
use crate::ranks::{Ranks, agree};
use crate::scan::{self, Found};
use crate::split::Split;
use crate::task::{Classes, TaskSpec};

/// What was found in rows.
pub(super) struct Findings {
    /// Rows of each class.
    pub(super) counts: Vec<u64>,
    /// In features, if they were read.
    pub(super) features: Option<Found>,
    /// Whether features that may be wrong were not read.
    pub(super) has_unread_features: bool,
}

impl Findings {
    /// Of rows that were not read.
    pub(super) fn unread(has_unread_features: bool) -> Findings {
        Findings {
            counts: Vec::new(),
            features: None,
            has_unread_features,
        }
    }
}

/// Reads all labels, and features if they may be wrong or moments are needed. `known` is the task
/// that was learned from other rows.
pub(super) fn look(
    source: &OpenFiles,
    known: Option<&TaskSpec>,
    split: Option<&Split>,
    normalize: Normalize,
    ranks: &dyn Ranks,
) -> Result<Findings> {
    let labels = source.labels.as_ref();
    let labels = labels.ok_or_else(|| Error::Internal("training without labels".into()))?;
    let element = source.features().element()?;
    let needs_moments = known.is_none()
        && match normalize {
            Normalize::None => false,
            Normalize::Unit => element != Element::U8,
            Normalize::Standard => true,
        };
    let counts = scan::labels(
        labels,
        known.and_then(TaskSpec::classes).map(Classes::count),
        ranks,
    )?;
    let mut findings = Findings::unread(false);
    findings.counts = counts;
    if needs_moments || element.is_float() || element == Element::Bool {
        let is_trained_on = |row| split.is_none_or(|split| split.is_trained_on(row));
        let found = scan::features(source.features(), &is_trained_on, ranks, scan::BYTES_MAX)?;
        if let Some((row, column)) = found.bad {
            return Err(bad_feature(source, row, column as usize, ranks));
        }
        findings.has_unread_features = !found.is_complete;
        findings.features = Some(found);
    }
    Ok(findings)
}

/// The error of a non-finite feature, from a rank that sees it, should files differ between hosts.
fn bad_feature(source: &OpenFiles, row: u64, column: usize, ranks: &dyn Ranks) -> Error {
    let features = source.features();
    let mine = features.number(row, column);
    let mine = mine.and_then(|number| match (number as f32).is_finite() {
        true => Ok(()),
        false => Err(nonfinite(
            features,
            row,
            column,
            source.opened.columns.as_deref(),
        )),
    });
    agree(ranks, mine).err().unwrap_or_else(|| {
        let place = features.place(row);
        Error::Data(format!(
            "{place}: it changed while it was read; help: start again"
        ))
    })
}
