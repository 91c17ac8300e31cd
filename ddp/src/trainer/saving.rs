//! Saving: what a checkpoint says besides tensors, when one is due, and what has to be true of a model before it is saved.
//!
//! A checkpoint is saved every so many steps, when the model is better on held-out rows than ever before, when the run is asked to stop, and at
//! the end. It is written beside training (`checkpoint::Saver`); the record says so once it is durable.

use std::path::PathBuf;
use std::time::Instant;

use ddp_comm::Signal;
use ddp_kernels::transfer::{Phase, in_phase};

use super::Trainer;
use crate::checkpoint::{Position, SAVING_MAX, Saver, ScheduleState, State};
use crate::error::{Error, Result};
use crate::faults::{self, Place};
use crate::metrics::CheckpointEvent;

/// What saves a run.
#[derive(Debug)]
pub(super) struct Saving {
    pub(super) saver: Saver,
    /// What every checkpoint of this run says; the step and what goes with it are filled in.
    pub(super) state: State,
    /// The step that was saved last, or gone on from.
    pub(super) saved: Option<u64>,
}

impl Trainer<'_> {
    /// Whether a checkpoint is due behind step `number`. `is_best`: no model before it was as good.
    pub(super) fn saving_is_due(&self, number: u64, is_best: bool) -> bool {
        let every = self.plan.checkpoint_every;
        every > 0 && (number.is_multiple_of(every) || is_best)
    }

    /// Saves the run as it is behind step `number`, unless that is saved. Training may go on when it returns: writing goes on beside it.
    pub(super) fn save(&mut self, number: u64) -> Result<()> {
        if self.saving.saved == Some(number) {
            return Ok(());
        }
        let began = Instant::now();
        in_phase(Phase::Checkpoint, || self.save_now(number))?;
        self.saving.saved = Some(number);
        self.done.held_up.saving += began.elapsed();
        self.tell_saved()
    }

    fn save_now(&mut self, number: u64) -> Result<()> {
        // The model would be that of the step before the bad one, under another's name.
        let report = self.step.report(false)?;
        if let Some(bad_step) = report.bad_step {
            return Err(self.explain_nonfinite(bad_step, report.own_bad_step)?);
        }
        if self.done.compared != Some(number) {
            self.compare_replicas(number)?;
        }
        self.step.gather()?;
        self.check_values(number)?;
        faults::at(Place::Snapshot)?;
        let state = self.state(number);
        self.saving.saver.save(&mut self.step, state)
    }

    /// Everything but tensors behind step `number`.
    fn state(&self, number: u64) -> State {
        let sampler = self.loader.sampler();
        let next = sampler.at(number);
        State {
            step: number,
            samples: self.done.samples,
            position: Position { epoch: next.epoch, in_epoch: next.in_epoch, ..self.saving.state.position.clone() },
            schedule: ScheduleState {
                learning_rate: self.schedule.learning_rate(number + 1),
                ..self.saving.state.schedule.clone()
            },
            best: self.done.best,
            last: self.done.last,
            ..self.saving.state.clone()
        }
    }

    /// Puts those checkpoints on record that are durable by now.
    pub(super) fn tell_saved(&mut self) -> Result<()> {
        self.saving.saver.check()?;
        let written = self.saving.saver.written();
        let Some(desk) = &mut self.desk else { return Ok(()) };
        for (step, folder) in written {
            let folder = folder.strip_prefix(&self.config.out).unwrap_or(&folder).to_string_lossy();
            desk.record.checkpoint(&CheckpointEvent { step, folder: &folder })?;
        }
        Ok(())
    }

    /// Saves behind the last step, or where the run stops, and waits until that is durable. Nobody goes on before it is, for a rank that ends
    /// early ends the job; and a large model may take longer than ranks otherwise wait for each other.
    pub(super) fn save_last(&mut self, number: u64) -> Result<Option<PathBuf>> {
        self.save(number)?;
        let folder = self.saving.saver.finish()?;
        self.tell_saved()?;
        self.world.barrier_within(SAVING_MAX.max(self.world.timeout()))?;
        Ok(folder)
    }

    /// The run was asked to stop, behind step `number`: saves, and says how to go on.
    pub(super) fn stop(&mut self, number: u64, signal: Signal) -> Result<Error> {
        let folder = self.save_last(number)?;
        let folder = folder.unwrap_or_else(|| crate::checkpoint::folder(&self.config.out, number));
        Ok(Error::Stopped(format!(
            "stopped at step {number} of {} by {signal}, and saved in {}; go on with the same command and --resume auto",
            self.plan.steps,
            folder.display()
        )))
    }
}
