//! Optimizers: AdamW and SGD over the flat arenas, one launch a step; learning-rate schedules; clipping.
//!
//! Under ZeRO-1 a rank's optimizer works on its slices of the arenas, one launch a slice, and has moments for these alone, one slice behind the
//! other. An element's update reads nothing but that element's numbers, so it has the same bits whoever makes it.

pub mod clip;
pub mod schedule;

pub use clip::Clip;
pub use schedule::{Schedule, Shape};

use std::ops::Range;

use ddp_comm::Group;
use ddp_kernels::ops::{self, AdamwConstants, AdamwScalars, ChunkTable, SgdConstants, SgdScalars};
use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Tensor};

use crate::error::{Error, Result};
use crate::params::{ParamId, Parameter, Params};
use crate::reducer::{self, ReducerOptions};

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

/// Elements of a parameter that an optimizer updates, and where their moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The parameter.
    pub parameter: ParamId,
    /// The first of its elements, counted row by row.
    pub start: usize,
    /// How many.
    pub length: usize,
    /// Where their moments begin in each of [`Optimizer::moments`].
    pub at: usize,
}

/// A part of the arenas that an optimizer updates.
#[derive(Debug)]
struct Slice {
    /// Its elements of the gradients' arena.
    range: Range<usize>,
    /// Where its moments begin.
    at: usize,
    /// Counted from its start.
    chunks: ChunkTable,
}

/// A rule with the memory it keeps from step to step.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    /// What it updates.
    slices: Vec<Slice>,
    pieces: Vec<Piece>,
    /// As long as the slices together, in the order of `Rule::moment_names`.
    moments: Vec<Tensor>,
    /// What changes from step to step, where the device reads it: of the model's dtype.
    scalars: Tensor,
    /// By which `update` sends them, once it was called.
    own_way: Option<Scalars>,
    /// The step behind which its moments were zero.
    since: u64,
}

impl Optimizer {
    /// For the trained parameters of `params`, its moments zero.
    pub fn new(rule: Rule, params: &Params) -> Result<Optimizer> {
        Optimizer::of_slices(rule, params, std::slice::from_ref(&(0..params.gradients().count())))
    }

    /// For what this rank of `group` owns of `params` where gradients are reduced with these options: everything, or, under ZeRO-1, its slice of
    /// each bucket.
    pub fn of_rank(rule: Rule, params: &Params, group: &Group, options: ReducerOptions) -> Result<Optimizer> {
        Optimizer::of_slices(rule, params, &reducer::owned(params, group, options))
    }

    /// For these ranges of the gradients' arena, which begin at whole quanta, in ascending order.
    fn of_slices(rule: Rule, params: &Params, ranges: &[Range<usize>]) -> Result<Optimizer> {
        rule.check()?;
        let (mut slices, mut pieces, mut at) = (Vec::new(), Vec::new(), 0);
        for range in ranges {
            pieces.extend(pieces_of(params, range, at));
            let chunks = params.chunks_of(range.clone())?;
            chunks.bring_to(params.device())?;
            slices.push(Slice { range: range.clone(), at, chunks });
            at += range.len();
        }
        let moment = |name: &&str| -> Result<Tensor> {
            let dtype = params.gradients().dtype();
            Ok(Tensor::zeros(&[at], dtype, params.device())?.named(name))
        };
        let moments = rule.moment_names().iter().map(moment).collect::<Result<_>>()?;
        let count = match rule {
            Rule::AdamW { .. } => 4,
            Rule::Sgd { .. } => 2,
        };
        let scalars = Tensor::zeros(&[count], params.master_dtype(), params.device())?.named("scalars of the step");
        Ok(Optimizer { rule, slices, pieces, moments, scalars, own_way: None, since: 0 })
    }

    /// The rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The ranges of the gradients' arena that it updates, in ascending order.
    pub fn owned(&self) -> impl Iterator<Item = Range<usize>> {
        self.slices.iter().map(|slice| slice.range.clone())
    }

    /// What it updates, parameter by parameter, and where the moments of each piece are.
    pub fn owned_pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The moments by name: flat, the ranges of `owned` one behind the other. So without ZeRO-1 they are laid out like the gradients' arena;
    /// `owned_pieces` says what is where.
    pub fn moments(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.rule.moment_names().iter().copied().zip(&self.moments)
    }

    /// The step behind which its moments were zero: 0, but of a run that went on with another optimizer.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Says that they were zero behind step `step`: from there on it counts the steps that they have seen, by which AdamW corrects them.
    pub(crate) fn count_from(&mut self, step: u64) {
        self.since = step;
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
                let step = step.saturating_sub(self.since);
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
        self.slices.iter().try_for_each(|slice| self.apply_to(slice, params, gradient_scale, first_bad_step))
    }

    fn apply_to(&self, slice: &Slice, params: &Params, scale: Option<&Tensor>, flag: Option<&Tensor>) -> Result<()> {
        let values = &params.trained_values().slice(slice.range.clone())?;
        let gradients = &params.gradients().slice(slice.range.clone())?;
        let moment = |index: usize| self.moments[index].slice(slice.at..slice.at + slice.range.len());
        let (chunks, scalars) = (&slice.chunks, &self.scalars);
        match &self.rule {
            Rule::AdamW { constants, .. } => {
                let (first, second) = (&moment(0)?, &moment(1)?);
                ops::adamw(values, gradients, first, second, chunks, constants, scalars, scale, flag)?;
            }
            Rule::Sgd { constants, .. } => {
                let momentum = if self.moments.is_empty() { None } else { Some(moment(0)?) };
                ops::sgd(values, gradients, momentum.as_ref(), chunks, constants, scalars, scale, flag)?;
            }
        }
        params.refresh(slice.range.clone())
    }
}

/// What a range of the gradients' arena has of each trained parameter; `at` is where its moments begin.
fn pieces_of(params: &Params, range: &Range<usize>, at: usize) -> Vec<Piece> {
    let trained = params.list().iter().filter(|p| p.is_trained());
    let cut = trained.map(|p| (p, p.range.start.max(range.start)..p.range.end.min(range.end)));
    let piece = |(p, part): (&Parameter, Range<usize>)| Piece {
        parameter: p.id,
        start: part.start - p.range.start,
        length: part.len(),
        at: at + part.start - range.start,
    };
    cut.filter(|(_, part)| !part.is_empty()).map(piece).collect()
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
