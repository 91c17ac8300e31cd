//! mark_nonfinite: the sticky flag "first non-finite step". It stays on the device. Once it is set,
//! the optimizers change nothing, so the weights from before that step survive until the host
//! looks.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::launch::{Grid, Source, args};
use crate::ops::call::{Buffer, Call, FLOATS, Slot, with_float};
use crate::ops::float::Float;
use crate::ops::loops::GRAIN;
use crate::simd::multiversion;
use crate::{DType, Tensor, threads};

static SOURCE: Source = Source::new("nonfinite.cu", include_str!("nonfinite.cu"));
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
    let mut call = Call::new("mark_nonfinite");
    let flag = call.updates("first_bad_step", first_bad_step);
    let values = call.reads("values", values);
    let step = call.reads("step", step);
    check_flag(&call, Some(flag))?;
    call.has_shape(step, &[1], "the number of this step")?;
    call.has_dtype(step, &[DType::I64])?;
    call.run(values, &FLOATS, |placed| {
        let [mut flag, values, step] = placed.enter([flag, values, step])?;
        if let Some(gpu) = placed.launcher() {
            let grid = Grid::elements(values.count.div_ceil(PER_THREAD));
            let args = args![flag, values, values.count, step];
            return gpu.launch(&SOURCE, "mark_nonfinite_f32", grid, args);
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
fn check_flag(call: &Call<'_>, flag: Option<Slot>) -> Result<()> {
    let Some(flag) = flag else { return Ok(()) };
    call.has_shape(flag, &[1], "the first non-finite step, or 0")?;
    call.has_dtype(flag, &[DType::I64])
}

/// The number of elements of a step's flags: the first bad step (0 for none), the first step in
/// which an optimizer met a non-finite gradient (0 for none), and this step.
pub const STEP_FLAGS: usize = 3;

/// Checks what an optimizer reads: a flag, i64 (1), or the flags of a step. Whether it is the
/// latter, which the optimizer also marks.
pub(super) fn check_flags(call: &Call<'_>, flags: Option<Slot>) -> Result<bool> {
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

#[cfg(test)]
mod tests;
