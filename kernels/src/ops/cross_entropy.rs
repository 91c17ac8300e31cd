//! cross_entropy: softmax cross-entropy of class indices and its gradient in one call, with the
//! semantics of PyTorch: class weights, label smoothing, ignored rows. Losses are by row and not
//! averaged (`reduction="none"`).
//!
//! With z = x − max x, s = Σ eᶻ, y the target, w the class weights, W = Σ w and a =
//! label_smoothing:
//!
//! ```text
//! loss    = (1 − a) w_y (ln s − z_y) + a/C Σ_c w_c (ln s − z_c)
//! dloss/dx_c = ((1 − a) w_y + a/C W) eᶻ_c/s − (1 − a) w_y [c = y] − a/C w_c
//! ```
//!
//! The order of sums depends on C alone (`rows.rs`), and the result of a row on that row alone. The
//! kernels (`cross_entropy.cu`) add in the same order, except for many classes in bf16: there the
//! order follows from how a row lies in memory, and 2ˣ is the GPU's, within 2 ulp.

mod rows;

use std::sync::atomic::{AtomicI64, Ordering};

use rows::{LossRows, RowOutputs};

use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, args};
use crate::ops::call::{Buffer, FLOATS_AND_BF16, OpCall, Slot, TARGET_DTYPES, Targets, with_float};
use crate::ops::float::{Float, lane_sum};
use crate::ops::stored::{Stored, rooms, with_stored};
use crate::ops::sum;
use crate::threads::{self, Shares};
use crate::{DType, Element, Tensor};

pub(super) static SOURCE: CuFile =
    CuFile::new("cross_entropy.cu", include_str!("cross_entropy.cu"));

/// The most classes whose sums are in the order of classes.
const NARROW_CLASSES_MAX: usize = 64;

/// An element costs as much as this many of a simple loop, so threads pay off earlier.
const COST: usize = 4;

/// What [`cross_entropy`] writes, in the logits' dtype; losses and weights are f32 where that is
/// bf16.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOut<'a> {
    /// The loss of each row, (B), not averaged; 0 for ignored rows.
    pub losses: &'a Tensor,
    /// The gradient of the sum of losses by the logits, times `gradient_scale`, (B, C). It may be
    /// the logits themselves.
    pub dlogits: Option<&'a Tensor>,
    /// The class weight of each row's target, (B), 0 for ignored rows. PyTorch's mean divides by
    /// their sum.
    pub weights: Option<&'a Tensor>,
}

/// Options of [`cross_entropy`]. The default is PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// Rows with this target are ignored.
    pub ignore_index: Option<i64>,
    /// The share of the target's probability that is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// The weight of each class, (C), of the losses' dtype.
    pub class_weights: Option<&'a Tensor>,
    /// Multiplies the gradient, not the losses: 1 / (global batch) for a mean.
    pub gradient_scale: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions {
            ignore_index: Some(-100),
            label_smoothing: 0.0,
            class_weights: None,
            gradient_scale: 1.0,
        }
    }
}

/// Softmax cross-entropy of `logits` (B, C) with `targets` (B; u8, i32 or i64): losses, and if
/// asked for their gradient. A row with NaN or +∞ gives NaN.
///
/// A target that is neither a class nor `ignore_index` is an error on the CPU, before anything is
/// written. On a GPU it makes the row's loss, weight and gradient NaN, which `mark_nonfinite`
/// finds. Logits may also be bf16: the math is in f32, and the gradient is rounded once.
///
/// Adds to `stats` (4), if given: the sum of losses; that of `out.weights`, or else the number of
/// rows that are not ignored; how many of these have the first of their largest logits at the
/// target, where NaN is the largest; and their number. Class weights need `out.weights` then. Of
/// more than 64 classes in bf16, a row whose loss is not finite counts as wrong.
///
/// Backward: in the same call, if `out` has a place for the gradient.
#[track_caller]
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    out: CrossEntropyOut<'_>,
    options: &CrossEntropyOptions<'_>,
    stats: Option<&Tensor>,
) -> Result<()> {
    let mut call = OpCall::new("cross_entropy");
    let losses = call.writes("losses", out.losses);
    let logits = call.reads("logits", logits);
    let targets = call.reads("targets", targets);
    let dlogits = call.writes_some("dlogits", out.dlogits);
    let weights = call.writes_some("weights", out.weights);
    let class_weights = call.reads_some("class_weights", options.class_weights);
    let stats = updates_stats(&mut call, stats)?;
    let [rows, classes] = check_operands(&call, logits, targets)?;
    let by_row = (rows, "one for each row of logits");
    let by_class = (classes, "one weight for each class");
    for (operand, (size, what)) in [
        (Some(losses), by_row),
        (weights, by_row),
        (class_weights, by_class),
    ] {
        if let Some(operand) = operand {
            call.has_shape(operand, &[size], what)?;
            call.math_dtype(operand, logits)?;
        }
    }
    call.elementwise(&[logits, dlogits.unwrap_or(logits)])?;
    if let Some(dlogits) = dlogits {
        call.may_be_in_place(logits, dlogits);
    }
    if !(0.0..=1.0).contains(&options.label_smoothing) {
        return Err(call.value("label_smoothing", "0 to 1", options.label_smoothing));
    }
    if !options.gradient_scale.is_finite() {
        let got = options.gradient_scale;
        return Err(call.value("gradient_scale", "a finite number", got));
    }
    call.run(logits, &FLOATS_AND_BF16, |placed| {
        let [losses, logits, targets] = placed.enter([losses, logits, targets])?;
        let [dlogits, weights] = [placed.enter_some(dlogits)?, placed.enter_some(weights)?];
        let operands = LossOperands {
            sizes: [rows, classes],
            losses,
            logits,
            targets,
            dlogits,
            weights,
            class_weights: placed.enter_some(class_weights)?,
            stats: placed.enter_some(stats)?,
        };
        if let Some(gpu) = placed.gpu() {
            return launch(&gpu, &operands, options);
        }
        let targets = Targets::of(&operands.targets);
        targets.check(&placed.call, classes, options.ignore_index)?;
        with_stored!(placed.dtype, S => run::<S>(operands, options));
        Ok(())
    })
}

