//! Many classes: row by row, with classes in SIMD lanes. A row is processed in blocks that fit the
//! L1 cache; sums within a block are kept in lanes, and the blocks' sums are added in f64.

use super::problem::{Problem, Rows};
use crate::ops::float::{Float, LANES, lane_sum, tree_sum};
use crate::simd::multiversion;

/// Classes at a time. With LANES partial sums, the sum of a block, and so of a row, has 512 / 32 +
/// 5 = 21 roundings.
pub(super) const BLOCK: usize = 512;

multiversion! {
    pub(super) fn rows[T: Float](problem: &Problem<'_, T>, rows: &mut Rows<'_, T>) {
        let mut buffer = [T::ZERO; BLOCK];
        for index in 0..rows.losses.len() {
            row(problem, rows, index, &mut buffer);
        }
    }
}

#[inline(always)]
fn row<T: Float>(
    problem: &Problem<'_, T>,
    rows: &mut Rows<'_, T>,
    index: usize,
    buffer: &mut [T; BLOCK],
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
            weighted_z +=
                weighted_sum(z, problem.class_weights.map(|weights| &weights[range])).widened();
        }
        for z in z.iter_mut() {
            *z = z.exponential();
        }
        sum += lane_sum(z).widened();
    }
    let sum = T::from_f64(sum);
    rows.losses[index] = problem.loss(sum.logarithm(), target_z, weight, T::from_f64(weighted_z));
    if let Some(gradient) = gradient {
        problem.finish_gradient(gradient, class, problem.factors(sum, weight));
    }
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

/// Σ w z in lanes, or Σ z without weights.
#[inline(always)]
fn weighted_sum<T: Float>(z: &[T], weights: Option<&[T]>) -> T {
    let Some(weights) = weights else {
        return lane_sum(z);
    };
    let mut lanes = [T::ZERO; LANES];
    for (z, weights) in z.chunks(LANES).zip(weights.chunks(LANES)) {
        for ((lane, &z), &weight) in lanes.iter_mut().zip(z).zip(weights) {
            *lane = weight.fused(z, *lane);
        }
    }
    tree_sum(lanes)
}
