//! Reads all labels: the rows of each class, and the first label that is wrong.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::first_nonfinite;
use super::segments::in_segments;
use crate::error::{Error, Result};
use crate::labels::{CLASSES_MAX, Labels};
use crate::ranks::Ranks;
use crate::sampler::share;

/// Numbers read at a time.
const BLOCK_NUMBERS: u64 = 1 << 13;
/// Parts that labels are cut into. Counts are the same in whatever order they are added.
const SEGMENTS: u64 = 64;

/// What was found in labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Summary {
    /// Rows of each class; empty if labels are numbers.
    counts: Vec<u64>,
    /// Why the first wrong label is wrong.
    bad: Option<String>,
}

impl Summary {
    /// Adds later rows.
    fn merge(&mut self, later: Summary) {
        let width = self.counts.len().max(later.counts.len());
        self.counts.resize(width, 0);
        for (count, later) in self.counts.iter_mut().zip(later.counts) {
            *count += later;
        }
        self.bad = self.bad.take().or(later.bad);
    }
}

/// The rows of each class, of all labels; empty if labels are numbers. All ranks share the work.
/// Classes have to be among the `known` ones, if given.
pub(crate) fn labels(labels: &Labels, known: Option<usize>, ranks: &dyn Ranks) -> Result<Vec<u64>> {
    let internal = |error: serde_json::Error| Error::Internal(error.to_string());
    let rows = labels.rows();
    let block_rows = (BLOCK_NUMBERS / labels.width() as u64).max(1);
    let segments = SEGMENTS.min(rows.div_ceil(block_rows)).max(1);
    let mine = share(&(0..segments), ranks.rank(), ranks.size());
    let found = in_segments(mine, |segment| {
        let rows = share(&(0..rows), segment as usize, segments as usize);
        let mut summary = Summary::default();
        let mut first = rows.start;
        while first < rows.end && summary.bad.is_none() {
            let block = first..(first + block_rows).min(rows.end);
            first = block.end;
            match labels.are_classes() {
                true => read_classes(labels, block, known, &mut summary)?,
                false => read_values(labels, block, &mut summary)?,
            }
        }
        Ok(summary)
    });
    let bytes = found.and_then(|segments| {
        let mut mine = Summary::default();
        segments.into_iter().for_each(|segment| mine.merge(segment));
        serde_json::to_vec(&mine).map_err(internal)
    });
    let mut all = Summary::default();
    for bytes in ranks.share(bytes)? {
        all.merge(serde_json::from_slice(&bytes).map_err(internal)?);
    }
    match all.bad {
        None => Ok(all.counts),
        Some(why) => Err(Error::Data(why)),
    }
}

fn read_classes(
    labels: &Labels,
    rows: Range<u64>,
    known: Option<usize>,
    summary: &mut Summary,
) -> Result<()> {
    let mut classes = vec![0; (rows.end - rows.start) as usize];
    labels.classes(rows.start, &mut classes)?;
    let most = known.unwrap_or(CLASSES_MAX);
    for (row, &class) in rows.zip(&classes) {
        let class = usize::try_from(class).ok().filter(|&class| class < most);
        let Some(class) = class else {
            summary.bad = Some(labels.why_no_class(row, known)?);
            return Ok(());
        };
        if class >= summary.counts.len() {
            summary.counts.resize(class + 1, 0);
        }
        summary.counts[class] += 1;
    }
    Ok(())
}

fn read_values(labels: &Labels, rows: Range<u64>, summary: &mut Summary) -> Result<()> {
    let width = labels.width();
    let mut values = vec![0f32; (rows.end - rows.start) as usize * width];
    labels.values(rows.start, &mut values)?;
    if let Some(index) = first_nonfinite(&values) {
        let row = rows.start + (index / width) as u64;
        summary.bad = Some(labels.why_no_value(row, index % width)?);
    }
    Ok(())
}
