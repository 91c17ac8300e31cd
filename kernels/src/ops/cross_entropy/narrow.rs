//! Few classes: a group of rows is transposed into a block in which SIMD lanes are rows. Each lane adds up its own row,
//! class by class, so its result is the same in any place of any group.

use super::{Problem, Rows};
use crate::ops::float::Float;
use crate::simd::multiversion;

/// Rows at a time: the lanes of the widest SIMD registers.
pub(super) const GROUP: usize = 16;

/// Up to this many classes the block stays in the first cache and rows are too short to fill lanes by themselves.
pub(super) const CLASSES_MAX: usize = 64;

/// One number a row.
type Lanes<T> = [T; GROUP];

multiversion! {
    pub(super) fn rows[T: Float](problem: &Problem<'_, T>, rows: &mut Rows<'_, T>) {
        let mut block = [[T::ZERO; GROUP]; CLASSES_MAX];
        let block = &mut block[..problem.classes];
        for start in (0..rows.losses.len()).step_by(GROUP) {
            let count = GROUP.min(rows.losses.len() - start);
            group(problem, rows, start, count, block);
        }
    }
}

/// `count` rows from `start` on. Lanes beyond `count` compute something that nobody reads.
#[inline(always)]
fn group<T: Float>(
    problem: &Problem<'_, T>,
    rows: &mut Rows<'_, T>,
    start: usize,
    count: usize,
    block: &mut [Lanes<T>],
) {
    let classes = problem.classes;
    let within = start * classes..(start + count) * classes;
    let first_row = rows.first + start;
    match (problem.logits, &rows.dlogits) {
        (Some(logits), _) => gather(block, &logits[first_row * classes..(first_row + count) * classes]),
        (None, Some(dlogits)) => gather(block, &dlogits[within.clone()]),
        (None, None) => unreachable!("logits are in place of dlogits or apart"),
    }
    let mut largest = [T::NEG_INFINITY; GROUP];
    for lanes in block.iter() {
        for (largest, &x) in largest.iter_mut().zip(lanes) {
            *largest = if x > *largest { x } else { *largest };
        }
    }
    let mut target_z = [T::ZERO; GROUP];
    let mut weight = [T::ZERO; GROUP];
    for lane in 0..count {
        if let Some(class) = problem.class(first_row + lane) {
            target_z[lane] = block[class][lane] - largest[lane];
            weight[lane] = problem.weight(class);
        }
    }
    let (sum, weighted_z) = exponentials(problem, block, &largest);
    let mut losses = [T::ZERO; GROUP];
    for lane in 0..GROUP {
        losses[lane] = problem.loss(sum[lane].logarithm(), target_z[lane], weight[lane], weighted_z[lane]);
    }
    for lane in 0..count {
        let ignored = problem.class(first_row + lane).is_none();
        rows.losses[start + lane] = if ignored { T::ZERO } else { losses[lane] };
    }
    if let Some(weights) = &mut rows.weights {
        weights[start..start + count].copy_from_slice(&weight[..count]);
    }
    if let Some(dlogits) = &mut rows.dlogits {
        gradients(problem, block, &sum, &weight);
        for lane in 0..count {
            if let Some(class) = problem.class(first_row + lane) {
                block[class][lane] = block[class][lane] - problem.factors(sum[lane], weight[lane]).target;
            }
        }
        scatter(&mut dlogits[within], block);
        for lane in (0..count).filter(|&lane| problem.class(first_row + lane).is_none()) {
            dlogits[(start + lane) * classes..(start + lane + 1) * classes].fill(T::ZERO);
        }
    }
}

/// Rows of logits into the block, transposed.
#[inline(always)]
fn gather<T: Float>(block: &mut [Lanes<T>], logits: &[T]) {
    for (lane, row) in logits.chunks_exact(block.len()).enumerate() {
        for (lanes, &x) in block.iter_mut().zip(row) {
            lanes[lane % GROUP] = x;
        }
    }
}

/// The block into rows, transposed back.
#[inline(always)]
fn scatter<T: Float>(dlogits: &mut [T], block: &[Lanes<T>]) {
    for (lane, row) in dlogits.chunks_exact_mut(block.len()).enumerate() {
        for (out, lanes) in row.iter_mut().zip(block) {
            *out = lanes[lane % GROUP];
        }
    }
}

/// x becomes eᶻ; gives s = Σ eᶻ and, if labels are smoothed, Σ w z.
#[inline(always)]
fn exponentials<T: Float>(
    problem: &Problem<'_, T>,
    block: &mut [Lanes<T>],
    largest: &Lanes<T>,
) -> (Lanes<T>, Lanes<T>) {
    let mut sum = [T::ZERO; GROUP];
    let mut weighted_z = [T::ZERO; GROUP];
    for (class, lanes) in block.iter_mut().enumerate() {
        for lane in 0..GROUP {
            lanes[lane] = lanes[lane] - largest[lane];
        }
        if problem.smooths {
            let weight = problem.weight(class);
            for lane in 0..GROUP {
                weighted_z[lane] = weight.fused(lanes[lane], weighted_z[lane]);
            }
        }
        for lane in 0..GROUP {
            lanes[lane] = lanes[lane].exponential();
            sum[lane] = sum[lane] + lanes[lane];
        }
    }
    (sum, weighted_z)
}

/// eᶻ becomes the gradient, but for the target's own term.
#[inline(always)]
fn gradients<T: Float>(problem: &Problem<'_, T>, block: &mut [Lanes<T>], sum: &Lanes<T>, weight: &Lanes<T>) {
    let mut softmax = [T::ZERO; GROUP];
    for lane in 0..GROUP {
        softmax[lane] = problem.factors(sum[lane], weight[lane]).softmax;
    }
    let class_factor = problem.factors(T::ONE, T::ONE).class;
    for (class, lanes) in block.iter_mut().enumerate() {
        let offset = class_factor * problem.weight(class);
        for (e, &softmax) in lanes.iter_mut().zip(&softmax) {
            *e = if problem.smooths { e.fused(softmax, T::ZERO - offset) } else { *e * softmax };
        }
    }
}
