//! Whether a training step has a result, decided on the device, and what follows from that.
//!
//! `grad_norm_partials` sums the squares of gradients by quantum; `clip_scale` turns the sums into
//! the number that the optimizers multiply gradients by. Squares are summed in f64, in an order
//! that depends on the chunk table alone. Ranks that each hold the partials of their own slices
//! (ZeRO-1) put them in order and get the norm that one rank alone would.
//!
//! `decide_step` and `mark_nonfinite` set the sticky flag "first non-finite step". It stays on the
//! device. Once it is set, the optimizers change nothing, so the weights from before that step
//! survive until the host looks. `vote_stopped` says whether steps were
//! stopped.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::launch::{CuFile, Grid, args};
use crate::ops::call::{Buffer, FLOATS, OpCall, Slot, with_float};
use crate::ops::chunks::{Chunk, ChunkTable};
use crate::ops::elementwise::GRAIN;
use crate::ops::float::{Float, lane_sum, lane_sum_of};
use crate::progress::StopWord;
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

pub(super) static GRAD_NORM: CuFile = CuFile::new("grad_norm.cu", include_str!("grad_norm.cu"));
/// Threads of the one block that adds the partials.
const CLIP_THREADS: u32 = 512;

multiversion! {
    /// Σ x². The square of an f32 is exact in f64, so fusing it with the sum changes nothing.
    fn sum_of_squares[T: Float](x: &[T]) -> f64 {
        lane_sum_of(x, |x| x.widened() * x.widened())
    }
}

multiversion! {
    fn sum[](x: &[f64]) -> f64 {
        lane_sum(x)
    }
}

/// The sum of squares of every quantum of `chunks` of `grads` (N), into `partials`, f64 (quanta).
#[track_caller]
pub fn grad_norm_partials(partials: &Tensor, grads: &Tensor, chunks: &ChunkTable) -> Result<()> {
    let mut call = OpCall::new("grad_norm_partials");
    let partials = call.writes("partials", partials);
    let grads = call.reads("grads", grads);
    chunks.check_fits(&call, grads)?;
    let quanta = chunks.quanta();
    call.has_shape(
        partials,
        &[quanta],
        "one sum for each quantum of the chunk table",
    )?;
    call.has_dtype(partials, &[DType::F64])?;
    call.run(grads, &FLOATS, |placed| {
        let [mut partials, grads] = placed.enter([partials, grads])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![partials, grads, quanta];
            return chunks.launch(&gpu, &GRAD_NORM, "grad_norm_partials_f32", (32, 1), args);
        }
        with_float!(placed.dtype, T => {
            let grads = grads.elements::<T>();
            let sum = |piece: Chunk| sum_of_squares(&grads[piece.range()]);
            chunks.each_quantum(partials.elements_mut(), sum);
        });
        Ok(())
    })
}

/// `out = [scale, norm]`: what the optimizers multiply gradients by, and the norm of the gradients.
/// Gradients are sums over rows; dividing by element 0 of `divisor`, of the dtype of `out`, makes
/// them means. It is 1 if absent; a divisor of 0 (no rows) gives a scale of 0.
///
/// `norm = √(Σ partials) / divisor` (0 without partials) and
/// `scale = min(1, max_norm / (norm + 1e-6)) / divisor`, as in `torch.nn.utils.clip_grad_norm_`.
/// A `max_norm` of 0 clips nothing. A norm that is not finite gives a scale of 0 or NaN: see
/// `mark_nonfinite`.
#[track_caller]
pub fn clip_scale(
    out: &Tensor,
    partials: Option<&Tensor>,
    max_norm: f64,
    divisor: Option<&Tensor>,
) -> Result<()> {
    decide_step(out, partials, max_norm, divisor, None)
}

