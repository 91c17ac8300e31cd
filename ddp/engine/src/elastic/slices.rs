//! ZeRO-1 where ranks may be lost: which slices a rank has, and how all of them survive.
//!
//! Each slice has an owner and a keeper, the rank `ReducerOptions::keeper_distance` after it, on
//! another host if there are several. The owner gives the keeper the sums of the slice's gradients.
//! Then both make the same update, so both have its values and moments, with the same bits.
//!
//! An update is made by all ranks or by none. A rank prepares the step, which takes the others, and
//! then waits until all ranks have (a barrier). The update after that waits for nothing. So when
//! ranks meet after a loss, they agree (`agreement.rs`): either all that are left have made the
//! update or are ready for it, and make it without the others; or one is not, then none has passed
//! the barrier, and all take the step again. What a step has spoiled by then comes from a copy.
//!
//! Slices are cut anew for the ranks of a new world in the same way: each rank gets values and
//! moments of its new slices from ranks that have them, and keeps its old ones until all ranks are
//! ready for theirs (a barrier again). Values are the same in both cuts, so they are written in
//! place.
//!
//! Only if owner and keeper of a slice are lost before it was cut anew are values or moments lost,
//! and the run continues from its last checkpoint.

use std::ops::Range;

use ddp_comm::Group;
use ddp_data::Batch;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor, ops};
use ddp_nn::optim::Optimizer;
use ddp_nn::params::Params;

use super::agreement::{Cut, Version};
use crate::error::Result;
use crate::faults::{self, FaultPoint};
use crate::reducer::{ReducerOptions, slices};
use crate::step::{Stage, Step};

/// The slices of a rank, and what it is ready for.
#[derive(Debug, Default)]
pub(crate) struct Slices {
    /// None for a rank that is new.
    cut: Option<Cut>,
    next: Option<NextState>,
    /// What a step that is not completed may spoil, and its copy.
    spoiled: Vec<[Tensor; 2]>,
}

/// What a rank can do without the others.
#[derive(Debug)]
enum NextState {
    /// The update of a step over this many rows, which is prepared.
    Update(u64),
    /// Take these slices, with an optimizer for each stage, or with those that it has.
    Slices(Cut, Vec<Optimizer>),
}

impl Slices {
    /// Those of `step`, if it has slices that must not be lost.
    pub(super) fn of(step: &Step) -> Option<Slices> {
        let options = options(step);
        (options.zero > 0 && options.keeper_distance > 0).then(Slices::default)
    }

    /// After this many steps: what this rank has, and what it is ready for.
    pub(super) fn versions(&self, steps: u64) -> [Option<Version>; 2] {
        let version = |steps, cut| Version { steps, cut };
        let ready = match &self.next {
            Some(NextState::Update(_)) => self.cut.map(|cut| version(steps + 1, cut)),
            Some(NextState::Slices(cut, _)) => Some(version(steps, *cut)),
            None => None,
        };
        [self.cut.map(|cut| version(steps, cut)), ready]
    }

    /// Takes a step whose update is made by all of `ranks` or by none.
    pub(super) fn take_step(
        &mut self,
        step: &mut Step,
        batch: &Batch,
        learning_rate: f64,
        ranks: &Group,
    ) -> Result<()> {
        step.prepare(batch, learning_rate)?;
        step.settle()?;
        self.next = Some(NextState::Update(batch.rows));
        ranks.barrier(&Stream::default_of(Device::Cpu)?)?;
        faults::at(FaultPoint::Agreed)?;
        self.advance(step).map(drop)
    }

    /// This rank has all that it needs of its slices in this generation of ranks, and these
    /// optimizers of them, if they are others.
    pub(super) fn make_ready(&mut self, step: &Step, generation: u64, optimizers: Vec<Optimizer>) {
        let group = step.stages()[0].reducer().group();
        let cut = Cut::of(generation, [group.rank(), group.size()], options(step));
        self.next = Some(NextState::Slices(cut, optimizers));
    }

    /// A GPU that was stopped has not prepared the step after `steps`.
    pub(super) fn check_prepared(&mut self, steps: u64, decided: u64) {
        if decided <= steps && matches!(self.next, Some(NextState::Update(_))) {
            self.next = None;
        }
    }

    /// Takes what this rank is ready for. Returns over how many rows the step was, if it is an
    /// update.
    pub(super) fn advance(&mut self, step: &mut Step) -> Result<Option<u64>> {
        let rows = match self.next.take() {
            Some(NextState::Update(rows)) => {
                step.update()?;
                Some(rows)
            }
            Some(NextState::Slices(cut, optimizers)) => {
                step.take_optimizers(optimizers)?;
                self.cut = Some(cut);
                self.spoiled = spoiled(step, cut)?;
                None
            }
            None => None,
        };
        for [tensor, copy] in &self.spoiled {
            copy.copy_from(tensor)?;
        }
        Ok(rows)
    }

    /// Goes back to what this rank had after its last complete step.
    pub(super) fn go_back(&mut self, step: &Step) -> Result<()> {
        self.next = None;
        for params in step.params().filter(|it| it.device().is_accelerator()) {
            // What other ranks own arrives anew, but for padding.
            ops::zero(params.trained_values())?;
        }
        for [tensor, copy] in &self.spoiled {
            tensor.copy_from(copy)?;
        }
        let mut all = step.params();
        Ok(all.try_for_each(|params| params.refresh(0..params.values().count()))?)
    }

