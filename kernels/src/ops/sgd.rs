//! sgd: one step of stochastic gradient descent over flat buffers, with `torch.optim.SGD`'s semantics: weight decay is
//! added to the gradient, momentum is plain or Nesterov's.
//!
//! Dampening is 0, as in PyTorch by default: then a momentum buffer of zeros gives the same first step as PyTorch's,
//! which starts the buffer with the first gradient. What changes from step to step is read from small tensors.

use crate::error::Result;
use crate::ops::call::{Call, FLOATS, Lent};
use crate::ops::chunks::ChunkTable;
use crate::ops::float::Float;
use crate::ops::{grad_norm, nonfinite};
use crate::simd::multiversion;
use crate::{DType, Tensor};

/// What stays the same for a whole run. The default is plain descent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SgdConstants {
    /// How much of the momentum buffer is kept at each step; 0 for none.
    pub momentum: f64,
    /// Whether the step looks ahead along the momentum.
    pub nesterov: bool,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdScalars {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// How much of the value is added to its gradient.
    pub weight_decay: f64,
}

impl SgdScalars {
    /// The two numbers that [`sgd`] reads: `[learning_rate, weight_decay]`.
    pub fn to_array(&self) -> [f32; 2] {
        [self.learning_rate as f32, self.weight_decay as f32]
    }
}

/// All that one element's update needs besides its own numbers.
#[derive(Clone, Copy)]
struct Update<T> {
    gradient_scale: T,
    learning_rate: T,
    /// 0 in chunks without decay.
    decay: T,
    momentum: T,
}

multiversion! {
    fn plain_run[T: Float](values: &mut [T], grads: &[T], update: &Update<T>) {
        let u = *update;
        for (value, &grad) in values.iter_mut().zip(grads) {
            let grad = decayed(grad, *value, u);
            *value = *value - u.learning_rate * grad;
        }
    }
}

multiversion! {
    fn momentum_run[T: Float](values: &mut [T], grads: &[T], momentum: &mut [T], update: &Update<T>) {
        let u = *update;
        for ((value, &grad), momentum) in values.iter_mut().zip(grads).zip(momentum) {
            let grad = decayed(grad, *value, u);
            *momentum = u.momentum.fused(*momentum, grad);
            *value = *value - u.learning_rate * *momentum;
        }
    }
}

multiversion! {
    fn nesterov_run[T: Float](values: &mut [T], grads: &[T], momentum: &mut [T], update: &Update<T>) {
        let u = *update;
        for ((value, &grad), momentum) in values.iter_mut().zip(grads).zip(momentum) {
            let grad = decayed(grad, *value, u);
            *momentum = u.momentum.fused(*momentum, grad);
            *value = *value - u.learning_rate * u.momentum.fused(*momentum, grad);
        }
    }
}

/// The gradient scaled, and with the decay's share of the value.
#[inline(always)]
fn decayed<T: Float>(grad: T, value: T, update: Update<T>) -> T {
    update.decay.fused(value, grad * update.gradient_scale)
}

/// One step of SGD on the elements in `chunks` of flat buffers of one length and dtype; the rest of them is not touched.
/// Weight decay applies in chunks that say so. `momentum` is the buffer, zeros at first, present exactly when
/// `constants.momentum` is not 0.
///
/// `scalars` is [`SgdScalars::to_array`] in the buffers' dtype. Element 0 of `gradient_scale` multiplies every gradient
/// (`clip_scale` writes it). While `first_bad_step`, i64\[1\], is not 0, nothing happens at all (`mark_nonfinite` sets it).
#[track_caller]
#[expect(clippy::too_many_arguments, reason = "each is one tensor of the update rule; a struct would only rename them")]
pub fn sgd(
    values: &Tensor,
    grads: &Tensor,
    momentum: Option<&Tensor>,
    chunks: &ChunkTable,
    constants: &SgdConstants,
    scalars: &Tensor,
    gradient_scale: Option<&Tensor>,
    first_bad_step: Option<&Tensor>,
) -> Result<()> {
    let mut call = Call::new("sgd");
    let values = call.writes("values", values);
    let grads = call.reads("grads", grads);
    let momentum = call.writes_some("momentum", momentum);
    let scalars = call.reads("scalars", scalars);
    let scale = call.reads_some("gradient_scale", gradient_scale);
    let flag = call.reads_some("first_bad_step", first_bad_step);
    chunks.check_fits(&call, values)?;
    call.elementwise(&[values, grads, momentum.unwrap_or(values)])?;
    call.has_shape(scalars, &[2], "what SgdScalars::to_array gives")?;
    call.same_dtype(scalars, values)?;
    grad_norm::check_scale(&call, scale)?;
    nonfinite::check_flag(&call, flag)?;
    check_constants(&call, constants, momentum.is_some())?;
    let placed = call.place(values, &FLOATS)?;
    {
        let [values, grads, lent_scalars] = placed.enter([values, grads, scalars])?;
        let momentum = placed.enter_some(momentum)?;
        let (lent_scale, lent_flag) = (placed.enter_some(scale)?, placed.enter_some(flag)?);
        if !nonfinite::is_set(lent_flag.as_ref()) {
            let scale = scale.zip(lent_scale.as_ref()).map(|(slot, lent)| (lent, placed.tensor(slot).dtype()));
            match placed.tensor(scalars).dtype() {
                DType::F32 => run::<f32>([values, grads], momentum, chunks, constants, &lent_scalars, scale),
                _ => run::<f64>([values, grads], momentum, chunks, constants, &lent_scalars, scale),
            }
        }
    }
    placed.finish()
}

fn check_constants(call: &Call<'_>, constants: &SgdConstants, has_buffer: bool) -> Result<()> {
    let SgdConstants { momentum, nesterov } = *constants;
    if !(0.0..f64::INFINITY).contains(&momentum) {
        return Err(call.bad_value("momentum", "0 or more", momentum.to_string()));
    }
    if nesterov && momentum == 0.0 {
        return Err(call.bad_value("momentum", "above 0, since nesterov looks ahead along it", momentum.to_string()));
    }
    if has_buffer != (momentum > 0.0) {
        let expected = if has_buffer { "above 0, since a momentum buffer is given" } else { "0, or a momentum buffer" };
        return Err(call.bad_value("momentum", expected, momentum.to_string()));
    }
    Ok(())
}

fn run<T: Float>(
    [mut values, grads]: [Lent<'_>; 2],
    momentum: Option<Lent<'_>>,
    chunks: &ChunkTable,
    constants: &SgdConstants,
    scalars: &Lent<'_>,
    scale: Option<(&Lent<'_>, DType)>,
) {
    let scalars = scalars.elements::<T>();
    let decaying = Update {
        gradient_scale: grad_norm::read_scale(scale),
        learning_rate: scalars[0],
        decay: scalars[1],
        momentum: T::from_f64(constants.momentum),
    };
    let keeping = Update { decay: T::ZERO, ..decaying };
    let grads = grads.elements::<T>();
    let values = values.elements_mut::<T>();
    let Some(mut momentum) = momentum else {
        return chunks.update([values], |chunk, [values]| {
            plain_run(values, &grads[chunk.range()], if chunk.decay { &decaying } else { &keeping });
        });
    };
    chunks.update([values, momentum.elements_mut()], |chunk, [values, momentum]| {
        let update = if chunk.decay { &decaying } else { &keeping };
        if constants.nesterov {
            nesterov_run(values, &grads[chunk.range()], momentum, update);
        } else {
            momentum_run(values, &grads[chunk.range()], momentum, update);
        }
    });
}