/// What [`decide_step`] looks at and marks.
#[derive(Clone, Copy, Debug)]
pub struct StepMarks<'a> {
    /// i64 (3): see [`STEP_FLAGS`](crate::ops::STEP_FLAGS).
    pub flags: &'a Tensor,
    /// i64 (1): the first step in which `stats` were not finite; 0 for none.
    pub own: Option<&'a Tensor>,
    /// Of the dtype of `out`: the statistics of the step's loss.
    pub stats: &'a Tensor,
    /// i64 (1): the number of the step, from 1.
    pub step: &'a Tensor,
    /// Once it is set, steps change nothing: the first flag is -1, and the last stays the number of
    /// the last complete step.
    pub stop: Option<StopWord>,
    /// f32 (1): likewise, if it is not 0.
    pub stopped: Option<&'a Tensor>,
}

/// As [`clip_scale`]. Besides, marks the step as bad if a statistic, the scale or the norm is not
/// finite, or if an optimizer has marked an earlier step. Bad steps after the first change nothing.
#[track_caller]
pub fn decide_step(
    out: &Tensor,
    partials: Option<&Tensor>,
    max_norm: f64,
    divisor: Option<&Tensor>,
    marks: Option<StepMarks<'_>>,
) -> Result<()> {
    let mut call = OpCall::new("clip_scale");
    let out = call.writes("out", out);
    let stop = marks.and_then(|marks| marks.stop);
    let partials = call.reads_some("partials", partials);
    let divisor = call.reads_some("divisor", divisor);
    let [flags, own, stats, step, stopped] = match marks {
        Some(marks) => add_marks(&mut call, marks, out)?,
        None => [None; 5],
    };
    call.has_shape(out, &[2], "scale and norm")?;
    if !(0.0..f64::INFINITY).contains(&max_norm) {
        return Err(call.value("max_norm", "0 (no clipping) or more", max_norm));
    }
    if let Some(partials) = partials {
        call.dims::<1>(partials, "what grad_norm_partials wrote")?;
        call.has_dtype(partials, &[DType::F64])?;
    } else if max_norm > 0.0 {
        let expected = "0, since there are no partials to clip by";
        return Err(call.value("max_norm", expected, max_norm));
    }
    check_scale(&call, divisor, out)?;
    call.run(out, &FLOATS, |placed| {
        let [mut out] = placed.enter([out])?;
        let (partials, divisor) = (placed.enter_some(partials)?, placed.enter_some(divisor)?);
        let (mut flags, mut own) = (placed.enter_some(flags)?, placed.enter_some(own)?);
        let (stats, step) = (placed.enter_some(stats)?, placed.enter_some(step)?);
        let stopped = placed.enter_some(stopped)?;
        if let Some(gpu) = placed.gpu() {
            let count = partials.as_ref().map_or(0, |partials| partials.count);
            let stats_count = stats.as_ref().map_or(0, |stats| stats.count);
            let args = args![
                out,
                partials,
                count,
                max_norm,
                divisor,
                flags,
                own,
                stats,
                stats_count,
                step,
                stopped,
                stop.map_or(0, StopWord::address),
            ];
            // Tiles of eight partials a thread, then the statistics.
            let loads = count.div_ceil(8 * CLIP_THREADS as usize) + stats_count.max(1);
            let grid = Grid::blocks(1, CLIP_THREADS, loads);
            return gpu.launch(&GRAD_NORM, "clip_scale_f32", grid, args);
        }
        let sum = partials.map_or(0.0, |partials| sum(partials.elements()));
        with_float!(placed.dtype, T => {
            let divisor = read_scale::<T>(divisor.as_ref()).widened();
            let result = clipped(sum, max_norm, divisor).map(T::from_f64);
            out.elements_mut().copy_from_slice(&result);
            if let (Some(flags), Some(stats), Some(step)) = (&mut flags, &stats, &step) {
                let finite = |values: &[T]| values.iter().all(|value| value.finite());
                let good = [finite(stats.elements()), finite(&result)];
                let is_stopped = stopped.is_some_and(|it| it.elements::<f32>()[0] != 0.0);
                let (flags, step) = (flags.elements_mut(), step.elements::<i64>()[0]);
                if !is_stopped {
                    mark(flags, own.as_mut(), good, step);
                } else if flags[0] == 0 {
                    flags[0] = -1;
                }
            }
        });
        Ok(())
    })
}

