//! adamw: one step of AdamW (Loshchilov and Hutter) over flat buffers, with the semantics of
//! `torch.optim.AdamW`: decoupled decay first, epsilon outside the root. One pass reads 16 bytes
//! and writes 12 for each f32 parameter, and 2 for its bf16 copy.

use crate::Tensor;
use crate::error::{Error, Result};
use crate::launch::CuFile;
use crate::ops::float::Float;
use crate::ops::formulas::{fused, number, root, select};
use crate::ops::update::{StepNumbers, UpdateRule, UpdateTensors, update};

pub(super) static SOURCE: CuFile = CuFile::new("adamw.cu", include_str!("adamw.cu"));

/// What stays the same for a whole run. The default is PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwConstants {
    /// First-moment decay, below 1.
    pub beta1: f64,
    /// Second-moment decay, below 1.
    pub beta2: f64,
    /// Keeps the quotient finite where the second moment is 0.
    pub epsilon: f64,
}

impl Default for AdamwConstants {
    fn default() -> AdamwConstants {
        AdamwConstants {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
        }
    }
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwScalars {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The weight decay, which is multiplied by the learning rate.
    pub weight_decay: f64,
    /// The step's number, from 1.
    pub step: u64,
}

impl AdamwConstants {
    #[track_caller]
    fn check(&self, op: &'static str) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::value(op, name, "at least 0 and below 1", beta));
            }
        }
        if !(0.0..f64::INFINITY).contains(&self.epsilon) {
            return Err(Error::value(op, "epsilon", "0 or more", self.epsilon));
        }
        Ok(())
    }
}

impl AdamwScalars {
    /// The four numbers that [`adamw`] reads, computed in f64:
    /// `[1 − lr wd, lr / (1 − β₁ᵗ), 1 / √(1 − β₂ᵗ), 0]`.
    #[track_caller]
    pub fn to_array(&self, constants: &AdamwConstants) -> Result<[f32; 4]> {
        Ok(self.to_array_f64(constants)?.map(|scalar| scalar as f32))
    }

    /// As [`to_array`](AdamwScalars::to_array), but not rounded: for parameters in f64.
    #[track_caller]
    pub fn to_array_f64(&self, constants: &AdamwConstants) -> Result<[f64; 4]> {
        const OP: &str = "adamw scalars";
        if self.step == 0 {
            let expected = "1 or more (steps count from 1)";
            return Err(Error::value(OP, "step", expected, 0));
        }
        check_finite(OP, "learning_rate", self.learning_rate)?;
        check_finite(OP, "weight_decay", self.weight_decay)?;
        constants.check(OP)?;
        let remaining = |beta: f64| 1.0 - beta.powf(self.step as f64);
        let keep = 1.0 - self.learning_rate * self.weight_decay;
        let step_size = self.learning_rate / remaining(constants.beta1);
        let second_correction = 1.0 / remaining(constants.beta2).sqrt();
        Ok([keep, step_size, second_correction, 0.0])
    }
}

#[track_caller]
pub(super) fn check_finite(op: &'static str, name: &str, value: f64) -> Result<()> {
    if value.is_finite() {
        return Ok(());
    }
    Err(Error::value(op, name, "a finite number", value))
}

struct Adamw;

impl UpdateRule<3> for Adamw {
    const KERNEL: (&'static CuFile, &'static str) = (&SOURCE, "adamw_f32");
    const STATE: [&'static str; 3] = ["values", "first_moments", "second_moments"];
    const SCALARS: Option<(usize, &'static str)> = Some((4, "what AdamwScalars::to_array gives"));

    #[inline(always)]
    fn step<T: Float>(state: [T; 3], grad: T, of: &StepNumbers<T>) -> [T; 3] {
        let [mut value, mut first, mut second] = state;
        include!("adamw_rule.cuh");
        [value, first, second]
    }
}

/// One step of AdamW, with first and second moments (N). The scalars (4) are
/// [`AdamwScalars::to_array`].
#[track_caller]
pub fn adamw(
    tensors: &UpdateTensors<'_>,
    [first, second]: [&Tensor; 2],
    constants: &AdamwConstants,
) -> Result<()> {
    let [beta1, beta2] = [constants.beta1, constants.beta2];
    let numbers = constants.check("adamw");
    let numbers = numbers.map(|()| [1.0 - beta1, beta2, 1.0 - beta2, constants.epsilon]);
    update::<Adamw, 3>("adamw", [tensors.values, first, second], tensors, numbers)
}

#[cfg(test)]
mod tests;
