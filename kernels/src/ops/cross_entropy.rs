//! cross_entropy: softmax cross-entropy of class indices and its gradient in one go, with PyTorch's semantics: class
//! weights, label smoothing, rows to ignore. Losses are by row and not averaged (`reduction="none"`).
//!
//! With z = x − max x, s = Σ eᶻ, y the target, w the class weights, W = Σ w and a = label_smoothing:
//!
//! ```text
//! loss    = (1 − a) w_y (ln s − z_y) + a/C Σ_c w_c (ln s − z_c)
//! dloss/dx_c = ((1 − a) w_y + a/C W) eᶻ_c/s − (1 − a) w_y [c = y] − a/C w_c
//! ```
//!
//! Few classes: a group of rows at a time (`narrow.rs`). Many: row by row, in blocks (`wide.rs`). Which of the two
//! depends on C alone, and what becomes of a row on that row alone. The kernels (`cross_entropy.cu`) add in the same
//! order.

mod narrow;
#[cfg(test)]
mod tests;
mod wide;

use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Call, Lent, TRAINED};
use crate::ops::float::{Float, lane_sum};
use crate::ops::targets::{Targets, check_operands};
use crate::threads::Shares;
use crate::{DType, Tensor, threads};

static SOURCE: Source = Source::new("cross_entropy.cu", include_str!("cross_entropy.cu"));

/// An element here costs as much as this many of a simple loop: what makes threads pay earlier.
const COST: usize = 4;

/// What [`cross_entropy`] writes: of the logits' dtype, but losses and weights are f32 where that is bf16.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOut<'a> {
    /// The loss of each row, (B), not averaged; 0 for ignored rows.
    pub losses: &'a Tensor,
    /// The gradient of the sum of losses by the logits, times `gradient_scale`, (B, C). May be the logits themselves.
    pub dlogits: Option<&'a Tensor>,
    /// The class weight of each row's target, (B), 0 for ignored rows: their sum is what PyTorch's mean divides by.
    pub weights: Option<&'a Tensor>,
}

/// How [`cross_entropy`] counts. The default is PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyOptions<'a> {
    /// Rows with this target count for nothing.
    pub ignore_index: Option<i64>,
    /// How much of the target's probability is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// How much each class counts, (C), of the losses' dtype.
    pub class_weights: Option<&'a Tensor>,
    /// Multiplies the gradient, not the losses: 1 / (global batch) for a mean.
    pub gradient_scale: f64,
}

impl Default for CrossEntropyOptions<'_> {
    fn default() -> Self {
        CrossEntropyOptions { ignore_index: Some(-100), label_smoothing: 0.0, class_weights: None, gradient_scale: 1.0 }
    }
}

/// Softmax cross-entropy of `logits` (B, C) with `targets` (B; u8, i32 or i64): losses, and on request their gradient.
/// Nothing is written if a target is neither a class nor `ignore_index`. A row with NaN or +∞ gives NaN.
///
/// On a GPU the host cannot know the targets: one that is neither makes its row's loss, weight and gradient NaN, which
/// `mark_nonfinite` finds. There logits may also be bf16: the math is that of f32, and the gradient is rounded once.
#[track_caller]
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    out: CrossEntropyOut<'_>,
    options: &CrossEntropyOptions<'_>,
) -> Result<()> {
    let mut call = Call::new("cross_entropy");
    let losses = call.writes("losses", out.losses);
    let logits = call.reads("logits", logits);
    let targets = call.reads("targets", targets);
    let dlogits = call.writes_some("dlogits", out.dlogits);
    let weights = call.writes_some("weights", out.weights);
    let class_weights = call.reads_some("class_weights", options.class_weights);
    let [rows, classes] = check_operands(&call, logits, targets)?;
    for by_row in [Some(losses), weights].into_iter().flatten() {
        call.has_shape(by_row, &[rows], "one for each row of logits")?;
        call.math_dtype(by_row, logits)?;
    }
    call.elementwise(&[logits, dlogits.unwrap_or(logits)])?;
    if let Some(dlogits) = dlogits {
        call.may_be_in_place(logits, dlogits);
    }
    if let Some(class_weights) = class_weights {
        call.has_shape(class_weights, &[classes], "one weight for each class")?;
        call.math_dtype(class_weights, logits)?;
    }
    if !(0.0..=1.0).contains(&options.label_smoothing) {
        return Err(call.bad_value("label_smoothing", "0 to 1", options.label_smoothing.to_string()));
    }
    if !options.gradient_scale.is_finite() {
        return Err(call.bad_value("gradient_scale", "a finite number", options.gradient_scale.to_string()));
    }
    let placed = call.place(logits, &TRAINED)?;
    {
        let [mut losses, lent_logits, lent_targets] = placed.enter([losses, logits, targets])?;
        let (mut dlogits, mut weights) = (placed.enter_some(dlogits)?, placed.enter_some(weights)?);
        let class_weights = placed.enter_some(class_weights)?;
        let target_dtype = placed.tensor(targets).dtype();
        if let Some(gpu) = placed.launcher()? {
            let dtype = placed.tensor(logits).dtype();
            let inputs = ((&lent_logits, dtype), (&lent_targets, target_dtype), class_weights.as_ref());
            launch(&gpu, [rows, classes], inputs, (&losses, dlogits.as_ref(), weights.as_ref()), options)?;
            drop((losses, lent_logits, lent_targets, dlogits, weights, class_weights));
            return placed.finish();
        }
        let targets = Targets::of(&lent_targets, target_dtype);
        targets.check("cross_entropy", classes, options.ignore_index)?;
        let inputs = (&lent_logits, targets, class_weights.as_ref());
        let outputs = (&mut losses, dlogits.as_mut(), weights.as_mut());
        match placed.tensor(logits).dtype() {
            DType::F32 => run::<f32>(classes, inputs, outputs, options),
            _ => run::<f64>(classes, inputs, outputs, options),
        }
    }
    placed.finish()
}