/// The operands of `of`: flags, own, stats, step and stopped.
fn add_marks<'a>(call: &mut OpCall<'a>, of: StepMarks<'a>, out: Slot) -> Result<[Option<Slot>; 5]> {
    let flags = call.updates("flags", of.flags);
    let own = of.own.map(|own| call.updates("own", own));
    let (stats, step) = (call.reads("stats", of.stats), call.reads("step", of.step));
    let stopped = of.stopped.map(|stopped| call.reads("stopped", stopped));
    if let Some(stopped) = stopped {
        call.has_shape(stopped, &[1], "whether the steps were stopped")?;
        call.has_dtype(stopped, &[DType::F32])?;
    }
    call.has_shape(flags, &[STEP_FLAGS], "the flags of a step")?;
    call.has_shape(step, &[1], "the number of this step")?;
    for flag in [Some(flags), own, Some(step)].into_iter().flatten() {
        call.has_dtype(flag, &[DType::I64])?;
    }
    call.same_dtype(stats, out)?;
    Ok([Some(flags), own, Some(stats), Some(step), stopped])
}

/// Marks step number `step` by whether its statistics, and its scale and norm, are good.
fn mark(flags: &mut [i64], own: Option<&mut Buffer<'_>>, good: [bool; 2], step: i64) {
    if let Some([own]) = own.map(|own| own.elements_mut::<i64>())
        && *own == 0
        && !good[0]
    {
        *own = step;
    }
    if flags[0] == 0 {
        let now = if good == [true; 2] { 0 } else { step };
        flags[0] = if flags[1] != 0 { flags[1] } else { now };
    }
    flags[2] = step;
}

/// Scale and norm, from the sum of squares.
fn clipped(sum: f64, max_norm: f64, divisor: f64) -> [f64; 2] {
    let mean = if divisor == 0.0 { 0.0 } else { 1.0 / divisor };
    let norm = mean * sum.sqrt();
    let limit = max_norm / (norm + 1e-6);
    // Not min(): that would lose NaN.
    let is_small = max_norm == 0.0 || limit > 1.0;
    [if is_small { mean } else { mean * limit }, norm]
}

/// Checks a `gradient_scale` or a divisor: the first of its elements is read.
pub(super) fn check_scale(call: &OpCall<'_>, scale: Option<Slot>, like: Slot) -> Result<()> {
    let Some(scale) = scale else { return Ok(()) };
    call.same_dtype(scale, like)?;
    let [count] = call.dims(scale, "of which the first element is read")?;
    if count == 0 {
        let help = "pass what clip_scale wrote, or None";
        return Err(call.operand_error(scale, "at least one element", help));
    }
    Ok(())
}

/// The first element of such a tensor; 1 if there is none.
pub(super) fn read_scale<T: Float>(scale: Option<&Buffer<'_>>) -> T {
    scale.map_or(T::ONE, |scale| scale.elements()[0])
}

pub(super) static NONFINITE: CuFile = CuFile::new("nonfinite.cu", include_str!("nonfinite.cu"));
/// Elements that a thread of the kernel loads before it looks at the first.
const PER_THREAD: usize = 16;

multiversion! {
    fn all_finite[T: Float](x: &[T]) -> bool {
        // No branch inside a block, so that it becomes a few vector instructions.
        x.chunks(GRAIN).all(|block| block.iter().fold(true, |all, x| all & x.finite()))
    }
}

