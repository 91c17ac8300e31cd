//! Few classes: several rows at a time, so that SIMD lanes are filled although a row has fewer
//! elements: the exponentials of all their logits in one loop, then the logarithms of all their
//! sums. Maxima and sums are by row, class by class, so a row's result does not depend on its
//! neighbours.

use super::problem::{Factors, Problem, Rows};
use crate::ops::float::Float;
use crate::simd::multiversion;

/// Rows at a time: the lanes of the widest SIMD registers.
pub(super) const GROUP: usize = 16;

/// The most classes for this way; rows of more fill the lanes by themselves.
pub(super) const CLASSES_MAX: usize = 64;

/// One number per row.
type ByRow<T> = [T; GROUP];

multiversion! {
    pub(super) fn rows[T: Float](problem: &Problem<'_, T>, rows: &mut Rows<'_, T>) {
        let mut buffer = [T::ZERO; GROUP * CLASSES_MAX];
        for start in (0..rows.losses.len()).step_by(GROUP) {
            let count = GROUP.min(rows.losses.len() - start);
            group(problem, rows, start, count, &mut buffer);
        }
    }
}

/// `count` rows from `start` on.
#[inline(always)]
fn group<T: Float>(
    problem: &Problem<'_, T>,
    rows: &mut Rows<'_, T>,
    start: usize,
    count: usize,
    buffer: &mut [T],
) {
    let classes = problem.classes;
    let first_row = rows.first + start;
    let has_gradient = rows.dlogits.is_some();
    // x, then z, then eᶻ, then the gradient.
    let values = match &mut rows.dlogits {
        Some(dlogits) => &mut dlogits[start * classes..(start + count) * classes],
        None => &mut buffer[..count * classes],
    };
    let (mut sum, mut target_z, mut weight, mut weighted_z) = (
        [T::ONE; GROUP],
        [T::ZERO; GROUP],
        [T::ZERO; GROUP],
        [T::ZERO; GROUP],
    );
    let mut targets = [None; GROUP];
    for (lane, values) in values.chunks_exact_mut(classes).enumerate() {
        let row = first_row + lane;
        match problem.logits {
            Some(logits) => shift_apart(values, &logits[row * classes..(row + 1) * classes]),
            None => shift(values),
        }
        targets[lane] = problem.class(row);
        if let Some(class) = targets[lane] {
            target_z[lane] = values[class];
            weight[lane] = problem.weight(class);
        }
        if problem.smooths {
            weighted_z[lane] = weighted_sum(problem, values);
        }
    }
    for value in values.iter_mut() {
        *value = value.exponential();
    }
    for (sum, values) in sum.iter_mut().zip(values.chunks_exact(classes)) {
        *sum = values.iter().fold(T::ZERO, |sum, &e| sum + e);
    }
    write_losses(
        problem,
        &mut rows.losses[start..start + count],
        &targets,
        [&sum, &target_z, &weight, &weighted_z],
    );
    if let Some(weights) = &mut rows.weights {
        weights[start..start + count].copy_from_slice(&weight[..count]);
    }
    if has_gradient {
        gradients(problem, values, &targets, &sum, &weight);
    }
}

/// x becomes z = x − max x. The maximum ignores NaN, which eᶻ then propagates.
#[inline(always)]
fn shift<T: Float>(values: &mut [T]) {
    let largest = maximum(values);
    values.iter_mut().for_each(|x| *x = *x - largest);
}

#[inline(always)]
fn shift_apart<T: Float>(z: &mut [T], x: &[T]) {
    let largest = maximum(x);
    z.iter_mut().zip(x).for_each(|(z, &x)| *z = x - largest);
}

#[inline(always)]
fn maximum<T: Float>(x: &[T]) -> T {
    x.iter().fold(
        T::NEG_INFINITY,
        |largest, &x| if x > largest { x } else { largest },
    )
}

/// Σ w z
#[inline(always)]
fn weighted_sum<T: Float>(problem: &Problem<'_, T>, z: &[T]) -> T {
    match problem.class_weights {
        Some(weights) => z
            .iter()
            .zip(weights)
            .fold(T::ZERO, |sum, (&z, &weight)| weight.fused(z, sum)),
        None => z.iter().fold(T::ZERO, |sum, &z| sum + z),
    }
}

#[inline(always)]
fn write_losses<T: Float>(
    problem: &Problem<'_, T>,
    out: &mut [T],
    targets: &ByRow<Option<usize>>,
    [sum, target_z, weight, weighted_z]: [&ByRow<T>; 4],
) {
    let mut losses = [T::ZERO; GROUP];
    for lane in 0..GROUP {
        losses[lane] = problem.loss(
            sum[lane].logarithm(),
            target_z[lane],
            weight[lane],
            weighted_z[lane],
        );
    }
    for ((out, loss), target) in out.iter_mut().zip(losses).zip(targets) {
        *out = if target.is_some() { loss } else { T::ZERO };
    }
}

/// eᶻ becomes the gradient.
#[inline(always)]
fn gradients<T: Float>(
    problem: &Problem<'_, T>,
    values: &mut [T],
    targets: &ByRow<Option<usize>>,
    sum: &ByRow<T>,
    weight: &ByRow<T>,
) {
    let mut softmax = [T::ZERO; GROUP];
    for lane in 0..GROUP {
        softmax[lane] = problem.factors(sum[lane], weight[lane]).softmax;
    }
    for (lane, row) in values.chunks_exact_mut(problem.classes).enumerate() {
        let Some(class) = targets[lane] else {
            row.fill(T::ZERO);
            continue;
        };
        let factors = problem.factors(T::ONE, weight[lane]);
        problem.finish_gradient(
            row,
            class,
            Factors {
                softmax: softmax[lane],
                ..factors
            },
        );
    }
}
