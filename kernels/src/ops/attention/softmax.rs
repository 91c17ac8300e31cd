//! What happens to a block of scores between its matmuls, vectorised across queries.
//!
//! A block is `scores[key][query]`, with rows of BLOCK queries, and these loops take GROUP of its
//! queries at a time. On the diagonal of a causal attention, key `j` is masked for the queries
//! before it. Each query is on its own and adds its keys in order, so every SIMD width has the
//! same bits.

use crate::ops::float::Float;
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
pub(super) struct Part {
    /// Keys of the block.
    pub(super) keys: usize,
    /// The first query of the group, counted in the block.
    pub(super) first: usize,
    /// Whether the block's keys and queries are the same tokens and later keys are masked.
    pub(super) diagonal: bool,
}

impl Part {
    /// Keys that some query of the group attends to.
    #[inline(always)]
    fn end(self) -> usize {
        match self.diagonal {
            true => self.keys.min(self.first + GROUP),
            false => self.keys,
        }
    }

    /// Of these, the ones that every query of the group attends to.
    #[inline(always)]
    fn whole(self) -> usize {
        match self.diagonal {
            true => self.keys.min(self.first + 1),
            false => self.keys,
        }
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

/// The largest score and the sum of weights of each query of a block, over the keys so far.
pub(super) struct Running<T> {
    pub(super) largest: [T; BLOCK],
    pub(super) sum: [T; BLOCK],
    /// What the weights so far were multiplied by when the last block raised the largest score.
    pub(super) rescale: [T; BLOCK],
}

impl<T: Float> Running<T> {
    pub(super) fn new() -> Running<T> {
        Running {
            largest: [T::NEG_INFINITY; BLOCK],
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
    pub(super) fn soften[T: Float](scores: &mut [T], part: Part, running: &mut Running<T>) {
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

multiversion! {
    /// The sums of weights become what to multiply by, and the largest scores the logarithms of
    /// the sums of e^score.
    pub(super) fn finish[T: Float](running: &mut Running<T>) {
        for (largest, sum) in running.largest.iter_mut().zip(&mut running.sum) {
            *largest = *largest + sum.logarithm();
            *sum = T::ONE / *sum;
        }
    }
}

multiversion! {
    /// Scores become weights e^(score − log_sum_exp), and the gradients of weights become those of
    /// scores, weight × (gradient − delta).
    pub(super) fn soften_backward[T: Float](
        scores: &mut [T],
        gradients: &mut [T],
        part: Part,
        lines: (&[T; BLOCK], &[T; BLOCK]),
    ) {
        let (whole, end, first) = (part.whole(), part.end(), part.first);
        let (log_sum_exp, delta) = (*group(lines.0, first), *group(lines.1, first));
        for key in 0..whole {
            let gradients = lanes(gradients, key, first);
            for (lane, score) in lanes(scores, key, first).iter_mut().enumerate() {
                *score = (*score - log_sum_exp[lane]).exponential_or_zero();
                gradients[lane] = *score * (gradients[lane] - delta[lane]);
            }
        }
        for key in whole..end {
            let masked = key - first;
            let gradients = lanes(gradients, key, first);
            for (lane, score) in lanes(scores, key, first).iter_mut().enumerate() {
                let weight = (*score - log_sum_exp[lane]).exponential_or_zero();
                let gradient = weight * (gradients[lane] - delta[lane]);
                *score = if lane >= masked { weight } else { T::ZERO };
                gradients[lane] = if lane >= masked { gradient } else { T::ZERO };
            }
        }
        part.clear_after(scores);
        part.clear_after(gradients);
    }
}
