//! Optimizers (AdamW, SGD and Muon, a file each: see docs/adding-an-optimizer.md), learning-rate
//! schedules and clipping. If all parameters have the same method and numbers, an update of the
//! flat arenas is one launch.
//!
//! Under ZeRO-1 a rank's optimizer updates its slices of the arenas, one launch for each, and has
//! moments only for these, one slice after the other. The update of an element reads only numbers
//! of that element, so it has the same bits on any rank.
//!
//! A step that needs a whole matrix, such as Muon's, gathers it from all ranks: see `muon.rs`.
//!
//! An update has two parts: the first waits for other ranks, the second for none, so that a rank
//! can make it alone once all have made the first.

mod adamw;
pub mod clip;
pub mod muon;
mod rule;
pub mod schedule;
mod sgd;

pub use adamw::AdamW;
pub use clip::Clip;
pub use rule::{
    Decayed, Declared, Method, Muon, ParameterGroup, Piece, Rule, SettingOf, check_groups,
};
pub use schedule::{Schedule, ScheduleShape};

use std::ops::Range;

use ddp_kernels::ops::{Chunk, ChunkTable, SgdConstants, UpdateTensors};
use ddp_kernels::transfer::Scalars;
use ddp_kernels::{DType, Tensor, choices};

use self::muon::{Exchange, Matrices, OneRank};
use self::rule::{ArenaPart, Update, Variant, pieces_of, runs, variant_of, variants};
use crate::error::Result;
use crate::params::Params;

choices! {
    /// An optimizer.
    #[derive(Default)]
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay
        #[default]
        Adamw = "adamw",
        /// Stochastic gradient descent with momentum
        Sgd = "sgd",
        /// Muon for the matrices of hidden layers, adamw for all else
        Muon = "muon",
    }
}

impl OptimizerKind {
    /// What its file declares.
    pub fn declared(self) -> &'static Declared {
        match self {
            OptimizerKind::Adamw => &adamw::DECLARED,
            OptimizerKind::Sgd => &sgd::DECLARED,
            OptimizerKind::Muon => &muon::DECLARED,
        }
    }

    /// The default of a setting, if it has that setting.
    pub fn default_of(self, name: &str) -> Option<f64> {
        let mut defaults = self.declared().defaults.iter();
        let found = defaults.find(|(known, _)| *known == name);
        found.map(|(_, value)| *value)
    }

    /// The rule with the settings that are `given`, and defaults for the others.
    pub fn rule(self, given: &dyn Fn(&str) -> Option<f64>) -> Rule {
        let of = |name: &str| given(name).or(self.default_of(name)).unwrap_or_default();
        Rule {
            weight_decay: of("weight-decay"),
            ..(self.declared().rule)(&of)
        }
    }
}

impl Rule {
    /// AdamW with PyTorch's defaults, but only matrices decay.
    pub fn adamw() -> Rule {
        AdamW::default().into()
    }

    /// SGD with this momentum and no weight decay.
    pub fn sgd(momentum: f64) -> Rule {
        let nesterov = false;
        Rule::of(Method::Sgd(SgdConstants { momentum, nesterov }))
    }

    /// Muon with Nesterov's momentum 0.95, and the same learning rate for AdamW.
    pub fn muon() -> Rule {
        Rule {
            rate: 1.0,
            ..OptimizerKind::Muon.rule(&|_| None)
        }
    }
}

/// Numbers of a step for each [`Variant`].
const NUMBERS: usize = 4;

/// A part of the arenas that an optimizer updates with one launch.
#[derive(Debug)]
struct UpdateSlice {
    /// Its elements in the gradients' arena.
    range: Range<usize>,
    /// The start of its moments.
    at: usize,
    /// With offsets from its start: those of the variant.
    chunks: ChunkTable,
    /// Its index in `Optimizer::variants`.
    variant: usize,
}

/// A part of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdatePart {
    /// What waits for other ranks: the steps of whole matrices.
    Prepare,
    /// The rest, which changes values.
    Finish,
}

