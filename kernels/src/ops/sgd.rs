//! sgd: one step of stochastic gradient descent over flat buffers, with the semantics of
//! `torch.optim.SGD`: weight decay is added to the gradient; momentum is plain or Nesterov's.
//!
//! Dampening is 0, PyTorch's default: a momentum buffer of zeros then gives the same first step as
//! PyTorch's, which starts with the first gradient. What changes from step to step is read from
//! small tensors on the device.

use crate::Tensor;
use crate::error::Result;
use crate::launch::{CuFile, args};
use crate::ops::adamw::{check_copies, check_finite, copied};
use crate::ops::call::{Buffer, FLOATS, OpCall, with_float};
use crate::ops::chunks::{Chunk, ChunkTable, QUANTUM_THREADS};
use crate::ops::float::Float;
use crate::ops::step;
use crate::simd::multiversion;
use crate::threads::Shares;

pub(super) static SOURCE: CuFile = CuFile::new("sgd.cu", include_str!("sgd.cu"));

/// What stays the same for a whole run. The default is plain descent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SgdConstants {
    /// Momentum decay; 0 for no momentum.
    pub momentum: f64,
    /// Whether momentum is Nesterov's.
    pub nesterov: bool,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdScalars {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The weight decay: this times the value is added to the gradient.
    pub weight_decay: f64,
}

impl SgdScalars {
    /// The two numbers that [`sgd`] reads: `[learning_rate, weight_decay]`.
    #[track_caller]
    pub fn to_array(&self) -> Result<[f32; 2]> {
        check_finite("sgd scalars", "learning_rate", self.learning_rate)?;
        check_finite("sgd scalars", "weight_decay", self.weight_decay)?;
        Ok([self.learning_rate as f32, self.weight_decay as f32])
    }
}

/// What the update of an element needs besides its own numbers.
#[derive(Clone, Copy)]
struct SgdUpdate<T> {
    gradient_scale: T,
    learning_rate: T,
    /// 0 in chunks without decay.
    decay: T,
    momentum: T,
    /// Whether an element whose gradient is not finite stays as it is.
    guards: bool,
}

impl<T: Float> SgdUpdate<T> {
    /// The gradient, scaled and with weight decay.
    #[inline(always)]
    fn decayed(&self, grad: T, value: T) -> T {
        self.decay.fused(value, grad * self.gradient_scale)
    }
}

multiversion! {
    /// Whether all gradients are finite or are not looked at.
    fn plain_run[T: Float](values: &mut [T], grads: &[T], update: &SgdUpdate<T>) -> bool {
        let u = *update;
        let mut all = true;
        for (value, &grad) in values.iter_mut().zip(grads) {
            let good = !u.guards | grad.finite();
            all &= good;
            let updated = *value - u.learning_rate * u.decayed(grad, *value);
            *value = if good { updated } else { *value };
        }
        all
    }
}

multiversion! {
    /// As `plain_run`.
    fn momentum_run[T: Float](
        values: &mut [T], grads: &[T], momentum: &mut [T], nesterov: bool, update: &SgdUpdate<T>,
    ) -> bool {
        let u = *update;
        let mut all = true;
        for ((value, &grad), momentum) in values.iter_mut().zip(grads).zip(momentum) {
            let good = !u.guards | grad.finite();
            all &= good;
            let grad = u.decayed(grad, *value);
            let next = u.momentum.fused(*momentum, grad);
            let ahead = u.momentum.fused(next, grad);
            let updated = *value - u.learning_rate * if nesterov { ahead } else { next };
            *momentum = if good { next } else { *momentum };
            *value = if good { updated } else { *value };
        }
        all
    }
}

