//! adamw: one step of AdamW (Loshchilov and Hutter) over flat buffers, with `torch.optim.AdamW`'s semantics: decoupled
//! decay first, epsilon outside the root. One pass: 16 bytes read and 12 written for each f32 parameter.
//!
//! What changes from step to step (learning rate, bias corrections, clip scale, the sticky flag) is read from small
//! tensors on the device, so that a captured graph can be replayed for every step.

use crate::error::{Error, Result};
use crate::ops::call::{Call, FLOATS, Lent};
use crate::ops::chunks::ChunkTable;
use crate::ops::float::Float;
use crate::ops::{grad_norm, nonfinite};
use crate::simd::multiversion;
use crate::{DType, Tensor};

/// What stays the same for a whole run. The default is PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwConstants {
    /// How much of the first moment is kept at each step; below 1.
    pub beta1: f64,
    /// How much of the second moment is kept at each step; below 1.
    pub beta2: f64,
    /// Keeps the quotient finite where the second moment is 0.
    pub epsilon: f64,
}

impl Default for AdamwConstants {
    fn default() -> AdamwConstants {
        AdamwConstants { beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwScalars {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The decay, which the learning rate multiplies.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u64,
}

impl AdamwScalars {
    /// The four numbers that [`adamw`] reads, computed in f64: `[1 − lr wd, lr / (1 − β₁ᵗ), 1 / √(1 − β₂ᵗ), 0]`.
    #[track_caller]
    pub fn to_array(&self, constants: &AdamwConstants) -> Result<[f32; 4]> {
        Ok(self.to_array_f64(constants)?.map(|scalar| scalar as f32))
    }

    /// As [`to_array`](AdamwScalars::to_array), not rounded: for checks in f64.
    #[track_caller]
    pub fn to_array_f64(&self, constants: &AdamwConstants) -> Result<[f64; 4]> {
        if self.step == 0 {
            return Err(Error::value("adamw scalars", "step", "1 or more (steps count from 1)", 0));
        }
        let remaining = |beta: f64| 1.0 - beta.powf(self.step as f64);
        let keep = 1.0 - self.learning_rate * self.weight_decay;
        let step_size = self.learning_rate / remaining(constants.beta1);
        Ok([keep, step_size, 1.0 / remaining(constants.beta2).sqrt(), 0.0])
    }
}

/// All that one element's update needs besides its own four numbers.
#[derive(Clone, Copy)]
struct Update<T> {
    gradient_scale: T,
    /// 1 − lr wd, or 1 in chunks without decay.
    keep: T,
    step_size: T,
    /// 1 / √(1 − β₂ᵗ)
    second_correction: T,
    /// 1 − β₁
    first_weight: T,
    beta2: T,
    /// 1 − β₂
    second_weight: T,
    epsilon: T,
}

impl<T: Float> Update<T> {
    fn new(constants: &AdamwConstants, scalars: &Lent<'_>, gradient_scale: T) -> Update<T> {
        let scalars = scalars.elements::<T>();
        Update {
            gradient_scale,
            keep: scalars[0],
            step_size: scalars[1],
            second_correction: scalars[2],
            first_weight: T::from_f64(1.0 - constants.beta1),
            beta2: T::from_f64(constants.beta2),
            second_weight: T::from_f64(1.0 - constants.beta2),
            epsilon: T::from_f64(constants.epsilon),
        }
    }
}

multiversion! {
    fn adamw_run[T: Float](values: &mut [T], grads: &[T], first: &mut [T], second: &mut [T], update: &Update<T>) {
        let u = *update;
        for (((value, &grad), first), second) in values.iter_mut().zip(grads).zip(first).zip(second) {
            let grad = grad * u.gradient_scale;
            let m = u.first_weight.fused(grad - *first, *first);
            let v = (u.second_weight * grad).fused(grad, u.beta2 * *second);
            let denominator = v.root().fused(u.second_correction, u.epsilon);
            *first = m;
            *second = v;
            *value = *value * u.keep - u.step_size * m / denominator;
        }
    }
}

/// One step of AdamW on the elements in `chunks` of four flat buffers of one length and dtype; the rest of them is not
/// touched. Weight decay applies in chunks that say so.
///
/// `scalars` is [`AdamwScalars::to_array`] in the buffers' dtype. Element 0 of `gradient_scale` multiplies every gradient
/// (`clip_scale` writes it). While `first_bad_step`, i64\[1\], is not 0, nothing happens at all (`mark_nonfinite` sets it).
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "each is one tensor of the update rule; a struct would only rename them")]
pub fn adamw(
    values: &Tensor,
    grads: &Tensor,
    first_moments: &Tensor,
    second_moments: &Tensor,
    chunks: &ChunkTable,
    constants: &AdamwConstants,
    scalars: &Tensor,
    gradient_scale: Option<&Tensor>,
    first_bad_step: Option<&Tensor>,
) -> Result<()> {
    let mut call = Call::new("adamw");
    let values = call.writes("values", values);
    let grads = call.reads("grads", grads);
    let first = call.writes("first_moments", first_moments);
    let second = call.writes("second_moments", second_moments);
    let scalars = call.reads("scalars", scalars);
    let scale = call.reads_some("gradient_scale", gradient_scale);
    let flag = call.reads_some("first_bad_step", first_bad_step);
    chunks.check_fits(&call, values)?;
    call.elementwise(&[values, grads, first, second])?;
    call.has_shape(scalars, &[4], "what AdamwScalars::to_array gives")?;
    call.same_dtype(scalars, values)?;
    grad_norm::check_scale(&call, scale)?;
    nonfinite::check_flag(&call, flag)?;
    check_constants(&call, constants)?;
    let placed = call.place(values, &FLOATS)?;
    {
        let [values, grads, first, second, lent_scalars] = placed.enter([values, grads, first, second, scalars])?;
        let (lent_scale, lent_flag) = (placed.enter_some(scale)?, placed.enter_some(flag)?);
        if !nonfinite::is_set(lent_flag.as_ref()) {
            let scale = scale.zip(lent_scale.as_ref()).map(|(slot, lent)| (lent, placed.tensor(slot).dtype()));
            let buffers = [values, grads, first, second];
            match placed.tensor(scalars).dtype() {
                DType::F32 => run::<f32>(buffers, chunks, constants, &lent_scalars, scale),
                _ => run::<f64>(buffers, chunks, constants, &lent_scalars, scale),
            }
        }
    }
    placed.finish()
}

fn check_constants(call: &Call<'_>, constants: &AdamwConstants) -> Result<()> {
    for (name, beta) in [("beta1", constants.beta1), ("beta2", constants.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(call.bad_value(name, "at least 0 and below 1", beta.to_string()));
        }
    }
    if !(0.0..f64::INFINITY).contains(&constants.epsilon) {
        return Err(call.bad_value("epsilon", "0 or more", constants.epsilon.to_string()));
    }
    Ok(())
}

fn run<T: Float>(
    [mut values, grads, mut first, mut second]: [Lent<'_>; 4],
    chunks: &ChunkTable,
    constants: &AdamwConstants,
    scalars: &Lent<'_>,
    scale: Option<(&Lent<'_>, DType)>,
) {
    let decaying = Update::<T>::new(constants, scalars, grad_norm::read_scale(scale));
    let keeping = Update { keep: T::ONE, ..decaying };
    let grads = grads.elements::<T>();
    let buffers = [values.elements_mut::<T>(), first.elements_mut(), second.elements_mut()];
    chunks.update(buffers, |chunk, [values, first, second]| {
        let update = if chunk.decay { &decaying } else { &keeping };
        adamw_run(values, &grads[chunk.range()], first, second, update);
    });
}
