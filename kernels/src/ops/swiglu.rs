//! swiglu: `out = silu(gate) · up`, where one matmul made gate and up side by side: each row of x
//! is a row of gate and then one of up. silu(z) is z / (1 + e⁻ᶻ). f32 uses `math.rs`, with the same
//! bits everywhere.
//!
//! Letters: R rows, H columns of the result.

use crate::error::Result;
use crate::launch::{Grid, Launcher, Source, args};
use crate::ops::call::{Buffer, Call, FLOATS_AND_BF16, Slot, with_float};
use crate::ops::float::Float;
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use crate::{Tensor, math};

static SOURCE: Source = Source::new("swiglu.cu", include_str!("swiglu.cu"));

/// A type whose silu is known.
trait Silu: Float {
    /// silu and its derivative.
    fn silu(self) -> (Self, Self);
}

impl Silu for f32 {
    #[inline(always)]
    fn silu(self) -> (f32, f32) {
        math::silu(self)
    }
}

impl Silu for f64 {
    fn silu(self) -> (f64, f64) {
        // Beyond these e⁻ᶻ would overflow, or ∞ × 0 give NaN.
        let x = if self < -700.0 { -700.0 } else { self };
        let s = 1.0 / (1.0 + (-x).exp());
        let slope = if x > 700.0 {
            1.0
        } else {
            s + x * s * (1.0 - s)
        };
        (x * s, slope)
    }
}

/// `out = silu(gate) · up`: `x` (R, 2 H), gate and then up in each row; `out` (R, H).
#[track_caller]
pub fn swiglu_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = Call::new("swiglu");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    let columns = check(&call, out, x)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.launcher() {
            return launch(
                &gpu,
                "swiglu",
                &out,
                columns,
                args![out, x, out.count, columns],
            );
        }
        with_float!(placed.dtype, T => {
            let x = x.elements::<T>();
            threads::split_mut(out.elements_mut::<T>(), columns.max(1), |first, out| {
                forward(out, &x[2 * first..][..2 * out.len()], columns);
            });
        });
        Ok(())
    })
}

/// The gradients of gate and up, side by side in `dx` (R, 2 H), from `dout` (R, H) and forward's
/// `x` (R, 2 H); `dx` may be `x`.
#[track_caller]
pub fn swiglu_backward_into(dx: &Tensor, dout: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = Call::new("swiglu_backward");
    let dx = call.writes("dx", dx);
    let dout = call.reads("dout", dout);
    let x = call.reads("x", x);
    call.may_be_in_place(x, dx);
    call.elementwise(&[x, dx])?;
    let columns = check(&call, dout, x)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut dx, dout, x] = placed.enter([dx, dout, x])?;
        if let Some(gpu) = placed.launcher() {
            let args = args![dx, dout, x, dout.count, columns];
            return launch(&gpu, "swiglu_backward", &dout, columns, args);
        }
        with_float!(placed.dtype, T => {
            let (dout, x) = (dout.elements::<T>(), x.unless_in_place::<T>());
            let dx = Shares::new(dx.elements_mut::<T>());
            threads::split(dout.len(), columns.max(1), |range| {
                let pair = 2 * range.start..2 * range.end;
                // SAFETY: `split` hands out ranges of whole rows that do not overlap.
                let dx = unsafe { dx.part(pair.clone()) };
                if let Some(x) = x {
                    dx.copy_from_slice(&x[pair]);
                }
                backward(dx, &dout[range], columns);
            });
        });
        Ok(())
    })
}

/// Checks `half` (R, H) and `x` (R, 2 H). Gives H.
fn check(call: &Call<'_>, half: Slot, x: Slot) -> Result<usize> {
    let [rows, columns] = call.dims::<2>(half, "[rows, columns]")?;
    let meaning = "gate and up side by side in each row";
    call.has_shape(x, &[rows, 2 * columns], meaning)?;
    call.same_dtype(x, half)?;
    call.all_row_major()?;
    Ok(columns)
}

/// A kernel with a thread for 16 bytes of `half`, or for an element where rows cannot be so cut.
fn launch(
    gpu: &Launcher,
    name: &'static str,
    half: &Buffer<'_>,
    columns: usize,
    args: &[u64],
) -> Result<()> {
    let grid = match columns.is_multiple_of(4) {
        true => Grid::elements(half.count / 4),
        false => Grid::elements(half.count),
    };
    gpu.launch(&SOURCE, (name, half.dtype), grid, args)
}

multiversion! {
    fn forward[T: Silu](out: &mut [T], x: &[T], columns: usize) {
        for (out, x) in out.chunks_exact_mut(columns.max(1)).zip(x.chunks_exact(2 * columns.max(1))) {
            let (gate, up) = x.split_at(columns);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate.silu().0 * up;
            }
        }
    }
}

multiversion! {
    /// `dx` holds x.
    fn backward[T: Silu](dx: &mut [T], dout: &[T], columns: usize) {
        let rows = dx.chunks_exact_mut(2 * columns.max(1));
        for (dx, dout) in rows.zip(dout.chunks_exact(columns.max(1))) {
            let (gate, up) = dx.split_at_mut(columns);
            for ((gate, up), &dout) in gate.iter_mut().zip(up).zip(dout) {
                let (silu, slope) = gate.silu();
                *gate = dout * *up * slope;
                *up = dout * silu;
            }
        }
    }
}

#[cfg(test)]
mod tests;
