//! Optimizers (AdamW and SGD), learning-rate schedules and clipping. An update of the flat arenas
//! is one launch.
//!
//! Under ZeRO-1 a rank's optimizer updates its slices of the arenas, one launch for each, and has
//! moments only for these, one slice after the other. The update of an element reads only numbers
//! of that element, so it has the same bits on any rank.

pub mod clip;
pub mod schedule;

pub use clip::Clip;
pub use schedule::{Schedule, Shape};

use std::ops::Range;

use ddp_kernels::ops::{
    self, AdamwConstants, AdamwScalars, Chunk, ChunkTable, SgdConstants, SgdScalars,
};
use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Tensor, choices};

use crate::error::{Error, Result};
use crate::params::{ParamId, Parameter, Params};

choices! {
    /// What weight decay applies to.
    #[derive(Default)]
    pub enum Decayed {
        /// Matrices, but not biases and other vectors
        #[default]
        Matrices = "matrices",
        /// All parameters, as in PyTorch's optimizers
        All = "all",
    }
}

/// An update rule and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `torch.optim.AdamW`.
    AdamW {
        /// β₁, β₂ and ε.
        constants: AdamwConstants,
        /// The decay, which is multiplied by the learning rate.
        weight_decay: f64,
        /// What decays.
        decayed: Decayed,
    },
    /// `torch.optim.SGD`, with dampening 0.
    Sgd {
        /// The momentum, and whether it is Nesterov's.
        constants: SgdConstants,
        /// The part of each value that is added to its gradient.
        weight_decay: f64,
        /// What decays.
        decayed: Decayed,
    },
}

impl Rule {
    /// AdamW with PyTorch's defaults, but only matrices decay.
    pub fn adamw() -> Rule {
        Rule::AdamW {
            constants: AdamwConstants::default(),
            weight_decay: 0.01,
            decayed: Decayed::Matrices,
        }
    }

    /// SGD with this momentum and no weight decay.
    pub fn sgd(momentum: f64) -> Rule {
        Rule::Sgd {
            constants: SgdConstants {
                momentum,
                nesterov: false,
            },
            weight_decay: 0.0,
            decayed: Decayed::Matrices,
        }
    }

    /// The names of its moments, also in checkpoints: those in the state of PyTorch's optimizers.
    pub fn moment_names(&self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { constants, .. } if constants.momentum > 0.0 => &["momentum_buffer"],
            Rule::Sgd { .. } => &[],
        }
    }

    /// These chunks, where the rule decays all, with decay.
    fn decaying(&self, chunks: ChunkTable) -> Result<ChunkTable> {
        let (Rule::AdamW { decayed, .. } | Rule::Sgd { decayed, .. }) = self;
        match decayed {
            Decayed::Matrices => Ok(chunks),
            Decayed::All => {
                let decaying = |chunk: &Chunk| Chunk {
                    decay: true,
                    ..*chunk
                };
                Ok(ChunkTable::new(
                    chunks.chunks().iter().map(decaying).collect(),
                )?)
            }
        }
    }

    /// Refuses invalid constants.
    fn check(&self) -> Result<()> {
        let (ranges, weight_decay): (&[(&str, f64, f64)], f64) = match *self {
            Rule::AdamW {
                constants:
                    AdamwConstants {
                        beta1,
                        beta2,
                        epsilon,
                    },
                weight_decay,
                ..
            } => (
                &[
                    ("beta1", beta1, 1.0),
                    ("beta2", beta2, 1.0),
                    ("epsilon", epsilon, f64::INFINITY),
                ],
                weight_decay,
            ),
            Rule::Sgd {
                constants,
                weight_decay,
                ..
            } => {
                if constants.nesterov && constants.momentum == 0.0 {
                    return Err(Error::Usage(
                        "Nesterov's momentum: expected a momentum above 0, got 0".into(),
                    ));
                }
                (
                    &[("momentum", constants.momentum, f64::INFINITY)],
                    weight_decay,
                )
            }
        };
        let decay = ("weight decay", weight_decay, f64::INFINITY);
        for &(name, value, end) in ranges.iter().chain([&decay]) {
            if !(0.0..end).contains(&value) {
                let below = if end.is_finite() {
                    format!(" and below {end}")
                } else {
                    String::new()
                };
                return Err(Error::Usage(format!(
                    "{name}: expected 0 or more{below}, got {value}"
                )));
            }
        }
        Ok(())
    }
}

