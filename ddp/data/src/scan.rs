//! Reads all rows once before training: the moments of features, non-finite numbers, the classes
//! there are, the largest token, and a hash of the content.
//!
//! The result has the same bits for any number of ranks and threads. Rows are cut into blocks and
//! blocks into segments depending only on their number and size. The blocks of a segment are added
//! one after another (Chan's formula, in f64), then the segments; ranks and threads take whole
//! segments. The hash is the sum of the hashes of all blocks, of the numbers as f32, so that the
//! same rows in files of another format have the same one.
//!
//! Of features larger than `BYTES_MAX` only some blocks are read, spread evenly over all rows,
//! which is enough for moments. Non-finite numbers elsewhere are then found when they are trained
//! on.

mod labels;
mod tokens;

use std::ops::Range;
use std::panic::Location;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::{DType, Device, Tensor, threads};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

pub(crate) use self::labels::{LabelsFound, labels};
pub(crate) use self::tokens::tokens;
use crate::error::{Error, Result};
use crate::ranks::Ranks;
use crate::sampler::share;

/// The most bytes of features, as f32, that are read before training.
pub(crate) const BYTES_MAX: u64 = 8 << 30;
/// The same for integers that need no moments: none of them can be wrong.
pub(crate) const HASHED_BYTES_MAX: u64 = 2 << 30;
/// The numbers of a block: as f32 they stay in a core's cache while they are read twice.
const BLOCK_NUMBERS: usize = 1 << 16;
/// The fewest rows of a block if rows are larger, so that merging costs less than adding; unless a
/// block would then have more numbers than the second of these.
const BLOCK_ROWS_MIN: usize = 8;
const BLOCK_NUMBERS_MAX: usize = 1 << 22;
/// As many segments as most numbers of ranks share evenly.
const SEGMENTS: u64 = 240;
/// The most bytes of the moments of all segments together.
const SEGMENTS_BYTES: u64 = 64 << 20;

/// Rows of one width that can be read in order.
#[derive(Clone, Copy)]
pub(crate) struct RowReader<'a> {
    rows: u64,
    width: usize,
    /// Reads whole rows from this one on.
    read: &'a (dyn Fn(u64, &mut [f32]) -> Result<()> + Sync),
}

impl<'a> RowReader<'a> {
    /// So many rows of this width.
    pub(crate) fn new(
        rows: u64,
        width: usize,
        read: &'a (dyn Fn(u64, &mut [f32]) -> Result<()> + Sync),
    ) -> RowReader<'a> {
        RowReader { rows, width, read }
    }
}

/// Which rows are trained on.
pub(crate) type IsTrainedOn<'a> = &'a (dyn Fn(u64) -> bool + Sync);

/// What was found in features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Of the rows that are trained on.
    pub(crate) moments: Moments,
    /// The row and the feature of the first non-finite number.
    pub(crate) bad: Option<(u64, u64)>,
    /// The sum of the hashes of all blocks; of those up to a bad one in each segment.
    pub(crate) hash: u64,
    /// Whether every row was read.
    pub(crate) is_complete: bool,
}

impl Found {
    /// In no rows.
    fn none(width: usize) -> Found {
        Found {
            moments: Moments::none(width),
            bad: None,
            hash: 0,
            is_complete: true,
        }
    }
}

/// Which blocks are read, and how they are cut into segments.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BlockPlan {
    rows: u64,
    block_rows: u64,
    blocks: u64,
    /// How many blocks are read.
    taken: u64,
    segments: u64,
}

impl BlockPlan {
    fn new(rows: u64, width: usize, bytes_max: u64) -> BlockPlan {
        let least = BLOCK_ROWS_MIN.min(BLOCK_NUMBERS_MAX / width).max(1);
        let block_rows = (BLOCK_NUMBERS / width).max(least) as u64;
        let blocks = rows.div_ceil(block_rows);
        let block_bytes = block_rows * width as u64 * 4;
        let taken = blocks.min((bytes_max / block_bytes).max(1));
        let moments_bytes = (8 + 24 * width) as u64;
        let segments_max = SEGMENTS.min((SEGMENTS_BYTES / moments_bytes).max(1));
        BlockPlan {
            rows,
            block_rows,
            blocks,
            taken,
            segments: segments_max.min(taken),
        }
    }

