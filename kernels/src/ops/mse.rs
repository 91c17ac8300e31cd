//! mse: the squared error of every sample, and its derivative, in one call.
//!
//! `losses[row]` is the sum of (pred − target)² over the features of the row, not a mean, so that
//! ranks with unequal numbers of rows can weight theirs correctly. The mean over N rows of F
//! features each, as in PyTorch's MSELoss, is `sum(losses) / (N F)`, and `gradient_scale` = 1 / (N
//! F) makes `dpred` its derivative; N counts the rows of all ranks.
//!
//! Squares are added in f64: within blocks of 1024 features in 8 lanes, which are added pairwise,
//! and block by block. So the bits depend neither on the SIMD level nor on how a GPU splits the
//! blocks.

use crate::error::Result;
use crate::launch::{BLOCK_THREADS, CuFile, Grid, args};
use crate::ops::call::{FLOATS_AND_BF16, OpCall, with_float};
use crate::ops::cross_entropy;
use crate::ops::elementwise::{self, of_elements};
use crate::ops::float::Float;
use crate::simd::multiversion;
use crate::{Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("mse.cu", include_str!("mse.cu"));

const LANES: usize = 8;
/// Features that are added together in lanes.
const BLOCK: usize = 1024;
/// Rows of a thread block, where a row has a thread for each lane.
const ROWS_PER_BLOCK: usize = BLOCK_THREADS as usize / LANES;

of_elements! {
    ScaledDifference(factor): (pred, target) => T::from_f64(factor) * (pred - target);
}

/// `losses` (B) `= Σ (pred − target)²` over each row of `pred` (B, …) and `target` (B, …), and if
/// given `dpred` (B, …) `= 2 gradient_scale (pred − target)`; `dpred` may be `pred`.
///
/// `pred` and `dpred` may also be bf16, with all else in f32: the math is that of f32, and `dpred`
/// is rounded once, except that on a GPU four squares at a time go to a lane.
///
/// Adds to `stats` (4), if given: the sum of losses, the number of elements of `pred`, nothing,
/// and the number of rows.
///
/// Backward: in the same call: `dpred`.
#[track_caller]
pub fn mse_into(
    losses: &Tensor,
    dpred: Option<&Tensor>,
    pred: &Tensor,
    target: &Tensor,
    gradient_scale: f64,
    stats: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("mse");
    let losses = call.writes("losses", losses);
    let pred = call.reads("pred", pred);
    let target = call.reads("target", target);
    let dpred = call.writes_some("dpred", dpred);
    let stats = cross_entropy::updates_stats(&mut call, stats)?;
    call.same_shape(target, pred)?;
    call.math_dtype(target, pred)?;
    call.row_major(target)?;
    call.elementwise(&[pred, dpred.unwrap_or(pred)])?;
    if let Some(dpred) = dpred {
        call.may_be_in_place(pred, dpred);
    }
    let &[rows, ..] = call.tensor(pred).shape().dims() else {
        let help = "reshape it to [1, 1] for a single number";
        return Err(call.operand_error(pred, "[rows, …], one row a sample", help));
    };
    call.has_shape(losses, &[rows], "[rows of pred]")?;
    call.math_dtype(losses, pred)?;
    if !gradient_scale.is_finite() {
        return Err(call.value("gradient_scale", "a finite number", gradient_scale));
    }
    let slope = 2.0 * gradient_scale;
    call.run(pred, &FLOATS_AND_BF16, |placed| {
        let [mut losses, pred, target] = placed.enter([losses, pred, target])?;
        let (mut dpred, mut stats) = (placed.enter_some(dpred)?, placed.enter_some(stats)?);
        if let Some(gpu) = placed.gpu() {
            let features = pred.count.checked_div(rows).unwrap_or(0);
            let slope = slope as f32;
            let counters = stats.as_ref().map(|_| gpu.counters()).transpose()?;
            let args = args![
                losses, dpred, pred, target, rows, features, slope, stats, counters
            ];
            // Of a row, or of its blocks by groups side by side, four loads at once in each lane.
            let (name, blocks, row_blocks) = if features <= BLOCK {
                ("mse_narrow", rows.div_ceil(ROWS_PER_BLOCK), 1)
            } else {
                let row_blocks = features.div_ceil(BLOCK * ROWS_PER_BLOCK);
                ("mse_wide", rows, row_blocks)
            };
            let loads = row_blocks * features.min(BLOCK).div_ceil(4 * LANES);
            let grid = Grid::blocks(blocks, BLOCK_THREADS, loads);
            return gpu.launch(&SOURCE, (name, placed.dtype), grid, args);
        }
        with_float!(placed.dtype, T => {
            let source = match &dpred {
                Some(dpred) if pred.is_in_place() => dpred.elements::<T>(),
                _ => pred.elements(),
            };
            sum_rows(losses.elements_mut::<T>(), source, target.elements());
            if let Some(dpred) = &mut dpred {
                elementwise::binary::<T, _>(dpred, &pred, &target, ScaledDifference(slope));
            }
            if let Some(stats) = &mut stats {
                let counts = [pred.count, 0, rows].map(|count| count as f64);
                cross_entropy::add_to_stats::<T>(stats, &losses, counts);
            }
        });
        Ok(())
    })
}

fn sum_rows<T: Float>(losses: &mut [T], pred: &[T], target: &[T]) {
    let features = pred.len() / losses.len().max(1);
    threads::split_sums(losses, 1, pred.len(), |first, losses| {
        for (row, loss) in losses.iter_mut().enumerate() {
            let range = (first + row) * features..(first + row + 1) * features;
            *loss = T::from_f64(squared_distance(&pred[range.clone()], &target[range]));
        }
    });
}

multiversion! {
    fn squared_distance[T: Float](pred: &[T], target: &[T]) -> f64 {
        let mut sum = 0.0;
        for (pred, target) in pred.chunks(BLOCK).zip(target.chunks(BLOCK)) {
            let mut lanes = [0f64; LANES];
            let ((pred, pred_rest), (target, target_rest)) = (pred.as_chunks::<LANES>(), target.as_chunks::<LANES>());
            for (pred, target) in pred.iter().zip(target) {
                for lane in 0..LANES {
                    let difference = (pred[lane] - target[lane]).widened();
                    lanes[lane] = difference.mul_add(difference, lanes[lane]);
                }
            }
            for (lane, (&pred, &target)) in lanes.iter_mut().zip(pred_rest.iter().zip(target_rest)) {
                let difference = (pred - target).widened();
                *lane = difference.mul_add(difference, *lane);
            }
            let [a, b, c, d, e, f, g, h] = lanes;
            sum += ((a + e) + (c + g)) + ((b + f) + (d + h));
        }
        sum
    }
}

#[cfg(test)]
mod tests;
