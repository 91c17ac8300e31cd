//! Blocks of scores or of their gradients on the CPU: their matmuls, with the tiles of `matmul`,
//! and what happens between these, vectorised across queries.
//!
//! A block is `[key][query]`, with rows of BLOCK queries. It is the matmul of rows of keys and of
//! panels of queries. Two other matmuls read it: along keys, for the output and dq, and along
//! queries, for dk and dv. On the diagonal of a causal attention (`diagonal`), where key `j` is
//! masked for the queries before it, masked tiles are skipped, and masked steps of other tiles,
//! except within a tile's own rows, where the weights are zeros. The loops between matmuls take
//! GROUP queries at a time. Each query is computed independently and adds its keys in order, so
//! every SIMD width has the same bits.
//!
//! Buffers have room for whole tiles. Elements beyond the last row or column have arbitrary values
//! and are never read.

use super::rows::{HeadRows, Lines};
use super::sizes::HEAD_SIZE_MAX;
use crate::ops::float::Float;
use crate::ops::matmul::{Real, TileKernel};
use crate::simd::multiversion;

/// Queries and keys of a block: whole tiles of every kernel in both directions, whose rows are 4,
/// 6 or 8 and whose columns are 8, 16 or 32. Results depend on it.
pub(super) const BLOCK: usize = 96;
/// Queries of one pass.
pub(super) const GROUP: usize = 32;
/// No tile has more rows: that many keys after a group's last are read on the diagonal, as zeros.
pub(super) const ROWS_MAX: usize = 8;

/// A group's part of a block.
#[derive(Clone, Copy)]
pub(super) struct BlockPart {
    /// Keys of the block.
    pub(super) keys: usize,
    /// The first query of the group, counted in the block.
    pub(super) first: usize,
    /// Whether the block's keys and queries are the same tokens and later keys are masked.
    pub(super) diagonal: bool,
}

impl BlockPart {
    /// Keys that some query of the group attends to.
    #[inline(always)]
    fn end(self) -> usize {
        if self.diagonal {
            return self.keys.min(self.first + GROUP);
        }
        self.keys
    }

    /// Of these, the ones that every query of the group attends to.
    #[inline(always)]
    fn whole(self) -> usize {
        if self.diagonal {
            return self.keys.min(self.first + 1);
        }
        self.keys
    }

    /// Zeros all keys after the group's last one, of a whole block.
    pub(super) fn clear_rest<T: Float>(self, block: &mut [T]) {
        (self.end()..BLOCK).for_each(|key| *lanes(block, key, self.first) = [T::ZERO; GROUP]);
    }

    /// Zeros the keys after the group's last one, which tiles on the diagonal read.
    #[inline(always)]
    fn clear_after<T: Float>(self, block: &mut [T]) {
        let end = self.end();
        for key in end..self.keys.min(end + ROWS_MAX) {
            *lanes(block, key, self.first) = [T::ZERO; GROUP];
        }
    }
}

/// The group's queries of one key.
#[inline(always)]
fn lanes<T>(block: &mut [T], key: usize, first: usize) -> &mut [T; GROUP] {
    let lanes = block[key * BLOCK + first..].first_chunk_mut();
    lanes.expect("a group lies within its block")
}

/// Below all scores, and finite: a query may not attend to any key of its first blocks, whose
/// scores are −∞ then and whose weights are 0.
const LOWEST: f64 = -3e38;

/// The largest score and the sum of weights of each query of a block, over the keys so far.
pub(super) struct RunningSoftmax<T> {
    pub(super) largest: [T; BLOCK],
    pub(super) sum: [T; BLOCK],
    /// What the weights so far were multiplied by when the last block raised the largest score.
    pub(super) rescale: [T; BLOCK],
}

impl<T: Float> RunningSoftmax<T> {
    pub(super) fn new() -> RunningSoftmax<T> {
        RunningSoftmax {
            largest: [T::from_f64(LOWEST); BLOCK],
            sum: [T::ZERO; BLOCK],
            rescale: [T::ONE; BLOCK],
        }
    }
}

