//! mse: the squared error of every sample, and its derivative, in one call.
//!
//! `losses[row]` is the sum over the row's features of (pred − target)², not yet a mean: so that ranks with unequal
//! numbers of rows can weigh theirs right. The mean over N rows of F features each, which PyTorch's MSELoss gives, is
//! `sum(losses) / (N F)`, and `gradient_scale` = 1 / (N F) makes `dpred` its derivative; N counts the rows of all
//! ranks.
//!
//! Squares are added in f64: within blocks of 1024 features in 8 lanes that are then added pairwise, and block by
//! block.
//! So the bits depend neither on the SIMD level nor on whether a GPU works on several blocks at once.

use crate::cuda::launch::BLOCK_THREADS;
use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Call, Lent, TRAINED};
use crate::ops::float::Float;
use crate::ops::loops::{self, Binary};
use crate::simd::multiversion;
use crate::threads::{self, PARALLEL_MIN};
use crate::{DType, Tensor};

static SOURCE: Source = Source::new("mse.cu", include_str!("mse.cu"));

const LANES: usize = 8;
/// Features that are added together in lanes.
const BLOCK: usize = 1024;
/// Rows of a thread block, where a row has a thread for each lane.
const ROWS_PER_BLOCK: usize = BLOCK_THREADS as usize / LANES;

/// `apply(pred, target)` is the factor times their difference.
#[derive(Clone, Copy)]
struct ScaledDifference<T>(T);

impl<T: Float> Binary<T> for ScaledDifference<T> {
    #[inline(always)]
    fn apply(self, pred: T, target: T) -> T {
        self.0 * (pred - target)
    }
}

/// `losses` (B) `= Σ (pred − target)²` over each row of `pred` (B, …) and `target` (B, …), and
/// `dpred` [B, …] `= 2 gradient_scale (pred − target)` if it is wanted; `dpred` may be `pred` itself.
///
/// On a GPU `pred` and `dpred` may also be bf16, with all else in f32: the math is that of f32, and `dpred` is rounded once.
#[track_caller]
pub fn mse_into(
    losses: &Tensor,
    dpred: Option<&Tensor>,
    pred: &Tensor,
    target: &Tensor,
    gradient_scale: f64,
) -> Result<()> {
    let mut call = Call::new("mse");
    let losses = call.writes("losses", losses);
    let pred = call.reads("pred", pred);
    let target = call.reads("target", target);
    let dpred = call.writes_some("dpred", dpred);
    call.same_shape(target, pred)?;
    call.math_dtype(target, pred)?;
    call.row_major(pred)?;
    call.row_major(target)?;
    if let Some(dpred) = dpred {
        call.may_be_in_place(pred, dpred);
        call.elementwise(&[pred, dpred])?;
    }
    let &[rows, ..] = call.tensor(pred).shape().dims() else {
        return Err(call.misfit(pred, "[rows, …], one row a sample", "Reshape it to [1, 1] for a single number."));
    };
    call.has_shape(losses, &[rows], "[rows of pred]")?;
    call.math_dtype(losses, pred)?;
    if !gradient_scale.is_finite() {
        return Err(call.bad_value("gradient_scale", "a finite number", gradient_scale.to_string()));
    }
    let placed = call.place(pred, &TRAINED)?;
    {
        let [mut losses, lent_pred, target] = placed.enter([losses, pred, target])?;
        let mut dpred = placed.enter_some(dpred)?;
        if let Some(gpu) = placed.launcher()? {
            let (count, dtype) = (placed.tensor(pred).count(), placed.tensor(pred).dtype());
            launch(&gpu, dtype, [&losses, &lent_pred, &target], dpred.as_ref(), [rows, count], 2.0 * gradient_scale)?;
            drop((losses, lent_pred, target, dpred));
            return placed.finish();
        }
        match placed.tensor(pred).dtype() {
            DType::F32 => {
                let slope = ScaledDifference((2.0 * gradient_scale) as f32);
                all_rows::<f32>(&mut losses, dpred.as_mut(), &lent_pred, &target, slope);
            }
            _ => {
                let slope = ScaledDifference(2.0 * gradient_scale);
                all_rows::<f64>(&mut losses, dpred.as_mut(), &lent_pred, &target, slope);
            }
        }
    }
    placed.finish()
}

