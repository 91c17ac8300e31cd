//! column_sum: the sum of the rows of a matrix, and so the gradient of a vector that was broadcast
//! along them. The order of the sum is that of linear's bias gradient, whose loop and kernel these
//! are.

use crate::Tensor;
use crate::error::Result;
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::linear::{add_rows, gpu};

/// `out` (C) `= Σ` of the rows of `x` (…, C), or added to what is there with `accumulate`. On a GPU
/// `out` may be f32 where `x` is bf16.
///
/// Backward: each row of `dx` is `dout`: `zero`, then `add_into`.
#[track_caller]
pub fn column_sum_into(out: &Tensor, x: &Tensor, accumulate: bool) -> Result<()> {
    let columns = x.shape().dims().last().copied();
    let mut call = Call::new("column_sum");
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
        if let Some(launcher) = placed.launcher() {
            let rows = x.count.checked_div(columns).unwrap_or(0);
            return gpu::sum_rows(&launcher, &out, &x, [rows, columns], accumulate);
        }
        with_float!(placed.dtype, T => {
            add_rows(out.elements_mut::<T>(), x.elements(), gpu::ROW_BLOCK, accumulate)
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests;
