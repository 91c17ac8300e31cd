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
//!
//! row_sum goes over the last dimension, which keeps the length 1. A row is added block by block as
//! above, on a GPU by a warp. column_sum is the sum of the rows of a matrix, as for the gradient of
//! a vector that was broadcast along them; its order is that of linear's bias gradient, whose loop
//! and kernel these are.
//!
//! add_in_order adds partial sums of several ranks in the order of a tree. Each is read once.
//! Letters: E elements, O parts from other ranks, G of this rank.

use crate::error::Result;
use crate::launch::{BLOCK_THREADS, CuFile, GpuLaunch, Grid, args};
use crate::ops::call::{Buffer, FLOATS, FLOATS_AND_BF16, OpCall, Placed, with_float};
use crate::ops::elementwise::GRAIN;
use crate::ops::float::{Float, LANES, tree_sum};
use crate::ops::linear::{add_rows, gpu};
use crate::ops::stored::{Stored, with_stored};
use crate::shape::RANK_MAX;
use crate::simd::multiversion;
use crate::storage::ContentsOrigin;
use crate::{DType, Device, Shape, Tensor, threads};

pub(super) static SUM: CuFile = CuFile::new("sum.cu", include_str!("sum.cu"));

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
    let mut call = OpCall::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.has_shape(out, &[], "one number")?;
    call.same_dtype(out, x)?;
    call.row_major(x)?;
    call.run(x, &FLOATS, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        let divisor = if op == "mean" { x.count as f64 } else { 1.0 };
        if let Some(gpu) = placed.gpu() {
            return launch(&gpu, placed, [&out, &x], divisor);
        }
        with_float!(placed.dtype, T => {
            out.elements_mut()[0] = T::from_f64(total::<T>(x.elements()) / divisor);
        });
        Ok(())
    })
}

fn launch(
    gpu: &GpuLaunch,
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
        return gpu.launch(&SUM, "sum_f32", grid, args);
    }
    let run_len = run_len(x.count);
    let runs = x.count.div_ceil(run_len);
    let shape = Shape::checked(&[runs], gpu.by)?;
    let (device, origin) = (gpu.gpu.device(), ContentsOrigin::Computed);
    let sums = Tensor::allocate(shape, DType::F64, device, origin, gpu.by)?;
    let sums = placed.enter_new(&sums)?;
    let grid = Grid::blocks(runs, RUN_THREADS, loads(run_len, RUN_THREADS));
    let args = args![sums, x, x.count, run_len];
    gpu.launch(&SUM, "sum_runs_f32", grid, args)?;
    let args = args![out, sums, runs as u32, divisor];
    let grid = Grid::blocks(1, RUNS_MAX as u32, 1);
    gpu.launch(&SUM, "sum_of_runs_f32", grid, args)
}

/// Dependent loads of each of `threads` threads that sum `count` elements: the loads of a whole
/// block of elements are in flight at once, those of a part four at a time.
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
    fn run_total[T: Float](x: &[T]) -> f64 {
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

/// Rows of a thread block: one a warp.
const ROWS_PER_BLOCK: usize = BLOCK_THREADS as usize / 32;

/// `out` (…, 1) `= Σ` of each row of `x` (…, C). 0 where C is 0.
///
/// Backward: every element of a row of `dx` is that row's number in `dout`; a chain broadcasts it.
#[track_caller]
pub fn row_sum_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let dims = x.shape().dims();
    let mut call = OpCall::new("row_sum");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let Some((&columns, rows)) = dims.split_last() else {
        let expected = "at least one dimension, its columns";
        return Err(call.operand_error(x, expected, "reshape it to [rows, columns]"));
    };
    // On the stack: a step that sums the rows of a loss does not touch the heap.
    let mut of_rows = [1; RANK_MAX];
    of_rows[..rows.len()].copy_from_slice(rows);
    call.has_shape(out, &of_rows[..dims.len()], "a number for each row of x")?;
    call.same_dtype(out, x)?;
    call.all_row_major()?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.gpu() {
            let blocks = out.count.div_ceil(ROWS_PER_BLOCK);
            let grid = Grid::blocks(blocks, BLOCK_THREADS, loads(columns, 32));
            let args = args![out, x, out.count, columns];
            return gpu.launch(&SUM, ("row_sum", placed.dtype), grid, args);
        }
        with_float!(placed.dtype, T => {
            let x = x.elements::<T>();
            threads::split_sums(out.elements_mut(), 1, x.len(), |first, out| {
                for (row, out) in (first..).zip(out) {
                    *out = T::from_f64(run_total(&x[row * columns..][..columns]));
                }
            });
        });
        Ok(())
    })
}