/// The GROUP elements from `first` on.
#[inline(always)]
fn group<T>(of: &[T; BLOCK], first: usize) -> &[T; GROUP] {
    let group = of[first..].first_chunk();
    group.expect("groups cut a block evenly")
}

#[inline(always)]
fn group_mut<T>(of: &mut [T; BLOCK], first: usize) -> &mut [T; GROUP] {
    let group = of[first..].first_chunk_mut();
    group.expect("groups cut a block evenly")
}

multiversion! {
    /// Scores become weights e^(score − largest), and `running` counts them in.
    pub(super) fn soften[T: Float](scores: &mut [T], part: BlockPart, running: &mut RunningSoftmax<T>) {
        let (whole, end, first) = (part.whole(), part.end(), part.first);
        let before = *group(&running.largest, first);
        let mut largest = before;
        for key in 0..whole {
            for (largest, &mut score) in largest.iter_mut().zip(lanes(scores, key, first)) {
                *largest = if score > *largest { score } else { *largest };
            }
        }
        for key in whole..end {
            let masked = key - first;
            for (lane, &mut score) in lanes(scores, key, first).iter_mut().enumerate() {
                let counts = (lane >= masked) & (score > largest[lane]);
                largest[lane] = if counts { score } else { largest[lane] };
            }
        }
        let mut sum = *group(&running.sum, first);
        for (lane, rescale) in group_mut(&mut running.rescale, first).iter_mut().enumerate() {
            *rescale = (before[lane] - largest[lane]).exponential_or_zero();
            sum[lane] = sum[lane] * *rescale;
        }
        for key in 0..whole {
            for (lane, score) in lanes(scores, key, first).iter_mut().enumerate() {
                *score = (*score - largest[lane]).exponential_or_zero();
                sum[lane] = sum[lane] + *score;
            }
        }
        for key in whole..end {
            let masked = key - first;
            for (lane, score) in lanes(scores, key, first).iter_mut().enumerate() {
                let weight = (*score - largest[lane]).exponential_or_zero();
                *score = if lane >= masked { weight } else { T::ZERO };
                sum[lane] = sum[lane] + *score;
            }
        }
        part.clear_after(scores);
        *group_mut(&mut running.largest, first) = largest;
        *group_mut(&mut running.sum, first) = sum;
    }
}

/// Scores become cap·tanh(score / cap), if there is a cap.
pub(super) fn cap_scores<T: Float>(scores: &mut [T], cap: Option<f64>) {
    if let Some(cap) = cap {
        cap_each(scores, T::from_f64(cap), T::from_f64(1.0 / cap));
    }
}

multiversion! {
    fn cap_each[T: Float](scores: &mut [T], cap: T, inverse: T) {
        for score in scores {
            *score = cap * (*score * inverse).tanh();
        }
    }
}

/// The derivative of a score below the cap 1 / `inverse`. Hidden ones, −∞, have none.
#[inline(always)]
fn slope<T: Float>(score: T, inverse: T) -> T {
    let share = score * inverse;
    let share = if share > T::NEG_INFINITY {
        share
    } else {
        T::ONE
    };
    T::ONE - share * share
}

/// The first block of keys that these queries attend to: its first key.
pub(super) fn first_block(firsts: &[u32; BLOCK], queries: usize) -> usize {
    let first = firsts[..queries]
        .iter()
        .min()
        .map_or(0, |&first| first as usize);
    first / BLOCK * BLOCK
}

/// Hides the keys of a block, of which `first_key` is the first, that come before the first of
/// each query.
pub(super) fn hide<T: Float>(
    scores: &mut [T],
    extent: Extent,
    first_key: usize,
    firsts: &[u32; BLOCK],
) {
    if firsts.iter().any(|&first| first as usize > first_key) {
        hide_before(scores, extent.keys, first_key as u32, firsts);
    }
}

