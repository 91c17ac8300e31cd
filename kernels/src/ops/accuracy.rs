//! accuracy: how many rows have their largest logit at the target. The largest is `torch.argmax`'s: the first of
//! equals, and NaN above everything.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::cuda::launch::BLOCK_THREADS;
use crate::cuda::{Grid, Launcher, Source};
use crate::error::Result;
use crate::ops::call::{Call, Lent, TRAINED};
use crate::ops::float::Float;
use crate::ops::targets::{Targets, check_operands};
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

static SOURCE: Source = Source::new("accuracy.cu", include_str!("accuracy.cu"));
/// Rows of a thread block, a warp for each.
const ROWS_PER_BLOCK: usize = BLOCK_THREADS as usize / 32;

multiversion! {
    /// How many of the rows have their argmax at the target, and how many are not ignored.
    fn count_rows[T: Float](
        logits: &[T], classes: usize, targets: Targets<'_>, first_row: usize, ignore_index: Option<i64>,
    ) -> [i64; 2] {
        let [mut correct, mut counted] = [0; 2];
        for (row, logits) in logits.chunks_exact(classes).enumerate() {
            if let Some(target) = targets.class(first_row + row, ignore_index) {
                counted += 1;
                correct += i64::from(is_argmax(logits, target));
            }
        }
        [correct, counted]
    }
}

/// Whether `target` is the first of the largest. No index is searched for: nothing before it may be as large, nothing
/// behind it larger. Comparisons with NaN are false, so a NaN elsewhere answers no by itself.
#[inline(always)]
fn is_argmax<T: Float>(logits: &[T], target: usize) -> bool {
    let (before, rest) = logits.split_at(target);
    let (largest, behind) = (rest[0], &rest[1..]);
    #[allow(clippy::eq_op)]
    let is_nan = |x: T| x != x;
    if is_nan(largest) {
        return before.iter().fold(true, |none, &x| none & !is_nan(x));
    }
    before.iter().fold(true, |all, &x| all & (x < largest)) & behind.iter().fold(true, |all, &x| all & (x <= largest))
}

