//! scale and axpy, element by element; other arithmetic is a chain's. Factors are first rounded to
//! the dtype of the math: f32, or f64 for f64.

use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, KernelArgument, args};
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, with_float};
use crate::ops::elementwise::{GRAIN, binary_in_place, of_elements, unary_op};
use crate::{Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("arithmetic.cu", include_str!("arithmetic.cu"));

of_elements! {
    pub(crate) Add(): (a, b) => a + b;
    Scale(factor): (x) => x * T::from_f64(factor);
    Axpy(factor): (y, x) => T::from_f64(factor).fused(x, y);
}

/// `out = factor · x`; `out` may be `x`.
///
/// Backward: `dx = factor · dout`, with `scale_into`.
#[track_caller]
pub fn scale_into(out: &Tensor, x: &Tensor, factor: f64) -> Result<()> {
    let kernel = (&SOURCE, "scale", Some((factor as f32).word()));
    unary_op("scale", out, x, Scale(factor), kernel)
}

/// `out = factor · x` on a GPU, for operands that another operation has entered.
pub(super) fn scale_on(gpu: &GpuLaunch, [out, x]: [&Buffer<'_>; 2], factor: f64) -> Result<()> {
    let grid = Grid::packs(out.count, out.dtype);
    let args = args![out, x, out.count, factor as f32];
    gpu.launch(&SOURCE, ("scale", out.dtype), grid, args)
}

/// `y += a x`, of one shape, each element with one fused multiply-add and so one rounding. `x` may
/// not be `y`: that is `scale_into(y, y, 1.0 + a)`. `y` may be f32 where `x` is bf16, to
/// sum without loss.
///
/// Backward: the gradient of `y` stays, `dx = a · dy`, with `scale_into`.
#[track_caller]
pub fn axpy(y: &Tensor, a: f64, x: &Tensor) -> Result<()> {
    let mut call = OpCall::new("axpy");
    let y = call.updates("y", y);
    let x = call.reads("x", x);
    call.same_shape(x, y)?;
    call.all_row_major()?;
    let same = call.same_or_wider(y, x);
    same.or_else(|_| call.same_dtype(x, y))?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut y, x] = placed.enter([y, x])?;
        if let Some(gpu) = placed.gpu() {
            let is_same = y.dtype == x.dtype;
            let name = if is_same { "axpy" } else { "axpy_to_f32" };
            let (grid, args) = (
                Grid::packs(y.count, y.dtype),
                args![y, x, y.count, a as f32],
            );
            return gpu.launch(&SOURCE, (name, x.dtype), grid, args);
        }
        with_float!(placed.dtype, T => {
            let x = x.elements::<T>();
            threads::split_mut(y.elements_mut(), GRAIN, |first, y| {
                binary_in_place(y, &x[first..first + y.len()], Axpy(a));
            });
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests;