/// Consecutive elements of a parameter that an optimizer updates, and where their moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The parameter.
    pub parameter: ParamId,
    /// The first element, in row-major order.
    pub start: usize,
    /// The number of elements.
    pub length: usize,
    /// The start of their moments in each of [`Optimizer::moments`].
    pub at: usize,
}

/// A part of the arenas that an optimizer updates.
#[derive(Debug)]
struct Slice {
    /// Its elements in the gradients' arena.
    range: Range<usize>,
    /// The start of its moments.
    at: usize,
    /// With offsets from its start.
    chunks: ChunkTable,
}

/// An update rule with its moments. Letters: U elements that it updates, with padding.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    /// What it updates.
    slices: Vec<Slice>,
    pieces: Vec<Piece>,
    /// (U) each, in the order of `Rule::moment_names`.
    moments: Vec<Tensor>,
    /// The numbers that change from step to step, on the device, in the masters' dtype.
    numbers: Tensor,
    /// Sends `numbers` in `update`; made by its first call.
    sender: Option<Scalars>,
    /// The step after which the moments were 0.
    since: u64,
}

impl Optimizer {
    /// An optimizer of all trained parameters of `params`, with moments of 0.
    pub fn new(rule: Rule, params: &Params) -> Result<Optimizer> {
        Optimizer::of_slices(
            rule,
            params,
            std::slice::from_ref(&(0..params.gradients().count())),
        )
    }

    /// An optimizer of these ranges of the gradients' arena, which start at whole quanta and are in
    /// ascending order.
    pub fn of_slices(rule: Rule, params: &Params, ranges: &[Range<usize>]) -> Result<Optimizer> {
        rule.check()?;
        let (mut slices, mut pieces, mut at) = (Vec::new(), Vec::new(), 0);
        for range in ranges {
            pieces.extend(pieces_of(params, range, at));
            let chunks = rule.decaying(params.chunks_of(range.clone())?)?;
            chunks.bring_to(params.device())?;
            slices.push(Slice {
                range: range.clone(),
                at,
                chunks,
            });
            at += range.len();
        }
        let moment = |name: &&str| -> Result<Tensor> {
            let dtype = params.gradients().dtype();
            Ok(Tensor::zeros(&[at], dtype, params.device())?.named(name))
        };
        let moments = rule
            .moment_names()
            .iter()
            .map(moment)
            .collect::<Result<_>>()?;
        let count = match rule {
            Rule::AdamW { .. } => 4,
            Rule::Sgd { .. } => 2,
        };
        let numbers = Tensor::zeros(&[count], params.master_dtype(), params.device())?
            .named("numbers of the step");
        Ok(Optimizer {
            rule,
            slices,
            pieces,
            moments,
            numbers,
            sender: None,
            since: 0,
        })
    }

    /// The update rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The ranges of the gradients' arena that it updates, in ascending order.
    pub fn owned(&self) -> impl Iterator<Item = Range<usize>> {
        self.slices.iter().map(|slice| slice.range.clone())
    }

    /// What it updates of each parameter, and where the moments of each piece are.
    pub fn owned_pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// (U) each, the moments with their names: the ranges of `owned`, one after the other. Without
    /// ZeRO-1 that is the layout of the gradients' arena.
    pub fn moments(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.rule.moment_names().iter().copied().zip(&self.moments)
    }

    /// The step after which its moments were 0: not 0 if a run was resumed with another optimizer.
    pub fn since(&self) -> u64 {
        self.since
    }

    /// Sets the step after which the moments were 0. AdamW's bias correction counts steps from
    /// there.
    pub fn count_from(&mut self, step: u64) {
        self.since = step;
    }

    /// Updates in step number `step`, counted from 1. Gradients are multiplied by element 0 of
    /// `gradient_scale`. Does nothing if the first element of `first_bad_step` is not 0, and may
    /// mark it (`ops::adamw`). Same as `numbers_of`, sent, and `apply`.
    pub fn update(
        &mut self,
        params: &Params,
        step: u64,
        learning_rate: f64,
        gradient_scale: Option<&Tensor>,
        first_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        let mut sender = match self.sender.take() {
            Some(sender) => sender,
            None => Scalars::new(self.numbers.device(), 1)?,
        };
        let numbers = self.numbers_of(step, learning_rate)?;
        let count = self.numbers.count();
        let sent = match self.numbers.dtype() {
            DType::F64 => sender.send(&self.numbers, &numbers[..count]),
            _ => {
                let rounded = numbers.map(|number| number as f32);
                sender.send(&self.numbers, &rounded[..count])
            }
        };
        self.sender = Some(sender);
        sent?;
        self.apply(params, gradient_scale, first_bad_step)
    }