    /// The rows of the blocks of a segment, in order.
    fn blocks_of(self, segment: u64) -> impl Iterator<Item = Range<u64>> {
        share(&(0..self.taken), segment as usize, self.segments as usize).map(move |index| {
            let block =
                (u128::from(index) * u128::from(self.blocks) / u128::from(self.taken)) as u64;
            let first = block * self.block_rows;
            first..(first + self.block_rows).min(self.rows)
        })
    }
}

/// Reads features; all ranks share the work. Moments are of those rows that `is_trained_on`.
pub(crate) fn features(
    rows: RowReader<'_>,
    is_trained_on: IsTrainedOn<'_>,
    ranks: &dyn Ranks,
    bytes_max: u64,
) -> Result<Found> {
    let plan = BlockPlan::new(rows.rows, rows.width, bytes_max);
    let read = |segment| Ok(vec![read_segment(rows, is_trained_on, plan, segment)?]);
    let add = |all: &mut Vec<Found>, mut later: Vec<Found>| all.append(&mut later);
    let mut total = Found::none(rows.width);
    total.is_complete = plan.taken == plan.blocks;
    for segment in merged(plan.segments, ranks, read, add)? {
        total.moments.merge(&segment.moments);
        total.bad = total.bad.or(segment.bad);
        total.hash = total.hash.wrapping_add(segment.hash);
    }
    Ok(total)
}

fn read_segment(
    rows: RowReader<'_>,
    is_trained_on: IsTrainedOn<'_>,
    plan: BlockPlan,
    segment: u64,
) -> Result<Found> {
    let width = rows.width;
    let mut total = Found::none(width);
    // A tensor, because it lends its bytes.
    let x = Tensor::zeros(&[plan.block_rows as usize * width], DType::F32, Device::Cpu)?;
    for block in plan.blocks_of(segment) {
        heartbeat::beat(Work::ReadsData);
        let count = (block.end - block.start) as usize * width;
        x.with_slice_mut(|x: &mut [f32]| (rows.read)(block.start, &mut x[..count]))??;
        let hash = |bytes: &[u8]| XxHash3_64::oneshot_with_seed(block.start, &bytes[..4 * count]);
        let hash = x.with_bytes("hash", Location::caller(), hash)?;
        total.hash = total.hash.wrapping_add(hash);
        x.with_slice_mut(|x: &mut [f32]| {
            let x = &mut x[..count];
            if let Some(index) = first_nonfinite(x) {
                let row = block.start + (index / width) as u64;
                total.bad = Some((row, (index % width) as u64));
                return;
            }
            let kept = keep(x, width, block.start, is_trained_on);
            let moments = Moments::of_rows(&x[..kept * width], width);
            total.moments.merge(&moments);
        })?;
        if total.bad.is_some() {
            break;
        }
    }
    Ok(total)
}

/// The index of the first number that is not finite.
pub(crate) fn first_nonfinite(x: &[f32]) -> Option<usize> {
    // Pieces without a branch inside are vectorized.
    const PIECE: usize = 256;
    let all_finite = |piece: &[f32]| piece.iter().fold(true, |all, x| all & x.is_finite());
    let start = PIECE * x.chunks(PIECE).position(|piece| !all_finite(piece))?;
    let index = x[start..].iter().position(|x| !x.is_finite())?;
    Some(start + index)
}

/// Moves the rows that are trained on to the front. Returns how many they are.
fn keep(x: &mut [f32], width: usize, first: u64, is_trained_on: IsTrainedOn<'_>) -> usize {
    let mut kept = 0;
    for row in 0..x.len() / width {
        if is_trained_on(first + row as u64) {
            if kept != row {
                x.copy_within(row * width..(row + 1) * width, kept * width);
            }
            kept += 1;
        }
    }
    kept
}

