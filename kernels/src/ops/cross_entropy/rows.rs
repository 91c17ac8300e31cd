//! The rows of one cross-entropy on the CPU: what they share, the formulas of one row, and the loop
//! over its classes, in SIMD lanes. A row is processed in blocks that fit the L1 cache, whose sums
//! are added in f64. Sums within a block are kept in lanes; those of few classes are added class by
//! class, as a thread of a GPU adds them.

use crate::ops::call::Targets;
use crate::ops::float::{Float, LANES, lane_dot, lane_sum};
use crate::simd::multiversion;

/// What all rows share.
#[derive(Clone, Copy)]
pub(super) struct LossRows<'a, T> {
    /// (B, C); None if they are in `dlogits`, to be overwritten.
    pub(super) logits: Option<&'a [T]>,
    /// (B)
    pub(super) targets: Targets<'a>,
    pub(super) ignore_index: Option<i64>,
    /// (C)
    pub(super) class_weights: Option<&'a [T]>,
    pub(super) classes: usize,
    /// Whether there are so few classes that sums are in their order.
    pub(super) is_narrow: bool,
    pub(super) smooths: bool,
    /// Whether correct rows are counted.
    pub(super) counts: bool,
    /// 1 − label_smoothing
    pub(super) target_share: T,
    /// label_smoothing / C
    pub(super) class_share: T,
    /// Σ class_weights
    pub(super) weight_sum: T,
    pub(super) gradient_scale: T,
}

/// The outputs of consecutive rows.
pub(super) struct RowOutputs<'a, T> {
    /// The batch's row that comes first.
    pub(super) first: usize,
    pub(super) losses: &'a mut [T],
    pub(super) dlogits: Option<&'a mut [T]>,
    pub(super) weights: Option<&'a mut [T]>,
}

/// The factors of one row's gradient: `dx_c = softmax eᶻ_c − class w_c − target [c = y]`.
#[derive(Clone, Copy)]
pub(super) struct Factors<T> {
    pub(super) softmax: T,
    pub(super) class: T,
    pub(super) target: T,
}

impl<T: Float> LossRows<'_, T> {
    #[inline(always)]
    pub(super) fn class(&self, row: usize) -> Option<usize> {
        self.targets.class(row, self.ignore_index)
    }

    #[inline(always)]
    pub(super) fn weight(&self, class: usize) -> T {
        self.class_weights.map_or(T::ONE, |weights| weights[class])
    }

    /// The loss, from ln s, z of the target, its weight, and Σ w z if labels are smoothed.
    #[inline(always)]
    pub(super) fn loss(&self, log_sum: T, target_z: T, weight: T, weighted_z: T) -> T {
        let target = self.target_share * (weight * (log_sum - target_z));
        // Without smoothing it is not added, because 0 × ∞ would be NaN. Both terms are positive,
        // so nothing cancels.
        if !self.smooths {
            return target;
        }
        let smoothed = self.weight_sum.fused(log_sum, T::ZERO - weighted_z);
        self.class_share.fused(smoothed, target)
    }

    #[inline(always)]
    pub(super) fn factors(&self, sum: T, weight: T) -> Factors<T> {
        let target = self.target_share * weight;
        let total = if self.smooths {
            self.class_share.fused(self.weight_sum, target)
        } else {
            target
        };
        Factors {
            softmax: self.gradient_scale * total / sum,
            class: self.gradient_scale * self.class_share,
            target: self.gradient_scale * target,
        }
    }

    /// eᶻ of one row becomes its gradient.
    #[inline(always)]
    pub(super) fn finish_gradient(&self, row: &mut [T], class: usize, factors: Factors<T>) {
        let elements = row.iter_mut();
        match self.class_weights {
            _ if !self.smooths => elements.for_each(|e| *e = *e * factors.softmax),
            None => elements.for_each(|e| *e = e.fused(factors.softmax, T::ZERO - factors.class)),
            Some(weights) => elements.zip(weights).for_each(|(e, &weight)| {
                *e = e.fused(factors.softmax, T::ZERO - factors.class * weight)
            }),
        }
        row[class] = row[class] - factors.target;
    }
}

/// Classes at a time. With LANES partial sums, the sum of a block, and so of a row, has 512 / 32 +
/// 5 = 21 roundings.
pub(super) const BLOCK: usize = 512;