/// An update rule with its moments. Letters: N variants, O elements of what it owns, K of what it
/// keeps.
#[derive(Debug)]
pub struct Optimizer {
    rule: Rule,
    groups: Vec<ParameterGroup>,
    variants: Vec<Variant>,
    owned: Vec<Range<usize>>,
    /// What it updates.
    slices: Vec<UpdateSlice>,
    /// What it owns, then what it keeps.
    pieces: Vec<Piece>,
    owned_pieces: usize,
    /// (O + K) each in one dimension, with all of `pieces` that have it, and (O), its beginning.
    moments: Vec<(&'static str, Tensor, Tensor)>,
    /// The matrices that are orthogonalised.
    matrices: Option<Matrices>,
    /// (4·N): the numbers that change from step to step, on the device, in the masters' dtype.
    numbers: Tensor,
    /// Sends `numbers` in `update`; made by its first call.
    sender: Option<Scalars>,
    /// What `update` sends.
    message: Vec<u8>,
    /// The step after which the moments were 0.
    since: u64,
}

impl Optimizer {
    /// An optimizer of all trained parameters of `params`, with moments of 0.
    pub fn new(rule: Rule, params: &Params) -> Result<Optimizer> {
        let all = params.trained_part();
        Optimizer::of_slices(rule, params, std::slice::from_ref(&all))
    }

    /// An optimizer of these ranges of the gradients' arena, which start at whole quanta and are in
    /// ascending order.
    pub fn of_slices(rule: Rule, params: &Params, ranges: &[Range<usize>]) -> Result<Optimizer> {
        Optimizer::of_groups(rule, &[], params, [ranges, &[]])
    }