multiversion! {
    fn hide_before[T: Float](scores: &mut [T], keys: usize, first_key: u32, firsts: &[u32; BLOCK]) {
        for (key, scores) in (first_key..).zip(scores.chunks_exact_mut(BLOCK).take(keys)) {
            for (score, &first) in scores.iter_mut().zip(firsts) {
                *score = if key < first { T::NEG_INFINITY } else { *score };
            }
        }
    }
}

multiversion! {
    /// The sums of weights become what to multiply by, and the largest scores the logarithms of
    /// the sums of e^score.
    pub(super) fn finish[T: Float](running: &mut RunningSoftmax<T>) {
        for (largest, sum) in running.largest.iter_mut().zip(&mut running.sum) {
            *largest = *largest + sum.logarithm();
            *sum = T::ONE / *sum;
        }
    }
}

multiversion! {
    /// Scores become weights e^(score − log_sum_exp), and the gradients of weights become those of
    /// scores, weight × (gradient − delta), times 1 − (score / cap)². `inverse` is 1 / cap, or 0.
    pub(super) fn soften_backward[T: Float](
        scores: &mut [T],
        gradients: &mut [T],
        part: BlockPart,
        lines: (&[T; BLOCK], &[T; BLOCK]),
        inverse: T,
    ) {
        let (whole, end, first) = (part.whole(), part.end(), part.first);
        let (log_sum_exp, delta) = (*group(lines.0, first), *group(lines.1, first));
        for key in 0..whole {
            let gradients = lanes(gradients, key, first);
            for (lane, score) in lanes(scores, key, first).iter_mut().enumerate() {
                let slope = slope(*score, inverse);
                *score = (*score - log_sum_exp[lane]).exponential_or_zero();
                gradients[lane] = *score * (gradients[lane] - delta[lane]) * slope;
            }
        }
        for key in whole..end {
            let masked = key - first;
            let gradients = lanes(gradients, key, first);
            for (lane, score) in lanes(scores, key, first).iter_mut().enumerate() {
                let weight = (*score - log_sum_exp[lane]).exponential_or_zero();
                let gradient = weight * (gradients[lane] - delta[lane]) * slope(*score, inverse);
                *score = if lane >= masked { weight } else { T::ZERO };
                gradients[lane] = if lane >= masked { gradient } else { T::ZERO };
            }
        }
        part.clear_after(scores);
        part.clear_after(gradients);
    }
}

/// The sizes of a block.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// At most BLOCK each, the same on the diagonal.
    pub(super) keys: usize,
    pub(super) queries: usize,
    /// Whether later keys than a query's own are masked.
    pub(super) diagonal: bool,
}

impl Extent {
    /// The groups of its queries.
    pub(super) fn parts(self) -> impl Iterator<Item = BlockPart> {
        let Extent { keys, diagonal, .. } = self;
        let firsts = (0..self.queries).step_by(GROUP);
        firsts.map(move |first| BlockPart {
            keys,
            first,
            diagonal,
        })
    }
}

/// A head's width in whole tiles.
pub(super) fn padded<T, K: TileKernel<T>>(head_size: usize) -> usize {
    head_size.next_multiple_of(K::COLUMNS)
}

