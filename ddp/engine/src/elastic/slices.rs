//! ZeRO-1 where ranks may be lost: which slices a rank has, and how none gets lost.
//!
//! Each slice has an owner and a backup, the rank `ReducerOptions::backup_distance` after it, on
//! another host if there are several. The owner gives the backup the sums of the slice's gradients.
//! Then both make the same update, so both have its values and moments, with the same bits.
//!
//! An update is made by all ranks or by none. A rank prepares the step together with the others.
//! Then it waits at a barrier until all are prepared. The update after that waits for nothing. So
//! when ranks meet after a loss, they agree (`agreement.rs` of ddp-comm): either all that are left
//! have made the update or are ready for it, and those make it now; or one is not, then none has
//! passed the barrier, and all take the step again. What the broken step overwrote is restored from
//! a copy.
//!
//! The ranks of a new world divide buckets into slices anew in the same way: each rank gets values
//! and moments of its new slices from ranks that have them, and keeps its old ones until all ranks
//! are ready for theirs (a barrier again). Values do not change when slices do, so new ones are
//! written over old ones.
//!
//! Values or moments are lost only if owner and backup are lost before the new slices are ready.
//! Then the run continues from its last checkpoint.

use ddp_comm::Group;
use ddp_comm::membership::agreement::{Move, NextVersion, SliceState, Slicing, Version, moves};
use ddp_data::Batch;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor, ops};
use ddp_nn::optim::Optimizer;

use crate::error::Result;
use crate::faults::{self, FaultPoint};
use crate::reducer::ReducerOptions;
use crate::step::{Stage, Step};

/// The slices of a rank, and what it is ready for.
#[derive(Debug, Default)]
pub(crate) struct Slices {
    state: SliceState,
    /// If it is ready for an update: over how many rows the step is.
    rows: u64,
    /// If it is ready for other slices: an optimizer for each stage, or none if they stay.
    optimizers: Vec<Optimizer>,
    /// What a step that is not completed may spoil, and its copy.
    spoiled: Vec<[Tensor; 2]>,
}

impl Slices {
    /// Those of `step`, if it has slices that must not be lost.
    pub(super) fn of(step: &Step) -> Option<Slices> {
        let options = options(step);
        (options.zero > 0 && options.backup_distance > 0).then(Slices::default)
    }

    /// After this many steps: what this rank has, and what it is ready for.
    pub(super) fn versions(&self, steps: u64) -> [Option<Version>; 2] {
        self.state.versions(steps)
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
        self.rows = batch.rows;
        self.state.make_ready(NextVersion::Update);
        ranks.barrier(&Stream::default_of(Device::Cpu)?)?;
        faults::at(FaultPoint::Agreed)?;
        self.advance(step).map(drop)
    }

    /// This rank has all that it needs of its slices in this generation of ranks, and these
    /// optimizers of them, if they are others.
    pub(super) fn make_ready(&mut self, step: &Step, generation: u64, optimizers: Vec<Optimizer>) {
        let group = step.stages()[0].reducer().group();
        let slicing = options(step).slicing(generation, [group.rank(), group.size()]);
        self.optimizers = optimizers;
        self.state.make_ready(NextVersion::Slices(slicing));
    }

    /// A GPU that was stopped has not prepared the step after `steps`.
    pub(super) fn check_prepared(&mut self, steps: u64, decided: u64) {
        if decided <= steps {
            self.state.forget_update();
        }
    }

    /// Takes what this rank is ready for. Returns over how many rows the step was, if it is an
    /// update.
    pub(super) fn advance(&mut self, step: &mut Step) -> Result<Option<u64>> {
        // None, unless it is ready for other slices.
        step.take_optimizers(std::mem::take(&mut self.optimizers))?;
        let next = self.state.advance();
        match next {
            Some(NextVersion::Update) => step.update()?,
            Some(NextVersion::Slices(slicing)) => self.spoiled = spoiled(step, slicing)?,
            None => {}
        }
        for [tensor, copy] in &self.spoiled {
            copy.copy_from(tensor)?;
        }
        Ok((next == Some(NextVersion::Update)).then_some(self.rows))
    }

    /// Goes back to what this rank had after its last complete step.
    pub(super) fn go_back(&mut self, step: &Step) -> Result<()> {
        self.state.go_back();
        self.optimizers.clear();
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

/// What a step that is not completed may spoil of a rank's slices, and room for a copy: moments
/// that change before the update, and values on a GPU, where a gather that was ended leaves
/// garbage.
fn spoiled(step: &Step, slicing: Slicing) -> Result<Vec<[Tensor; 2]>> {
    let mut all = Vec::new();
    for stage in step.stages() {
        all.extend(stage.optimizer().prepared_moments().cloned());
        let params = &stage.model().params;
        if params.device().is_accelerator() {
            let ranges = options(step).ranges(params, slicing).concat().into_iter();
            let values = ranges.map(|range| params.trained_values().slice(range));
            all.extend(values.collect::<Result<Vec<_>, _>>()?);
        }
    }
    let with_room = |tensor: Tensor| Ok([tensor.clone(), tensor.zeros_like()?]);
    all.into_iter().map(with_room).collect()
}

/// Gives the ranks of `group` values and moments of their slices among them, from ranks that have
/// them: `held`, by rank. Then all ranks have all values. Returns optimizers of the new slices.
pub(super) fn slice_anew(
    step: &mut Step,
    group: &Group,
    held: &[Option<Slicing>],
) -> Result<Vec<Optimizer>> {
    let stages = step.stages().iter();
    let optimizers = stages.map(|stage| slice_stage_anew(stage, group, held));
    let optimizers = optimizers.collect::<Result<_>>()?;
    step.gather()?;
    // On a GPU they may not have arrived.
    step.settle()?;
    Ok(optimizers)
}

fn slice_stage_anew(stage: &Stage, group: &Group, held: &[Option<Slicing>]) -> Result<Optimizer> {
    let (params, rank, ranks) = (&stage.model().params, group.rank(), group.size());
    let (before, options) = (stage.optimizer(), stage.reducer().options);
    let new = |rank: usize| options.ranges(params, options.slicing(0, [rank, ranks]));
    let old = |it: &Option<Slicing>| it.map(|it| options.ranges(params, it).concat());
    let held: Vec<_> = held.iter().map(|it| old(it).unwrap_or_default()).collect();
    let wanted: Vec<_> = (0..ranks).map(|rank| new(rank).concat()).collect();
    let [owned, kept] = &new(rank);
    let after = before.slice_anew(params, [owned, kept])?;
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

#[cfg(test)]
pub(crate) mod tests;