    /// The same, with other numbers for the parameters of each group. A parameter belongs to the
    /// first group that matches its name. Besides the first ranges, which it owns, it updates the
    /// second ones, which it keeps for another rank: so both have the same values and moments.
    pub fn of_groups(
        rule: Rule,
        groups: &[ParameterGroup],
        params: &Params,
        [ranges, kept]: [&[Range<usize>]; 2],
    ) -> Result<Optimizer> {
        rule.check()?;
        let variants = variants(&rule, groups, params);
        let (masters, device) = (params.master_dtype(), params.device());
        let numbers = Tensor::zeros(&[NUMBERS * variants.len()], masters, device)?;
        let mut optimizer = Optimizer {
            variants,
            groups: groups.to_vec(),
            owned: ranges.to_vec(),
            slices: Vec::new(),
            pieces: Vec::new(),
            owned_pieces: 0,
            moments: Vec::new(),
            matrices: rule
                .hidden
                .map(|_| Matrices::new(params, 0, 1))
                .transpose()?,
            numbers: numbers.named("numbers of the step"),
            sender: None,
            message: Vec::new(),
            since: 0,
            rule,
        };
        let mut sizes: Vec<(&'static str, usize)> = Vec::new();
        for run in ranges.iter().flat_map(|range| runs(&rule, params, range)) {
            optimizer.add_run(groups, params, run, &mut sizes)?;
        }
        optimizer.owned_pieces = optimizer.pieces.len();
        let owned = sizes.clone();
        for run in kept.iter().flat_map(|range| runs(&rule, params, range)) {
            optimizer.add_run(groups, params, run, &mut sizes)?;
        }
        for (name, size) in sizes {
            let all = Tensor::zeros(&[size], masters, device)?.named(name);
            let owned = owned.iter().find(|size| size.0 == name);
            let owned = all.slice(0..owned.map_or(0, |size| size.1))?;
            optimizer.moments.push((name, all, owned));
        }
        Ok(optimizer)
    }

    /// One of other ranges of the same parameters, with moments of 0.
    pub fn slice_anew(&self, params: &Params, ranges: [&[Range<usize>]; 2]) -> Result<Optimizer> {
        let new = Optimizer::of_groups(self.rule, &self.groups, params, ranges)?;
        Ok(Optimizer {
            numbers: self.numbers.clone(),
            ..new
        })
    }

    /// The moments of a part of a range that it updates, in an order that follows from the part.
    pub fn moments_of(&self, params: &Params, part: &Range<usize>) -> Result<Vec<Tensor>> {
        let mut parts = Vec::new();
        for piece in &self.pieces {
            let first = params.parameter(piece.parameter).range.start + piece.start;
            let start = part.start.max(first);
            let end = part.end.min(first + piece.length);
            let moments = self.moments.iter().filter(|_| start < end);
            for (_, all, _) in moments.filter(|it| piece.moments.contains(&it.0)) {
                let at = piece.at + start - first;
                parts.push(all.slice(at..at + end - start)?);
            }
        }
        Ok(parts)
    }

    /// Adds elements that one method updates: a slice for each variant among them. `sizes` are the
    /// names and lengths of the moments so far.
    fn add_run(
        &mut self,
        groups: &[ParameterGroup],
        params: &Params,
        (method, range): (Method, Range<usize>),
        sizes: &mut Vec<(&'static str, usize)>,
    ) -> Result<()> {
        let mut at = 0;
        let moments = method.update().moments();
        for &name in moments {
            let index = sizes.iter().position(|size| size.0 == name);
            let index = index.unwrap_or_else(|| {
                sizes.push((name, 0));
                sizes.len() - 1
            });
            at = sizes[index].1;
            sizes[index].1 += range.len();
        }
        let pieces = pieces_of(params, &range, at, moments);
        for (variant, of) in self.variants.iter().enumerate() {
            let mut chunks = Vec::new();
            for piece in &pieces {
                let parameter = params.parameter(piece.parameter);
                let (variant, decay) = variant_of(&self.rule, groups, parameter);
                if variant == *of {
                    chunks.push(Chunk {
                        offset: parameter.range.start + piece.start - range.start,
                        len: piece.length,
                        decay,
                    });
                }
            }
            if !chunks.is_empty() {
                let chunks = ChunkTable::new(chunks)?;
                chunks.bring_to(params.device())?;
                self.slices.push(UpdateSlice {
                    range: range.clone(),
                    at,
                    chunks,
                    variant,
                });
            }
        }
        self.pieces.extend(pieces);
        Ok(())
    }

    /// Shares the whole matrices with the other ranks: this one, number `rank` of this many, does
    /// some.
    pub fn share(&mut self, params: &Params, rank: usize, ranks: usize) -> Result<()> {
        if self.matrices.take().is_some() {
            self.matrices = Some(Matrices::new(params, rank, ranks)?);
        }
        Ok(())
    }

    /// The update rule.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The ranges of the gradients' arena that it updates, in ascending order.
    pub fn owned(&self) -> impl Iterator<Item = Range<usize>> {
        self.owned.iter().cloned()
    }

    /// What it owns of each parameter, and where the moments of each piece are.
    pub fn owned_pieces(&self) -> &[Piece] {
        &self.pieces[..self.owned_pieces]
    }

    /// The same with what it keeps for another rank, whose moments are in `all_moments`.
    pub fn all_pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The moments with their names, each of one dimension: the elements of `owned` that have it,
    /// one after the other. Without ZeRO-1 and Muon that is the layout of the gradients' arena.
    pub fn moments(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let owning = self.moments.iter().filter(|it| it.2.count() > 0);
        owning.map(|(name, _, owned)| (*name, owned))
    }

    /// The same, and after them those of what it keeps for another rank.
    pub fn all_moments(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.moments.iter().map(|(name, all, _)| (*name, all))
    }

    /// Those that the first part of an update changes.
    pub fn prepared_moments(&self) -> impl Iterator<Item = &Tensor> {
        let whole = self.rule.hidden.map_or(&[][..], |it| it.update().moments());
        let changed = self.all_moments().filter(|it| whole.contains(&it.0));
        changed.map(|(_, all)| all)
    }

    /// Bytes of all moments.
    pub fn moment_bytes(&self) -> usize {
        self.all_moments().map(|(_, all)| all.bytes()).sum()
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
    /// mark it (`ops::adamw`). Same as `append_numbers`, sent, and `apply`.
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
            None => Scalars::with_room(self.numbers.device(), 1, self.numbers.bytes())?,
        };
        let mut message = std::mem::take(&mut self.message);
        message.clear();
        self.append_numbers(step, learning_rate, &mut message)?;
        let sent = sender.send(&self.numbers.bits_as(DType::U8)?, &message[..]);
        self.message = message;
        self.sender = Some(sender);
        sent?;
        self.apply(params, &mut OneRank, gradient_scale, first_bad_step)
    }

    /// Appends what `apply` reads in step number `step`, counted from 1: the bytes of `numbers`.
    pub fn append_numbers(
        &self,
        step: u64,
        learning_rate: f64,
        message: &mut Vec<u8>,
    ) -> Result<()> {
        let (step, dtype) = (step.saturating_sub(self.since), self.numbers.dtype());
        for variant in &self.variants {
            let (update, rate) = (variant.method.update(), learning_rate * variant.rate);
            for number in update.numbers(step, rate, variant.weight_decay)? {
                match dtype {
                    DType::F64 => message.extend(number.to_ne_bytes()),
                    DType::F32 => message.extend((number as f32).to_ne_bytes()),
                    other => unreachable!("masters are f32 or f64, not {other}"),
                }
            }
        }
        Ok(())
    }

    /// (4·N), in the masters' dtype on the device: the numbers that `apply` reads.
    pub fn numbers(&self) -> &Tensor {
        &self.numbers
    }

    /// Lets `apply` read its numbers from here, a tensor like `numbers`, into which the caller
    /// sends what `append_numbers` appends in each step.
    pub fn read_numbers_from(&mut self, numbers: Tensor) {
        let kind = |it: &Tensor| (it.count(), it.dtype(), it.device());
        assert_eq!(kind(&numbers), kind(&self.numbers), "like `numbers`");
        self.numbers = numbers;
    }

    /// Updates with the numbers that were sent last. Only work for the device, the same in every
    /// step. Arguments as in `update`. Steps of whole matrices overwrite their gradients, and all
    /// ranks call this together.
    pub fn apply(
        &self,
        params: &Params,
        ranks: &mut dyn Exchange,
        gradient_scale: Option<&Tensor>,
        first_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        let scales = [gradient_scale, first_bad_step];
        self.apply_part(UpdatePart::Prepare, params, ranks, scales)?;
        self.apply_part(UpdatePart::Finish, params, ranks, scales)
    }

    /// A part of `apply`, with scale and flag as there.
    pub fn apply_part(
        &self,
        part: UpdatePart,
        params: &Params,
        ranks: &mut dyn Exchange,
        scales: [Option<&Tensor>; 2],
    ) -> Result<()> {
        for slice in &self.slices {
            let update = self.variants[slice.variant].method.update();
            match (part, self.is_whole(slice)) {
                (UpdatePart::Prepare, false) => continue,
                // The step of a matrix is the gradient of plain SGD: the same decay.
                (UpdatePart::Finish, true) => {
                    self.apply_to(slice, &SgdConstants::default(), params, [None, scales[1]])?;
                }
                _ => self.apply_to(slice, update, params, scales)?,
            }
        }
        match &self.matrices {
            Some(matrices) if part == UpdatePart::Prepare => {
                ranks.gather()?;
                matrices.orthogonalize()?;
                ranks.distribute(&mut matrices.owned())
            }
            _ => Ok(()),
        }
    }

    /// Whether `slice` has whole matrices.
    fn is_whole(&self, slice: &UpdateSlice) -> bool {
        self.rule.hidden == Some(self.variants[slice.variant].method)
    }

    fn apply_to(
        &self,
        slice: &UpdateSlice,
        update: &dyn Update,
        params: &Params,
        [scale, flag]: [Option<&Tensor>; 2],
    ) -> Result<()> {
        let numbers = NUMBERS * slice.variant..NUMBERS * (slice.variant + 1);
        let copies = params.copies(slice.range.clone())?;
        let moment = |name: &str| -> Result<Tensor> {
            let mut all = self.moments.iter();
            let (_, all, _) = all.find(|moment| moment.0 == name).expect("its name");
            Ok(all.slice(slice.at..slice.at + slice.range.len())?)
        };
        update.apply(&ArenaPart {
            tensors: UpdateTensors {
                values: &params.values_of(slice.range.clone())?,
                grads: &params.gradients_of(slice.range.clone())?,
                copies: copies.as_ref(),
                chunks: &slice.chunks,
                scalars: &self.numbers.slice(numbers)?,
                gradient_scale: scale,
                first_bad_step: flag,
            },
            moment: &moment,
        })
    }
}

#[cfg(test)]
mod tests;