/// What `work` returns for each of these segments, in their order.
pub(crate) fn in_segments<T: Send>(
    segments: Range<u64>,
    work: impl Fn(u64) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let count = (segments.end - segments.start) as usize;
    let results: Mutex<Vec<Option<Result<T>>>> = Mutex::new((0..count).map(|_| None).collect());
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            let result = work(segments.start + index as u64);
            results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads::count().min(count) {
            // If the system grants fewer threads, those do the work.
            if Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let results = results.into_iter();
    results
        .map(|result| result.expect("every segment was taken"))
        .collect()
}

/// What `read` finds in these segments, merged in their order. All ranks share the work.
fn merged<T: Default + Send + Serialize + DeserializeOwned>(
    segments: u64,
    ranks: &dyn Ranks,
    read: impl Fn(u64) -> Result<T> + Sync,
    merge: fn(&mut T, T),
) -> Result<T> {
    let internal = |error: serde_json::Error| Error::Internal(error.to_string());
    let all = |parts: Vec<T>| {
        let mut total = T::default();
        parts.into_iter().for_each(|part| merge(&mut total, part));
        total
    };
    let mine = in_segments(share(&(0..segments), ranks.rank(), ranks.size()), read);
    let mine = mine.and_then(|found| serde_json::to_vec(&all(found)).map_err(internal));
    // Each rank's segments follow those of the rank before.
    let parts = ranks.share(mine)?;
    let parts = parts.iter().map(|bytes| serde_json::from_slice(bytes));
    Ok(all(parts.collect::<Result<_, _>>().map_err(internal)?))
}

/// The moments of F features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moments {
    /// The number of rows.
    pub(crate) count: u64,
    /// `[F]`
    pub(crate) mean: Vec<f64>,
    /// The sum of squares about the mean, `[F]`.
    pub(crate) squares: Vec<f64>,
    /// `[F]`
    pub(crate) least: Vec<f32>,
    /// `[F]`
    pub(crate) greatest: Vec<f32>,
}

impl Moments {
    /// The moments of no rows.
    pub(crate) fn none(width: usize) -> Moments {
        Moments {
            count: 0,
            mean: vec![0.0; width],
            squares: vec![0.0; width],
            // JSON has no infinity.
            least: vec![f32::MAX; width],
            greatest: vec![f32::MIN; width],
        }
    }

    /// The moments of finite rows: first the mean, then the squares about it, so that large numbers
    /// do not cancel.
    pub(crate) fn of_rows(x: &[f32], width: usize) -> Moments {
        let mut moments = Moments::none(width);
        moments.count = (x.len() / width) as u64;
        if moments.count == 0 {
            return moments;
        }
        for row in x.chunks_exact(width) {
            let ends = moments.least.iter_mut().zip(&mut moments.greatest);
            for ((mean, (least, greatest)), &x) in moments.mean.iter_mut().zip(ends).zip(row) {
                *mean += f64::from(x);
                *least = if x < *least { x } else { *least };
                *greatest = if x > *greatest { x } else { *greatest };
            }
        }
        let count = moments.count as f64;
        moments.mean.iter_mut().for_each(|mean| *mean /= count);
        for row in x.chunks_exact(width) {
            let means = moments.squares.iter_mut().zip(&moments.mean);
            for ((squares, mean), &x) in means.zip(row) {
                let off = f64::from(x) - mean;
                *squares += off * off;
            }
        }
        moments
    }

    /// Adds later rows (Chan's formula).
    pub(crate) fn merge(&mut self, later: &Moments) {
        if later.count == 0 {
            return;
        }
        let (here, there) = (self.count as f64, later.count as f64);
        let part = there / (here + there);
        for at in 0..self.mean.len() {
            let apart = later.mean[at] - self.mean[at];
            self.mean[at] += apart * part;
            self.squares[at] += later.squares[at] + apart * apart * (here * part);
            self.least[at] = self.least[at].min(later.least[at]);
            self.greatest[at] = self.greatest[at].max(later.greatest[at]);
        }
        self.count += later.count;
    }
}

#[cfg(test)]
mod tests;
