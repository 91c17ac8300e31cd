//! One step of an optimizer over flat buffers, whatever its rule. A rule says what happens to one
//! element; all else is here and in update.cuh: chunks, threads, SIMD, 16 bytes at a time, the
//! flag, bad gradients, weight decay by chunk, and copies in bf16.
//!
//! The arithmetic of one element is a text, `<rule>_rule.cuh`, that is Rust as well as CUDA. So
//! both have the same bits. It reads and assigns the variables of `UpdateRule::step` around it, and
//! calls functions of formulas.rs.
//!
//! What changes from step to step (learning rate, bias corrections, clip scale, the non-finite
//! flag) is read from small tensors on the device, so that a captured graph can be replayed.

use crate::dtype::{bf16, bf16_nearest};
use crate::error::Result;
use crate::launch::{CuFile, args};
use crate::ops::call::{Buffer, FLOATS, OpCall, with_float};
use crate::ops::chunks::{ChunkTable, QUANTUM_THREADS};
use crate::ops::float::Float;
use crate::ops::formulas::select;
use crate::ops::step;
use crate::simd::multiversion;
use crate::threads::Shares;
use crate::{DType, Tensor};

/// What an optimizer updates in one step, besides its moments: the elements in `chunks` of flat
/// buffers of one length (N) and dtype. Other elements stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct UpdateTensors<'a> {
    /// (N)
    pub values: &'a Tensor,
    /// (N)
    pub grads: &'a Tensor,
    /// bf16 (N): the values are also rounded into these.
    pub copies: Option<&'a Tensor>,
    /// Which elements, and which of them decay.
    pub chunks: &'a ChunkTable,
    /// The numbers of the step, of the buffers' dtype: see the optimizer's `to_array`.
    pub scalars: &'a Tensor,
    /// Of the buffers' dtype: element 0 multiplies every gradient (`clip_scale` writes it).
    pub gradient_scale: Option<&'a Tensor>,
    /// i64 (1), which `mark_nonfinite` sets, or the flags of a step, i64 (3), which `decide_step`
    /// sets. While its first element is not 0, nothing is changed. In the flags of a step, a
    /// gradient that is not finite is marked, and its element stays as it is.
    pub first_bad_step: Option<&'a Tensor>,
}

impl<'a> UpdateTensors<'a> {
    /// Without copies, scale and flag.
    pub fn new(
        [values, grads]: [&'a Tensor; 2],
        chunks: &'a ChunkTable,
        scalars: &'a Tensor,
    ) -> UpdateTensors<'a> {
        UpdateTensors {
            values,
            grads,
            copies: None,
            chunks,
            scalars,
            gradient_scale: None,
            first_bad_step: None,
        }
    }
}

/// What a rule reads besides an element's own numbers: `StepNumbers` of update.cuh.
#[derive(Clone, Copy)]
pub(super) struct StepNumbers<T> {
    pub(super) scalars: [T; 4],
    pub(super) constants: [T; 4],
    /// Whether weight decay applies to this chunk.
    pub(super) decays: bool,
    gradient_scale: T,
    /// Whether an element whose gradient is not finite stays as it is.
    guards: bool,
}

