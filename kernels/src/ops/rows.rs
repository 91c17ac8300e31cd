//! row_sum, row_mean and row_max: over the last dimension, which keeps the length 1, so that the
//! result can be broadcast to the rows again (`add`, `sub`, `mul`).
//!
//! Sums are accumulated in f64, in blocks of 1024 elements as in `sum`, and rounded once. On a GPU
//! a warp takes a row and follows the same order.

use crate::Tensor;
use crate::error::Result;
use crate::launch::{BLOCK_THREADS, Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::float::{Float, LANES};
use crate::ops::sum::run_total;
use crate::simd::multiversion;
use crate::threads::{self, PARALLEL_MIN};

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

/// `out` (…, 1) `=` the largest element of each row of `x` (…, C). NaN if any is NaN; −∞ where C is
/// 0; a zero is +0.
#[track_caller]
pub fn row_max_into(out: &Tensor, x: &Tensor) -> Result<()> {
    reduce("row_max", out, x)
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
            let name = if op == "row_max" { op } else { "row_sum" };
            let grid = Grid::blocks(out.count.div_ceil(ROWS_PER_BLOCK), BLOCK_THREADS);
            let args = args![out, x, out.count, columns, divisor];
            return gpu.launch(&SOURCE, (name, placed.dtype), grid, args);
        }
        with_float!(placed.dtype, T => {
            let of_row = |row: &[T]| match op {
                "row_max" => largest(row),
                _ => T::from_f64(run_total(row) / divisor),
            };
            each_row(out.elements_mut(), x.elements(), columns, of_row);
        });
        Ok(())
    })
}

/// `out[row] = f(the row of x)`.
fn each_row<T: Float>(out: &mut [T], x: &[T], columns: usize, f: impl Fn(&[T]) -> T + Sync) {
    let pieces = if x.len() < PARALLEL_MIN {
        1
    } else {
        threads::count().min(out.len())
    };
    threads::split_mut_in(out, 1, pieces, |first, out| {
        for (row, out) in (first..).zip(out) {
            *out = f(&x[row * columns..][..columns]);
        }
    });
}

multiversion! {
    fn largest[T: Float](x: &[T]) -> T {
        let mut lanes = [T::NEG_INFINITY; LANES];
        let (whole, rest) = x.as_chunks::<LANES>();
        for elements in whole {
            for (lane, &element) in lanes.iter_mut().zip(elements) {
                *lane = larger(*lane, element);
            }
        }
        for (lane, &element) in lanes.iter_mut().zip(rest) {
            *lane = larger(*lane, element);
        }
        // −0 + 0 is +0: which of two zeros was larger would depend on the order.
        lanes.into_iter().fold(T::NEG_INFINITY, larger) + T::ZERO
    }
}

/// The larger of two; NaN if either is.
#[inline(always)]
fn larger<T: Float>(a: T, b: T) -> T {
    if a > b {
        a
    } else if a <= b {
        b
    } else {
        a + b
    }
}

#[cfg(test)]
mod tests;
