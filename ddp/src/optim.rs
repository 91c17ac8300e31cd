//! Optimizers: AdamW and SGD over the flat arenas, one launch a step; learning-rate schedules; clipping.

pub mod clip;
pub mod schedule;

pub use clip::Clip;
pub use schedule::{Schedule, Shape};

use ddp_kernels::ops::{self, AdamwConstants, AdamwScalars, ChunkTable, SgdConstants, SgdScalars};
use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Tensor};

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
    /// By which `update` sends them, once it was called.
    own_way: Option<Scalars>,
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
        Ok(Optimizer { rule, chunks: params.chunks()?, moments, scalars, own_way: None })
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
    /// is not 0, nothing happens. It is `send` and `apply` in one.
    pub fn update(
        &mut self,
        params: &Params,
        step: u64,
        learning_rate: f64,
        gradient_scale: Option<&Tensor>,
        first_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        let mut way = match self.own_way.take() {
            Some(way) => way,
            None => Scalars::new(self.scalars.device(), 1)?,
        };
        let sent = self.send(&mut way, step, learning_rate);
        self.own_way = Some(way);
        sent?;
        self.apply(params, gradient_scale, first_bad_step)
    }

    /// Sends what step number `step`, counted from 1, has that others have not, to where `apply` reads it on the device: rounded
    /// to the dtype there. One message.
    pub fn send(&self, way: &mut Scalars, step: u64, learning_rate: f64) -> Result<()> {
        match self.rule {
            Rule::AdamW { constants, weight_decay } => {
                let scalars = AdamwScalars { learning_rate, weight_decay, step }.to_array_f64(&constants)?;
                send(way, &self.scalars, scalars)
            }
            Rule::Sgd { weight_decay, .. } => {
                // Checked in f32; sent as it is.
                SgdScalars { learning_rate, weight_decay }.to_array()?;
                send(way, &self.scalars, [learning_rate, weight_decay])
            }
        }
    }

    /// The step whose numbers were sent last: device work alone, the same in every step. The rest as in `update`.
    pub fn apply(
        &self,
        params: &Params,
        gradient_scale: Option<&Tensor>,
        first_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        let (values, gradients) = (params.trained_values(), params.gradients());
        let (chunks, scalars) = (&self.chunks, &self.scalars);
        let (scale, flag) = (gradient_scale, first_bad_step);
        match (&self.rule, &self.moments[..]) {
            (Rule::AdamW { constants, .. }, [first, second]) => {
                ops::adamw(values, gradients, first, second, chunks, constants, scalars, scale, flag)?;
            }
            (Rule::Sgd { constants, .. }, moments) => {
                ops::sgd(values, gradients, moments.first(), chunks, constants, scalars, scale, flag)?;
            }
            _ => unreachable!("AdamW has two moments since it was made"),
        }
        Ok(())
    }
}

/// Sends a few numbers, rounded to the target's dtype. Takes no memory on the CPU.
fn send<const N: usize>(way: &mut Scalars, target: &Tensor, numbers: [f64; N]) -> Result<()> {
    match target.dtype() {
        DType::F64 => way.send(target, &numbers)?,
        _ => way.send(target, &numbers.map(|number| number as f32))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests;
