//! A run as one rank has it, which it carries from one world of ranks to the next.
//!
//! Without ZeRO-1 a rank updates alone, after the last collective of the step. So after a loss no
//! update is half made, and ranks differ by at most one step. With ZeRO-1 an update is made by all
//! or none (`slices.rs`). A GPU may not complete every step that it was given: only those that it
//! has counted are taken. Nothing is read from disk.

use std::ops::Range;
use std::path::Path;

use ddp_comm::membership::agreement::{RankProgress, RankReport, Regroup};
use ddp_comm::{Group, World};
use ddp_data::Batch;
use ddp_data::sampler::Sampler;
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor};
use ddp_nn::optim::Optimizer;

use super::slices::{self, Slices};
use super::totals::{Clock, RunTotals};
use crate::audit::Workload;
use crate::checkpoint::{self, Best, State};
use crate::error::{Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::metrics_log::MetricsLog;
use crate::step::{Stats, Step};

use self::StateRole::{Gets, Gives};

/// How many elements of its state a rank gives another at once.
const GIVEN_AT_ONCE: usize = 1 << 22;

/// This rank's part in sending the state to new ranks while the others already train.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum StateTransfer {
    /// No rank lacks it.
    Complete,
    /// It gives it to these ranks.
    GivesTo(Vec<usize>),
    /// It has none yet, and gets it from this rank.
    AwaitsFrom(usize),
    /// Other ranks give it and get it.
    Bystander,
}

/// A rank's part where one gives its state to others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StateRole {
    Gives,
    Gets,
}

/// A run, on one rank.
pub(crate) struct RankRun {
    pub(crate) step: Step,
    /// Under ZeRO-1.
    pub(crate) slices: Option<Slices>,
    pub(crate) totals: RunTotals,
    pub(crate) clock: Clock,
    /// This rank's part of the steps.
    pub(crate) workload: Workload,
    /// The steps that were complete when this process got the state of the run.
    began: u64,
    /// The step after which ranks were last found to have the same model.
    pub(crate) compared: Option<u64>,
    /// This rank's part in sending the state to new ranks.
    pub(crate) late_state: StateTransfer,
    /// The digest of the base model, if adapters are trained.
    pub(crate) base: Option<String>,
}

impl RankRun {
    /// A new run, or one that resumes from `state`.
    pub(crate) fn new(step: Step, state: Option<&State>, has_rates: bool) -> RankRun {
        let totals = RunTotals::new(state);
        RankRun {
            slices: Slices::of(&step),
            step,
            began: totals.steps,
            totals,
            clock: Clock::new(has_rates),
            workload: Workload::default(),
            compared: None,
            late_state: StateTransfer::Complete,
            base: None,
        }
    }

    /// Counts a step over this many rows.
    fn count(&mut self, rows: u64) {
        self.totals.steps += 1;
        self.totals.samples += rows;
        self.clock.count(rows);
    }

    /// Takes the next step. Under ZeRO-1 all `ranks` make its update, or none.
    pub(crate) fn take_step(
        &mut self,
        batch: &Batch,
        learning_rate: f64,
        ranks: &Group,
    ) -> Result<()> {
        match &mut self.slices {
            Some(slices) => slices.take_step(&mut self.step, batch, learning_rate, ranks)?,
            None => self.step.run(batch, learning_rate)?,
        }
        self.count(batch.rows);
        Ok(())
    }

    /// Where this rank stands.
    pub(crate) fn report(&self) -> RankReport {
        let of = &self.totals;
        let versions = self.slices.as_ref().map(|it| it.versions(of.steps));
        let [has, ready] = versions.unwrap_or_default();
        RankReport {
            progress: Some(RankProgress {
                steps: of.steps,
                logged: of.logged,
                evaluated: of.evaluated,
                saved: of.saved,
            }),
            has,
            ready,
        }
    }

    /// Takes what this rank is ready for.
    pub(crate) fn advance(&mut self) -> Result<()> {
        let slices = self.slices.as_mut();
        let rows = slices.map(|it| it.advance(&mut self.step)).transpose()?;
        rows.flatten().into_iter().for_each(|rows| self.count(rows));
        Ok(())
    }

