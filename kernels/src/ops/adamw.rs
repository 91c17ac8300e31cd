//! adamw: one step of AdamW (Loshchilov and Hutter) over flat buffers, with the semantics of
//! `torch.optim.AdamW`: decoupled decay first, epsilon outside the root. One pass reads 16 bytes
//! and writes 12 for each f32 parameter, and 2 for its bf16 copy.
//!
//! What changes from step to step (learning rate, bias corrections, clip scale, the non-finite
//! flag) is read from small tensors on the device, so that a captured graph can be replayed.

use std::ops::Range;

use crate::dtype::{bf16, bf16_nearest};
use crate::error::{Error, Result};
use crate::launch::{CuFile, args};
use crate::ops::call::{Buffer, FLOATS, OpCall, Slot, with_float};
use crate::ops::chunks::{Chunk, ChunkTable, QUANTUM_THREADS};
use crate::ops::float::Float;
use crate::ops::step;
use crate::simd::multiversion;
use crate::threads::Shares;
use crate::{DType, Tensor};

pub(super) static SOURCE: CuFile = CuFile::new("adamw.cu", include_str!("adamw.cu"));

/// What stays the same for a whole run. The default is PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwConstants {
    /// First-moment decay, below 1.
    pub beta1: f64,
    /// Second-moment decay, below 1.
    pub beta2: f64,
    /// Keeps the quotient finite where the second moment is 0.
    pub epsilon: f64,
}

impl Default for AdamwConstants {
    fn default() -> AdamwConstants {
        AdamwConstants {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
        }
    }
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwScalars {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The weight decay, which is multiplied by the learning rate.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u64,
}

impl AdamwConstants {
    #[track_caller]
    fn check(&self, op: &'static str) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::value(op, name, "at least 0 and below 1", beta));
            }
        }
        if !(0.0..f64::INFINITY).contains(&self.epsilon) {
            return Err(Error::value(op, "epsilon", "0 or more", self.epsilon));
        }
        Ok(())
    }
}

impl AdamwScalars {
    /// The four numbers that [`adamw`] reads, computed in f64:
    /// `[1 − lr wd, lr / (1 − β₁ᵗ), 1 / √(1 − β₂ᵗ), 0]`.
    #[track_caller]
    pub fn to_array(&self, constants: &AdamwConstants) -> Result<[f32; 4]> {
        Ok(self.to_array_f64(constants)?.map(|scalar| scalar as f32))
    }

    /// As [`to_array`](AdamwScalars::to_array), but not rounded: for parameters in f64.
    #[track_caller]
    pub fn to_array_f64(&self, constants: &AdamwConstants) -> Result<[f64; 4]> {
        const OP: &str = "adamw scalars";
        if self.step == 0 {
            let expected = "1 or more (steps count from 1)";
            return Err(Error::value(OP, "step", expected, 0));
        }
        check_finite(OP, "learning_rate", self.learning_rate)?;
        check_finite(OP, "weight_decay", self.weight_decay)?;
        constants.check(OP)?;
        let remaining = |beta: f64| 1.0 - beta.powf(self.step as f64);
        let keep = 1.0 - self.learning_rate * self.weight_decay;
        let step_size = self.learning_rate / remaining(constants.beta1);
        let second_correction = 1.0 / remaining(constants.beta2).sqrt();
        Ok([keep, step_size, second_correction, 0.0])
    }
}

#[track_caller]
pub(super) fn check_finite(op: &'static str, name: &str, value: f64) -> Result<()> {
    if value.is_finite() {
        return Ok(());
    }
    Err(Error::value(op, name, "a finite number", value))
}

/// Refuses `copies` that are not those of `values` in bf16.
pub(super) fn check_copies(call: &OpCall<'_>, copies: Option<Slot>, values: Slot) -> Result<()> {
    let Some(copies) = copies else { return Ok(()) };
    call.same_shape(copies, values)?;
    call.has_dtype(copies, &[DType::BF16])
}

/// Elements of a chunk that are updated at a time where they are also rounded into copies: as many
/// as the first cache holds.
const COPIED: usize = 2048;

/// Runs `update` on parts of a chunk, and rounds the values of each into `copies`, if there are
/// any.
pub(super) fn copied<T: Float, const N: usize>(
    chunk: Chunk,
    mut buffers: [&mut [T]; N],
    copies: Option<&Shares<'_, bf16>>,
    mut update: impl FnMut([&mut [T]; N], Range<usize>) -> bool,
) -> bool {
    let Some(copies) = copies else {
        return update(buffers, chunk.range());
    };
    let mut all = true;
    for start in (0..chunk.len).step_by(COPIED) {
        let part = start..chunk.len.min(start + COPIED);
        let range = chunk.offset + part.start..chunk.offset + part.end;
        let parts = buffers.each_mut().map(|buffer| &mut buffer[part.clone()]);
        all &= update(parts, range.clone());
        // SAFETY: `ChunkTable::update` gives each part of each chunk to one thread.
        let copies = unsafe { copies.part(range) };
        round(copies, &buffers[0][part]);
    }
    all
}

multiversion! {
    fn round[T: Float](copies: &mut [bf16], values: &[T]) {
        for (copy, value) in copies.iter_mut().zip(values) {
            *copy = bf16_nearest(value.widened() as f32);
        }
    }
}

/// What the update of an element needs besides its own four numbers.
#[derive(Clone, Copy)]
struct AdamwUpdate<T> {
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
    /// Whether an element whose gradient is not finite stays as it is.
    guards: bool,
}

