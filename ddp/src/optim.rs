//! Optimizers: AdamW and SGD over the flat arenas, one launch a step; learning-rate schedules; clipping.

pub mod clip;
pub mod schedule;

pub use clip::Clip;
pub use schedule::{Schedule, Shape};

use ddp_kernels::ops::{self, AdamwConstants, AdamwScalars, ChunkTable, SgdConstants, SgdScalars};
use ddp_kernels::{DType, Device, Element, Tensor, transfer};

use crate::error::{Error, Result};
use crate::params::Params;

/// Which rule, and its constants. Weight decay applies to matrices alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `torch.optim.AdamW`.
    AdamW {
        /// The betas and epsilon.
        constants: AdamwConstants,
        /// The decay, which the learning rate multiplies.
        weight_decay: f64,
    },
    /// `torch.optim.SGD`, with dampening 0.
    Sgd {
        /// Momentum, and whether it is Nesterov's.
        constants: SgdConstants,
        /// How much of the value is added to its gradient.
        weight_decay: f64,
    },
}

impl Rule {
    /// AdamW with PyTorch's defaults.
    pub fn adamw() -> Rule {
        Rule::AdamW { constants: AdamwConstants::default(), weight_decay: 0.01 }
    }

    /// SGD with this momentum and no decay.
    pub fn sgd(momentum: f64) -> Rule {
        Rule::Sgd { constants: SgdConstants { momentum, nesterov: false }, weight_decay: 0.0 }
    }

    /// What its moments are called, in checkpoints too: as PyTorch's optimizers name their state.
    pub fn moment_names(&self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { constants, .. } if constants.momentum > 0.0 => &["momentum_buffer"],
            Rule::Sgd { .. } => &[],
        }
    }

    /// Says what is wrong with the constants, before anything is made.
    fn check(&self) -> Result<()> {
        let (ranges, weight_decay): (&[(&str, f64, f64)], f64) = match *self {
            Rule::AdamW { constants: AdamwConstants { beta1, beta2, epsilon }, weight_decay } => {
                (&[("beta1", beta1, 1.0), ("beta2", beta2, 1.0), ("epsilon", epsilon, f64::INFINITY)], weight_decay)
            }
            Rule::Sgd { constants, weight_decay } => {
                if constants.nesterov && constants.momentum == 0.0 {
                    let text = "Nesterov's step looks ahead along the momentum: expected a momentum above 0, got 0";
                    return Err(Error::Usage(text.into()));
                }
                (&[("momentum", constants.momentum, f64::INFINITY)], weight_decay)
            }
        };
        let decay = ("weight decay", weight_decay, f64::INFINITY);
        for &(name, value, end) in ranges.iter().chain([&decay]) {
            if !(0.0..end).contains(&value) {
                let below = if end.is_finite() { format!(" and below {end}") } else { String::new() };
                return Err(Error::Usage(format!("{name}: expected 0 or more{below}, got {value}")));
            }
        }
        Ok(())
    }
}

/// A rule with the memory it keeps from step to step.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    chunks: ChunkTable,
    /// As long as the gradients' arena, in the order of `Rule::moment_names`.
    moments: Vec<Tensor>,
    /// What changes from step to step, where the device reads it: of the model's dtype.
    scalars: Tensor,
}

impl Optimizer {
    /// For the trained parameters of `params`, its moments zero.
    pub fn new(rule: Rule, params: &Params) -> Result<Optimizer> {
        rule.check()?;
        let moment = |name: &&str| -> Result<Tensor> { Ok(params.gradients().zeros_like()?.named(name)) };
        let moments = rule.moment_names().iter().map(moment).collect::<Result<_>>()?;
        let count = match rule {
            Rule::AdamW { .. } => 4,
            Rule::Sgd { .. } => 2,
        };
        let scalars = Tensor::zeros(&[count], params.dtype(), params.device())?.named("scalars of the step");
        Ok(Optimizer { rule, chunks: params.chunks()?, moments, scalars })
    }

    /// The rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The moments, flat like the gradients' arena, by name.
    pub fn moments(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.rule.moment_names().iter().copied().zip(&self.moments)
    }

    /// Step number `step`, counted from 1. Element 0 of `gradient_scale` multiplies every gradient. While `first_bad_step`
    /// is not 0, nothing happens.
    pub fn update(
        &mut self,
        params: &Params,
        step: u64,
        learning_rate: f64,
        gradient_scale: Option<&Tensor>,
        first_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        let (values, gradients) = (params.trained_values(), params.gradients());
        match (&self.rule, &self.moments[..]) {
            (&Rule::AdamW { constants, weight_decay }, [first, second]) => {
                let scalars = AdamwScalars { learning_rate, weight_decay, step }.to_array_f64(&constants)?;
                set(&self.scalars, &scalars)?;
                let (chunks, scalars) = (&self.chunks, &self.scalars);
                let (scale, flag) = (gradient_scale, first_bad_step);
                ops::adamw(values, gradients, first, second, chunks, &constants, scalars, scale, flag)?;
            }
            (&Rule::Sgd { constants, weight_decay }, moments) => {
                // Checked in f32; written as it is.
                SgdScalars { learning_rate, weight_decay }.to_array()?;
                set(&self.scalars, &[learning_rate, weight_decay])?;
                let (chunks, scalars) = (&self.chunks, &self.scalars);
                let momentum = moments.first();
                ops::sgd(values, gradients, momentum, chunks, &constants, scalars, gradient_scale, first_bad_step)?;
            }
            _ => unreachable!("AdamW has two moments since it was made"),
        }
        Ok(())
    }
}

/// Writes a few numbers to where the device reads them, rounded to the dtype there. Takes no memory on the CPU.
fn set<const N: usize>(target: &Tensor, numbers: &[f64; N]) -> Result<()> {
    fn as_elements<T: Element, const N: usize>(target: &Tensor, numbers: &[f64; N]) -> Result<()> {
        let numbers = numbers.map(T::from_f64);
        if target.device() == Device::Cpu {
            return Ok(target.with_slice_mut(|elements| elements.copy_from_slice(&numbers))?);
        }
        let source = Tensor::from_slice(&numbers, &[N], Device::Cpu)?;
        Ok(transfer::announced("the optimizer's scalars of the step", || target.copy_from(&source))?)
    }
    match target.dtype() {
        DType::F64 => as_elements::<f64, N>(target, numbers),
        _ => as_elements::<f32, N>(target, numbers),
    }
}

#[cfg(test)]
mod tests;
