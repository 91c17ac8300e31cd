//! Reads all labels: the rows of each class, a hash of their content, what shows whether they are
//! classes or numbers, and the first label that is wrong.

use std::collections::BTreeSet;
use std::ops::Range;

use ddp_kernels::heartbeat::{self, Work};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::{IsTrainedOn, first_nonfinite, merged};
use crate::error::Result;
use crate::labels::Labels;
use crate::ranks::Ranks;
use crate::sampler::share;
use crate::task::CLASSES_MAX;

/// Numbers read at a time.
const BLOCK_NUMBERS: u64 = 1 << 13;
/// Parts that labels are cut into. Counts are the same in whatever order they are added.
const SEGMENTS: u64 = 64;

/// What was found in labels. The task is a guess where `whole`, `fractions` and `one_hot` count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LabelsFound {
    /// Rows of each class; empty if labels are numbers.
    pub(crate) counts: Vec<u64>,
    /// Of these, the rows that are trained on.
    pub(crate) trained: Vec<u64>,
    /// The least and the greatest number, if labels are numbers.
    pub(crate) range: Option<(f32, f32)>,
    /// The different whole numbers, up to `CLASSES_MAX`.
    pub(crate) whole: BTreeSet<i64>,
    /// Labels with a fraction.
    pub(crate) fractions: u64,
    /// Labels that are a single 1 among zeros.
    pub(crate) one_hot: u64,
    /// The sum of the hashes of all blocks.
    pub(crate) hash: u64,
    /// Why the first wrong label is wrong.
    pub(crate) bad: Option<String>,
}

impl LabelsFound {
    /// Adds later rows.
    fn merge(&mut self, later: LabelsFound) {
        let width = self.counts.len().max(later.counts.len());
        let trained = (&mut self.trained, later.trained);
        for (counts, later) in [(&mut self.counts, later.counts), trained] {
            counts.resize(width, 0);
            for (count, later) in counts.iter_mut().zip(later) {
                *count += later;
            }
        }
        if let Some((least, greatest)) = later.range {
            self.widen(least, greatest);
        }
        self.whole.extend(later.whole);
        self.fractions += later.fractions;
        self.one_hot += later.one_hot;
        self.hash = self.hash.wrapping_add(later.hash);
        self.bad = self.bad.take().or(later.bad);
    }

    fn widen(&mut self, least: f32, greatest: f32) {
        let (a, b) = self.range.unwrap_or((least, greatest));
        self.range = Some((a.min(least), b.max(greatest)));
    }

    /// Adds the hash of the block that begins with row `first`.
    fn hash_block<const N: usize>(&mut self, first: u64, numbers: impl Iterator<Item = [u8; N]>) {
        let bytes: Vec<u8> = numbers.flatten().collect();
        let hash = XxHash3_64::oneshot_with_seed(first, &bytes);
        self.hash = self.hash.wrapping_add(hash);
    }
}

/// Reads all labels. All ranks share the work. Classes have to be among the `known` ones, if given.
pub(crate) fn labels(
    labels: &Labels,
    known: Option<usize>,
    is_trained_on: IsTrainedOn<'_>,
    ranks: &dyn Ranks,
) -> Result<LabelsFound> {
    let rows = labels.count();
    let block_rows = (BLOCK_NUMBERS / labels.width() as u64).max(1);
    let segments = SEGMENTS.min(rows.div_ceil(block_rows)).max(1);
    let read = |segment| {
        let rows = share(&(0..rows), segment as usize, segments as usize);
        let mut found = LabelsFound::default();
        let mut first = rows.start;
        while first < rows.end && found.bad.is_none() {
            let block = first..(first + block_rows).min(rows.end);
            first = block.end;
            heartbeat::beat(Work::ReadsData);
            match labels.are_classes() {
                true => read_classes(labels, block, known, is_trained_on, &mut found)?,
                false => read_values(labels, block, &mut found)?,
            }
        }
        Ok(found)
    };
    merged(segments, ranks, read, LabelsFound::merge)
}

fn read_classes(
    labels: &Labels,
    rows: Range<u64>,
    known: Option<usize>,
    is_trained_on: IsTrainedOn<'_>,
    found: &mut LabelsFound,
) -> Result<()> {
    let mut classes = vec![0; (rows.end - rows.start) as usize];
    labels.classes(rows.start, &mut classes)?;
    found.hash_block(rows.start, classes.iter().map(|class| class.to_le_bytes()));
    let most = known.unwrap_or(CLASSES_MAX);
    for (row, &class) in rows.zip(&classes) {
        let class = usize::try_from(class).ok().filter(|&class| class < most);
        let Some(class) = class else {
            found.bad = Some(labels.why_no_class(row, known)?);
            return Ok(());
        };
        if class >= found.counts.len() {
            found.counts.resize(class + 1, 0);
            found.trained.resize(class + 1, 0);
        }
        found.counts[class] += 1;
        found.trained[class] += u64::from(is_trained_on(row));
    }
    Ok(())
}

fn read_values(labels: &Labels, rows: Range<u64>, found: &mut LabelsFound) -> Result<()> {
    let width = labels.width();
    let mut values = vec![0f32; (rows.end - rows.start) as usize * width];
    labels.rows.read_f32(rows.start, &mut values)?;
    found.hash_block(rows.start, values.iter().map(|value| value.to_le_bytes()));
    if let Some(index) = first_nonfinite(&values) {
        let row = rows.start + (index / width) as u64;
        found.bad = Some(labels.why_no_value(row, index % width)?);
        return Ok(());
    }
    values.iter().for_each(|&value| found.widen(value, value));
    if !labels.is_guessed {
        return Ok(());
    }
    for label in values.chunks_exact(width) {
        let ones = label.iter().filter(|&&value| value == 1.0).count();
        let zeros = label.iter().filter(|&&value| value == 0.0).count();
        found.one_hot += u64::from(ones == 1 && zeros == width - 1);
        match label[0].fract() == 0.0 {
            true if found.whole.len() < CLASSES_MAX => _ = found.whole.insert(label[0] as i64),
            true => {}
            false => found.fractions += 1,
        }
    }
    Ok(())
}