impl<T: Float> AdamwUpdate<T> {
    fn new(
        constants: &AdamwConstants,
        scalars: &Buffer<'_>,
        gradient_scale: T,
        guards: bool,
    ) -> AdamwUpdate<T> {
        let scalars = scalars.elements::<T>();
        AdamwUpdate {
            gradient_scale,
            keep: scalars[0],
            step_size: scalars[1],
            second_correction: scalars[2],
            first_weight: T::from_f64(1.0 - constants.beta1),
            beta2: T::from_f64(constants.beta2),
            second_weight: T::from_f64(1.0 - constants.beta2),
            epsilon: T::from_f64(constants.epsilon),
            guards,
        }
    }
}

multiversion! {
    /// Whether all gradients are finite or are not looked at.
    fn adamw_run[T: Float](
        values: &mut [T], grads: &[T], first: &mut [T], second: &mut [T], update: &AdamwUpdate<T>,
    ) -> bool {
        let u = *update;
        let mut all = true;
        for (((value, &grad), first), second) in values.iter_mut().zip(grads).zip(first).zip(second) {
            let good = !u.guards | grad.finite();
            all &= good;
            let grad = grad * u.gradient_scale;
            let m = u.first_weight.fused(grad - *first, *first);
            let v = (u.second_weight * grad).fused(grad, u.beta2 * *second);
            let denominator = v.root().fused(u.second_correction, u.epsilon);
            let updated = *value * u.keep - u.step_size * m / denominator;
            *first = if good { m } else { *first };
            *second = if good { v } else { *second };
            *value = if good { updated } else { *value };
        }
        all
    }
}

/// One step of AdamW on the elements in `chunks` of four flat buffers of one length (N) and dtype.
/// Other elements stay as they are. Weight decay applies in chunks that ask for it.
///
/// `scalars` (4) is [`AdamwScalars::to_array`] in the buffers' dtype. Element 0 of
/// `gradient_scale`, also of that dtype, multiplies every gradient (`clip_scale` writes it). While
/// the first element of `first_bad_step` is not 0, nothing is changed. That is i64 (1), which
/// `mark_nonfinite` sets, or the flags of a step, i64 (3), which `decide_step` sets. In the latter
/// this marks a gradient that is not finite, and leaves that element as it is. The values are also
/// rounded into `copies`, bf16 (N).
#[track_caller]
#[expect(
    clippy::too_many_arguments,
    reason = "each is one tensor of the update rule; a struct would only rename them"
)]
pub fn adamw(
    values: &Tensor,
    grads: &Tensor,
    first_moments: &Tensor,
    second_moments: &Tensor,
    copies: Option<&Tensor>,
    chunks: &ChunkTable,
    constants: &AdamwConstants,
    scalars: &Tensor,
    gradient_scale: Option<&Tensor>,
    first_bad_step: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("adamw");
    let values = call.updates("values", values);
    let grads = call.reads("grads", grads);
    let first = call.updates("first_moments", first_moments);
    let second = call.updates("second_moments", second_moments);
    let copies = call.writes_some("copies", copies);
    let scalars = call.reads("scalars", scalars);
    let scale = call.reads_some("gradient_scale", gradient_scale);
    let flag = first_bad_step.map(|flags| call.updates("first_bad_step", flags));
    chunks.check_fits(&call, values)?;
    call.elementwise(&[values, grads, first, second])?;
    call.has_shape(scalars, &[4], "what AdamwScalars::to_array gives")?;
    call.same_dtype(scalars, values)?;
    step::check_scale(&call, scale, values)?;
    let guards = step::check_flags(&call, flag)?;
    check_copies(&call, copies, values)?;
    constants.check("adamw")?;
    call.run(values, &FLOATS, |placed| {
        let [values, grads, first, second] = placed.enter([values, grads, first, second])?;
        let [scalars] = placed.enter([scalars])?;
        let (scale, mut flag) = (placed.enter_some(scale)?, placed.enter_some(flag)?);
        let copies = placed.enter_some(copies)?;
        if let Some(gpu) = placed.gpu() {
            let of = constants;
            let weights = [1.0 - of.beta1, of.beta2, 1.0 - of.beta2, of.epsilon];
            let [weight_1, beta_2, weight_2, epsilon] = weights.map(|weight| weight as f32);
            let args = args![
                values, grads, first, second, copies, scalars, scale, flag, guards, weight_1,
                beta_2, weight_2, epsilon
            ];
            return chunks.launch(&gpu, &SOURCE, "adamw_f32", (QUANTUM_THREADS, 1), args);
        }
        if !step::is_set(flag.as_ref()) {
            with_float!(placed.dtype, T => {
                let scale = step::read_scale(scale.as_ref());
                let update = AdamwUpdate::<T>::new(constants, &scalars, scale, guards);
                if !run([values, grads, first, second], copies, chunks, update) {
                    step::mark_gradient(flag.as_mut());
                }
            });
        }
        Ok(())
    })
}

fn run<T: Float>(
    [mut values, grads, mut first, mut second]: [Buffer<'_>; 4],
    mut copies: Option<Buffer<'_>>,
    chunks: &ChunkTable,
    decaying: AdamwUpdate<T>,
) -> bool {
    let keeping = AdamwUpdate {
        keep: T::ONE,
        ..decaying
    };
    let grads = grads.elements::<T>();
    let buffers = [
        values.elements_mut::<T>(),
        first.elements_mut(),
        second.elements_mut(),
    ];
    let copies = copies
        .as_mut()
        .map(|copies| Shares::new(copies.elements_mut()));
    chunks.update(buffers, |chunk, buffers| {
        let update = if chunk.decay { &decaying } else { &keeping };
        copied(
            chunk,
            buffers,
            copies.as_ref(),
            |[values, first, second], range| {
                adamw_run(values, &grads[range], first, second, update)
            },
        )
    })
}

#[cfg(test)]
mod tests;