/// `out[key][query] = scale × left[key]·right[query]`, where `left` is the block's keys and `right`
/// its queries.
///
/// # Safety
/// The processor has the instructions of `K`.
pub(super) unsafe fn scores<T: Real, K: TileKernel<T>>(
    out: &mut [T],
    left: HeadRows<'_, T>,
    right: Lines<'_, T>,
    extent: Extent,
    scale: T,
) {
    assert!(out.len() == BLOCK * BLOCK && extent.keys.max(extent.queries) <= BLOCK);
    assert!(left.rows >= extent.keys && left.width == right.along);
    let scales = (scale, T::ZERO);
    for column in (0..extent.queries).step_by(K::COLUMNS) {
        let b = right.at(column / K::COLUMNS, 0, K::COLUMNS);
        for row in (0..extent.keys).step_by(K::ROWS) {
            if extent.diagonal && row >= column + K::COLUMNS {
                break;
            }
            let rest = &left.elements[row * left.stride..];
            // SAFETY: the panel holds `along` steps; the left rows of a whole tile are in
            // `left`, and others are copied. The tile begins within the block, which tiles cut
            // evenly in both directions.
            unsafe {
                let out = out.as_mut_ptr().add(row * BLOCK + column);
                if row + K::ROWS <= left.rows {
                    let a = (rest.as_ptr(), left.stride, 1);
                    K::run::<false>(left.width, a, b, out, BLOCK, scales);
                } else {
                    let mut rows = [T::ZERO; ROWS_MAX * HEAD_SIZE_MAX];
                    for (row, to) in rest.chunks(left.stride).zip(rows.chunks_mut(left.width)) {
                        to.copy_from_slice(&row[..left.width]);
                    }
                    let a = (rows.as_ptr(), left.width, 1);
                    K::run::<false>(left.width, a, b, out, BLOCK, scales);
                }
            }
        }
    }
}

/// `out[query][column] += scale × Σ weights[key][query] right[key][column]`, over the keys of a
/// block whose first is number `first_key` of `right`. `out` has rows for BLOCK queries.
///
/// # Safety
/// The processor has the instructions of `K`.
pub(super) unsafe fn add_over_keys<T: Real, K: TileKernel<T>>(
    out: &mut [T],
    weights: &[T],
    (right, first_key): (Lines<'_, T>, usize),
    extent: Extent,
    scale: T,
) {
    assert!(weights.len() == BLOCK * BLOCK && extent.keys.max(extent.queries) <= BLOCK);
    let stride = out.len() / BLOCK;
    for column in (0..stride).step_by(K::COLUMNS) {
        for row in (0..extent.queries).step_by(K::ROWS) {
            let along = if extent.diagonal {
                extent.keys.min(row + K::ROWS)
            } else {
                extent.keys
            };
            let b = right.at(column / K::COLUMNS, first_key, K::COLUMNS);
            assert!(first_key + along <= right.along);
            // SAFETY: the panel holds `along` steps from `first_key` on, and the weights have as
            // many rows. The tile begins within BLOCK rows and `stride` columns, which tiles cut
            // evenly.
            unsafe {
                let out = out.as_mut_ptr().add(row * stride + column);
                let a = weights.as_ptr().add(row);
                K::run::<false>(along, (a, 1, BLOCK), b, out, stride, (scale, T::ONE));
            }
        }
    }
}

/// `out[key][column] += scale × Σ weights[key][query] right[query][column]`, over the queries of a
/// block. `out` has rows for BLOCK keys.
///
/// # Safety
/// The processor has the instructions of `K`.
pub(super) unsafe fn add_over_queries<T: Real, K: TileKernel<T>>(
    out: &mut [T],
    weights: &[T],
    right: Lines<'_, T>,
    extent: Extent,
    scale: T,
) {
    assert!(weights.len() == BLOCK * BLOCK && extent.keys.max(extent.queries) <= BLOCK);
    let stride = out.len() / BLOCK;
    for column in (0..stride).step_by(K::COLUMNS) {
        for row in (0..extent.keys).step_by(K::ROWS) {
            let first = if extent.diagonal { row } else { 0 };
            let along = extent.queries - first;
            let b = right.at(column / K::COLUMNS, first, K::COLUMNS);
            assert!(extent.queries <= right.along);
            // SAFETY: the panel holds `queries` steps, and each row of weights BLOCK. The tile
            // begins within BLOCK rows and `stride` columns, which tiles cut evenly.
            unsafe {
                let out = out.as_mut_ptr().add(row * stride + column);
                let a = weights.as_ptr().add(row * BLOCK + first);
                K::run::<false>(along, (a, BLOCK, 1), b, out, stride, (scale, T::ONE));
            }
        }
    }
}
