//! Checkpoints between steps and at the end.

use std::path::PathBuf;
use std::time::Instant;

use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_nn::params::Params;

use super::TrainingRun;
use crate::checkpoint::{self, State};
use crate::error::Result;
use crate::faults::{self, FaultPoint};
use crate::trainer::nonfinite;

/// The largest model whose best state is kept in memory rather than written at once.
const SMALL_PARAMETERS: usize = 1 << 20;

/// What a trace shows.
const SNAPSHOT: Label = Label::new(Lane::Saving, "copy for checkpoint");

impl TrainingRun<'_> {
    /// Saves the run as it is after step `number`, unless it is saved. A thread writes the files
    /// while training continues.
    pub(super) fn save(&mut self, number: u64) -> Result<()> {
        // 0 means no checkpoint.
        if number > 0 && self.rank_run.totals.saved == number {
            return Ok(());
        }
        let began = Instant::now();
        trace::record(SNAPSHOT, || {
            in_phase(Phase::Checkpoint, || self.save_now(number))
        })?;
        self.rank_run.totals.saved = number;
        self.rank_run.clock.waits.saving += began.elapsed();
        self.record_saved()
    }

    /// Whether the best model is written only with the next checkpoint: it is small, and every rank
    /// that may be lost would take its memory along.
    pub(super) fn remembers_best(&self) -> bool {
        let count: usize = self.rank_run.step.params().map(Params::count).sum();
        let is_small = count <= SMALL_PARAMETERS;
        is_small && self.run.plan.checkpoint_every > 0 && !self.world.is_elastic()
    }

    /// Keeps the model after step `number`, the best so far, until the next checkpoint is written.
    pub(super) fn remember(&mut self, number: u64) -> Result<()> {
        let began = Instant::now();
        nonfinite::check_values(&self.rank_run.step, number)?;
        let state = self.state_after(number);
        in_phase(Phase::Checkpoint, || {
            self.saver.remember(&mut self.rank_run.step, state)
        })?;
        self.rank_run.clock.waits.saving += began.elapsed();
        Ok(())
    }

    fn save_now(&mut self, number: u64) -> Result<()> {
        // After a bad step the model is that of an earlier step.
        let report = self.rank_run.step.report()?;
        self.check_finite(&report)?;
        // A GPU has its own copy.
        if self.run.kept_bytes.is_none() {
            self.run.data.train.check_unchanged()?;
        }
        self.run.data.held_out.check_unchanged()?;
        if self.rank_run.compared != Some(number) {
            self.compare_replicas(number)?;
        }
        self.rank_run.step.gather()?;
        nonfinite::check_values(&self.rank_run.step, number)?;
        faults::at(FaultPoint::Snapshot)?;
        let state = self.state_after(number);
        self.saver.save(&mut self.rank_run.step, state)
    }

    /// Everything but tensors after step `number`.
    fn state_after(&self, number: u64) -> State {
        let (next, totals) = (self.loader.sampler().at(number), &self.rank_run.totals);
        let mut state = self.state.clone();
        (state.step, state.samples) = (number, totals.samples);
        (state.position.epoch, state.position.in_epoch) = (next.epoch, next.in_epoch);
        state.schedule.learning_rate = self.schedule.learning_rate(number);
        (state.best, state.last) = (totals.best, totals.last);
        state.progress = totals.progress;
        state.held_out = totals.held_out.clone();
        state
    }

    /// Records the checkpoints that are durable by now.
    pub(super) fn record_saved(&mut self) -> Result<()> {
        self.saver.check()?;
        let written = self.saver.written();
        let Some(log) = self.metrics_log else {
            return Ok(());
        };
        for (step, folder) in written {
            log.check_present()?;
            log.write_checkpoint(step, &folder)?;
        }
        Ok(())
    }

    /// Saves after the last step, and waits until the files are durable. All ranks wait, because
    /// the first to end ends the job.
    pub(super) fn save_last(&mut self, number: u64) -> Result<PathBuf> {
        self.save(number)?;
        let folder = self.saver.finish()?;
        self.record_saved()?;
        self.world.barrier()?;
        Ok(folder.unwrap_or_else(|| checkpoint::folder(&self.run.settled.out, number)))
    }
}
