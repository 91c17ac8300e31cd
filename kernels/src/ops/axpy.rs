//! axpy: `y += a x`, each element with one fused multiply-add and so one rounding. `a` is first
//! rounded to the dtype of the math: f32, or f64 for f64.

use crate::error::Result;
use crate::launch::{Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, with_float};
use crate::ops::float::Float;
use crate::ops::loops::GRAIN;
use crate::simd::multiversion;
use crate::{Tensor, threads};

static SOURCE: Source = Source::new("axpy.cu", include_str!("axpy.cu"));

/// `y += a x`, of one shape. `x` may not be `y`: that is `scale_into(y, y, 1.0 + a)`. On a GPU `y`
/// may be f32 where `x` is bf16, to sum without loss.
///
/// Backward: the gradient of `y` stays, `dx = a · dy`, with `scale_into`.
#[track_caller]
pub fn axpy(y: &Tensor, a: f64, x: &Tensor) -> Result<()> {
    let mut call = Call::new("axpy");
    let y = call.updates("y", y);
    let x = call.reads("x", x);
    call.same_shape(x, y)?;
    call.all_row_major()?;
    let same = call.same_or_wider(y, x);
    same.or_else(|_| call.same_dtype(x, y))?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut y, x] = placed.enter([y, x])?;
        if let Some(gpu) = placed.launcher() {
            let base = if y.dtype == x.dtype {
                "axpy"
            } else {
                "axpy_to_f32"
            };
            let grid = Grid::packs(y.count, y.dtype);
            return gpu.launch(
                &SOURCE,
                (base, x.dtype),
                grid,
                args![y, x, y.count, a as f32],
            );
        }
        with_float!(placed.dtype, T => {
            let x = x.elements();
            threads::split_mut(y.elements_mut(), GRAIN, |first, y| {
                update::<T>(y, T::from_f64(a), &x[first..first + y.len()])
            });
        });
        Ok(())
    })
}

multiversion! {
    fn update[T: Float](y: &mut [T], a: T, x: &[T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = a.fused(x, *y);
        }
    }
}

#[cfg(test)]
mod tests;