/// The kernels for f32 and bf16 that keep a row in a warp's registers, and for how many classes they have room.
const ROW_A_WARP: [(usize, [&str; 2]); 4] = [
    (128, ["cross_entropy_128_f32", "cross_entropy_128_bf16"]),
    (256, ["cross_entropy_256_f32", "cross_entropy_256_bf16"]),
    (512, ["cross_entropy_512_f32", "cross_entropy_512_bf16"]),
    (1024, ["cross_entropy_1024_f32", "cross_entropy_1024_bf16"]),
];
const NARROW: [&str; 2] = ["cross_entropy_narrow_f32", "cross_entropy_narrow_bf16"];
const WIDE: [&str; 2] = ["cross_entropy_wide_f32", "cross_entropy_wide_bf16"];

/// An operand and its dtype.
type Typed<'a> = (&'a Lent<'a>, DType);

fn launch(
    gpu: &Launcher,
    [rows, classes]: [usize; 2],
    ((logits, dtype), (targets, target_dtype), class_weights): (Typed<'_>, Typed<'_>, Option<&Lent<'_>>),
    (losses, dlogits, weights): (&Lent<'_>, Option<&Lent<'_>>, Option<&Lent<'_>>),
    options: &CrossEntropyOptions<'_>,
) -> Result<()> {
    if rows == 0 {
        return Ok(());
    }
    // Rows of a block and its threads, as `cross_entropy.cu` has them.
    let (names, rows_per_block, threads) = if classes <= narrow::CLASSES_MAX {
        (NARROW, 32, 128)
    } else if let Some((_, names)) = ROW_A_WARP.iter().find(|(classes_max, _)| classes <= *classes_max) {
        (*names, 4, 128)
    } else {
        (WIDE, 1, 512)
    };
    let mut blocks = rows.div_ceil(rows_per_block);
    if rows_per_block == 1 {
        // A block goes from row to row, two on a processor.
        blocks = blocks.min(2 * gpu.gpu.multiprocessors as usize);
    }
    let switches = u32::from(options.ignore_index.is_some()) + 2 * u32::from(options.label_smoothing > 0.0);
    let kernel =
        gpu.kernel(&SOURCE, names[usize::from(dtype == DType::BF16)])?.output(losses).maybe(dlogits).maybe(weights);
    let kernel = if let Some(dlogits) = dlogits { kernel.input(logits, dlogits) } else { kernel.reads(logits) };
    let kernel = kernel.reads(targets).u32(target_dtype.bytes() as u32).maybe(class_weights);
    let kernel = kernel.count(rows).count(classes).i64(options.ignore_index.unwrap_or_default()).u32(switches);
    let kernel = kernel.f32((1.0 - options.label_smoothing) as f32);
    let kernel = kernel.f32((options.label_smoothing / classes as f64) as f32).f32(options.gradient_scale as f32);
    kernel.launch(Grid::blocks(blocks, threads))
}

/// What all rows share.
#[derive(Clone, Copy)]
struct Problem<'a, T> {
    /// (B, C); nothing if they are in `dlogits`, to be overwritten.
    logits: Option<&'a [T]>,
    /// (B)
    targets: Targets<'a>,
    ignore_index: Option<i64>,
    /// (C)
    class_weights: Option<&'a [T]>,
    classes: usize,
    smooths: bool,
    /// 1 − label_smoothing
    target_share: T,
    /// label_smoothing / C
    class_share: T,
    /// Σ class_weights
    weight_sum: T,
    gradient_scale: T,
}

/// The outputs of some consecutive rows.
struct Rows<'a, T> {
    /// Which row of the batch is the first.
    first: usize,
    losses: &'a mut [T],
    dlogits: Option<&'a mut [T]>,
    weights: Option<&'a mut [T]>,
}

