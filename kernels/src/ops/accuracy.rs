//! accuracy: in how many rows the largest logit is at the target. The largest is `torch.argmax`'s:
//! the first of equals, and NaN above everything.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::cuda::launch::{BLOCK_THREADS, BLOCKS_MAX, args};
use crate::cuda::{Grid, Source};
use crate::error::Result;
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::float::Float;
use crate::ops::targets::{Targets, check_operands};
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

static SOURCE: Source = Source::new("accuracy.cu", include_str!("accuracy.cu"));
/// Rows of a thread block, which has a warp for each.
const ROWS_PER_BLOCK: usize = BLOCK_THREADS as usize / 32;

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

/// `out = [correct, counted]`, i64 (2): of the rows of `logits` (B, C) whose target (B; u8, i32 or
/// i64) is not `ignore_index`, how many have their first maximum at the target.
///
/// A target that is not a class is an error on the CPU; a GPU counts it as not correct. On a GPU
/// logits may also be bf16.
#[track_caller]
pub fn accuracy(
    out: &Tensor,
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: Option<i64>,
) -> Result<()> {
    let mut call = Call::new("accuracy");
    let out = call.writes("out", out);
    let logits = call.reads("logits", logits);
    let targets = call.reads("targets", targets);
    let [rows, classes] = check_operands(&call, logits, targets)?;
    call.row_major(logits)?;
    call.has_shape(out, &[2], "correct and counted")?;
    call.has_dtype(out, &[DType::I64])?;
    call.run(logits, &FLOATS_AND_BF16, |placed| {
        let [mut out, logits, targets] = placed.enter([out, logits, targets])?;
        if let Some(gpu) = placed.launcher() {
            gpu.launch(&SOURCE, "accuracy_zero", Grid::blocks(1, 32), args![out])?;
            let blocks = rows.div_ceil(ROWS_PER_BLOCK).min(BLOCKS_MAX);
            let grid = Grid::blocks(blocks, BLOCK_THREADS);
            let target_bytes = targets.dtype.bytes() as u32;
            let (ignored, ignores) = (ignore_index.unwrap_or_default(), ignore_index.is_some());
            let args = args![
                out,
                logits,
                targets,
                target_bytes,
                rows,
                classes,
                ignored,
                ignores,
            ];
            return gpu.launch(&SOURCE, ("accuracy", placed.dtype), grid, args);
        }
        let targets = Targets::of(&targets);
        targets.check(&placed.call, classes, ignore_index)?;
        let counts = with_float!(placed.dtype, T => {
            count::<T>(logits.elements(), classes, targets, ignore_index)
        });
        out.elements_mut().copy_from_slice(&counts);
        Ok(())
    })
}

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