multiversion! {
    /// Returns how many rows have their first maximum at the target, where NaN is the largest, and
    /// how many are not ignored; zeros if no row counts.
    pub(super) fn rows[T: Float](problem: &LossRows<'_, T>, rows: &mut RowOutputs<'_, T>) -> [i64; 2] {
        let mut buffer = [T::ZERO; BLOCK];
        let mut counts = [0; 2];
        for index in 0..rows.losses.len() {
            row(problem, rows, index, &mut buffer, &mut counts);
        }
        counts
    }
}

#[inline(always)]
fn row<T: Float>(
    problem: &LossRows<'_, T>,
    rows: &mut RowOutputs<'_, T>,
    index: usize,
    buffer: &mut [T; BLOCK],
    [correct, counted]: &mut [i64; 2],
) {
    let classes = problem.classes;
    let row = rows.first + index;
    let mut gradient = rows
        .dlogits
        .as_mut()
        .map(|all| &mut all[index * classes..(index + 1) * classes]);
    let class = problem.class(row);
    if let Some(weights) = &mut rows.weights {
        weights[index] = class.map_or(T::ZERO, |class| problem.weight(class));
    }
    let Some(class) = class else {
        rows.losses[index] = T::ZERO;
        if let Some(gradient) = gradient {
            gradient.fill(T::ZERO);
        }
        return;
    };
    let logits = problem
        .logits
        .map(|all| &all[row * classes..(row + 1) * classes]);
    let source = logits.or(gradient.as_deref()).unwrap_or_default();
    if problem.counts {
        *counted += 1;
        *correct += i64::from(is_argmax(source, class));
    }
    let largest = maximum(source);
    let target_z = source[class] - largest;
    let weight = problem.weight(class);
    let (mut sum, mut weighted_z) = (0.0, 0.0);
    for start in (0..classes).step_by(BLOCK) {
        let range = start..classes.min(start + BLOCK);
        let z = match &mut gradient {
            Some(gradient) => &mut gradient[range.clone()],
            None => &mut buffer[..range.len()],
        };
        match logits {
            Some(logits) => z
                .iter_mut()
                .zip(&logits[range.clone()])
                .for_each(|(z, &x)| *z = x - largest),
            None => z.iter_mut().for_each(|z| *z = *z - largest),
        }
        if problem.smooths {
            let weights = problem.class_weights.map(|weights| &weights[range]);
            weighted_z += weighted_sum(problem, z, weights).widened();
        }
        for z in z.iter_mut() {
            *z = z.exponential();
        }
        sum += if problem.is_narrow {
            z.iter().fold(T::ZERO, |sum, &e| sum + e)
        } else {
            lane_sum(z)
        }
        .widened();
    }
    let sum = T::from_f64(sum);
    rows.losses[index] = problem.loss(sum.logarithm(), target_z, weight, T::from_f64(weighted_z));
    if let Some(gradient) = gradient {
        problem.finish_gradient(gradient, class, problem.factors(sum, weight));
    }
}

/// Whether `target` is the first of the largest: nothing before it is as large, nothing after it is
/// larger. Comparisons with NaN are false, so a NaN elsewhere gives false.
#[inline(always)]
fn is_argmax<T: Float>(logits: &[T], target: usize) -> bool {
    let (before, rest) = logits.split_at(target);
    let (largest, after) = (rest[0], &rest[1..]);
    #[allow(clippy::eq_op)]
    let is_nan = |x: T| x != x;
    if is_nan(largest) {
        return before.iter().fold(true, |none, &x| none & !is_nan(x));
    }
    before.iter().fold(true, |all, &x| all & (x < largest))
        & after.iter().fold(true, |all, &x| all & (x <= largest))
}

/// The largest, ignoring NaN, which eᶻ then propagates.
#[inline(always)]
fn maximum<T: Float>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (blocks, tail) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, &x) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, x);
        }
    }
    lanes
        .into_iter()
        .chain(tail.iter().copied())
        .fold(T::NEG_INFINITY, larger)
}

/// Σ w z, or Σ z without weights.
#[inline(always)]
fn weighted_sum<T: Float>(problem: &LossRows<'_, T>, z: &[T], weights: Option<&[T]>) -> T {
    match (weights, problem.is_narrow) {
        (Some(weights), true) => {
            let terms = z.iter().zip(weights);
            terms.fold(T::ZERO, |sum, (&z, &weight)| weight.fused(z, sum))
        }
        (None, true) => z.iter().fold(T::ZERO, |sum, &z| sum + z),
        (Some(weights), false) => lane_dot(weights, z),
        (None, false) => lane_sum(z),
    }
}
