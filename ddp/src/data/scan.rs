//! Looking at all rows once before training: the moments of features, what is no finite number, which classes there are.
//!
//! The result has the same bits however many ranks and threads share the work. Rows are cut into blocks and blocks into
//! segments by their number and size alone; a segment's blocks are added one after another (by Chan's formula, in f64), and so are
//! the segments. Ranks take whole segments, and so do the threads of a rank.
//!
//! Features of more than `BYTES_MAX` are looked at in part: in blocks spread evenly over all rows, which is enough for moments. What
//! is no finite number elsewhere is then found as it is trained on.

mod kept;
mod labels;
mod moments;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ddp_comm::World;
use ddp_kernels::threads;

pub(crate) use self::kept::Kept;
pub(crate) use self::labels::{CLASSES_MAX, LabelSummary, labels};
pub(crate) use self::moments::Moments;
use super::agree;
use super::sampler::share;
use crate::error::{Error, Result};

/// The most bytes of features, as f32, that are read before training.
pub(crate) const BYTES_MAX: u64 = 8 << 30;
/// The numbers of a block: as f32 they stay in a core's cache while they are looked at twice.
const BLOCK_NUMBERS: usize = 1 << 16;
/// The fewest rows of a block where rows are larger than that, since merging has to cost less than adding; unless a block would then have
/// more numbers than the second of these.
const BLOCK_ROWS_MIN: usize = 8;
const BLOCK_NUMBERS_MAX: usize = 1 << 22;
/// Segments where there is room for them: as many as can be shared evenly by most numbers of ranks.
const SEGMENTS: u64 = 240;
/// The most bytes of moments of all segments together.
const SEGMENTS_BYTES: u64 = 64 << 20;

/// Rows of one width that can be read in order.
pub(crate) trait Rows: Sync {
    fn rows(&self) -> u64;
    fn width(&self) -> usize;
    /// Whole rows from `first` on, as f32.
    fn read(&self, first: u64, into: &mut [f32]) -> Result<()>;
}

/// What was found in features.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    /// Of the rows that are trained on.
    pub(crate) moments: Moments,
    /// The first row, and feature of it, that is no finite number.
    pub(crate) bad: Option<(u64, u64)>,
    /// Whether every row was looked at.
    pub(crate) is_complete: bool,
}

/// Which blocks are looked at, and how they are cut into segments.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    rows: u64,
    block_rows: u64,
    blocks: u64,
    /// Of these so many are looked at.
    taken: u64,
    segments: u64,
}

impl Plan {
    fn new(rows: u64, width: usize, bytes_max: u64) -> Plan {
        let least = BLOCK_ROWS_MIN.min(BLOCK_NUMBERS_MAX / width).max(1);
        let block_rows = (BLOCK_NUMBERS / width).max(least) as u64;
        let blocks = rows.div_ceil(block_rows);
        let block_bytes = block_rows * width as u64 * 4;
        let taken = blocks.min((bytes_max / block_bytes).max(1));
        let moments_bytes = Moments::bytes(width) as u64;
        let segments = SEGMENTS.min(taken).min((SEGMENTS_BYTES / moments_bytes).max(1));
        Plan { rows, block_rows, blocks, taken, segments }
    }

    /// The rows of the blocks of a segment, in order.
    fn blocks_of(self, segment: u64) -> impl Iterator<Item = Range<u64>> {
        share(&(0..self.taken), segment as usize, self.segments as usize).map(move |index| {
            let block = (u128::from(index) * u128::from(self.blocks) / u128::from(self.taken)) as u64;
            let first = block * self.block_rows;
            first..(first + self.block_rows).min(self.rows)
        })
    }
}