fn launch(
    gpu: &Launcher,
    dtype: DType,
    [losses, pred, target]: [&Lent<'_>; 3],
    dpred: Option<&Lent<'_>>,
    [rows, count]: [usize; 2],
    slope: f64,
) -> Result<()> {
    if rows == 0 {
        return Ok(());
    }
    let features = count / rows;
    let is_narrow = features <= BLOCK;
    let name = match (is_narrow, dtype) {
        (true, DType::BF16) => "mse_narrow_bf16",
        (true, _) => "mse_narrow_f32",
        (false, DType::BF16) => "mse_wide_bf16",
        (false, _) => "mse_wide_f32",
    };
    let kernel = gpu.kernel(&SOURCE, name)?;
    let kernel = kernel.output(losses).maybe(dpred);
    let kernel = if let Some(dpred) = dpred { kernel.input(pred, dpred) } else { kernel.reads(pred) }.reads(target);
    if is_narrow {
        let kernel = kernel.count(rows).count(features).f32(slope as f32);
        kernel.launch(Grid::blocks(rows.div_ceil(ROWS_PER_BLOCK), BLOCK_THREADS))
    } else {
        kernel.count(features).f32(slope as f32).launch(Grid::blocks(rows, BLOCK_THREADS))
    }
}

fn all_rows<T: Float>(
    losses: &mut Lent<'_>,
    mut dpred: Option<&mut Lent<'_>>,
    pred: &Lent<'_>,
    target: &Lent<'_>,
    slope: ScaledDifference<T>,
) {
    {
        let pred = match (pred.unless_in_place::<T>(), &mut dpred) {
            (Some(pred), _) => pred,
            (None, Some(dpred)) => dpred.elements_mut::<T>(),
            (None, None) => unreachable!("pred is in place of nothing but dpred"),
        };
        sum_rows(losses.elements_mut::<T>(), pred, target.elements::<T>());
    }
    if let Some(dpred) = dpred {
        loops::binary::<T, _>(dpred, pred, target, slope);
    }
}

fn sum_rows<T: Float>(losses: &mut [T], pred: &[T], target: &[T]) {
    let features = pred.len() / losses.len().max(1);
    let pieces = if pred.len() < PARALLEL_MIN { 1 } else { threads::count().min(losses.len()) };
    threads::split_mut_in(losses, 1, pieces, |first, losses| {
        for (row, loss) in losses.iter_mut().enumerate() {
            let range = (first + row) * features..(first + row + 1) * features;
            *loss = T::from_f64(squared_distance(&pred[range.clone()], &target[range]));
        }
    });
}

multiversion! {
    fn squared_distance[T: Float](pred: &[T], target: &[T]) -> f64 {
        let mut sum = 0.0;
        for (pred, target) in pred.chunks(BLOCK).zip(target.chunks(BLOCK)) {
            let mut lanes = [0f64; LANES];
            let ((pred, pred_rest), (target, target_rest)) = (pred.as_chunks::<LANES>(), target.as_chunks::<LANES>());
            for (pred, target) in pred.iter().zip(target) {
                for lane in 0..LANES {
                    let difference = (pred[lane] - target[lane]).widened();
                    lanes[lane] = difference.mul_add(difference, lanes[lane]);
                }
            }
            for (lane, (&pred, &target)) in lanes.iter_mut().zip(pred_rest.iter().zip(target_rest)) {
                let difference = (pred - target).widened();
                *lane = difference.mul_add(difference, *lane);
            }
            let [a, b, c, d, e, f, g, h] = lanes;
            sum += ((a + e) + (c + g)) + ((b + f) + (d + h));
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, cpu, cpu_of, random_f32};
    use crate::ops::{mean, sum};

    /// 2⁻²⁴: what one rounding to f32 is off by at most, relative.
    const EPSILON: f64 = 1.0 / (1 << 24) as f64;
    const SHAPES: [&[usize]; 9] =
        [&[0, 3], &[3, 0], &[1, 1], &[7], &[2, 8], &[3, 17], &[5, 3, 33], &[1025, 3], &[301, 1001]];

    #[test]
    fn losses_and_derivative_are_those_of_f64_for_every_shape_apart_and_in_place() {
        for shape in SHAPES {
            let (count, rows) = (shape.iter().product(), shape[0]);
            let (pred, target) = (random_f32(count, 91), random_f32(count, 92));
            let features = count.checked_div(rows).unwrap_or(0).max(1);
            let distance = |index: usize| f64::from(pred[index]) - f64::from(target[index]);
            let mut expected = vec![0.0; rows];
            (0..count).for_each(|index| expected[index / features] += distance(index).powi(2));
            let gradient: Vec<f64> = (0..count).map(|index| 2.0 * 0.3 * distance(index)).collect();

            let (p, t) = (cpu(&pred, shape), cpu(&target, shape));
            let (losses, dpred) = (cpu(&vec![9.0; rows], &[rows]), p.ones_like().unwrap());
            mse_into(&losses, Some(&dpred), &p, &t, 0.3).unwrap();
            let got = losses.to_vec::<f32>().unwrap();
            // Each difference is off by ε relative, so its square by 2ε; the sum of f64 rounds to f32 once more. The
            // slack covers ε² and f64's own roundings.
            assert_close(&got, &expected, |_, loss| 3.001 * EPSILON * loss);
            // The difference, the factor and the product round once each.
            let got_gradient = dpred.to_vec::<f32>().unwrap();
            assert_close(&got_gradient, &gradient, |_, slope| 3.001 * EPSILON * slope.abs());

            let (p64, t64) = (p.to_dtype(DType::F64).unwrap(), t.to_dtype(DType::F64).unwrap());
            let losses64 = losses.to_dtype(DType::F64).unwrap();
            mse_into(&losses64, None, &p64, &t64, 1.0).unwrap();
            for (got, expected) in losses64.to_vec::<f64>().unwrap().iter().zip(&expected) {
                // At most as many roundings as features, on each side, of positive terms.
                assert!((got - expected).abs() <= 2.0 * features as f64 * f64::EPSILON * expected);
            }
            mse_into(&losses, Some(&p), &p, &t, 0.3).unwrap();
            assert_eq!((losses.to_vec::<f32>().unwrap(), p.to_vec::<f32>().unwrap()), (got, got_gradient));
        }
    }

    #[test]
    fn sum_over_count_is_the_mean_and_dpred_its_finite_difference() {
        let (pred, target) = (random_f32(12, 93), random_f32(12, 94));
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (pred, target) = (wide(&pred), cpu_of(&wide(&target), &[4, 3]));
        let losses = cpu_of(&[0.0f64; 4], &[4]);
        let loss = |pred: &[f64]| {
            mse_into(&losses, None, &cpu_of(pred, &[4, 3]), &target, 1.0).unwrap();
            sum(&losses).unwrap().item().unwrap() / 12.0
        };
        let squares: Vec<f64> =
            pred.iter().zip(target.to_vec::<f64>().unwrap()).map(|(pred, target)| (pred - target).powi(2)).collect();
        let expected = mean(&cpu_of(&squares, &[12])).unwrap().item().unwrap();
        // Twelve squares of a few units, each and their sum rounded by 2⁻⁵³ relative: below 12 · 2 · 10 · 1.2e-16.
        assert!((loss(&pred) - expected).abs() < 3e-14);

        let dpred = cpu_of(&[0.0f64; 12], &[4, 3]);
        mse_into(&losses, Some(&dpred), &cpu_of(&pred, &[4, 3]), &target, 1.0 / 12.0).unwrap();
        const STEP: f64 = 1e-4;
        for (index, slope) in dpred.to_vec::<f64>().unwrap().into_iter().enumerate() {
            let shifted = |step: f64| {
                let mut pred = pred.clone();
                pred[index] += step;
                loss(&pred)
            };
            // A quadratic: the central difference is exact but for rounding, some 2⁻⁵³ / STEP.
            assert!((slope - (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)).abs() < 1e-10);
        }
    }

    #[test]
    fn infinite_and_nan_errors_reach_their_own_row_alone() {
        let pred = cpu(&[1.0, f32::NAN, f32::INFINITY, 1.0, 1.0, 1.0], &[3, 2]);
        let (losses, target) = (cpu(&[0.0; 3], &[3]), cpu(&[0.0; 6], &[3, 2]));
        mse_into(&losses, None, &pred, &target, 1.0).unwrap();
        let losses = losses.to_vec::<f32>().unwrap();
        assert!(losses[0].is_nan() && losses[1] == f32::INFINITY && losses[2] == 2.0);
    }

    #[test]
    fn operands_that_do_not_fit_or_overlap_are_named() {
        let (x, losses) = (cpu(&[0.0; 6], &[2, 3]), cpu(&[0.0; 2], &[2]));
        let error = |losses: &Tensor, dpred, pred: &Tensor, target: &Tensor| {
            mse_into(losses, dpred, pred, target, 1.0).unwrap_err().to_string()
        };
        let got = error(&losses, None, &x, &cpu(&[0.0; 6], &[3, 2]));
        assert!(got.contains("mse: target f32[3, 2] on cpu: expected shape [2, 3], as pred has"), "{got}");
        let got = error(&cpu(&[0.0; 3], &[3]), None, &x, &x);
        assert!(got.contains("mse: losses f32[3] on cpu: expected shape [2], that is [rows of pred]"), "{got}");
        let got = error(&cpu_of(&[0.0f64; 2], &[2]), None, &x, &x);
        assert!(got.contains("mse: losses f64[2] on cpu: expected dtype f32, as pred has"), "{got}");
        let got = error(&losses, Some(&x), &cpu(&[0.0; 6], &[2, 3]), &x);
        assert!(got.contains("mse: dpred f32[2, 3] on cpu and target f32[2, 3] on cpu share memory"), "{got}");
        let whole = cpu_of(&[0i32; 6], &[2, 3]);
        let got = error(&cpu_of(&[0i32; 2], &[2]), None, &whole, &whole);
        assert!(got.contains("mse: there is no version for i32 on cpu"), "{got}");
    }
}
