//! accuracy: in how many rows the largest logit is at the target. The largest is `torch.argmax`'s:
//! the first of equals, and NaN above everything.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::ops::float::Float;
use crate::ops::targets::Targets;
use crate::simd::multiversion;
use crate::threads;

multiversion! {
    /// In how many rows the argmax is the target, and how many rows are not ignored.
    fn count_rows[T: Float](
        logits: &[T], classes: usize, targets: Targets<'_>, first_row: usize,
        ignore_index: Option<i64>,
    ) -> [i64; 2] {
        let [mut correct, mut counted] = [0; 2];
        for (row, logits) in logits.chunks_exact(classes).enumerate() {
            if let Some(target) = targets.class(first_row + row, ignore_index) {
                counted += 1;
                correct += i64::from(is_argmax(logits, target));
            }
        }
        [correct, counted]
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

/// Of the rows of `logits` (B, C) whose target is not `ignore_index`: how many have their first
/// maximum at the target, and how many there are.
pub(super) fn count<T: Float>(
    logits: &[T],
    classes: usize,
    targets: Targets<'_>,
    ignore_index: Option<i64>,
) -> [i64; 2] {
    let totals = [const { AtomicI64::new(0) }; 2];
    threads::split(logits.len(), classes, |range| {
        let counts = count_rows(
            &logits[range.clone()],
            classes,
            targets,
            range.start / classes,
            ignore_index,
        );
        for (total, count) in totals.iter().zip(counts) {
            total.fetch_add(count, Ordering::Relaxed);
        }
    });
    totals.map(AtomicI64::into_inner)
}

#[cfg(test)]
mod tests;