/// `first_bad_step = step` if that is 0 and any element of `values` (any shape) is NaN or infinite.
/// Both are i64 (1). `step` counts from 1; on a GPU that is not checked, and a step of 0 marks
/// nothing.
#[track_caller]
pub fn mark_nonfinite(first_bad_step: &Tensor, values: &Tensor, step: &Tensor) -> Result<()> {
    let mut call = OpCall::new("mark_nonfinite");
    let flag = call.updates("first_bad_step", first_bad_step);
    let values = call.reads("values", values);
    let step = call.reads("step", step);
    check_flag(&call, Some(flag))?;
    call.has_shape(step, &[1], "the number of this step")?;
    call.has_dtype(step, &[DType::I64])?;
    call.run(values, &FLOATS, |placed| {
        let [mut flag, values, step] = placed.enter([flag, values, step])?;
        if let Some(gpu) = placed.gpu() {
            let grid = Grid::elements(values.count.div_ceil(PER_THREAD));
            let args = args![flag, values, values.count, step];
            return gpu.launch(&NONFINITE, "mark_nonfinite_f32", grid, args);
        }
        let step = step.elements::<i64>()[0];
        if step < 1 {
            let expected = "1 or more (steps count from 1)";
            return Err(placed.call.value("step", expected, step));
        }
        let flag = &mut flag.elements_mut::<i64>()[0];
        let fine = with_float!(placed.dtype, T => is_finite::<T>(values.elements()));
        if *flag == 0 && !fine {
            *flag = step;
        }
        Ok(())
    })
}

fn is_finite<T: Float>(values: &[T]) -> bool {
    let finite = AtomicBool::new(true);
    threads::split(values.len(), GRAIN, |range| {
        if !all_finite(&values[range]) {
            finite.store(false, Ordering::Relaxed);
        }
    });
    finite.into_inner()
}

/// Checks a flag: i64 (1).
fn check_flag(call: &OpCall<'_>, flag: Option<Slot>) -> Result<()> {
    let Some(flag) = flag else { return Ok(()) };
    call.has_shape(flag, &[1], "the first non-finite step, or 0")?;
    call.has_dtype(flag, &[DType::I64])
}

/// The number of elements of a step's flags: the first bad step (0 for none), the first step in
/// which an optimizer met a non-finite gradient (0 for none), and this step.
pub const STEP_FLAGS: usize = 3;

/// Checks what an optimizer reads: a flag, i64 (1), or the flags of a step. Whether it is the
/// latter, which the optimizer also marks.
pub(super) fn check_flags(call: &OpCall<'_>, flags: Option<Slot>) -> Result<bool> {
    match flags {
        Some(flags) if call.tensor(flags).count() == STEP_FLAGS => {
            call.has_dtype(flags, &[DType::I64])?;
            Ok(true)
        }
        flags => check_flag(call, flags).map(|()| false),
    }
}

/// Marks that an optimizer met a non-finite gradient.
pub(super) fn mark_gradient(flags: Option<&mut Buffer<'_>>) {
    if let Some([_, found, step]) = flags.map(|flags| flags.elements_mut::<i64>())
        && *found == 0
    {
        *found = *step;
    }
}

/// Whether there is a flag and it is set.
pub(super) fn is_set(flag: Option<&Buffer<'_>>) -> bool {
    flag.is_some_and(|flag| flag.elements::<i64>()[0] != 0)
}

pub(super) static VOTE_STOPPED: CuFile =
    CuFile::new("vote_stopped.cu", include_str!("vote_stopped.cu"));

/// `vote`, f32 (1), becomes 1 if steps were stopped, else 0: if the first of `flags`
/// ([`STEP_FLAGS`](crate::ops::STEP_FLAGS)) is below 0, or the stop word is set.
#[track_caller]
pub fn vote_stopped(vote: &Tensor, flags: &Tensor, stop: Option<StopWord>) -> Result<()> {
    let mut call = OpCall::new("vote_stopped");
    let (vote, flags) = (call.writes("vote", vote), call.reads("flags", flags));
    call.has_shape(vote, &[1], "whether the steps were stopped")?;
    call.has_dtype(vote, &[DType::F32])?;
    check_flags(&call, Some(flags))?;
    call.run(vote, &FLOATS, |placed| {
        let [mut vote, flags] = placed.enter([vote, flags])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![vote, flags, stop.map_or(0, StopWord::address)];
            return gpu.launch(
                &VOTE_STOPPED,
                "vote_stopped_f32",
                Grid::blocks(1, 1, 1),
                args,
            );
        }
        let is_stopped = flags.elements::<i64>()[0] < 0;
        vote.elements_mut::<f32>()[0] = f32::from(u8::from(is_stopped));
        Ok(())
    })
}

#[cfg(test)]
mod tests;
