//! A training run on one rank: its steps and its end. `ending.rs` has what comes after the last
//! step, `evaluation.rs` the evaluations, `saving.rs` the checkpoints, `logging.rs` the metrics
//! log.

mod ending;
mod evaluation;
mod logging;
mod saving;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ddp_comm::{Group, Signal, World};
use ddp_data::{InOrder, Loader};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_nn::optim::Schedule;

use super::program::RunProgram;
use super::run::{Meet, Run};
use super::setup::{AgreedRun, Ready};
use super::stop_poll::StopPoll;
use crate::checkpoint::{Saver, State};
use crate::elastic::loss::{self, EXIT_LOST};
use crate::elastic::run::RankRun;
use crate::elastic::totals::Clock;
use crate::error::{Error, Result};
use crate::faults;
use crate::metrics_log::MetricsLog;
use crate::model::data_shape;
use crate::setting::{MIN_RANKS, RESUME};
use crate::tasks::{self, Task};
use crate::trace::{RunTrace, TraceSteps};

/// What a trace shows of the loop.
const STEP: Label = Label::new(Lane::Step, "step");
const LOG: Label = Label::new(Lane::Step, "log");

/// What follows a step.
#[derive(PartialEq, Eq)]
enum AfterStep {
    /// The next one.
    Step,
    /// The ranks meet again, because processes have come that are to be taken in.
    Meet,
    /// Nothing: it was the last one.
    End,
}

/// A run that takes steps with the ranks of a generation, on one rank.
pub(super) struct TrainingRun<'a> {
    program: &'a mut dyn RunProgram,
    world: &'a World,
    run: AgreedRun,
    main: Group,
    loader: Loader,
    held_out: InOrder,
    /// What this rank keeps when the ranks meet again.
    rank_run: &'a mut RankRun,
    /// On rank 0.
    metrics_log: &'a mut Option<MetricsLog>,
    task: Box<dyn Task>,
    schedule: Schedule,
    saver: Saver,
    /// What every checkpoint of this run says; the step and what depends on it are filled in.
    state: State,
    /// Whether the last checkpoint was lost with the rank that wrote it.
    lost_checkpoint: bool,
    stop_poll: StopPoll,
    trace: RunTrace,
    /// Multiplications and additions of a row in training, if the model's family says so.
    flop_of_a_row: Option<f64>,
    /// What large matmuls reach on all devices, in 10¹² a second; measured at the first log.
    matmul_tflops: Option<f64>,
}

