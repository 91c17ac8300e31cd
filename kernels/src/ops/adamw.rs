//! adamw: one step of AdamW (Loshchilov and Hutter) over flat buffers, with `torch.optim.AdamW`'s semantics: decoupled
//! decay first, epsilon outside the root. One pass: 16 bytes read and 12 written for each f32 parameter.
//!
//! What changes from step to step (learning rate, bias corrections, clip scale, the sticky flag) is read from small
//! tensors on the device, so that a captured graph can be replayed for every step.

use crate::cuda::{Grid, Launcher};
use crate::error::{Error, Result};
use crate::ops::call::{Call, FLOATS, Lent};
use crate::ops::chunks::{self, ChunkTable};
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
        for (name, value) in [("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)] {
            if !value.is_finite() {
                return Err(Error::value("adamw scalars", name, "a finite number", value));
            }
        }
        for (name, beta) in [("beta1", constants.beta1), ("beta2", constants.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::value("adamw scalars", name, "at least 0 and below 1", beta));
            }
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
/// `scalars` is [`AdamwScalars::to_array`] in the buffers' dtype. Element 0 of `gradient_scale` multiplies every
/// gradient (`clip_scale` writes it). While `first_bad_step`, i64\[1\], is not 0, nothing happens at all
/// (`mark_nonfinite` sets it).
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
        let scale = scale.zip(lent_scale.as_ref()).map(|(slot, lent)| (lent, placed.tensor(slot).dtype()));
        let buffers = [values, grads, first, second];
        if let Some(gpu) = placed.launcher()? {
            launch(&gpu, &buffers, chunks, constants, &lent_scalars, scale, lent_flag.as_ref())?;
        } else if !nonfinite::is_set(lent_flag.as_ref()) {
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

fn launch(
    gpu: &Launcher,
    [values, grads, first, second]: &[Lent<'_>; 4],
    chunks: &ChunkTable,
    constants: &AdamwConstants,
    scalars: &Lent<'_>,
    scale: Option<(&Lent<'_>, DType)>,
    flag: Option<&Lent<'_>>,
) -> Result<()> {
    if chunks.quanta() == 0 {
        return Ok(());
    }
    let kernel = gpu.kernel(&chunks::SOURCE, "adamw_f32")?;
    let kernel = kernel.output(values).reads(grads).output(first).output(second).reads(scalars);
    let kernel = grad_norm::give_scale(kernel, scale).maybe(flag);
    let AdamwConstants { beta1, beta2, epsilon } = *constants;
    let kernel = kernel.f32((1.0 - beta1) as f32).f32(beta2 as f32).f32((1.0 - beta2) as f32).f32(epsilon as f32);
    chunks.launch(gpu, kernel, Grid::blocks(chunks.quanta(), chunks::QUANTUM_THREADS))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::chunks::Chunk;
    use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};
    use crate::threads;

    const CONSTANTS: AdamwConstants = AdamwConstants { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 };

    fn scalars(step: u64) -> AdamwScalars {
        AdamwScalars { learning_rate: 0.01, weight_decay: 0.1, step }
    }

    /// The textbook, in f64.
    fn reference(p: &mut f64, m: &mut f64, v: &mut f64, grad: f64, decay: bool, scalars: AdamwScalars) {
        let AdamwScalars { learning_rate, weight_decay, step } = scalars;
        if decay {
            *p -= learning_rate * weight_decay * *p;
        }
        *m = CONSTANTS.beta1 * *m + (1.0 - CONSTANTS.beta1) * grad;
        *v = CONSTANTS.beta2 * *v + (1.0 - CONSTANTS.beta2) * grad * grad;
        let m_hat = *m / (1.0 - CONSTANTS.beta1.powi(step as i32));
        let v_hat = *v / (1.0 - CONSTANTS.beta2.powi(step as i32));
        *p -= learning_rate * m_hat / (v_hat.sqrt() + CONSTANTS.epsilon);
    }

    /// Twenty steps of the operation and of the reference over two chunks with a gap between: values of both.
    fn twenty_steps<T: Float>(size: usize) -> (Vec<T>, Vec<f64>) {
        let half = size / 2;
        let chunks = ChunkTable::new(vec![
            Chunk { offset: 0, len: half, decay: true },
            Chunk { offset: half + 1, len: size.saturating_sub(half + 1), decay: false },
        ]);
        let chunks = if size == 0 { ChunkTable::whole(0, true) } else { chunks.unwrap() };
        let fresh = |seed: u64| -> Vec<f64> { random_f32(size, seed).into_iter().map(f64::from).collect() };
        let tensor = |x: &[f64]| cpu_of(&x.iter().map(|&x| T::from_f64(x)).collect::<Vec<T>>(), &[size]);
        let mut p = fresh(1);
        let (mut m, mut v) = (vec![0.0; size], vec![0.0; size]);
        let [values, first, second] = [&p, &m, &v].map(|x| tensor(x));
        let scale = cpu(&[0.5, 7.0], &[2]);
        for step in 1..=20 {
            let grads = fresh(100 + step);
            for chunk in chunks.chunks() {
                for i in chunk.range() {
                    reference(&mut p[i], &mut m[i], &mut v[i], 0.5 * grads[i], chunk.decay, scalars(step));
                }
            }
            let numbers = scalars(step).to_array_f64(&CONSTANTS).unwrap().map(T::from_f64);
            let (grads, numbers) = (tensor(&grads), cpu_of(&numbers, &[4]));
            adamw(&values, &grads, &first, &second, &chunks, &CONSTANTS, &numbers, Some(&scale), None).unwrap();
        }
        (values.to_vec().unwrap(), p)
    }

    #[test]
    fn twenty_steps_agree_with_f64_and_leave_the_gap_alone() {
        for size in SIZES {
            let (got, want) = twenty_steps::<f32>(size);
            // Each step rounds the value (|p| < 8) three times, ε = 2⁻²⁴ relative. The update is lr × m̂/√v̂ with
            // |g|/√v̂ <= √20; m's roundings add up over 1/(1 − β₁) = 10 steps, 4 a step: under 200ε in all.
            let bound = 20.0 * (3.0 * 8.0 + 0.01 * 200.0) / f64::from(1 << 24);
            assert_close(&got, &want, |_, _| bound);
            let (got, want) = twenty_steps::<f64>(size.min(5000));
            for (got, want) in got.iter().zip(&want) {
                // The same bound with 2⁻⁵³.
                assert!((got - want).abs() <= 20.0 * 26.0 * f64::EPSILON, "{got} {want}");
            }
        }
    }

    /// PyTorch 2.11:
    /// ```python
    /// p = torch.tensor([.5, -1.25, 2., 0.], requires_grad=True)
    /// o = torch.optim.AdamW([p], lr=.1, betas=(.9, .99), eps=1e-6, weight_decay=.05)
    /// for g in [[.1,-.2,.3,1.], [-.4,.5,0.,-1.], [2.,-3.,.25,1e-3]]: p.grad = torch.tensor(g); o.step()
    /// ```
    #[test]
    fn pytorch_makes_the_same_three_steps() {
        let [values, first, second] = [[0.5, -1.25, 2.0, 0.0], [0.0; 4], [0.0; 4]].map(|x: [f32; 4]| cpu(&x, &[4]));
        for (step, grads) in [[0.1, -0.2, 0.3, 1.0], [-0.4, 0.5, 0.0, -1.0], [2.0, -3.0, 0.25, 1e-3]].iter().enumerate()
        {
            let scalars = AdamwScalars { learning_rate: 0.1, weight_decay: 0.05, step: step as u64 + 1 };
            let scalars = cpu(&scalars.to_array(&CONSTANTS).unwrap(), &[4]);
            let chunks = ChunkTable::whole(4, true);
            adamw(&values, &cpu(grads, &[4]), &first, &second, &chunks, &CONSTANTS, &scalars, None, None).unwrap();
        }
        let want = [0.395_488_470_792_770_4, -1.119_675_397_872_924_8, 1.723_566_532_135_01, -0.089_733_183_383_941_65];
        // Both sides round some ten times a step, numbers of up to 2.
        assert_close(&values.to_vec::<f32>().unwrap(), &want, |_, _| 3.0 * 10.0 * 2.0 / f64::from(1 << 24));
    }

    /// Values and moments after a step on 100,003 elements.
    fn one_step(flag: Option<i64>) -> Vec<u32> {
        let count = 100_003;
        let tensors = [1, 2, 3, 4].map(|seed| cpu(&random_f32(count, seed), &[count]));
        let [values, grads, first, second] = &tensors;
        let squares: Vec<f32> = second.to_vec::<f32>().unwrap().iter().map(|x| x * x).collect();
        let second = &second.new_zeros(&[count]).unwrap();
        second.copy_from(&cpu(&squares, &[count])).unwrap();
        let scalars = cpu(&scalars(5).to_array(&CONSTANTS).unwrap(), &[4]);
        let flag = flag.map(|flag| cpu_of(&[flag], &[1]));
        let chunks = ChunkTable::whole(count, true);
        adamw(values, grads, first, second, &chunks, &CONSTANTS, &scalars, None, flag.as_ref()).unwrap();
        [values, first, second].iter().flat_map(|x| x.to_vec::<f32>().unwrap()).map(f32::to_bits).collect()
    }

    #[test]
    fn the_bits_do_not_depend_on_the_number_of_threads() {
        let _alone = crate::ops::testing::alone_with_the_pool();
        threads::set_count(1).unwrap();
        let one = one_step(None);
        for count in [2, 3] {
            threads::set_count(count).unwrap();
            assert!(one_step(None) == one, "{count} threads");
        }
    }

    #[test]
    fn a_set_flag_stops_everything_and_a_clear_one_nothing() {
        assert!(one_step(Some(0)) == one_step(None));
        let untouched = [1, 3].map(|seed| random_f32(100_003, seed)).concat();
        let stopped = one_step(Some(3));
        assert!(stopped.iter().zip(&untouched).all(|(&got, want)| got == want.to_bits()));
    }

    #[test]
    fn arguments_that_do_not_fit_are_named() {
        let [values, grads, first, second] = [(); 4].map(|()| cpu(&[0.0; 3], &[3]));
        let four = cpu(&[0.0; 4], &[4]);
        let call = |grads: &Tensor, len: usize, constants: &AdamwConstants, scalars: &Tensor| {
            let chunks = ChunkTable::whole(len, true);
            adamw(&values, grads, &first, &second, &chunks, constants, scalars, None, None).unwrap_err().to_string()
        };
        let text = call(&grads, 4, &CONSTANTS, &four);
        assert!(text.contains("values f32[3] on cpu: expected at least 4 elements"), "{text}");
        let text = call(&four, 3, &CONSTANTS, &four);
        assert!(text.contains("grads f32[4] on cpu: expected shape [3], as values has"), "{text}");
        let text = call(&grads, 3, &CONSTANTS, &grads);
        assert!(text.contains("scalars f32[3] on cpu: expected shape [4]"), "{text}");
        let text = call(&grads, 3, &AdamwConstants { beta2: 1.0, ..CONSTANTS }, &four);
        assert!(text.contains("adamw: beta2: expected at least 0 and below 1, got 1"), "{text}");
        let text = call(&values, 3, &CONSTANTS, &four);
        assert!(text.contains("share memory"), "{text}");
        assert!(scalars(0).to_array(&CONSTANTS).unwrap_err().to_string().contains("steps count from 1"));
    }
}
