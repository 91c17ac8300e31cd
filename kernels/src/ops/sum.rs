//! sum and mean of all elements, accumulated in f64 and rounded once at the end.
//!
//! The order depends on the number of elements alone, so the bits depend neither on the number of
//! threads nor on the SIMD level. A block of 1024 elements goes into 32 lanes (element i into lane
//! i mod 32), which are added pairwise; runs of whole blocks, at most 256 runs of equal length, add
//! their blocks in order; and the runs are added in order.
//!
//! On a GPU a warp adds a block of elements. Up to 256 blocks, one thread block does it all; beyond
//! that each run has a thread block, and the sums of the runs take 2 KiB of scratch memory, which
//! cannot be allocated during capture.

use crate::error::Result;
use crate::launch::{Grid, Launcher, Source, args};
use crate::ops::call::{Buffer, Call, FLOATS, Placed, with_float};
use crate::ops::float::{Float, LANES, tree_sum};
use crate::simd::multiversion;
use crate::storage::Origin;
use crate::threads;
use crate::{DType, Shape, Tensor};

static SOURCE: Source = Source::new("sum.cu", include_str!("sum.cu"));

/// Elements added together in lanes.
const BLOCK: usize = 1024;
/// The most runs, whose sums are kept on the stack.
const RUNS_MAX: usize = 256;

/// The sum of all elements, as a tensor without dimensions. 0 if there are none.
#[track_caller]
pub fn sum(x: &Tensor) -> Result<Tensor> {
    let out = x.new_empty(&[])?;
    sum_into(&out, x)?;
    Ok(out)
}

/// `out` [] `= sum(x)`. Allocates nothing.
///
/// Backward: none; `mse_into` and `cross_entropy` write the gradients of losses.
#[track_caller]
pub fn sum_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce_into("sum", out, x)
}

/// The mean of all elements, as a tensor without dimensions. NaN if there are none, as in PyTorch.
#[track_caller]
pub fn mean(x: &Tensor) -> Result<Tensor> {
    let out = x.new_empty(&[])?;
    mean_into(&out, x)?;
    Ok(out)
}

/// `out` [] `= mean(x)`. Allocates nothing.
///
/// Backward: none, as for `sum_into`.
#[track_caller]
pub fn mean_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce_into("mean", out, x)
}

#[track_caller]
fn reduce_into(op: &'static str, out: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.has_shape(out, &[], "one number")?;
    call.same_dtype(out, x)?;
    call.row_major(x)?;
    call.run(x, &FLOATS, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        let divisor = if op == "mean" { x.count as f64 } else { 1.0 };
        if let Some(gpu) = placed.launcher() {
            return launch(&gpu, placed, [&out, &x], divisor);
        }
        with_float!(placed.dtype, T => {
            out.elements_mut()[0] = T::from_f64(total::<T>(x.elements()) / divisor);
        });
        Ok(())
    })
}

fn launch(
    gpu: &Launcher,
    placed: &Placed<'_>,
    [out, x]: [&Buffer<'_>; 2],
    divisor: f64,
) -> Result<()> {
    /// As in `sum.cu`.
    const ONE_RUN_WARPS_MAX: usize = 32;
    const RUN_THREADS: u32 = 512;
    let blocks = x.count.div_ceil(BLOCK);
    if blocks <= RUNS_MAX {
        // Every run is one block, so the runs in order are the blocks in order.
        let threads = 32 * blocks.clamp(1, ONE_RUN_WARPS_MAX) as u32;
        let args = args![out, x, x.count, divisor];
        let grid = Grid::blocks(1, threads, loads(x.count, threads));
        return gpu.launch(&SOURCE, "sum_f32", grid, args);
    }
    let run_len = run_len(x.count);
    let runs = x.count.div_ceil(run_len);
    let shape = Shape::checked(&[runs], gpu.by)?;
    let (device, origin) = (gpu.gpu.device(), Origin::Computed);
    let sums = Tensor::allocate(shape, DType::F64, device, origin, gpu.by)?;
    let sums = placed.enter_new(&sums)?;
    let grid = Grid::blocks(runs, RUN_THREADS, loads(run_len, RUN_THREADS));
    let args = args![sums, x, x.count, run_len];
    gpu.launch(&SOURCE, "sum_runs_f32", grid, args)?;
    let args = args![out, sums, runs as u32, divisor];
    let grid = Grid::blocks(1, RUNS_MAX as u32, 1);
    gpu.launch(&SOURCE, "sum_of_runs_f32", grid, args)
}

/// Loads, one after another, of a thread of so many that sum `count` elements: those of a whole
/// block of elements are under way at once, of a part four.
pub(super) fn loads(count: usize, threads: u32) -> usize {
    let part = (count % BLOCK).div_ceil(4 * 32);
    count.div_ceil(BLOCK * (threads / 32) as usize).max(1) + part
}

/// Elements of a run, a multiple of BLOCK; 0 if there are no elements.
fn run_len(count: usize) -> usize {
    count.div_ceil(BLOCK).div_ceil(RUNS_MAX) * BLOCK
}

/// The sum in the order described at the head of this file.
pub(super) fn total<T: Float>(x: &[T]) -> f64 {
    let run_len = run_len(x.len());
    if run_len == 0 {
        return 0.0;
    }
    let runs = x.len().div_ceil(run_len);
    let mut sums = [0f64; RUNS_MAX];
    threads::split_sums(&mut sums[..runs], 1, x.len(), |first, sums| {
        for (run, sum) in sums.iter_mut().enumerate() {
            let start = (first + run) * run_len;
            *sum = run_total(&x[start..x.len().min(start + run_len)]);
        }
    });
    sums[..runs].iter().sum()
}

multiversion! {
    pub(super) fn run_total[T: Float](x: &[T]) -> f64 {
        let mut sum = 0.0;
        for block in x.chunks(BLOCK) {
            let mut lanes = [0f64; LANES];
            let (whole, rest) = block.as_chunks::<LANES>();
            for elements in whole {
                for (lane, element) in lanes.iter_mut().zip(elements) {
                    *lane += element.widened();
                }
            }
            for (lane, element) in lanes.iter_mut().zip(rest) {
                *lane += element.widened();
            }
            sum += pairwise(lanes);
        }
        sum
    }
}

/// `tree_sum`, not inlined: otherwise LLVM splits the lanes of the loop before it to suit these
/// additions, which takes twice the time.
#[inline(never)]
fn pairwise(lanes: [f64; LANES]) -> f64 {
    tree_sum(lanes)
}

#[cfg(test)]
mod tests;