impl<'a> TrainingRun<'a> {
    /// Everything else up to the first step: opens the run's folder, and says who was lost.
    pub(super) fn new(
        whole: &'a mut Run<'_>,
        (run, (main, loader, held_out), locked): Ready,
        world: &'a World,
        program: &'a mut dyn RunProgram,
    ) -> Result<TrainingRun<'a>> {
        let mut state = run.state(whole.built(), world)?;
        whole.open_log(&run, &state, locked, world, program)?;
        let options = &run.settled;
        if let (Some(bytes), 0, false) = (run.kept_bytes, world.rank(), run.continues) {
            let mb = bytes as f64 / 1e6;
            tracing::info!("the training data, {mb:.1} MB, are kept on the GPU");
        }
        let held_out_rows = state.held_out.take();
        let rank_run = whole.rank_run.as_mut().expect("the run is built");
        let lost_checkpoint = if run.continues {
            rank_run.complete_log(whole.metrics_log.as_mut(), &options.out, world)?
        } else {
            // A new run, or one that resumes a checkpoint.
            rank_run.clock = Clock::new(rank_run.clock.has_rates);
            if let Some(before) = &run.resumed {
                rank_run.totals.held_out = before.state.held_out.clone();
            }
            false
        };
        rank_run.clock.restart();
        // The best stays what it was while there is nothing to compare.
        let totals = &mut rank_run.totals;
        totals.held_out = held_out_rows.or(totals.held_out.take());
        let taken = totals.steps;
        let stop_poll = StopPoll::new(world, taken)?;
        // Ranks that met again trace what is left.
        let is_left = |steps: &TraceSteps| !run.continues || steps.reach(taken + 1);
        let traced = options.trace.filter(is_left);
        let trace = RunTrace::new(traced, [taken + 1, run.plan.steps], &run.devices, world);
        whole.announce(world, taken)?;
        let behind = whole.metrics_log.as_ref().map(MetricsLog::handle);
        let behind = behind.transpose()?;
        let tokenizer = run.data.tokenizer.clone();
        let saver = Saver::of_run(world, &options.out, options.keep, behind, tokenizer)?;
        let shape = data_shape(run.data.train.spec());
        Ok(TrainingRun {
            program,
            world,
            task: tasks::of(run.data.train.task()),
            schedule: options.learning_rate(&run.plan)?,
            flop_of_a_row: options.model.flop_of_a_row(&shape),
            saver,
            state,
            lost_checkpoint,
            stop_poll,
            trace,
            matmul_tflops: None,
            run,
            main,
            loader,
            held_out,
            rank_run: whole.rank_run.as_mut().expect("the run is built"),
            metrics_log: &mut whole.metrics_log,
        })
    }

    /// Trains until the run is over (None), or until the ranks meet again.
    pub(super) fn train(mut self) -> Result<Option<Meet>> {
        let saved = self.steps();
        if matches!(saved, Err(Error::NonFinite(_))) {
            // A checkpoint from before the bad step may still be being written.
            let best = self.rank_run.totals.best.map(|best| best.step);
            let written = self.saver.write_remembered(best);
            let finished = written.and_then(|()| self.saver.finish());
            _ = finished.and_then(|_| self.record_saved());
        }
        match saved {
            Ok(Some(saved)) => self.finish(Ok(saved)),
            Ok(None) => Ok(Some(self.leave(None))),
            Err(error) if self.continues_after(&error) => Ok(Some(self.leave(Some(error)))),
            Err(error) => self.finish(Err(error)),
        }
    }

    fn continues_after(&self, error: &Error) -> bool {
        loss::continues_after(error, self.world, &self.run.devices)
    }

    /// Ends what it shares with the ranks of this world, because of `why`. First the calls of its
    /// groups end, then the GPU, which may wait in one of them, then all that belongs to the
    /// generation is dropped. What the `Run` has is whole.
    fn leave(self, why: Option<Error>) -> Meet {
        let of_ranks = why.as_ref().and_then(Error::of_ranks);
        self.world.end_generation(of_ranks);
        if let Err(error) = self.rank_run.halt(self.loader.sampler()) {
            self.world.leave(&error, EXIT_LOST);
        }
        Meet(why)
    }

    /// Takes all steps and saves the model, in the folder that is returned. None if the ranks meet,
    /// because processes have come that are to be taken in.
    fn steps(&mut self) -> Result<Option<PathBuf>> {
        if self.train_steps()? == AfterStep::Meet {
            // All steps are complete on all ranks, so none is repeated.
            self.rank_run.step.settle()?;
            self.world.barrier()?;
            return Ok(None);
        }
        let saved = self.save_last(self.run.plan.steps)?;
        self.finish_trace()?;
        // Only after a successful run can all ranks be asked.
        self.audit()?;
        Ok(Some(saved))
    }

    /// Takes steps, with evaluations and checkpoints between them, until the ranks meet or the run
    /// ends.
    fn train_steps(&mut self) -> Result<AfterStep> {
        let taken = self.rank_run.totals.steps;
        // A stop may have been requested during set-up. Asked before `give_state`, so that
        // the others need not wait until new ranks have the state.
        let asked = if self.is_over() {
            None
        } else {
            self.stop_poll.requested(taken, true, self.world)?
        };
        // Before anything is saved or compared.
        self.rank_run.give_state(&self.main)?;
        if self.world.generation() > 1 && taken > 0 {
            // What belongs to the last step, as far as it is not done.
            if self.logs(taken) && self.rank_run.totals.logged != taken {
                self.rank_run.step.measure_norm(true);
                self.log_step(taken)?;
            }
            self.finish_step(taken)?;
        }
        asked.map_or(Ok(()), |signal| self.stop(taken, signal))?;
        self.stop_early(taken);
        self.check_ranks()?;
        while !self.is_over() {
            let step0 = self.rank_run.totals.steps;
            let number = step0 + 1;
            self.trace.before(number, self.world)?;
            trace::record(STEP, || self.take_step(step0))?;
            match self.finish_step(number)? {
                AfterStep::Step => {}
                AfterStep::Meet => return Ok(AfterStep::Meet),
                AfterStep::End => break,
            }
        }
        // Also if the run stops early: only the last evaluation keeps samples.
        self.evaluate(self.run.plan.steps)?;
        Ok(AfterStep::End)
    }

    /// Whether all steps are taken.
    fn is_over(&self) -> bool {
        self.run.plan.is_over(self.rank_run.totals.steps)
    }

    /// Makes step `number`, after its evaluation, the last one if the run stops early there.
    fn stop_early(&mut self, number: u64) -> bool {
        let progress = &self.rank_run.totals.progress;
        let stops = self.run.settled.has_stopped_early(progress);
        if stops {
            self.run.plan.steps = number;
        }
        stops
    }

    /// Whether step `number` is logged.
    fn logs(&self, number: u64) -> bool {
        number == 1
            || self.run.plan.is_over(number)
            || number.is_multiple_of(self.run.settled.log_every)
    }

    /// Ends a run that has lost too many ranks, after it has saved.
    fn check_ranks(&mut self) -> Result<()> {
        let (ranks, least) = (self.world.size(), self.world.min_ranks());
        let step = self.rank_run.totals.steps;
        if ranks >= least || self.is_over() {
            return Ok(());
        }
        let folder = self.save_last(step)?;
        let text = format!(
            "{ranks} of {} ranks are left after step {step}: expected at least {least} \
             ({MIN_RANKS}); the run is saved in {}; help: continue with the same command and \
             {RESUME} auto",
            self.world.ranks_max(),
            folder.display()
        );
        Err(Error::remote(0, text, EXIT_LOST))
    }

    /// What follows step `number`, but for its line in the metrics log: its evaluation, its
    /// checkpoint. The last step is evaluated later.
    fn finish_step(&mut self, number: u64) -> Result<AfterStep> {
        let is_multiple = |every: u64| every > 0 && number.is_multiple_of(every);
        if self.is_over() {
            return Ok(AfterStep::End);
        }
        let (world, is_full) = (self.world, self.world.size() == self.world.ranks_max());
        faults::await_newcomer(number, || is_full || world.has_newcomers());
        let evaluates = is_multiple(self.run.plan.eval_every);
        if evaluates && self.rank_run.totals.evaluated != number {
            self.evaluate(number)?;
        }
        if self.stop_early(number) {
            return Ok(AfterStep::End);
        }
        let is_best = evaluates
            && self
                .rank_run
                .totals
                .best
                .is_some_and(|best| best.step == number);
        let is_lost = std::mem::take(&mut self.lost_checkpoint);
        let is_due = is_multiple(self.run.plan.checkpoint_every);
        let saves = is_due || is_lost || is_best && !self.remembers_best();
        if saves {
            self.save(number)?;
        } else if is_best {
            self.remember(number)?;
        }
        if self.trace.ends_after(number) {
            self.finish_trace()?;
        }
        self.stop_if_asked(number, evaluates || saves)?;
        Ok(if self.stop_poll.has_newcomers {
            AfterStep::Meet
        } else {
            AfterStep::Step
        })
    }

    /// One step, from its rows to its line in the metrics log.
    fn take_step(&mut self, step0: u64) -> Result<()> {
        let number = step0 + 1;
        let logs = self.logs(number);
        let learning_rate = self.schedule.learning_rate(step0);
        let began = Instant::now();
        let batch = in_phase(Phase::Step, || self.loader.load(step0))?;
        self.rank_run.clock.waits.data += began.elapsed();
        self.rank_run.workload.count(batch);
        self.rank_run.clock.count_lengths(batch);
        self.rank_run.step.measure_norm(logs);
        let ranks = &self.main;
        self.rank_run.take_step(batch, learning_rate, ranks)?;
        let stages = self.rank_run.step.stages().iter();
        let exposed = stages.map(|stage| stage.reducer().last_time().exposed);
        self.rank_run.clock.waits.reductions += exposed.sum::<Duration>();
        faults::rows(number, self.loader.rows());
        if self.metrics_log.is_some() {
            self.program.step(number);
        }
        if logs {
            self.log_step(number)?;
        }
        Ok(())
    }

    /// Logs step `number`, which was taken last.
    fn log_step(&mut self, number: u64) -> Result<()> {
        let epoch = self.loader.sampler().at(number - 1).epoch;
        let learning_rate = self.schedule.learning_rate(number - 1);
        let log = || self.log(number, epoch, learning_rate);
        trace::record(LOG, || in_phase(Phase::Log, log))?;
        self.rank_run.totals.logged = number;
        Ok(())
    }

    /// Ends the run after step `number` if it was asked to stop: saves it, so that it can be
    /// resumed. `now` polls even if no poll is due.
    fn stop_if_asked(&mut self, number: u64, now: bool) -> Result<()> {
        let asked = self.stop_poll.requested(number, now, self.world)?;
        asked.map_or(Ok(()), |signal| self.stop(number, signal))
    }

    /// Saves the run after step `number` and ends it.
    fn stop(&mut self, number: u64, signal: Signal) -> Result<()> {
        let folder = self.save_last(number)?;
        self.finish_trace()?;
        Err(Error::Stopped(format!(
            "stopped at step {number} of {} by {signal}, and saved in {}; help: continue with the \
             same command and {RESUME} auto",
            self.run.plan.steps,
            folder.display()
        )))
    }

    /// Writes the trace, if one is being recorded.
    fn finish_trace(&mut self) -> Result<()> {
        let lines = self.trace.finish(self.world, &self.run.settled.out)?;
        for line in &lines {
            self.program.note(line);
            self.rank_run.clock.restart();
        }
        Ok(())
    }
}
