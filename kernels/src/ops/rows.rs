//! row_sum and row_mean: over the last dimension, which keeps the length 1, so that the result can
//! be broadcast to the rows again (`add`, `sub`, `mul`).
//!
//! Sums are accumulated in f64, in blocks of 1024 elements as in `sum`, and rounded once. On a GPU
//! a warp takes a row and follows the same order.

use crate::Tensor;
use crate::error::Result;
use crate::launch::{BLOCK_THREADS, Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::float::Float;
use crate::ops::sum::{self, run_total};
use crate::threads;

static SOURCE: Source = Source::new("rows.cu", include_str!("rows.cu"));

/// Rows of a thread block: one a warp.
const ROWS_PER_BLOCK: usize = BLOCK_THREADS as usize / 32;

/// `out` (…, 1) `= Σ` of each row of `x` (…, C). 0 where C is 0.
///
/// Backward: each element of a row of `dx` is that of `dout`: `zero`, then `add_into`.
#[track_caller]
pub fn row_sum_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce("row_sum", out, x)
}

/// `out` (…, 1) `=` the mean of each row of `x` (…, C). NaN where C is 0, as in PyTorch.
///
/// Backward: as for `row_sum_into`, times 1/C.
#[track_caller]
pub fn row_mean_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce("row_mean", out, x)
}

#[track_caller]
fn reduce(op: &'static str, out: &Tensor, x: &Tensor) -> Result<()> {
    let dims = x.shape().dims();
    let mut call = Call::new(op);
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let Some((&columns, rows)) = dims.split_last() else {
        let expected = "at least one dimension, its columns";
        return Err(call.operand_error(x, expected, "reshape it to [rows, columns]"));
    };
    call.has_shape(out, &[rows, &[1]].concat(), "a number for each row of x")?;
    call.same_dtype(out, x)?;
    call.all_row_major()?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        let divisor = if op == "row_mean" {
            columns as f64
        } else {
            1.0
        };
        if let Some(gpu) = placed.launcher() {
            let blocks = out.count.div_ceil(ROWS_PER_BLOCK);
            let grid = Grid::blocks(blocks, BLOCK_THREADS, sum::loads(columns, 32));
            let args = args![out, x, out.count, columns, divisor];
            return gpu.launch(&SOURCE, ("row_sum", placed.dtype), grid, args);
        }
        with_float!(placed.dtype, T => {
            let of_row = |row: &[T]| T::from_f64(run_total(row) / divisor);
            each_row(out.elements_mut(), x.elements(), columns, of_row);
        });
        Ok(())
    })
}

/// `out[row] = f(the row of x)`.
fn each_row<T: Float>(out: &mut [T], x: &[T], columns: usize, f: impl Fn(&[T]) -> T + Sync) {
    threads::split_sums(out, 1, x.len(), |first, out| {
        for (row, out) in (first..).zip(out) {
            *out = f(&x[row * columns..][..columns]);
        }
    });
}

#[cfg(test)]
mod tests;