/// Checks `logits` (B, C), with at least one class, and `targets` (B). Gives B and C.
fn check_operands(call: &OpCall<'_>, logits: Slot, targets: Slot) -> Result<[usize; 2]> {
    let [rows, classes] = call.dims(logits, "[rows, classes]")?;
    if classes == 0 {
        let help = "the second dimension is the number of classes";
        return Err(call.operand_error(logits, "at least one class", help));
    }
    call.has_shape(targets, &[rows], "one class index for each row of logits")?;
    call.has_dtype(targets, &TARGET_DTYPES)?;
    Ok([rows, classes])
}

/// Statistics of a step as an operand that is updated, if they are given.
pub(super) fn updates_stats<'a>(
    call: &mut OpCall<'a>,
    stats: Option<&'a Tensor>,
) -> Result<Option<Slot>> {
    let Some(stats) = stats else { return Ok(None) };
    let stats = call.updates("stats", stats);
    call.has_shape(stats, &[4], "losses, divisor, correct rows, rows")?;
    call.has_dtype(stats, &[DType::F32, DType::F64])?;
    Ok(Some(stats))
}

/// Adds to the statistics what the rows have: `counts` are correct rows and rows.
fn add_totals<T: Float>(of: &mut LossOperands<'_>, counts: [i64; 2]) {
    let Some(stats) = &mut of.stats else { return };
    let [correct, counted] = counts.map(|count| count as f64);
    let divisor = of.weights.as_ref().map_or(counted, total::<T>);
    add_to_stats::<T>(stats, &of.losses, [divisor, correct, counted]);
}

/// Adds the sum of losses, and these, to the statistics of a step.
pub(super) fn add_to_stats<T: Float>(stats: &mut Buffer<'_>, losses: &Buffer<'_>, rest: [f64; 3]) {
    let [divisor, correct, rows] = rest;
    let parts = [total::<T>(losses), divisor, correct, rows];
    with_float!(stats.dtype, S => {
        for (stat, part) in stats.elements_mut::<S>().iter_mut().zip(parts) {
            *stat += S::from_f64(part);
        }
    });
}

/// The sum, rounded to its elements' type.
fn total<T: Float>(x: &Buffer<'_>) -> f64 {
    T::from_f64(sum::total::<T>(x.elements())).widened()
}

/// The operands, entered.
struct LossOperands<'a> {
    /// B, C
    sizes: [usize; 2],
    /// (B)
    losses: Buffer<'a>,
    /// (B, C)
    logits: Buffer<'a>,
    /// (B)
    targets: Buffer<'a>,
    /// (B, C)
    dlogits: Option<Buffer<'a>>,
    /// (B)
    weights: Option<Buffer<'a>>,
    /// (C)
    class_weights: Option<Buffer<'a>>,
    /// (4)
    stats: Option<Buffer<'a>>,
}

