//! sgd: one step of stochastic gradient descent over flat buffers, with `torch.optim.SGD`'s semantics: weight decay is
//! added to the gradient, momentum is plain or Nesterov's.
//!
//! Dampening is 0, as in PyTorch by default: then a momentum buffer of zeros gives the same first step as PyTorch's,
//! which starts the buffer with the first gradient. What changes from step to step is read from small tensors.

use crate::cuda::{Grid, Launcher};
use crate::error::{Error, Result};
use crate::ops::call::{Call, FLOATS, Lent};
use crate::ops::chunks::{self, ChunkTable};
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
    #[track_caller]
    pub fn to_array(&self) -> Result<[f32; 2]> {
        for (name, value) in [("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)] {
            if !value.is_finite() {
                return Err(Error::value("sgd scalars", name, "a finite number", value));
            }
        }
        Ok([self.learning_rate as f32, self.weight_decay as f32])
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

/// One step of SGD on the elements in `chunks` of flat buffers of one length and dtype; the rest of them is not
/// touched.
/// Weight decay applies in chunks that say so. `momentum` is the buffer, zeros at first, present exactly when
/// `constants.momentum` is not 0.
///
/// `scalars` is [`SgdScalars::to_array`] in the buffers' dtype. Element 0 of `gradient_scale` multiplies every gradient
/// (`clip_scale` writes it). While `first_bad_step`, i64\[1\], is not 0, nothing happens at all (`mark_nonfinite` sets
/// it).
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
        let scale = scale.zip(lent_scale.as_ref()).map(|(slot, lent)| (lent, placed.tensor(slot).dtype()));
        if let Some(gpu) = placed.launcher()? {
            let buffers = [&values, &grads];
            launch(&gpu, buffers, momentum.as_ref(), chunks, constants, &lent_scalars, scale, lent_flag.as_ref())?;
        } else if !nonfinite::is_set(lent_flag.as_ref()) {
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

#[expect(clippy::too_many_arguments, reason = "what the operation has")]
fn launch(
    gpu: &Launcher,
    [values, grads]: [&Lent<'_>; 2],
    momentum: Option<&Lent<'_>>,
    chunks: &ChunkTable,
    constants: &SgdConstants,
    scalars: &Lent<'_>,
    scale: Option<(&Lent<'_>, DType)>,
    flag: Option<&Lent<'_>>,
) -> Result<()> {
    if chunks.quanta() == 0 {
        return Ok(());
    }
    let name = match (momentum, constants.nesterov) {
        (None, _) => "sgd_plain_f32",
        (Some(_), false) => "sgd_momentum_f32",
        (Some(_), true) => "sgd_nesterov_f32",
    };
    let kernel = gpu.kernel(&chunks::SOURCE, name)?.output(values).reads(grads).maybe(momentum).reads(scalars);
    let kernel = grad_norm::give_scale(kernel, scale).maybe(flag).f32(constants.momentum as f32);
    chunks.launch(gpu, kernel, Grid::blocks(chunks.quanta(), chunks::QUANTUM_THREADS))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::chunks::Chunk;
    use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};
    use crate::threads;

    const SCALARS: SgdScalars = SgdScalars { learning_rate: 0.1, weight_decay: 0.05 };
    const KINDS: [SgdConstants; 3] = [
        SgdConstants { momentum: 0.0, nesterov: false },
        SgdConstants { momentum: 0.9, nesterov: false },
        SgdConstants { momentum: 0.9, nesterov: true },
    ];

    /// The textbook, in f64.
    fn reference(p: &mut f64, buffer: &mut f64, grad: f64, decay: bool, constants: SgdConstants) {
        let grad = if decay { grad + SCALARS.weight_decay * *p } else { grad };
        *buffer = constants.momentum * *buffer + grad;
        let direction = if constants.nesterov { grad + constants.momentum * *buffer } else { *buffer };
        *p -= SCALARS.learning_rate * direction;
    }

    #[test]
    fn twenty_steps_agree_with_f64_and_leave_the_gap_alone() {
        for (size, constants) in SIZES.into_iter().flat_map(|size| KINDS.map(|kind| (size, kind))) {
            let half = size / 2;
            let second = Chunk { offset: half + 1, len: size.saturating_sub(half + 1), decay: false };
            let mut chunks = vec![Chunk { offset: 0, len: half, decay: true }, second];
            chunks.retain(|chunk| chunk.len > 0);
            let chunks = ChunkTable::new(chunks).unwrap();
            let x = random_f32(size, 1);
            let mut p: Vec<f64> = x.iter().copied().map(f64::from).collect();
            let mut buffer = vec![0.0; size];
            let (values, momentum) = (cpu(&x, &[size]), cpu(&vec![0.0; size], &[size]));
            let momentum = (constants.momentum > 0.0).then_some(&momentum);
            let (scalars, scale) = (cpu(&SCALARS.to_array().unwrap(), &[2]), cpu(&[0.5], &[1]));
            for step in 0..20 {
                let grads = random_f32(size, 100 + step);
                for chunk in chunks.chunks() {
                    for i in chunk.range() {
                        reference(&mut p[i], &mut buffer[i], 0.5 * f64::from(grads[i]), chunk.decay, constants);
                    }
                }
                let grads = cpu(&grads, &[size]);
                sgd(&values, &grads, momentum, &chunks, &constants, &scalars, Some(&scale), None).unwrap();
            }
            // |p| < 32 and |buffer| < 32. A step rounds the buffer by 3 × 32ε, which stays in it for 10 steps and comes
            // back as lr = 0.1 of that, twice with Nesterov; and the value by 2 × 32ε.
            assert_close(&values.to_vec::<f32>().unwrap(), &p, |_, _| 20.0 * 8.0 * 32.0 / f64::from(1 << 24));
        }
    }

    /// PyTorch 2.11, with `momentum` and `nesterov` as in KINDS:
    /// ```python
    /// p = torch.tensor([.5, -1.25, 2., 0.], requires_grad=True)
    /// o = torch.optim.SGD([p], lr=.1, weight_decay=.05, momentum=…, nesterov=…)
    /// for g in [[.1,-.2,.3,1.], [-.4,.5,0.,-1.], [2.,-3.,.25,1e-3]]: p.grad = torch.tensor(g); o.step()
    /// ```
    #[test]
    fn pytorch_makes_the_same_three_steps() {
        let golden = [
            [0.322_437_167_167_663_6, -0.961_293_101_310_73, 1.915_449_023_246_765_1, 0.000_397_499_563_405_290_25],
            [0.334_924_727_678_298_95, -0.956_016_898_155_212_4, 1.838_409_066_200_256_3, -0.079_702_503_979_206_09],
            [0.173_852_130_770_683_3, -0.696_971_178_054_809_6, 1.771_073_222_160_339_4, -0.069_763_131_439_685_82],
        ];
        let (chunks, scalars) = (ChunkTable::whole(4, true), cpu(&SCALARS.to_array().unwrap(), &[2]));
        for (constants, want) in KINDS.into_iter().zip(golden) {
            let (values, momentum) = (cpu(&[0.5, -1.25, 2.0, 0.0], &[4]), cpu(&[0.0; 4], &[4]));
            let momentum = (constants.momentum > 0.0).then_some(&momentum);
            for grads in [[0.1, -0.2, 0.3, 1.0], [-0.4, 0.5, 0.0, -1.0], [2.0, -3.0, 0.25, 1e-3]] {
                sgd(&values, &cpu(&grads, &[4]), momentum, &chunks, &constants, &scalars, None, None).unwrap();
            }
            // Both sides round some five times a step, numbers of up to 3.
            assert_close(&values.to_vec::<f32>().unwrap(), &want, |_, _| 3.0 * 5.0 * 3.0 / f64::from(1 << 24));
        }
    }

    #[test]
    fn the_bits_do_not_depend_on_the_number_of_threads_and_a_set_flag_stops_everything() {
        let _alone = crate::ops::testing::alone_with_the_pool();
        let count = 100_003;
        let run = |constants: &SgdConstants, flag: i64| -> Vec<u32> {
            let [values, grads, momentum] = [1, 2, 3].map(|seed| cpu(&random_f32(count, seed), &[count]));
            let buffer = (constants.momentum > 0.0).then_some(&momentum);
            let (scalars, flag) = (cpu(&SCALARS.to_array().unwrap(), &[2]), cpu_of(&[flag], &[1]));
            let chunks = ChunkTable::whole(count, true);
            sgd(&values, &grads, buffer, &chunks, constants, &scalars, None, Some(&flag)).unwrap();
            [values, momentum].iter().flat_map(|x| x.to_vec::<f32>().unwrap()).map(f32::to_bits).collect()
        };
        let untouched: Vec<u32> = [1, 3].iter().flat_map(|&seed| random_f32(count, seed)).map(f32::to_bits).collect();
        for constants in &KINDS {
            threads::set_count(1).unwrap();
            let one = run(constants, 0);
            assert!(one != untouched && run(constants, 9) == untouched);
            for threads in [2, 3] {
                threads::set_count(threads).unwrap();
                assert!(run(constants, 0) == one, "{threads} threads");
            }
        }
    }

    #[test]
    fn arguments_that_contradict_each_other_are_named() {
        let [values, grads, momentum] = [(); 3].map(|()| cpu(&[0.0; 3], &[3]));
        let (chunks, scalars) = (ChunkTable::whole(3, true), cpu(&SCALARS.to_array().unwrap(), &[2]));
        for (buffer, factor, nesterov, wanted) in [
            (None, 0.9, false, "sgd: momentum: expected 0, or a momentum buffer, got 0.9"),
            (Some(&momentum), 0.0, false, "sgd: momentum: expected above 0, since a momentum buffer is given, got 0"),
            (None, 0.0, true, "sgd: momentum: expected above 0, since nesterov looks ahead along it, got 0"),
            (None, f64::NAN, false, "sgd: momentum: expected 0 or more, got NaN"),
        ] {
            let constants = SgdConstants { momentum: factor, nesterov };
            let error =
                sgd(&values, &grads, buffer, &chunks, &constants, &scalars, None, None).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
