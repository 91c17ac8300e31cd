//! The norm of all gradients and the scale that clips them, without leaving the device: `grad_norm_partials` sums
//! squares by quantum, `clip_scale` makes of them the number that the optimizers multiply gradients by.
//!
//! Squares are summed in f64, in an order that depends on the chunk table alone. So ranks that each hold the partials
//! of their own slices (ZeRO-1) get, once these are put in order, the norm that one rank alone would.

use crate::error::Result;
use crate::ops::call::{Call, FLOATS, Lent, Slot};
use crate::ops::chunks::ChunkTable;
use crate::ops::float::{Float, LANES, lane_sum, tree_sum};
use crate::simd::multiversion;
use crate::{DType, Tensor};

multiversion! {
    /// Σ x². The square of an f32 is exact in f64, so whether it is fused with the sum makes no difference.
    fn sum_of_squares[T: Float](x: &[T]) -> f64 {
        let mut lanes = [0.0; LANES];
        let (blocks, tail) = x.as_chunks::<LANES>();
        for block in blocks {
            for (lane, &x) in lanes.iter_mut().zip(block) {
                *lane += x.widened() * x.widened();
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(tail) {
            *lane += x.widened() * x.widened();
        }
        tree_sum(lanes)
    }
}

multiversion! {
    fn sum[](x: &[f64]) -> f64 {
        lane_sum(x)
    }
}

/// The sum of squares of every quantum of `chunks`, into `partials`, f64\[chunks.quanta()\].
#[track_caller]
pub fn grad_norm_partials(partials: &Tensor, grads: &Tensor, chunks: &ChunkTable) -> Result<()> {
    let mut call = Call::new("grad_norm_partials");
    let partials = call.writes("partials", partials);
    let grads = call.reads("grads", grads);
    chunks.check_fits(&call, grads)?;
    call.has_shape(partials, &[chunks.quanta()], "one sum for each quantum of the chunk table")?;
    call.has_dtype(partials, &[DType::F64])?;
    let placed = call.place(grads, &FLOATS)?;
    {
        let [mut partials, lent_grads] = placed.enter([partials, grads])?;
        let partials = partials.elements_mut::<f64>();
        match placed.tensor(grads).dtype() {
            DType::F32 => partials_of::<f32>(partials, lent_grads.elements(), chunks),
            _ => partials_of::<f64>(partials, lent_grads.elements(), chunks),
        }
    }
    placed.finish()
}

fn partials_of<T: Float>(partials: &mut [f64], grads: &[T], chunks: &ChunkTable) {
    chunks.each_quantum(partials, |piece| sum_of_squares(&grads[piece.range()]));
}

/// `out = [scale, norm]` with `norm = gradient_scale × √(Σ partials)`, the norm of the scaled gradients, and
/// `scale = gradient_scale × min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` has it.
/// A `max_norm` of 0 clips nothing. A norm that is not finite makes a scale of 0 or NaN: see `mark_nonfinite`.
#[track_caller]
pub fn clip_scale(out: &Tensor, partials: &Tensor, max_norm: f64, gradient_scale: f64) -> Result<()> {
    let mut call = Call::new("clip_scale");
    let out = call.writes("out", out);
    let partials = call.reads("partials", partials);
    call.has_shape(out, &[2], "scale and norm")?;
    call.dims::<1>(partials, "what grad_norm_partials wrote")?;
    call.has_dtype(partials, &[DType::F64])?;
    if !(0.0..f64::INFINITY).contains(&max_norm) {
        return Err(call.bad_value("max_norm", "0 (no clipping) or more", max_norm.to_string()));
    }
    if !(gradient_scale > 0.0 && gradient_scale < f64::INFINITY) {
        return Err(call.bad_value("gradient_scale", "above 0", gradient_scale.to_string()));
    }
    let placed = call.place(out, &FLOATS)?;
    {
        let [mut lent_out, partials] = placed.enter([out, partials])?;
        let norm = gradient_scale * sum(partials.elements()).sqrt();
        // Not min(): a NaN must stay.
        let limit = max_norm / (norm + 1e-6);
        let scale = if max_norm == 0.0 || limit > 1.0 { gradient_scale } else { gradient_scale * limit };
        match placed.tensor(out).dtype() {
            DType::F32 => lent_out.elements_mut().copy_from_slice(&[scale as f32, norm as f32]),
            _ => lent_out.elements_mut().copy_from_slice(&[scale, norm]),
        }
    }
    placed.finish()
}

/// What an optimizer asks of a `gradient_scale`: at least one float, of which it reads the first.
pub(super) fn check_scale(call: &Call<'_>, scale: Option<Slot>) -> Result<()> {
    let Some(scale) = scale else { return Ok(()) };
    call.has_dtype(scale, &[DType::F32, DType::F64])?;
    let [count] = call.dims(scale, "of which the first element multiplies every gradient")?;
    if count == 0 {
        return Err(call.misfit(scale, "at least one element", "Give it what clip_scale wrote, or None."));
    }
    Ok(())
}

/// The scale in such a tensor, 1 if there is none.
pub(super) fn read_scale<T: Float>(scale: Option<(&Lent<'_>, DType)>) -> T {
    match scale {
        None => T::ONE,
        Some((lent, DType::F32)) => T::from_f64(f64::from(lent.elements::<f32>()[0])),
        Some((lent, _)) => T::from_f64(lent.elements::<f64>()[0]),
    }
}
