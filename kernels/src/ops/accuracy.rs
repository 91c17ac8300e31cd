//! accuracy: how many rows have their largest logit at the target. The largest is `torch.argmax`'s: the first of
//! equals, and NaN above everything.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::error::Result;
use crate::ops::call::{Call, FLOATS};
use crate::ops::float::Float;
use crate::ops::targets::{Targets, check_operands};
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

multiversion! {
    /// How many of the rows have their argmax at the target, and how many are not ignored.
    fn count_rows[T: Float](
        logits: &[T], classes: usize, targets: Targets<'_>, first_row: usize, ignore_index: Option<i64>,
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

/// Whether `target` is the first of the largest. No index is searched for: nothing before it may be as large, nothing
/// behind it larger. Comparisons with NaN are false, so a NaN elsewhere answers no by itself.
#[inline(always)]
fn is_argmax<T: Float>(logits: &[T], target: usize) -> bool {
    let (before, rest) = logits.split_at(target);
    let (largest, behind) = (rest[0], &rest[1..]);
    #[allow(clippy::eq_op)]
    let is_nan = |x: T| x != x;
    if is_nan(largest) {
        return before.iter().fold(true, |none, &x| none & !is_nan(x));
    }
    before.iter().fold(true, |all, &x| all & (x < largest)) & behind.iter().fold(true, |all, &x| all & (x <= largest))
}

/// `out = [correct, counted]`, i64\[2\]: of the rows of `logits` (B, C) whose target (B; u8, i32 or i64) is not
/// `ignore_index`, how many have their first maximum at the target.
#[track_caller]
pub fn accuracy(out: &Tensor, logits: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> Result<()> {
    let mut call = Call::new("accuracy");
    let out = call.writes("out", out);
    let logits = call.reads("logits", logits);
    let targets = call.reads("targets", targets);
    let [_, classes] = check_operands(&call, logits, targets)?;
    call.row_major(logits)?;
    call.has_shape(out, &[2], "correct and counted")?;
    call.has_dtype(out, &[DType::I64])?;
    let placed = call.place(logits, &FLOATS)?;
    {
        let [mut out, lent_logits, lent_targets] = placed.enter([out, logits, targets])?;
        let targets = Targets::of(&lent_targets, placed.tensor(targets).dtype());
        targets.check("accuracy", classes, ignore_index)?;
        let counts = match placed.tensor(logits).dtype() {
            DType::F32 => count::<f32>(lent_logits.elements(), classes, targets, ignore_index),
            _ => count::<f64>(lent_logits.elements(), classes, targets, ignore_index),
        };
        out.elements_mut().copy_from_slice(&counts);
    }
    placed.finish()
}

fn count<T: Float>(logits: &[T], classes: usize, targets: Targets<'_>, ignore_index: Option<i64>) -> [i64; 2] {
    let totals = [const { AtomicI64::new(0) }; 2];
    threads::split(logits.len(), classes, |range| {
        let counts = count_rows(&logits[range.clone()], classes, targets, range.start / classes, ignore_index);
        for (total, count) in totals.iter().zip(counts) {
            total.fetch_add(count, Ordering::Relaxed);
        }
    });
    totals.map(AtomicI64::into_inner)
}