/// The factors of one row's gradient: `dx_c = softmax eᶻ_c − class w_c − target [c = y]`.
#[derive(Clone, Copy)]
struct Factors<T> {
    softmax: T,
    class: T,
    target: T,
}

impl<T: Float> Problem<'_, T> {
    #[inline(always)]
    fn class(&self, row: usize) -> Option<usize> {
        self.targets.class(row, self.ignore_index)
    }

    #[inline(always)]
    fn weight(&self, class: usize) -> T {
        self.class_weights.map_or(T::ONE, |weights| weights[class])
    }

    /// The loss, from ln s, z of the target, its weight, and Σ w z if labels are smoothed.
    #[inline(always)]
    fn loss(&self, log_sum: T, target_z: T, weight: T, weighted_z: T) -> T {
        let target = self.target_share * (weight * (log_sum - target_z));
        // Not added when it is absent: 0 × ∞ would be NaN. Both of its terms are positive, so nothing cancels.
        if self.smooths {
            self.class_share.fused(self.weight_sum.fused(log_sum, T::ZERO - weighted_z), target)
        } else {
            target
        }
    }

    #[inline(always)]
    fn factors(&self, sum: T, weight: T) -> Factors<T> {
        let target = self.target_share * weight;
        let total = if self.smooths { self.class_share.fused(self.weight_sum, target) } else { target };
        Factors {
            softmax: self.gradient_scale * total / sum,
            class: self.gradient_scale * self.class_share,
            target: self.gradient_scale * target,
        }
    }

    /// eᶻ of one row becomes its gradient.
    #[inline(always)]
    fn finish_gradient(&self, row: &mut [T], class: usize, factors: Factors<T>) {
        match self.class_weights {
            _ if !self.smooths => row.iter_mut().for_each(|e| *e = *e * factors.softmax),
            None => row.iter_mut().for_each(|e| *e = e.fused(factors.softmax, T::ZERO - factors.class)),
            Some(weights) => {
                let offsets = weights.iter().map(|&weight| T::ZERO - factors.class * weight);
                row.iter_mut().zip(offsets).for_each(|(e, offset)| *e = e.fused(factors.softmax, offset));
            }
        }
        row[class] = row[class] - factors.target;
    }
}

fn run<T: Float>(
    classes: usize,
    (logits, targets, class_weights): (&Lent<'_>, Targets<'_>, Option<&Lent<'_>>),
    (losses, dlogits, weights): (&mut Lent<'_>, Option<&mut Lent<'_>>, Option<&mut Lent<'_>>),
    options: &CrossEntropyOptions<'_>,
) {
    let class_weights = class_weights.map(|lent| lent.elements::<T>());
    let smooths = options.label_smoothing > 0.0;
    let problem = Problem {
        logits: logits.unless_in_place(),
        targets,
        ignore_index: options.ignore_index,
        class_weights,
        classes,
        smooths,
        target_share: T::from_f64(1.0 - options.label_smoothing),
        class_share: T::from_f64(options.label_smoothing / classes as f64),
        weight_sum: class_weights.filter(|_| smooths).map_or(T::from_f64(classes as f64), lane_sum),
        gradient_scale: T::from_f64(options.gradient_scale),
    };
    let losses = losses.elements_mut::<T>();
    let rows = losses.len();
    let losses = Shares::new(losses);
    let dlogits = dlogits.map(|lent| Shares::new(lent.elements_mut::<T>()));
    let weights = weights.map(|lent| Shares::new(lent.elements_mut::<T>()));
    let is_narrow = classes <= narrow::CLASSES_MAX;
    let grain = if is_narrow { narrow::GROUP } else { 1 };
    let row_cost = classes * COST;
    threads::split(rows * row_cost, grain * row_cost, |range| {
        let range = range.start / row_cost..range.end / row_cost;
        // SAFETY: `split` hands out ranges that do not overlap, on multiples of a row's cost: every row goes to one
        // thread, once, and the parts are those rows'.
        let mut rows = unsafe {
            Rows {
                first: range.start,
                losses: losses.part(range.clone()),
                dlogits: dlogits.as_ref().map(|share| share.part(range.start * classes..range.end * classes)),
                weights: weights.as_ref().map(|share| share.part(range.clone())),
            }
        };
        if is_narrow { narrow::rows(&problem, &mut rows) } else { wide::rows(&problem, &mut rows) }
    });
}
