//! What Muon (Jordan, 2024) does besides matmuls: `muon_direction` turns gradients into the
//! direction of their momentum, `divide_by_norm` scales a matrix for the Newton–Schulz iteration.

use crate::error::Result;
use crate::launch::{CuFile, Grid, args};
use crate::ops::call::{Buffer, FLOATS, OpCall, with_float};
use crate::ops::chunks::{ChunkTable, QUANTUM_THREADS};
use crate::ops::elementwise::{GRAIN, of_elements, unary_in_place};
use crate::ops::float::Float;
use crate::ops::sgd::{SgdConstants, check_constants};
use crate::ops::step;
use crate::simd::multiversion;
use crate::{Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("muon.cu", include_str!("muon.cu"));

/// The least divisor, as in PyTorch.
const EPSILON: f64 = 1e-7;

/// What the direction of an element needs besides its gradient and momentum.
#[derive(Clone, Copy)]
struct Direction<T> {
    gradient_scale: T,
    momentum: T,
    /// 1 − momentum
    weight: T,
    nesterov: bool,
}

multiversion! {
    fn direction_run[T: Float](grads: &mut [T], momentum: &mut [T], of: &Direction<T>) {
        let of = *of;
        for (grad, momentum) in grads.iter_mut().zip(momentum) {
            let scaled = *grad * of.gradient_scale;
            let next = of.weight.fused(scaled - *momentum, *momentum);
            let ahead = of.momentum.fused(next - scaled, scaled);
            *grad = if of.nesterov { ahead } else { next };
            *momentum = next;
        }
    }
}

of_elements! {
    DivideBy(divisor): (x) => x / T::from_f64(divisor);
}

/// Moves `momentum` towards the gradients, `m += (1 − β)(g − m)`, and replaces these by the
/// direction of the step: m, or Nesterov's `g + β(m − g)`. β is `constants.momentum`.
///
/// For the elements in `chunks` of two flat buffers of one length (N) and dtype. Element 0 of
/// `gradient_scale`, of that dtype, multiplies every gradient. While the first element of
/// `first_bad_step` is not 0, nothing is changed. It does not check whether gradients are finite.
#[track_caller]
pub fn muon_direction(
    grads: &Tensor,
    momentum: &Tensor,
    chunks: &ChunkTable,
    constants: &SgdConstants,
    gradient_scale: Option<&Tensor>,
    first_bad_step: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("muon_direction");
    let grads = call.updates("grads", grads);
    let momentum = call.updates("momentum", momentum);
    let scale = call.reads_some("gradient_scale", gradient_scale);
    let flag = call.reads_some("first_bad_step", first_bad_step);
    chunks.check_fits(&call, grads)?;
    call.elementwise(&[grads, momentum])?;
    step::check_scale(&call, scale, grads)?;
    step::check_flags(&call, flag)?;
    check_constants(&call, constants, true)?;
    call.run(grads, &FLOATS, |placed| {
        let [mut grads, mut momentum] = placed.enter([grads, momentum])?;
        let (scale, flag) = (placed.enter_some(scale)?, placed.enter_some(flag)?);
        let beta = constants.momentum;
        if let Some(gpu) = placed.gpu() {
            let weights = [beta as f32, (1.0 - beta) as f32];
            let [beta, weight] = weights;
            let nesterov = constants.nesterov;
            let args = args![grads, momentum, scale, flag, beta, weight, nesterov];
            return chunks.launch(
                &gpu,
                &SOURCE,
                "muon_direction_f32",
                (QUANTUM_THREADS, 4),
                args,
            );
        }
        if !step::is_set(flag.as_ref()) {
            with_float!(placed.dtype, T => {
                let of = Direction::<T> {
                    gradient_scale: step::read_scale(scale.as_ref()),
                    momentum: T::from_f64(beta),
                    weight: T::from_f64(1.0 - beta),
                    nesterov: constants.nesterov,
                };
                let buffers = [grads.elements_mut::<T>(), momentum.elements_mut()];
                chunks.update(buffers, |_, [grads, momentum]| {
                    direction_run(grads, momentum, &of);
                    true
                });
            });
        }
        Ok(())
    })
}

/// `x /= max(norm, 1e-7)`, where `norm` is element 1 of what `clip_scale` wrote, in `x`'s dtype.
#[track_caller]
pub fn divide_by_norm(x: &Tensor, norm: &Tensor) -> Result<()> {
    let mut call = OpCall::new("divide_by_norm");
    let x = call.updates("x", x);
    let norm = call.reads("norm", norm);
    call.has_shape(norm, &[2], "what clip_scale wrote")?;
    call.same_dtype(norm, x)?;
    call.all_row_major()?;
    call.run(x, &FLOATS, |placed| {
        let [mut x, norm] = placed.enter([x, norm])?;
        if let Some(gpu) = placed.gpu() {
            let (grid, count) = (Grid::packs(x.count, x.dtype), x.count);
            return gpu.launch(&SOURCE, "divide_by_norm_f32", grid, args![x, norm, count]);
        }
        with_float!(placed.dtype, T => divide_on_cpu::<T>(&mut x, &norm));
        Ok(())
    })
}

fn divide_on_cpu<T: Float>(x: &mut Buffer<'_>, norm: &Buffer<'_>) {
    let (norm, least) = (norm.elements::<T>()[1], T::from_f64(EPSILON));
    // NaN stays.
    let divisor = if norm < least { least } else { norm };
    threads::split_mut(x.elements_mut(), GRAIN, |_, x| {
        unary_in_place::<T, _>(x, DivideBy(divisor.widened()))
    });
}

#[cfg(test)]
mod tests;
