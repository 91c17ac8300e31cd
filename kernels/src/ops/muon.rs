//! What Muon (Jordan, 2024) does besides matmuls: `muon_direction` turns gradients into the
//! direction of their momentum, `divide_by_norm` scales a matrix for the Newton–Schulz iteration.

use crate::error::Result;
use crate::launch::{CuFile, Grid, args};
use crate::ops::call::{Buffer, FLOATS, OpCall, with_float};
use crate::ops::elementwise::{GRAIN, of_elements, unary_in_place};
use crate::ops::float::Float;
use crate::ops::formulas::{fused, number, select};
use crate::ops::sgd::SgdConstants;
use crate::ops::update::{StepNumbers, UpdateRule, UpdateTensors, update};
use crate::{Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("muon.cu", include_str!("muon.cu"));

/// The least divisor, as in PyTorch.
const EPSILON: f64 = 1e-7;

of_elements! {
    DivideBy(divisor): (x) => x / T::from_f64(divisor);
}

struct Direction;

impl UpdateRule<2> for Direction {
    const KERNEL: (&'static CuFile, &'static str) = (&SOURCE, "muon_direction_f32");
    const STATE: [&'static str; 2] = ["grads", "momentum"];
    const SCALARS: Option<(usize, &'static str)> = None;

    #[inline(always)]
    fn step<T: Float>(state: [T; 2], grad: T, of: &StepNumbers<T>) -> [T; 2] {
        let [_, mut momentum] = state;
        let direction;
        include!("muon_rule.cuh");
        [direction, momentum]
    }
}

/// Moves `momentum` towards the gradients, `m += (1 − β)(g − m)`, and replaces these by the
/// direction of the step: m, or Nesterov's `g + β(m − g)`. β is `constants.momentum`.
///
/// Of `tensors` it uses the gradients, chunks, scale and flag. It does not check whether gradients
/// are finite.
#[track_caller]
pub fn muon_direction(
    tensors: &UpdateTensors<'_>,
    momentum: &Tensor,
    constants: &SgdConstants,
) -> Result<()> {
    let (beta, nesterov) = (constants.momentum, u8::from(constants.nesterov));
    let numbers = constants.check("muon_direction", true);
    let numbers = numbers.map(|()| [beta, 1.0 - beta, nesterov.into(), 0.0]);
    let state = [tensors.grads, momentum];
    update::<Direction, 2>("muon_direction", state, tensors, numbers)
}

/// `x /= max(norm, 1e-7)`, where `norm` is element 1 of what `clip_scale` wrote, in `x`'s dtype.
#[track_caller]
pub fn divide_by_norm(x: &Tensor, norm: &Tensor) -> Result<()> {
    let mut call = OpCall::new("divide_by_norm");
    let x = call.updates("x", x);
    let norm = call.reads("norm", norm);
    call.has_shape(norm, &[2], "what clip_scale wrote")?;
    call.same_dtype(norm, x)?;
    call.all_row_major()?;
    call.run(x, &FLOATS, |placed| {
        let [mut x, norm] = placed.enter([x, norm])?;
        if let Some(gpu) = placed.gpu() {
            let (grid, count) = (Grid::packs(x.count, x.dtype), x.count);
            return gpu.launch(&SOURCE, "divide_by_norm_f32", grid, args![x, norm, count]);
        }
        with_float!(placed.dtype, T => divide_on_cpu::<T>(&mut x, &norm));
        Ok(())
    })
}

fn divide_on_cpu<T: Float>(x: &mut Buffer<'_>, norm: &Buffer<'_>) {
    let (norm, least) = (norm.elements::<T>()[1], T::from_f64(EPSILON));
    // NaN stays.
    let divisor = if norm < least { least } else { norm };
    threads::split_mut(x.elements_mut(), GRAIN, |_, x| {
        unary_in_place::<T, _>(x, DivideBy(divisor.widened()))
    });
}

#[cfg(test)]
mod tests;
