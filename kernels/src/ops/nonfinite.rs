//! mark_nonfinite: the sticky flag "first non-finite step". It stays on the device; the optimizers read it and do
//! nothing once it is set, so the weights from before that step are kept until the host looks.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::ops::call::{Call, FLOATS, Lent, Slot};
use crate::ops::float::Float;
use crate::ops::loops::GRAIN;
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

multiversion! {
    fn all_finite[T: Float](x: &[T]) -> bool {
        // Blocks without a branch inside, so that each is a few vector instructions.
        x.chunks(GRAIN).all(|block| block.iter().fold(true, |all, x| all & x.finite()))
    }
}

/// If `first_bad_step`, i64\[1\], is 0 and any element of `values` is NaN or infinite, `first_bad_step = step`.
/// `step`, i64\[1\], counts from 1.
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
