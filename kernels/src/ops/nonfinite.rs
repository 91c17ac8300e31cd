//! mark_nonfinite: the sticky flag "first non-finite step". It stays on the device; the optimizers read it and do
//! nothing once it is set, so the weights from before that step are kept until the host looks.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::{Grid, Launcher, Source};
use crate::error::{Error, Result};
use crate::ops::call::{Call, FLOATS, Lent, Slot};
use crate::ops::float::Float;
use crate::ops::loops::GRAIN;
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

static SOURCE: Source = Source::new("nonfinite.cu", include_str!("nonfinite.cu"));
/// Elements that a thread of the kernel has on their way at once.
const PER_THREAD: usize = 16;

multiversion! {
    fn all_finite[T: Float](x: &[T]) -> bool {
        // Blocks without a branch inside, so that each is a few vector instructions.
        x.chunks(GRAIN).all(|block| block.iter().fold(true, |all, x| all & x.finite()))
    }
}

/// If `first_bad_step`, i64\[1\], is 0 and any element of `values` is NaN or infinite, `first_bad_step = step`.
/// `step`, i64\[1\], counts from 1; on a GPU that is not checked, and a step of 0 marks nothing.
#[track_caller]
pub fn mark_nonfinite(first_bad_step: &Tensor, values: &Tensor, step: &Tensor) -> Result<()> {
    let mut call = Call::new("mark_nonfinite");
    let flag = call.writes("first_bad_step", first_bad_step);
    let values = call.reads("values", values);
    let step = call.reads("step", step);
    check_flag(&call, Some(flag))?;
    call.has_shape(step, &[1], "the number of this step")?;
    call.has_dtype(step, &[DType::I64])?;
    let placed = call.place(values, &FLOATS)?;
    {
        let [mut flag, lent_values, step] = placed.enter([flag, values, step])?;
        if let Some(gpu) = placed.launcher()? {
            launch(&gpu, [&flag, &lent_values, &step], placed.tensor(values).count())?;
            drop((flag, lent_values, step));
            return placed.finish();
        }
        let step = step.elements::<i64>()[0];
        if step < 1 {
            return Err(Error::value("mark_nonfinite", "step", "1 or more (steps count from 1)", step));
        }
        let flag = &mut flag.elements_mut::<i64>()[0];
        let fine = *flag != 0
            || match placed.tensor(values).dtype() {
                DType::F32 => is_finite::<f32>(lent_values.elements()),
                _ => is_finite::<f64>(lent_values.elements()),
            };
        if !fine {
            *flag = step;
        }
    }
    placed.finish()
}

fn launch(gpu: &Launcher, [flag, values, step]: [&Lent<'_>; 3], count: usize) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let kernel = gpu.kernel(&SOURCE, "mark_nonfinite_f32")?.output(flag).reads(values).count(count).reads(step);
    kernel.launch(Grid::elements(count.div_ceil(PER_THREAD)))
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

/// What the flag must be: i64\[1\].
pub(super) fn check_flag(call: &Call<'_>, flag: Option<Slot>) -> Result<()> {
    let Some(flag) = flag else { return Ok(()) };
    call.has_shape(flag, &[1], "the first non-finite step, or 0")?;
    call.has_dtype(flag, &[DType::I64])
}

/// Whether a flag, if there is one, is set.
pub(super) fn is_set(flag: Option<&Lent<'_>>) -> bool {
    flag.is_some_and(|flag| flag.elements::<i64>()[0] != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{SIZES, cpu, cpu_of, random_f32};

    #[test]
    fn the_flag_keeps_the_first_bad_step_wherever_the_bad_element_is() {
        for size in SIZES {
            let mut x = random_f32(size, 1);
            let flag = cpu_of(&[0i64], &[1]);
            let step = |number: i64| cpu_of(&[number], &[1]);
            mark_nonfinite(&flag, &cpu(&x, &[size]), &step(1)).unwrap();
            assert_eq!(flag.item().unwrap(), 0.0, "all finite");
            let places = [0, size / 2, size.saturating_sub(1)];
            for (place, bad) in places.into_iter().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
                let Some(element) = x.get_mut(place) else { continue };
                let good = std::mem::replace(element, bad);
                let flag = cpu_of(&[0i64], &[1]);
                mark_nonfinite(&flag, &cpu(&x, &[size]), &step(7)).unwrap();
                mark_nonfinite(&flag, &cpu(&x, &[size]), &step(8)).unwrap();
                assert_eq!(flag.item().unwrap(), 7.0, "{bad} at {place} of {size}");
                x[place] = good;
            }
        }
    }

    #[test]
    fn the_largest_finite_numbers_and_doubles_beyond_f32_are_fine() {
        let (flag, step) = (cpu_of(&[0i64], &[1]), cpu_of(&[1i64], &[1]));
        mark_nonfinite(&flag, &cpu(&[f32::MAX, f32::MIN, -0.0, 1e-45], &[2, 2]), &step).unwrap();
        mark_nonfinite(&flag, &cpu_of(&[1e300f64], &[]), &step).unwrap();
        assert_eq!(flag.item().unwrap(), 0.0);
        mark_nonfinite(&flag, &cpu_of(&[f64::NAN], &[1]), &step).unwrap();
        assert_eq!(flag.item().unwrap(), 1.0);
    }

    #[test]
    fn a_step_before_the_first_is_refused() {
        let flag = cpu_of(&[0i64], &[1]);
        let error = mark_nonfinite(&flag, &cpu(&[1.0], &[1]), &cpu_of(&[0i64], &[1])).unwrap_err().to_string();
        assert!(
            error.contains("mark_nonfinite: step: expected 1 or more") && error.contains("nonfinite.rs"),
            "{error}"
        );
        let error = mark_nonfinite(&cpu(&[0.0], &[1]), &flag, &flag).unwrap_err().to_string();
        assert!(error.contains("first_bad_step f32[1] on cpu: expected dtype i64"), "{error}");
    }
}