    /// Continues with what it had after the last complete step.
    pub(crate) fn stay(&mut self) -> Result<()> {
        let slices = self.slices.as_mut();
        slices.map_or(Ok(()), |it| it.go_back(&self.step))
    }

    /// Gives the ranks that are behind the state of rank `source`. This one's is replaced only when
    /// all has arrived: if `source` is lost meanwhile, the ranks continue from what they have. New
    /// ranks get it later (`give_state`), unless others are behind, too, or there are slices.
    pub(crate) fn share_progress(
        &mut self,
        world: &World,
        group: &Group,
        plan: &Regroup,
    ) -> Result<Vec<Optimizer>> {
        // What ranks do together does not depend on what one of them did alone before.
        self.compared = None;
        let mut optimizers = Vec::new();
        if plan.has_slices() {
            optimizers = slices::slice_anew(&mut self.step, group, &plan.slicings)?;
            faults::at_step(FaultPoint::Slices, world.generation())?;
        }
        let source = plan.source().expect("a rank has a run");
        self.catch_up(world, group, plan, source)?;
        Ok(optimizers)
    }

    /// This rank has all that it needs in this generation of ranks, under ZeRO-1 these optimizers
    /// of its slices if they are others. Until all have that, it keeps what it had.
    pub(crate) fn make_ready(&mut self, world: &World, optimizers: Vec<Optimizer>) {
        if let Some(slices) = &mut self.slices {
            slices.make_ready(&self.step, world.generation(), optimizers);
        }
    }

    fn catch_up(
        &mut self,
        world: &World,
        group: &Group,
        plan: &Regroup,
        source: usize,
    ) -> Result<()> {
        let most = &plan.progress[source];
        if plan.progress.iter().all(|it| it == most) {
            return Ok(());
        }
        let is_behind = plan.progress[world.rank()] != *most;
        let given = || {
            let mut totals = self.totals.clone();
            // JSON has no other numbers.
            totals.evaluation = totals.evaluation.filter(Stats::is_finite);
            let since = self.step.stages()[0].optimizer().since();
            Ok((totals, since, self.clock.since_began()))
        };
        let (totals, since, began): (RunTotals, u64, _) =
            exchange::broadcast(world, source, given)?;
        let is_new = |rank: &usize| plan.progress[*rank].is_none();
        let new: Vec<usize> = (0..world.size()).filter(is_new).collect();
        let mut old = plan.progress.iter().filter(|it| it.is_some());
        // Under ZeRO-1 a new rank has slices by now, which must not be lost.
        if !plan.has_slices() && old.all(|it| it == most) {
            self.late_state = match world.rank() {
                rank if rank == source => StateTransfer::GivesTo(new),
                rank if new.contains(&rank) => StateTransfer::AwaitsFrom(source),
                _ => StateTransfer::Bystander,
            };
        } else {
            let stream = Stream::default_of(Device::Cpu)?;
            let pass_on = |tensor: &Tensor| group.broadcast(tensor, source, &stream);
            let role = if is_behind { Gets } else { Gives };
            share_state(&self.step, role, !plan.has_slices(), pass_on)?;
        }
        if is_behind {
            self.began = totals.steps;
            self.totals = totals;
            self.step.count_moments_from(since);
            self.clock = Clock::new(self.clock.has_rates);
            self.clock.began_before(began);
        }
        Ok(())
    }

    /// Gives new ranks the state of the run, if there are any. The other ranks do not wait: they
    /// meet these at the sums of the next step.
    pub(crate) fn give_state(&mut self, group: &Group) -> Result<()> {
        let stream = Stream::default_of(Device::Cpu)?;
        match &self.late_state {
            StateTransfer::GivesTo(new) => {
                let give = |tensor: &Tensor| {
                    new.iter()
                        .try_for_each(|to| group.send(tensor, *to, &stream))
                };
                share_state(&self.step, Gives, true, give)?;
            }
            StateTransfer::AwaitsFrom(source) => {
                let take = |tensor: &Tensor| group.receive(tensor, *source, &stream);
                share_state(&self.step, Gets, true, take)?;
            }
            StateTransfer::Complete | StateTransfer::Bystander => {}
        }
        self.late_state = StateTransfer::Complete;
        Ok(())
    }

