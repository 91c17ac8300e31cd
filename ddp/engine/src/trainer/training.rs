//! A training run on one rank: steps, log, and the end. `begin.rs` has what comes before the first
//! step, `ending.rs` what comes after the last one, `evaluation.rs` the evaluations, `saving.rs`
//! the checkpoints.

mod begin;
mod ending;
mod evaluation;
mod saving;

pub(super) use self::begin::{ReadyRun, prepare};

use std::time::{Duration, Instant};

use ddp_comm::{Signal, World};
use ddp_kernels::Device;
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::{Phase, in_phase};
use ddp_nn::optim::Schedule;

use super::program::RunProgram;
use super::setup::Assembled;
use super::stop_poll::StopPoll;
use super::{matmuls, nonfinite};
use crate::audit;
use crate::checkpoint::{Saver, State};
use crate::config::Config;
use crate::digest::{self, StepDigests};
use crate::elastic::run::RankRun;
use crate::elastic::session::{self, Next};
use crate::error::{Error, Result};
use crate::faults::{self, FaultPoint};
use crate::metrics_log::{self, LogEvent, MetricsLog, RunOutcome, StepEvent};
use crate::process;
use crate::setting::{MIN_RANKS, RESUME};
use crate::tasks::Task;
use crate::trace::RunTrace;

/// How long the metrics log and the report may delay the message of what failed.
const CLOSING_MAX: Duration = Duration::from_secs(10);

/// What a trace shows of the loop.
const STEP: Label = Label::new(Lane::Step, "step");
const LOG: Label = Label::new(Lane::Step, "log");

/// What follows a step.
enum AfterStep {
    /// The next one.
    Step,
    /// The ranks meet again, because processes have come that are to be taken in.
    Meet,
    /// Nothing: it was the last one.
    End,
}

/// A training run, on one rank.
pub(super) struct TrainingRun<'a> {
    options: &'a Config,
    program: &'a mut dyn RunProgram,
    world: &'a World,
    run: Assembled,
    /// What this rank keeps when the ranks meet again.
    rank_run: &'a mut RankRun,
    /// On rank 0.
    metrics_log: &'a mut Option<MetricsLog>,
    /// When this rank noticed that the ranks have to meet again.
    noticed: &'a mut Option<Instant>,
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

