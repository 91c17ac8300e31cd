//! sgd: one step of stochastic gradient descent over flat buffers, with the semantics of
//! `torch.optim.SGD`: weight decay is added to the gradient; momentum is plain or Nesterov's.
//!
//! Dampening is 0, PyTorch's default: a momentum buffer of zeros then gives the same first step as
//! PyTorch's, which starts with the first gradient.

use crate::Tensor;
use crate::error::{Error, Result};
use crate::launch::CuFile;
use crate::ops::adamw::check_finite;
use crate::ops::float::Float;
use crate::ops::formulas::{fused, number, select};
use crate::ops::update::{StepNumbers, UpdateRule, UpdateTensors, update};

pub(super) static SOURCE: CuFile = CuFile::new("sgd.cu", include_str!("sgd.cu"));

/// What stays the same for a whole run. The default is plain descent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SgdConstants {
    /// Momentum decay; 0 for no momentum.
    pub momentum: f64,
    /// Whether momentum is Nesterov's.
    pub nesterov: bool,
}

/// What changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdScalars {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// The weight decay: this times the value is added to the gradient.
    pub weight_decay: f64,
}

impl SgdConstants {
    /// Refuses constants that contradict each other or the buffer.
    #[track_caller]
    pub(super) fn check(&self, op: &'static str, has_buffer: bool) -> Result<()> {
        let SgdConstants { momentum, nesterov } = *self;
        let expected = if !(0.0..f64::INFINITY).contains(&momentum) {
            "0 or more"
        } else if nesterov && momentum == 0.0 {
            "above 0, as nesterov requires"
        } else if has_buffer && momentum == 0.0 {
            "above 0, since a momentum buffer is given"
        } else if !has_buffer && momentum > 0.0 {
            "0, or a momentum buffer"
        } else {
            return Ok(());
        };
        Err(Error::value(op, "momentum", expected, momentum))
    }
}

impl SgdScalars {
    /// The two numbers that [`sgd`] reads: `[learning_rate, weight_decay]`.
    #[track_caller]
    pub fn to_array(&self) -> Result<[f32; 2]> {
        check_finite("sgd scalars", "learning_rate", self.learning_rate)?;
        check_finite("sgd scalars", "weight_decay", self.weight_decay)?;
        Ok([self.learning_rate as f32, self.weight_decay as f32])
    }
}

const SCALARS: Option<(usize, &str)> = Some((2, "what SgdScalars::to_array gives"));

struct PlainSgd;

impl UpdateRule<1> for PlainSgd {
    const KERNEL: (&'static CuFile, &'static str) = (&SOURCE, "sgd_plain_f32");
    const STATE: [&'static str; 1] = ["values"];
    const SCALARS: Option<(usize, &'static str)> = SCALARS;

    #[inline(always)]
    fn step<T: Float>([mut value]: [T; 1], grad: T, of: &StepNumbers<T>) -> [T; 1] {
        include!("sgd_rule.cuh");
        [value]
    }
}

struct MomentumSgd<const NESTEROV: bool>;

impl<const NESTEROV: bool> UpdateRule<2> for MomentumSgd<NESTEROV> {
    const KERNEL: (&'static CuFile, &'static str) = (
        &SOURCE,
        ["sgd_momentum_f32", "sgd_nesterov_f32"][NESTEROV as usize],
    );
    const STATE: [&'static str; 2] = ["values", "momentum"];
    const SCALARS: Option<(usize, &'static str)> = SCALARS;

    #[inline(always)]
    fn step<T: Float>(state: [T; 2], grad: T, of: &StepNumbers<T>) -> [T; 2] {
        let [mut value, mut momentum] = state;
        include!("sgd_momentum_rule.cuh");
        [value, momentum]
    }
}

/// One step of SGD. `momentum` (N) starts as zeros and must be given exactly when
/// `constants.momentum` is not 0. The scalars (2) are [`SgdScalars::to_array`].
#[track_caller]
pub fn sgd(
    tensors: &UpdateTensors<'_>,
    momentum: Option<&Tensor>,
    constants: &SgdConstants,
) -> Result<()> {
    let numbers = constants.check("sgd", momentum.is_some());
    let numbers = numbers.map(|()| [constants.momentum, 0.0, 0.0, 0.0]);
    let values = tensors.values;
    match (momentum, constants.nesterov) {
        (None, _) => update::<PlainSgd, 1>("sgd", [values], tensors, numbers),
        (Some(it), false) => update::<MomentumSgd<false>, 2>("sgd", [values, it], tensors, numbers),
        (Some(it), true) => update::<MomentumSgd<true>, 2>("sgd", [values, it], tensors, numbers),
    }
}

#[cfg(test)]
mod tests;