    /// What `apply` reads in step number `step`, counted from 1: as many of these as `numbers` has.
    pub fn numbers_of(&self, step: u64, learning_rate: f64) -> Result<[f64; 4]> {
        Ok(match self.rule {
            Rule::AdamW {
                constants,
                weight_decay,
                ..
            } => {
                let step = step.saturating_sub(self.since);
                let scalars = AdamwScalars {
                    learning_rate,
                    weight_decay,
                    step,
                };
                scalars.to_array_f64(&constants)?
            }
            Rule::Sgd { weight_decay, .. } => {
                // Checked in f32, sent in f64.
                SgdScalars {
                    learning_rate,
                    weight_decay,
                }
                .to_array()?;
                [learning_rate, weight_decay, 0.0, 0.0]
            }
        })
    }

    /// (4 or 2), in the masters' dtype on the device: the numbers that `apply` reads.
    pub fn numbers(&self) -> &Tensor {
        &self.numbers
    }

    /// Lets `apply` read its numbers from here, a tensor like `numbers`, into which the caller
    /// sends `numbers_of` each step.
    pub fn read_numbers_from(&mut self, numbers: Tensor) {
        let alike = |it: &Tensor| (it.count(), it.dtype(), it.device());
        assert_eq!(
            alike(&numbers),
            alike(&self.numbers),
            "a tensor like `numbers`"
        );
        self.numbers = numbers;
    }

    /// Updates with the numbers that were sent last. Only work for the device, the same in every
    /// step. Arguments as in `update`.
    pub fn apply(
        &self,
        params: &Params,
        gradient_scale: Option<&Tensor>,
        first_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        self.slices
            .iter()
            .try_for_each(|slice| self.apply_to(slice, params, gradient_scale, first_bad_step))
    }

    fn apply_to(
        &self,
        slice: &Slice,
        params: &Params,
        scale: Option<&Tensor>,
        flag: Option<&Tensor>,
    ) -> Result<()> {
        let values = &params.trained_values().slice(slice.range.clone())?;
        let gradients = &params.gradients().slice(slice.range.clone())?;
        let moment =
            |index: usize| self.moments[index].slice(slice.at..slice.at + slice.range.len());
        let (chunks, scalars) = (&slice.chunks, &self.numbers);
        let copies = params.copies_on_gpu(slice.range.clone())?;
        match &self.rule {
            Rule::AdamW { constants, .. } => ops::adamw_with_copies(
                values,
                gradients,
                &moment(0)?,
                &moment(1)?,
                copies.as_ref(),
                chunks,
                constants,
                scalars,
                scale,
                flag,
            )?,
            Rule::Sgd { constants, .. } => {
                let momentum = match self.moments.is_empty() {
                    true => None,
                    false => Some(moment(0)?),
                };
                ops::sgd_with_copies(
                    values,
                    gradients,
                    momentum.as_ref(),
                    copies.as_ref(),
                    chunks,
                    constants,
                    scalars,
                    scale,
                    flag,
                )?;
            }
        }
        match copies {
            Some(_) => Ok(()),
            None => params.refresh(slice.range.clone()),
        }
    }
}

/// The parts of trained parameters in a range of the gradients' arena, whose moments start at `at`.
fn pieces_of(params: &Params, range: &Range<usize>, at: usize) -> Vec<Piece> {
    let trained = params.list().iter().filter(|p| p.is_trained());
    let cut = trained.map(|p| {
        (
            p,
            p.range.start.max(range.start)..p.range.end.min(range.end),
        )
    });
    let piece = |(p, part): (&Parameter, Range<usize>)| Piece {
        parameter: p.id,
        start: part.start - p.range.start,
        length: part.len(),
        at: at + part.start - range.start,
    };
    cut.filter(|(_, part)| !part.is_empty())
        .map(piece)
        .collect()
}

#[cfg(test)]
mod tests;