/// One step of SGD on the elements in `chunks` of flat buffers of one length (N) and dtype. Other
/// elements stay as they are. Weight decay applies in chunks that ask for it. `momentum` (N) starts
/// as zeros and must be given exactly when `constants.momentum` is not 0.
///
/// `scalars` (2) is [`SgdScalars::to_array`] in the buffers' dtype. Element 0 of `gradient_scale`,
/// also of that dtype, multiplies every gradient (`clip_scale` writes it). `first_bad_step` and
/// `copies` are as for `adamw`.
#[track_caller]
#[expect(
    clippy::too_many_arguments,
    reason = "each is one tensor of the update rule; a struct would only rename them"
)]
pub fn sgd(
    values: &Tensor,
    grads: &Tensor,
    momentum: Option<&Tensor>,
    copies: Option<&Tensor>,
    chunks: &ChunkTable,
    constants: &SgdConstants,
    scalars: &Tensor,
    gradient_scale: Option<&Tensor>,
    first_bad_step: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("sgd");
    let values = call.updates("values", values);
    let grads = call.reads("grads", grads);
    let momentum = momentum.map(|momentum| call.updates("momentum", momentum));
    let copies = call.writes_some("copies", copies);
    let scalars = call.reads("scalars", scalars);
    let scale = call.reads_some("gradient_scale", gradient_scale);
    let flag = first_bad_step.map(|flags| call.updates("first_bad_step", flags));
    chunks.check_fits(&call, values)?;
    call.elementwise(&[values, grads, momentum.unwrap_or(values)])?;
    call.has_shape(scalars, &[2], "what SgdScalars::to_array gives")?;
    call.same_dtype(scalars, values)?;
    step::check_scale(&call, scale, values)?;
    let guards = step::check_flags(&call, flag)?;
    check_copies(&call, copies, values)?;
    check_constants(&call, constants, momentum.is_some())?;
    call.run(values, &FLOATS, |placed| {
        let [values, grads, scalars] = placed.enter([values, grads, scalars])?;
        let momentum = placed.enter_some(momentum)?;
        let (scale, mut flag) = (placed.enter_some(scale)?, placed.enter_some(flag)?);
        let copies = placed.enter_some(copies)?;
        if let Some(gpu) = placed.gpu() {
            let name = match (&momentum, constants.nesterov) {
                (None, _) => "sgd_plain_f32",
                (Some(_), false) => "sgd_momentum_f32",
                (Some(_), true) => "sgd_nesterov_f32",
            };
            let factor = constants.momentum as f32;
            let args = args![
                values, grads, momentum, copies, scalars, scale, flag, guards, factor
            ];
            return chunks.launch(&gpu, &SOURCE, name, (QUANTUM_THREADS, 1), args);
        }
        if !step::is_set(flag.as_ref()) {
            with_float!(placed.dtype, T => {
                let scalars = scalars.elements::<T>();
                let update = SgdUpdate {
                    gradient_scale: step::read_scale(scale.as_ref()),
                    learning_rate: scalars[0],
                    decay: scalars[1],
                    momentum: T::from_f64(constants.momentum),
                    guards,
                };
                let buffers = ([values, grads], momentum, copies);
                if !run(buffers, chunks, constants.nesterov, update) {
                    step::mark_gradient(flag.as_mut());
                }
            });
        }
        Ok(())
    })
}

pub(super) fn check_constants(
    call: &OpCall<'_>,
    constants: &SgdConstants,
    has_buffer: bool,
) -> Result<()> {
    let SgdConstants { momentum, nesterov } = *constants;
    let expected = if !(0.0..f64::INFINITY).contains(&momentum) {
        "0 or more"
    } else if nesterov && momentum == 0.0 {
        "above 0, as nesterov requires"
    } else if has_buffer && momentum == 0.0 {
        "above 0, since a momentum buffer is given"
    } else if !has_buffer && momentum > 0.0 {
        "0, or a momentum buffer"
    } else {
        return Ok(());
    };
    Err(call.value("momentum", expected, momentum))
}

/// Values and gradients, momentum, copies.
type Buffers<'a> = ([Buffer<'a>; 2], Option<Buffer<'a>>, Option<Buffer<'a>>);

fn run<T: Float>(
    ([mut values, grads], momentum, mut copies): Buffers<'_>,
    chunks: &ChunkTable,
    nesterov: bool,
    decaying: SgdUpdate<T>,
) -> bool {
    let keeping = SgdUpdate {
        decay: T::ZERO,
        ..decaying
    };
    let update_of = |chunk: Chunk| if chunk.decay { &decaying } else { &keeping };
    let (grads, values) = (grads.elements::<T>(), values.elements_mut::<T>());
    let copies = copies
        .as_mut()
        .map(|copies| Shares::new(copies.elements_mut()));
    match momentum {
        None => chunks.update([values], |chunk, buffers| {
            copied(chunk, buffers, copies.as_ref(), |[values], range| {
                plain_run(values, &grads[range], update_of(chunk))
            })
        }),
        Some(mut momentum) => {
            let buffers = [values, momentum.elements_mut()];
            chunks.update(buffers, |chunk, buffers| {
                copied(
                    chunk,
                    buffers,
                    copies.as_ref(),
                    |[values, momentum], range| {
                        momentum_run(values, &grads[range], momentum, nesterov, update_of(chunk))
                    },
                )
            })
        }
    }
}

#[cfg(test)]
mod tests;