    /// Ends what it does, of which only complete steps count: a GPU may have been given more.
    pub(crate) fn halt(&mut self, sampler: &Sampler) -> Result<()> {
        let Some(counted) = self.step.halt()? else {
            return Ok(());
        };
        let totals = &mut self.totals;
        if let Some(slices) = &mut self.slices {
            slices.check_prepared(totals.steps, counted);
            return Ok(());
        }
        // It counts from the first step of this process on.
        let complete = counted.max(self.began);
        let rows = |steps: Range<u64>| -> u64 {
            let rows = steps.map(|step| sampler.at(step).positions);
            rows.map(|rows| rows.end - rows.start).sum()
        };
        totals.samples -= rows(complete..totals.steps);
        totals.samples += rows(totals.steps..complete);
        totals.steps = complete;
        Ok(())
    }

    /// Completes the metrics log for the steps so far, on rank 0, and says what has to be repeated,
    /// the same on all ranks: whether a checkpoint was lost.
    pub(crate) fn complete_log(
        &mut self,
        log: Option<&mut MetricsLog>,
        out: &Path,
        world: &World,
    ) -> Result<bool> {
        let totals = &mut self.totals;
        let written = || {
            let log = log.ok_or_else(|| Error::Internal("rank 0 has no log".into()))?;
            let (step, line) = &totals.line;
            if *step > 0 && *step == totals.steps {
                log.write_once(line.clone())?;
            }
            let (step, folder) = (totals.saved, checkpoint::folder(out, totals.saved));
            let is_saved = step == 0 || folder.is_dir();
            if step > 0 && is_saved {
                log.write_checkpoint(step, &folder)?;
            }
            Ok((log.has("eval", totals.steps), is_saved))
        };
        let (is_evaluated, is_saved) = exchange::broadcast(world, 0, written)?;
        if !is_evaluated {
            totals.evaluated = 0;
        }
        if !is_saved {
            // Where the run has continued, the best model so far is lost. A later one replaces it.
            let is_lost = |best: &mut Best| best.step == totals.saved && best.step < totals.steps;
            totals.best.take_if(is_lost);
            totals.saved = 0;
        }
        Ok(!is_saved)
    }
}

/// Passes on, by `pass_on`, each tensor of the state after the last step, `with_moments` or
/// without. What a rank has that gets it is replaced only when all has arrived.
fn share_state(
    step: &Step,
    role: StateRole,
    with_moments: bool,
    pass_on: impl Fn(&Tensor) -> Result<(), ddp_comm::Error>,
) -> Result<()> {
    let mut received = Vec::new();
    let stages = step.stages().iter();
    let state = stages.flat_map(|stage| stage.state(with_moments));
    for tensor in state.filter(|tensor| tensor.count() > 0) {
        let target = match role {
            Gets => Tensor::zeros(tensor.shape(), tensor.dtype(), Device::Cpu)?,
            Gives => tensor.to(Device::Cpu)?,
        };
        let (all, count) = (target.flatten()?, target.count());
        for start in (0..count).step_by(GIVEN_AT_ONCE) {
            // The others wait for a rank that gets the state only while it shows progress.
            heartbeat::beat(Work::Starts);
            pass_on(&all.slice(start..(start + GIVEN_AT_ONCE).min(count))?)?;
        }
        received.push((tensor, target));
    }
    for (tensor, target) in received.into_iter().filter(|_| role == Gets) {
        tensor.copy_from(&target)?;
    }
    let mut all = step.params();
    Ok(all.try_for_each(|params| params.refresh(0..params.values().count()))?)
}

#[cfg(test)]
mod tests;