impl TrainingRun<'_> {
    /// Trains. The metrics log's last line says how the run ended, also after an error.
    pub(super) fn train(mut self) -> Next {
        let trained = match self.train_steps() {
            Ok(AfterStep::Meet) => {
                // All steps are complete on all ranks, so none is repeated.
                let settled = self.rank_run.step.settle();
                match settled.and_then(|()| Ok(self.world.barrier()?)) {
                    Ok(()) => return self.leave(None),
                    Err(error) => Err(error),
                }
            }
            Ok(AfterStep::Step | AfterStep::End) => self.save_last(self.run.plan.steps),
            Err(error) => Err(error),
        };
        let trained = trained.and_then(|saved| self.finish_trace().map(|()| saved));
        if matches!(trained, Err(Error::NonFinite(_))) {
            // A checkpoint from before the bad step may still be being written.
            _ = self.saver.finish().and_then(|_| self.record_saved());
        }
        // Only after a successful run can all ranks be asked.
        let result = trained.and_then(|saved| self.audit().map(|()| saved));
        let result = match result {
            Err(error) if session::continues_after(&error, self.world, &self.run.devices) => {
                return self.leave(Some(error));
            }
            result => result,
        };
        if let Err(error) = &result {
            session::leave_if_alone(error, self.world);
        }
        let (reason, exit_code) = match &result {
            Ok(_) => (self.early().unwrap_or_else(|| metrics_log::DONE.into()), 0),
            Err(Error::Remote(error)) if error.rank > 0 => {
                (format!("rank {}: {error}", error.rank), error.exit_code)
            }
            Err(error) => (error.to_string(), error.exit_code()),
        };
        let all_know = matches!(result, Err(Error::Stopped(_) | Error::NonFinite(_)));
        let has_failed = result.is_err() && !all_know;
        // The cause, such as a disk that does not answer, may hold up the metrics log too.
        let ending = has_failed.then(|| self.world.fail_after(CLOSING_MAX, &reason, exit_code));
        let outcome = match &result {
            Ok(_) if self.early().is_some() => RunOutcome::Early,
            _ => RunOutcome::of_exit_code(exit_code),
        };
        let closed = self.close(outcome, &reason, exit_code);
        let report = self.report();
        drop(ending);
        if has_failed {
            // Threads of the run may wait forever: the caller reports the error and ends the
            // process without waiting for them.
            std::mem::forget(self);
            return Next::End(result.map(drop));
        }
        if all_know {
            // The first rank to leave ends the others, so all close their files first. The first
            // error is the one that counts.
            _ = self.world.barrier();
            if matches!(result, Err(Error::Stopped(_))) && self.world.rank() > 0 {
                // Rank 0 says it, after its progress: launchers mix the lines of several ranks.
                _ = self.world.barrier();
            }
        }
        let saved = match result.and_then(|saved| closed.map(|()| saved)) {
            Ok(saved) => saved,
            Err(error) => return Next::End(Err(error)),
        };
        if self.world.is_elastic()
            && let Err(error) = self.world.barrier().map_err(Error::from)
            && self.metrics_log.is_none()
        {
            // Rank 0 may be lost before it has closed the metrics log: another one does it then.
            return if session::continues_after(&error, self.world, &self.run.devices) {
                self.leave(Some(error))
            } else {
                Next::End(Err(error))
            };
        }
        if self.world.rank() == 0 {
            self.say_end(&saved, report);
        }
        Next::End(Ok(()))
    }

    /// Ends what it shares with the ranks of this world, because of `why`. All else is kept.
    fn leave(self, why: Option<Error>) -> Next {
        *self.noticed = Some(Instant::now());
        let of_ranks = why.as_ref().and_then(Error::of_ranks);
        self.world.end_generation(of_ranks);
        if let Err(error) = self.rank_run.halt(self.run.loader.sampler()) {
            self.world.leave(&error, session::EXIT_LOST);
        }
        Next::Meet(why)
    }

    /// Takes steps, with evaluations and checkpoints between them, until the ranks meet or the run
    /// ends.
    fn train_steps(&mut self) -> Result<AfterStep> {
        let taken = self.rank_run.totals.steps;
        // A stop may have been requested during set-up. The others do not wait for new ranks.
        let asked = if self.is_over() {
            None
        } else {
            self.stop_poll.requested(taken, true, self.world)?
        };
        // Before anything is saved or compared.
        self.rank_run.give_state(&self.run.main)?;
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
        let stops = self.options.has_stopped_early(progress);
        if stops {
            self.run.plan.steps = number;
        }
        stops
    }

    /// Whether step `number` is logged.
    fn logs(&self, number: u64) -> bool {
        number == 1
            || self.run.plan.is_over(number)
            || number.is_multiple_of(self.options.log_every)
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
        Err(Error::remote(0, text, session::EXIT_LOST))
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
        let saves = self.run.plan.checkpoint_every > 0
            && (is_multiple(self.run.plan.checkpoint_every) || is_best || is_lost);
        if saves {
            self.save(number)?;
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
        let batch = in_phase(Phase::Step, || self.run.loader.load(step0))?;
        self.rank_run.clock.waits.data += began.elapsed();
        self.rank_run.workload.count(batch);
        self.rank_run.clock.count_lengths(batch);
        self.rank_run.step.measure_norm(logs);
        let ranks = &self.run.main;
        self.rank_run.take_step(batch, learning_rate, ranks)?;
        let stages = self.rank_run.step.stages().iter();
        let exposed = stages.map(|stage| stage.reducer().last_time().exposed);
        self.rank_run.clock.waits.reductions += exposed.sum::<Duration>();
        faults::rows(number, self.run.loader.rows());
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
        let epoch = self.run.loader.sampler().at(number - 1).epoch;
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
        let lines = self.trace.finish(self.world, &self.options.out)?;
        for line in &lines {
            self.program.note(line);
            self.rank_run.clock.restart();
        }
        Ok(())
    }

    /// Reads the statistics of the last step. Ends the run if they are not finite.
    fn log(&mut self, number: u64, epoch: u64, learning_rate: f64) -> Result<()> {
        faults::at(FaultPoint::Log)?;
        self.record_saved()?;
        let report = self.rank_run.step.report()?;
        self.check_finite(&report)?;
        // If rank 0 is lost before it has written the line, another one does.
        let is_elastic = self.world.is_elastic();
        let [gradients, weights] = self
            .rank_run
            .step
            .digests(report.stats.weight_sum, is_elastic)?;
        let [_, share] = self.rank_run.clock.shares();
        let rates = self.rank_run.clock.rates();
        // As many whole rows as were computed.
        let rows_per_s = share * rates.samples_per_s;
        let tflops = self.flop_of_a_row.map(|flop| rows_per_s * flop / 1e12);
        if tflops.is_some() && self.rank_run.clock.has_rates && self.matmul_tflops.is_none() {
            let measure = || matmuls::tflops(self.rank_run.step.stages(), self.world);
            self.matmul_tflops = Some(in_phase(Phase::Setup, measure)?);
            self.rank_run.clock.restart();
        }
        let loss = report.stats.loss();
        self.rank_run.totals.last_loss = Some(loss);
        if self.metrics_log.is_none() && !is_elastic {
            return Ok(());
        }
        let share = tflops.zip(self.matmul_tflops).map(|(own, of)| own / of);
        let is_on_cpu = self.run.devices.iter().all(|it| *it == Device::Cpu);
        let event = StepEvent {
            step: number,
            epoch: epoch + 1,
            loss,
            accuracy: self.task.accuracy(&report.stats),
            figures: self.task.figures(loss).into_iter().collect(),
            lr: learning_rate,
            grad_norm: report.grad_norm,
            tokens_per_s: self.tokens_per_s(rows_per_s),
            tflops,
            matmul_share: share.filter(|share| share.is_finite()),
            // On GPUs the host does not wait for reductions.
            reduce_ms: rates.reduce_ms.filter(|_| is_on_cpu),
            device_peak_mb: process::devices_peak_mb(&self.run.devices),
            digests: Some(StepDigests {
                batch: digest::of_batch(&mut self.run.loader, number - 1),
                gradients,
                weights,
            }),
            ..rates
        };
        if let Some(log) = self.metrics_log {
            self.program.logged(&event)?;
            log.write(&LogEvent::Step(event.clone()))?;
        }
        if is_elastic {
            self.rank_run.totals.line = (number, LogEvent::Step(event).to_line());
        }
        Ok(())
    }

    fn check_finite(&mut self, report: &crate::step::StepReport) -> Result<()> {
        let (step, loader) = (&mut self.rank_run.step, &mut self.run.loader);
        let error = nonfinite::explain(report, step, loader, &*self.task, self.world)?;
        error.map_or(Ok(()), Err)
    }

    /// Sums up what all ranks moved between devices and between each other.
    fn audit(&mut self) -> Result<()> {
        let audit = audit::audit(self.world, self.rank_run.workload, &self.run.devices)?;
        if let (Some(audit), Some(log)) = (audit, &mut *self.metrics_log) {
            if audit.is_worth_a_line() {
                self.program.note(&audit.to_string());
            }
            log.write(&LogEvent::Placement(&audit))?;
        }
        Ok(())
    }

    /// Whole rows a second as tokens a second, if the model predicts at each token of a row.
    fn tokens_per_s(&self, rows_per_s: f64) -> Option<f64> {
        let model = self.rank_run.step.stages().last()?.model();
        let (_, tokens) = model.output_shape.split_last()?;
        let in_row: usize = tokens.iter().product();
        (!tokens.is_empty()).then_some(rows_per_s * in_row as f64)
    }
}
