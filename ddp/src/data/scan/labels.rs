//! Looking at all labels: which classes there are, with how many rows each, and the first label that is none.

use ddp_comm::World;
use serde::{Deserialize, Serialize};

use super::{in_segments, share};
use crate::data::agree;
use crate::data::labels::Labels;
use crate::error::{Error, Result};

/// The most classes: labels that go beyond are hardly classes.
pub(crate) const CLASSES_MAX: usize = 1 << 16;
/// Numbers that are read at a time.
const BLOCK_NUMBERS: u64 = 1 << 13;
/// Pieces that labels are cut into: counts are the same however they are added.
const SEGMENTS: u64 = 64;

/// What was found in labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LabelSummary {
    /// Rows of each class; empty where labels are no classes.
    pub(crate) counts: Vec<u64>,
    /// The first row whose label cannot be, and why.
    pub(crate) bad: Option<(u64, String)>,
}

impl LabelSummary {
    fn merge(&mut self, behind: LabelSummary) {
        if self.counts.len() < behind.counts.len() {
            self.counts.resize(behind.counts.len(), 0);
        }
        self.counts.iter_mut().zip(&behind.counts).for_each(|(count, behind)| *count += behind);
        // The first of both: ranks take segments in the order of rows.
        self.bad = self.bad.take().or(behind.bad);
    }
}

/// Looks at all labels, on all ranks of `world` together. Where `known` classes are known, others cannot be.
pub(crate) fn labels(labels: &Labels, known: Option<usize>, world: &World) -> Result<LabelSummary> {
    let rows = labels.rows();
    let block_rows = (BLOCK_NUMBERS / labels.width() as u64).max(1);
    let segments = SEGMENTS.min(rows.div_ceil(block_rows)).max(1);
    let mine = share(&(0..segments), world.rank(), world.size());
    let found = in_segments(mine, |segment| {
        let rows = share(&(0..rows), segment as usize, segments as usize);
        let mut summary = LabelSummary::default();
        let mut first = rows.start;
        while first < rows.end && summary.bad.is_none() {
            let end = (first + block_rows).min(rows.end);
            if labels.are_classes() {
                look_at_classes(labels, first..end, known, &mut summary)?;
            } else {
                look_at_values(labels, first..end, &mut summary)?;
            }
            first = end;
        }
        Ok(summary)
    });
    let mut total = LabelSummary::default();
    agree::all(world, found)?.into_iter().for_each(|segment| total.merge(segment));
    if world.size() == 1 {
        return Ok(total);
    }
    let told = serde_json::to_vec(&total).map_err(|error| Error::Internal(error.to_string()))?;
    let mut all = LabelSummary::default();
    for told in world.all_gather_bytes(&told)? {
        all.merge(serde_json::from_slice(&told).map_err(|error| Error::Internal(error.to_string()))?);
    }
    Ok(all)
}

fn look_at_classes(
    labels: &Labels,
    rows: std::ops::Range<u64>,
    known: Option<usize>,
    summary: &mut LabelSummary,
) -> Result<()> {
    let mut classes = vec![0; (rows.end - rows.start) as usize];
    labels.classes(rows.start, &mut classes)?;
    for (row, &class) in rows.zip(&classes) {
        match usize::try_from(class).ok().filter(|&class| class < known.unwrap_or(CLASSES_MAX)) {
            Some(class) => {
                if class >= summary.counts.len() {
                    summary.counts.resize(class + 1, 0);
                }
                summary.counts[class] += 1;
            }
            None => {
                summary.bad = Some((row, labels.why_no_class(row, known)?));
                return Ok(());
            }
        }
    }
    Ok(())
}

fn look_at_values(labels: &Labels, rows: std::ops::Range<u64>, summary: &mut LabelSummary) -> Result<()> {
    let mut values = vec![0f32; (rows.end - rows.start) as usize * labels.width()];
    labels.values(rows.start, &mut values)?;
    if let Some(index) = super::first_nonfinite(&values) {
        let row = rows.start + (index / labels.width()) as u64;
        summary.bad = Some((row, labels.why_no_value(row, index % labels.width())?));
    }
    Ok(())
}