/// How one element is updated: its N numbers in the buffers that change.
pub(super) trait UpdateRule<const N: usize> {
    /// The file and the name of its kernel.
    const KERNEL: (&'static CuFile, &'static str);
    /// What changes, for errors. The first is rounded into copies.
    const STATE: [&'static str; N];
    /// The number of scalars that it reads, and what makes them. None if it replaces the gradients,
    /// the first of `STATE`, and reads none.
    const SCALARS: Option<(usize, &'static str)>;
    /// `grad` is scaled.
    fn step<T: Float>(state: [T; N], grad: T, of: &StepNumbers<T>) -> [T; N];
}

/// Elements of a chunk that are updated at a time where they are also rounded into copies: as many
/// as the first cache holds.
const COPIED: usize = 2048;

multiversion! {
    fn round[T: Float](copies: &mut [bf16], values: &[T]) {
        for (copy, value) in copies.iter_mut().zip(values) {
            *copy = bf16_nearest(value.widened() as f32);
        }
    }
}

multiversion! {
    /// Whether all gradients are finite or are not looked at. The first N slices are the state:
    /// arguments, not an array, since the compiler then knows that they do not overlap.
    fn run[T: Float, R: UpdateRule<N>; const N](
        first: &mut [T], second: &mut [T], third: &mut [T], grads: &[T], of: &StepNumbers<T>,
    ) -> bool {
        let (count, of) = (first.len(), *of);
        let counts = [count * usize::from(N > 1), count * usize::from(N > 2)];
        let (second, third) = (&mut second[..counts[0]], &mut third[..counts[1]]);
        let grads = if R::SCALARS.is_some() { &grads[..count] } else { grads };
        let guards = of.guards && R::SCALARS.is_some();
        let mut all = true;
        // No loops over the state: they would be unrolled too late for what follows from N.
        for i in 0..count {
            let mut old = [first[i]; N];
            if N > 1 { old[1] = second[i]; }
            if N > 2 { old[2] = third[i]; }
            let grad = if R::SCALARS.is_some() { grads[i] } else { old[0] };
            let good = !guards | grad.finite();
            all &= good;
            let new = R::step(old, grad * of.gradient_scale, &of);
            first[i] = select(good, new[0], old[0]);
            if N > 1 { second[i] = select(good, new[1], old[1]); }
            if N > 2 { third[i] = select(good, new[2], old[2]); }
        }
        all
    }
}

/// One step of operation `op` on `state`.
#[track_caller]
pub(super) fn update<R: UpdateRule<N>, const N: usize>(
    op: &'static str,
    state: [&Tensor; N],
    of: &UpdateTensors<'_>,
    constants: Result<[f64; 4]>,
) -> Result<()> {
    let mut call = OpCall::new(op);
    let values = call.updates(R::STATE[0], state[0]);
    let grads = R::SCALARS.map(|_| call.reads("grads", of.grads));
    let mut slots = [values; N];
    for (at, slot) in slots.iter_mut().enumerate().skip(1) {
        *slot = call.updates(R::STATE[at], state[at]);
    }
    let copies = call.writes_some("copies", of.copies.filter(|_| R::SCALARS.is_some()));
    let scalars = R::SCALARS.map(|_| call.reads("scalars", of.scalars));
    let scale = call.reads_some("gradient_scale", of.gradient_scale);
    let flag = of.first_bad_step.map(|flags| match R::SCALARS {
        Some(_) => call.updates("first_bad_step", flags),
        None => call.reads("first_bad_step", flags),
    });
    of.chunks.check_fits(&call, values)?;
    call.elementwise(&[values, grads.unwrap_or(values)])?;
    call.elementwise(&slots)?;
    if let (Some(scalars), Some((count, made_by))) = (scalars, R::SCALARS) {
        call.has_shape(scalars, &[count], made_by)?;
        call.same_dtype(scalars, values)?;
    }
    step::check_scale(&call, scale, values)?;
    let guards = step::check_flags(&call, flag)? && R::SCALARS.is_some();
    if let Some(copies) = copies {
        call.same_shape(copies, values)?;
        call.has_dtype(copies, &[DType::BF16])?;
    }
    let constants = constants?;
    call.run(values, &FLOATS, |placed| {
        let state = placed.enter(slots)?;
        let (grads, scalars) = (placed.enter_some(grads)?, placed.enter_some(scalars)?);
        let (scale, mut flag) = (placed.enter_some(scale)?, placed.enter_some(flag)?);
        let copies = placed.enter_some(copies)?;
        if let Some(gpu) = placed.gpu() {
            let [a, b, c, d] = constants.map(|constant| constant as f32);
            let (first, second) = (state.get(1), state.get(2));
            let args = args![
                state[0], grads, first, second, copies, scalars, scale, flag, guards, a, b, c, d
            ];
            let (source, name) = R::KERNEL;
            return (of.chunks).launch(&gpu, source, name, (QUANTUM_THREADS, 1), args);
        }
        if !step::is_set(flag.as_ref()) {
            let good = with_float!(placed.dtype, T => {
                let scalars = scalars.as_ref().map_or(&[][..], |scalars| scalars.elements::<T>());
                let numbers = StepNumbers::<T> {
                    scalars: std::array::from_fn(|at| scalars.get(at).copied().unwrap_or(T::ZERO)),
                    constants: constants.map(T::from_f64),
                    decays: true,
                    gradient_scale: step::read_scale(scale.as_ref()),
                    guards,
                };
                on_cpu::<T, R, N>(state, (grads, copies), of.chunks, numbers)
            });
            if !good {
                step::mark_gradient(flag.as_mut());
            }
        }
        Ok(())
    })
}

fn on_cpu<T: Float, R: UpdateRule<N>, const N: usize>(
    mut state: [Buffer<'_>; N],
    (grads, mut copies): (Option<Buffer<'_>>, Option<Buffer<'_>>),
    chunks: &ChunkTable,
    numbers: StepNumbers<T>,
) -> bool {
    let grads = grads.as_ref().map(|grads| grads.elements::<T>());
    let copies = copies.as_mut().map(|it| Shares::new(it.elements_mut()));
    let buffers = state.each_mut().map(|buffer| buffer.elements_mut::<T>());
    chunks.update(buffers, |chunk, mut buffers| {
        let mut numbers = numbers;
        numbers.decays = chunk.decay;
        let most = if copies.is_some() { COPIED } else { usize::MAX };
        let mut all = true;
        for start in (0..chunk.len).step_by(most) {
            let part = start..start.saturating_add(most).min(chunk.len);
            let range = chunk.offset + part.start..chunk.offset + part.end;
            let grads = grads.map_or(&[][..], |grads| &grads[range.clone()]);
            let mut parts = buffers.iter_mut().map(|it| &mut it[part.clone()]);
            let mut next = || parts.next().unwrap_or_default();
            all &= run::<T, R, N>(next(), next(), next(), grads, &numbers);
            if let Some(copies) = &copies {
                // SAFETY: `ChunkTable::update` gives each part of each chunk to one thread.
                round(unsafe { copies.part(range) }, &buffers[0][part]);
            }
        }
        all
    })
}