    /// Bytes of copies.
    pub(crate) fn bytes(&self) -> usize {
        self.spoiled.iter().map(|[_, copy]| copy.bytes()).sum()
    }
}

fn options(step: &Step) -> ReducerOptions {
    step.stages()[0].reducer().options
}

/// What a step that is not completed may spoil of what a rank has by `cut`, and room for a copy:
/// moments that change before the update, and values on a GPU, where a gather that was ended leaves
/// garbage.
fn spoiled(step: &Step, cut: Cut) -> Result<Vec<[Tensor; 2]>> {
    let mut all = Vec::new();
    for stage in step.stages() {
        all.extend(stage.optimizer().prepared_moments().cloned());
        let params = &stage.model().params;
        if params.device().is_accelerator() {
            let ranges = cut.ranges(params, options(step)).concat().into_iter();
            let values = ranges.map(|range| params.trained_values().slice(range));
            all.extend(values.collect::<Result<Vec<_>, _>>()?);
        }
    }
    let with_room = |tensor: Tensor| Ok([tensor.clone(), tensor.zeros_like()?]);
    all.into_iter().map(with_room).collect()
}

/// Gives the ranks of `group` values and moments of their slices among them, from ranks that have
/// them: `held`, by rank. Then all ranks have all values. Returns optimizers of the new slices.
pub(super) fn cut_anew(
    step: &mut Step,
    group: &Group,
    held: &[Option<Cut>],
) -> Result<Vec<Optimizer>> {
    let stages = step.stages().iter();
    let optimizers = stages.map(|stage| cut_stage_anew(stage, group, held));
    let optimizers = optimizers.collect::<Result<_>>()?;
    step.gather()?;
    // On a GPU they may not have arrived.
    step.settle()?;
    Ok(optimizers)
}

fn cut_stage_anew(stage: &Stage, group: &Group, held: &[Option<Cut>]) -> Result<Optimizer> {
    let (params, rank, ranks) = (&stage.model().params, group.rank(), group.size());
    let (before, options) = (stage.optimizer(), stage.reducer().options);
    let new = |rank: usize| Cut::of(0, [rank, ranks], options).ranges(params, options);
    let old = |cut: &Option<Cut>| cut.map(|cut| cut.ranges(params, options).concat());
    let held: Vec<_> = held
        .iter()
        .map(|cut| old(cut).unwrap_or_default())
        .collect();
    let wanted: Vec<_> = (0..ranks).map(|rank| new(rank).concat()).collect();
    let [owned, kept] = &new(rank);
    let after = before.cut_anew(params, [owned, kept])?;
    let stream = Stream::default_of(Device::Cpu)?;
    for Move { from, to, range } in moves(&held, &wanted) {
        heartbeat::beat(Work::Starts);
        let values = params.trained_values().slice(range.clone())?;
        let moments = |of: &Optimizer| of.moments_of(params, &range);
        if (from, to) == (rank, rank) {
            for (new, old) in moments(&after)?.iter().zip(moments(before)?) {
                new.copy_from(&old)?;
            }
        } else if from == rank {
            for tensor in moments(before)?.into_iter().chain([values]) {
                group.send(&tensor.to(Device::Cpu)?, to, &stream)?;
            }
        } else if to == rank {
            for tensor in moments(&after)?.into_iter().chain([values]) {
                let arrives = tensor.to(Device::Cpu)?;
                group.receive(&arrives, from, &stream)?;
                if tensor.device().is_accelerator() {
                    tensor.copy_from(&arrives)?;
                }
            }
        }
    }
    Ok(after)
}

impl Cut {
    /// That of rank `rank` of `ranks`.
    pub(crate) fn of(number: u64, [rank, ranks]: [usize; 2], options: ReducerOptions) -> Cut {
        Cut {
            number,
            ranks,
            owns: rank,
            keeps: options.kept_by(rank, ranks),
        }
    }

    /// The elements of the gradients' arena that it owns, and those that it keeps.
    pub(crate) fn ranges(
        &self,
        params: &Params,
        options: ReducerOptions,
    ) -> [Vec<Range<usize>>; 2] {
        let of = |slice| slices(params, [slice, self.ranks], options);
        [of(self.owns), self.keeps.map_or_else(Vec::new, of)]
    }
}

/// Elements that one rank gives to another, or has itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) range: Range<usize>,
}

/// Who gives what, from the ranges that each rank has to those that each gets, in one order for all
/// ranks. Each move is part of one range of either rank. What no rank has is padding.
pub(crate) fn moves(held: &[Vec<Range<usize>>], wanted: &[Vec<Range<usize>>]) -> Vec<Move> {
    let all = || held.iter().chain(wanted).flatten();
    let mut edges: Vec<usize> = all().flat_map(|range| [range.start, range.end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let has = |ranges: &[Range<usize>], at: usize| ranges.iter().any(|range| range.contains(&at));
    let mut moves = Vec::new();
    for edge in edges.windows(2) {
        let range = edge[0]..edge[1];
        let having = || (0..held.len()).filter(|&rank| has(&held[rank], range.start));
        for to in (0..wanted.len()).filter(|&rank| has(&wanted[rank], range.start)) {
            let from = having().find(|&rank| rank == to).or(having().next());
            let range = range.clone();
            moves.extend(from.map(|from| Move { from, to, range }));
        }
    }
    moves
}

#[cfg(test)]
pub(crate) mod tests;