/// `out` (C) `= Σ` of the rows of `x` (…, C), or added to what is there with `accumulate`.
/// `out` may be f32 where `x` is bf16.
///
/// Backward: every row of `dx` is `dout`; a chain broadcasts it.
#[track_caller]
pub fn column_sum_into(out: &Tensor, x: &Tensor, accumulate: bool) -> Result<()> {
    let columns = x.shape().dims().last().copied();
    let mut call = OpCall::new("column_sum");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let Some(columns) = columns else {
        let expected = "at least one dimension, its columns";
        return Err(call.operand_error(x, expected, "reshape it to [rows, columns]"));
    };
    call.has_shape(out, &[columns], "a number for each column of x")?;
    call.same_or_wider(out, x)?;
    call.all_row_major()?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.gpu() {
            let rows = x.count.checked_div(columns).unwrap_or(0);
            return gpu::sum_rows(&gpu, &out, &x, [rows, columns], accumulate);
        }
        with_stored!(placed.dtype, S => {
            add_rows(out.elements_mut(), x.elements::<S>(), gpu::ROW_BLOCK, accumulate)
        });
        Ok(())
    })
}

pub(super) static ADD_IN_ORDER: CuFile =
    CuFile::new("add_in_order.cu", include_str!("add_in_order.cu"));
/// The most sums that are left at a time: of 2¹⁰ shards.
const DEPTH: usize = 10;

/// Where a part is, in the lowest bits of its word: what another gave, one of the rows, or the last
/// of this rank, which the sum replaces.
const OTHER: i32 = 0;
const ROW: i32 = 1;
const OUT: i32 = 2;

/// In what order partial sums are added, on one device.
#[derive(Clone, Debug)]
pub struct AddOrder {
    /// (O + G): where each part is, and four times the number of additions that follow it.
    words: Vec<i32>,
    /// i32 (O + G): the same on the device.
    on_device: Tensor,
}

impl AddOrder {
    /// Of each part whether it is this rank's, which has at least one, and how many additions
    /// follow it: each adds the last two sums that are left.
    #[track_caller]
    pub fn new(parts: &[(bool, usize)], device: Device) -> Result<AddOrder> {
        let last = parts.iter().rposition(|(is_own, _)| *is_own);
        let last = last.expect("a part of this rank");
        let mut left = 0;
        let word = |(index, &(is_own, additions)): (usize, &(bool, usize))| {
            assert!(left >= additions && left < DEPTH + additions, "{parts:?}");
            left = left + 1 - additions;
            let own = if index == last { OUT } else { ROW };
            4 * additions as i32 + if is_own { own } else { OTHER }
        };
        let words: Vec<i32> = parts.iter().enumerate().map(word).collect();
        assert_eq!(left, 1, "{parts:?}");
        let on_device = Tensor::from_slice(&words, &[words.len()], device)?;
        Ok(AddOrder { words, on_device })
    }

    fn count(&self, place: i32) -> usize {
        self.words.iter().filter(|word| *word & 3 == place).count()
    }
}

/// `out` (E) becomes the sum of all parts in `order`: those of `others` (O · E), the elements from
/// `start` on of each of the `rows` (G - 1, …), and last of this rank that of `out`. Every sum is
/// rounded.
///
/// Backward: none.
#[track_caller]
pub fn add_in_order(
    out: &Tensor,
    others: &Tensor,
    rows: &Tensor,
    start: usize,
    order: &AddOrder,
) -> Result<()> {
    let mut call = OpCall::new("add_in_order");
    let (count, own) = (out.count(), order.count(ROW));
    let stride = rows.count() / own.max(1);
    let out = call.updates("out", out);
    let others = call.reads("others", others);
    let rows = call.reads("rows", rows);
    let words = call.reads("order", &order.on_device);
    let expected = "a part of each other that the order has";
    call.has_shape(others, &[order.count(OTHER) * count], expected)?;
    call.has_shape(rows, &[own * stride], "as many rows as the order has")?;
    if own > 0 && start + count > stride {
        let expected = format!("rows of {} elements or more", start + count);
        return Err(call.operand_error(rows, expected, "start earlier"));
    }
    call.same_dtype(others, out)?;
    call.same_dtype(rows, out)?;
    call.run(out, &FLOATS_AND_BF16, |placed| {
        let [mut out, others, rows, words] = placed.enter([out, others, rows, words])?;
        if let Some(gpu) = placed.gpu() {
            let row = rows.address() + (start * rows.dtype.bytes()) as u64;
            // Of each part its word, then its elements.
            let grid = Grid::packs(count, out.dtype).rounds_of(2 * order.words.len());
            let args = args![out, others, row, words, order.words.len(), count, stride];
            return gpu.launch(&ADD_IN_ORDER, ("add_in_order", placed.dtype), grid, args);
        }
        with_stored!(placed.dtype, S => {
            let (others, rows) = (others.elements::<S>(), rows.elements::<S>());
            threads::split_mut(out.elements_mut::<S>(), GRAIN, |first, out| {
                for (index, out) in (first..).zip(out) {
                    let mut others = others.iter().skip(index).step_by(count);
                    let mut rows = rows.iter().skip(start + index).step_by(stride.max(1));
                    let mut left = Vec::with_capacity(DEPTH);
                    for word in &order.words {
                        let mut sum = match word & 3 {
                            OTHER => *others.next().expect("checked above"),
                            ROW => *rows.next().expect("checked above"),
                            _ => *out,
                        };
                        for _ in 0..word >> 2 {
                            let other: S = left.pop().expect("checked by the order");
                            sum = S::rounded(sum.wide() + other.wide());
                        }
                        left.push(sum);
                    }
                    *out = left[0];
                }
            });
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests;