/// Looks at features, on all ranks of `world` together. Moments are of those rows that `is_trained_on`.
pub(crate) fn features(
    rows: &dyn Rows,
    is_trained_on: &(dyn Fn(u64) -> bool + Sync),
    world: &World,
    bytes_max: u64,
) -> Result<Found> {
    let plan = Plan::new(rows.rows(), rows.width(), bytes_max);
    let mine = share(&(0..plan.segments), world.rank(), world.size());
    let found = in_segments(mine, |segment| segment_of(rows, is_trained_on, plan, segment));
    let found = agree::all(world, found)?;
    let mut total = Found { moments: Moments::none(rows.width()), bad: None, is_complete: plan.taken == plan.blocks };
    let bytes: Vec<u8> = found.iter().flat_map(|(moments, bad)| encode(moments, *bad)).collect();
    in_order(world, bytes, |bytes| {
        for segment in bytes.chunks_exact(Moments::bytes(rows.width()) + BAD_BYTES) {
            let (moments, bad) = decode(segment)?;
            total.moments.merge(&moments);
            total.bad = total.bad.or(bad);
        }
        Ok(())
    })?;
    Ok(total)
}

type Segment = (Moments, Option<(u64, u64)>);

fn segment_of(
    rows: &dyn Rows,
    is_trained_on: &(dyn Fn(u64) -> bool + Sync),
    plan: Plan,
    segment: u64,
) -> Result<Segment> {
    let width = rows.width();
    let mut total = Moments::none(width);
    let mut x = vec![0f32; plan.block_rows as usize * width];
    for block in plan.blocks_of(segment) {
        let x = &mut x[..(block.end - block.start) as usize * width];
        rows.read(block.start, x)?;
        if let Some(index) = first_nonfinite(x) {
            return Ok((total, Some((block.start + (index / width) as u64, (index % width) as u64))));
        }
        let kept = keep(x, width, block.start, is_trained_on);
        total.merge(&Moments::of_rows(&x[..kept * width], width));
    }
    Ok((total, None))
}

/// Where the first number is that is not finite.
pub(crate) fn first_nonfinite(x: &[f32]) -> Option<usize> {
    // Pieces without a branch inside are looked at many numbers at a time.
    const PIECE: usize = 256;
    let piece = x.chunks(PIECE).position(|piece| !piece.iter().fold(true, |all, x| all & x.is_finite()))?;
    x[piece * PIECE..].iter().position(|x| !x.is_finite()).map(|index| piece * PIECE + index)
}

/// Moves the rows that are trained on to the front: how many they are.
fn keep(x: &mut [f32], width: usize, first: u64, is_trained_on: &(dyn Fn(u64) -> bool + Sync)) -> usize {
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

/// What `work` gives for each of these segments, in their order; this rank's threads share them.
fn in_segments<T: Send>(segments: Range<u64>, work: impl Fn(u64) -> Result<T> + Sync) -> Result<Vec<T>> {
    let count = (segments.end - segments.start) as usize;
    let results: Mutex<Vec<Option<Result<T>>>> = Mutex::new((0..count).map(|_| None).collect());
    let next = AtomicUsize::new(0);
    let turns = || {
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
            scope.spawn(turns);
        }
        turns();
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().map(|result| result.expect("every segment had its turn")).collect()
}

/// Hands the bytes of each rank to `take`, in the order of ranks, on all ranks.
fn in_order(world: &World, mine: Vec<u8>, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    if world.size() == 1 {
        return take(&mine);
    }
    for rank in 0..world.size() {
        let mut bytes = if rank == world.rank() { mine.clone() } else { Vec::new() };
        world.broadcast_bytes(&mut bytes, rank)?;
        take(&bytes)?;
    }
    Ok(())
}

/// A bad place as bytes: whether there is one, its row and its feature.
const BAD_BYTES: usize = 24;

fn encode(moments: &Moments, bad: Option<(u64, u64)>) -> Vec<u8> {
    let mut bytes = moments.to_bytes();
    let (row, feature) = bad.unwrap_or_default();
    [u64::from(bad.is_some()), row, feature].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes
}

fn decode(bytes: &[u8]) -> Result<Segment> {
    let broken = || Error::Internal("what a rank told of its rows cannot be read".into());
    let (moments, bad) = bytes.split_at_checked(bytes.len().wrapping_sub(BAD_BYTES)).ok_or_else(broken)?;
    let moments = Moments::from_bytes(moments).ok_or_else(broken)?;
    let numbers: Vec<u64> = bad.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    let &[is_bad, row, feature] = &numbers[..] else { return Err(broken()) };
    Ok((moments, (is_bad != 0).then_some((row, feature))))
}

#[cfg(test)]
mod tests;