fn launch(gpu: &GpuLaunch, of: &LossOperands<'_>, options: &CrossEntropyOptions<'_>) -> Result<()> {
    let [rows, classes] = of.sizes;
    let smooths = options.label_smoothing > 0.0;
    // The rows and threads of a block are those of `cross_entropy.cu`.
    let (name, blocks, threads, loads) = if classes <= NARROW_CLASSES_MAX {
        let loads = 1 + (32 * classes).div_ceil(4 * 128);
        ("cross_entropy_narrow", rows.div_ceil(32), 128, loads)
    } else {
        // A block loops over rows; there are two blocks on each multiprocessor.
        let blocks = rows.min(2 * gpu.gpu.multiprocessors as usize);
        // Of each row the target, its logit, and passes, in each of which a thread has so many
        // elements under way.
        let (name, at_once) = match of.logits.dtype {
            DType::BF16 if smooths && of.class_weights.is_some() => {
                ("cross_entropy_weighted", &[32, 32][..])
            }
            DType::BF16 if smooths => ("cross_entropy_smooth", &[32, 32][..]),
            DType::BF16 => ("cross_entropy_wide", &[32, 32][..]),
            _ => ("cross_entropy_wide", &[8, 16, 4][..]),
        };
        let of_row = at_once
            .iter()
            .map(|at_once| classes.div_ceil(512 * at_once));
        let loads = rows.div_ceil(blocks.max(1)) * (2 + of_row.sum::<usize>());
        (name, blocks, 512, loads)
    };
    let switches = u32::from(options.ignore_index.is_some()) + 2 * u32::from(smooths);
    let args = args![
        of.losses,
        of.dlogits,
        of.weights,
        of.logits,
        of.targets,
        of.targets.dtype.bytes() as u32,
        of.class_weights,
        rows,
        classes,
        options.ignore_index.unwrap_or_default(),
        switches,
        (1.0 - options.label_smoothing) as f32,
        (options.label_smoothing / classes as f64) as f32,
        options.gradient_scale as f32,
        of.stats,
        of.stats.as_ref().map(|_| gpu.counters()).transpose()?,
    ];
    let grid = Grid::blocks(blocks, threads, loads);
    gpu.launch(&SOURCE, (name, of.logits.dtype), grid, args)
}

fn run<S: Stored>(mut of: LossOperands<'_>, options: &CrossEntropyOptions<'_>) {
    type Math<S> = <S as Stored>::Math;
    let [rows, classes] = of.sizes;
    let class_weights = of
        .class_weights
        .as_ref()
        .map(|weights| weights.elements::<Math<S>>());
    let smooths = options.label_smoothing > 0.0;
    let logits = of.logits.unless_in_place::<S>();
    let problem = LossRows {
        logits: logits.and_then(S::math_of),
        targets: Targets::of(&of.targets),
        ignore_index: options.ignore_index,
        class_weights,
        classes,
        is_narrow: classes <= NARROW_CLASSES_MAX,
        smooths,
        counts: of.stats.is_some(),
        target_share: Math::<S>::from_f64(1.0 - options.label_smoothing),
        class_share: Math::<S>::from_f64(options.label_smoothing / classes as f64),
        weight_sum: class_weights
            .filter(|_| smooths)
            .map_or(Math::<S>::from_f64(classes as f64), lane_sum),
        gradient_scale: Math::<S>::from_f64(options.gradient_scale),
    };
    let losses = Shares::new(of.losses.elements_mut::<Math<S>>());
    let dlogits = of
        .dlogits
        .as_mut()
        .map(|out| Shares::new(out.elements_mut::<S>()));
    let weights = of
        .weights
        .as_mut()
        .map(|out| Shares::new(out.elements_mut::<Math<S>>()));
    let row_cost = classes * COST;
    let counts = [const { AtomicI64::new(0) }; 2];
    threads::split(rows * row_cost, row_cost, |range| {
        let range = range.start / row_cost..range.end / row_cost;
        // A row in bf16 is widened to a place for its gradient.
        let at_once = if S::WIDENS { 1 } else { range.len() };
        let [mut room] = rooms::<S, 1>(classes);
        for first in range.clone().step_by(at_once.max(1)) {
            let range = first..range.end.min(first + at_once);
            let elements = range.start * classes..range.end * classes;
            // SAFETY: `split` hands out ranges that do not overlap, at multiples of the cost of a
            // row: every row goes to one thread, once, and the parts belong to those rows.
            let (losses, dlogits, weights) = unsafe {
                let dlogits = dlogits.as_ref().map(|share| share.part(elements.clone()));
                let weights = weights.as_ref().map(|share| share.part(range.clone()));
                (losses.part(range), dlogits, weights)
            };
            let logits = logits.map(|logits| &logits[elements]);
            let of_rows = |dlogits: Option<&mut [Math<S>]>| {
                let mut rows = RowOutputs {
                    first,
                    losses,
                    dlogits,
                    weights,
                };
                for (count, of_rows) in counts.iter().zip(rows::rows(&problem, &mut rows)) {
                    count.fetch_add(of_rows, Ordering::Relaxed);
                }
            };
            if !S::WIDENS {
                of_rows(dlogits.and_then(S::as_math));
                continue;
            }
            let row = logits.or(dlogits.as_deref()).unwrap_or_default();
            S::widened(row, &mut room);
            of_rows(Some(&mut room));
            if let Some(dlogits) = dlogits {
                S::keep(dlogits, &room);
            }
        }
    });
    add_totals::<Math<S>>(&mut of, counts.map(AtomicI64::into_inner));
}

#[cfg(test)]
mod tests;