/// `out = [correct, counted]`, i64\[2\]: of the rows of `logits` (B, C) whose target (B; u8, i32 or i64) is not
/// `ignore_index`, how many have their first maximum at the target. A target that is no class is an error, except on a
/// GPU, where the host cannot know: there it is counted, and is not correct. There logits may also be bf16.
#[track_caller]
pub fn accuracy(out: &Tensor, logits: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> Result<()> {
    let mut call = Call::new("accuracy");
    let out = call.writes("out", out);
    let logits = call.reads("logits", logits);
    let targets = call.reads("targets", targets);
    let [rows, classes] = check_operands(&call, logits, targets)?;
    call.row_major(logits)?;
    call.has_shape(out, &[2], "correct and counted")?;
    call.has_dtype(out, &[DType::I64])?;
    let placed = call.place(logits, &TRAINED)?;
    {
        let [mut out, lent_logits, lent_targets] = placed.enter([out, logits, targets])?;
        let target_dtype = placed.tensor(targets).dtype();
        if let Some(gpu) = placed.launcher()? {
            let targets = (&lent_targets, target_dtype);
            let name = match placed.tensor(logits).dtype() {
                DType::BF16 => "accuracy_bf16",
                _ => "accuracy_f32",
            };
            launch(&gpu, name, [&out, &lent_logits], targets, [rows, classes], ignore_index)?;
            drop((out, lent_logits, lent_targets));
            return placed.finish();
        }
        let targets = Targets::of(&lent_targets, target_dtype);
        targets.check("accuracy", classes, ignore_index)?;
        let counts = match placed.tensor(logits).dtype() {
            DType::F32 => count::<f32>(lent_logits.elements(), classes, targets, ignore_index),
            _ => count::<f64>(lent_logits.elements(), classes, targets, ignore_index),
        };
        out.elements_mut().copy_from_slice(&counts);
    }
    placed.finish()
}

fn launch(
    gpu: &Launcher,
    name: &'static str,
    [out, logits]: [&Lent<'_>; 2],
    (targets, target_dtype): (&Lent<'_>, DType),
    [rows, classes]: [usize; 2],
    ignore_index: Option<i64>,
) -> Result<()> {
    /// Sixteen blocks on each of 132 processors: beyond that a warp takes several rows.
    const BLOCKS_MAX: usize = 16 * 132;
    gpu.kernel(&SOURCE, "accuracy_zero")?.output(out).launch(Grid::blocks(1, 32))?;
    if rows == 0 {
        return Ok(());
    }
    let kernel = gpu.kernel(&SOURCE, name)?.output(out).reads(logits);
    let kernel = kernel.reads(targets).u32(target_dtype.bytes() as u32).count(rows).count(classes);
    let kernel = kernel.i64(ignore_index.unwrap_or_default()).u32(u32::from(ignore_index.is_some()));
    kernel.launch(Grid::blocks(rows.div_ceil(ROWS_PER_BLOCK).min(BLOCKS_MAX), BLOCK_THREADS))
}

fn count<T: Float>(logits: &[T], classes: usize, targets: Targets<'_>, ignore_index: Option<i64>) -> [i64; 2] {
    let totals = [const { AtomicI64::new(0) }; 2];
    threads::split(logits.len(), classes, |range| {
        let counts = count_rows(&logits[range.clone()], classes, targets, range.start / classes, ignore_index);
        for (total, count) in totals.iter().zip(counts) {
            total.fetch_add(count, Ordering::Relaxed);
        }
    });
    totals.map(AtomicI64::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{cpu, cpu_of, random_f32};

    fn counts(logits: &Tensor, targets: &Tensor, ignore_index: Option<i64>) -> [i64; 2] {
        let out = cpu_of(&[9i64; 2], &[2]);
        accuracy(&out, logits, targets, ignore_index).unwrap();
        out.to_vec::<i64>().unwrap().try_into().unwrap()
    }

    /// torch.argmax, one comparison at a time.
    fn argmax(row: &[f32]) -> usize {
        let larger = |best: usize, x: f32| !row[best].is_nan() && (x.is_nan() || x > row[best]);
        (1..row.len()).fold(0, |best, index| if larger(best, row[index]) { index } else { best })
    }

    #[test]
    fn counts_are_those_of_an_argmax_for_every_shape_and_number_of_threads() {
        let _alone = crate::ops::testing::alone_with_the_pool();
        for (rows, classes) in [(0, 3), (1, 1), (7, 2), (1000, 10), (33, 31), (50, 1000)] {
            // Whole numbers in a small range, so that equal maxima are common; some NaN.
            let small = |x: &f32| if *x > 2.5 { f32::NAN } else { (x * 2.0).round() };
            let x: Vec<f32> = random_f32(rows * classes, 1).iter().map(small).collect();
            let best: Vec<usize> = x.chunks(classes).map(argmax).collect();
            let target = |(row, &best): (usize, &usize)| match row % 4 {
                0 => -1,
                1 => ((best + 1) % classes) as i32,
                _ => best as i32,
            };
            let y: Vec<i32> = best.iter().enumerate().map(target).collect();
            let counted = y.iter().filter(|&&y| y >= 0).count() as i64;
            let correct = y.iter().zip(&best).filter(|&(&y, &best)| y == best as i32).count() as i64;
            let (logits, targets) = (cpu(&x, &[rows, classes]), cpu_of(&y, &[rows]));
            for count in [1, 2, 3] {
                threads::set_count(count).unwrap();
                assert_eq!(counts(&logits, &targets, Some(-1)), [correct, counted], "{rows} × {classes}");
            }
        }
    }

    #[test]
    fn the_first_of_equals_wins_and_nan_is_the_largest() {
        // torch.argmax: 0 of [2, 2], 1 of [1, nan, 3, nan].
        let tie = cpu(&[2.0, 2.0, 2.0, 2.0], &[2, 2]);
        assert_eq!(counts(&tie, &cpu_of(&[0u8, 1], &[2]), None), [1, 2]);
        let nan = cpu(&[1.0, f32::NAN, 3.0, f32::NAN].repeat(4), &[4, 4]);
        assert_eq!(counts(&nan, &cpu_of(&[0i64, 1, 2, 3], &[4]), None), [1, 4]);
        assert_eq!(counts(&nan, &cpu_of(&[1i64, 1, 1, 1], &[4]), Some(1)), [0, 0]);
    }

    #[test]
    fn a_target_out_of_range_is_named() {
        let out = cpu_of(&[9i64; 2], &[2]);
        let error = accuracy(&out, &cpu(&[0.0; 4], &[2, 2]), &cpu_of(&[0u8, 2], &[2]), Some(-100)).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("accuracy: targets[1]: expected a class in 0..2 or ignore_index -100, got 2"),
            "{error}"
        );
        assert_eq!(out.to_vec::<i64>().unwrap(), [9, 9]);
    }
}
