//! The loop around the step: the log, evaluations, and the model at the end.

mod desk;
mod done;
mod dry_run;
mod finished;
pub(crate) mod model;
mod nonfinite;
mod pulse;
mod resuming;
mod saving;
mod setup;
mod shown;

use std::time::{Duration, Instant};

use ddp_comm::{Field, Group, World};
use ddp_kernels::Device;
use ddp_kernels::transfer::{Ledger, Phase, in_phase};

use self::done::{Done, Rates};
pub use self::dry_run::dry_run;
use self::pulse::Pulse;
use self::saving::Saving;
use crate::audit::{self, Share};
use crate::checkpoint::{Best, MODEL_FILE};
use crate::config::{Config, Plan};
use crate::data::{InOrder, Loader, Task};
use crate::error::{Error, Result};
use crate::faults::{self, Place};
use crate::metrics::{EVENTS_FILE, End, EvalEvent, Record, StepEvent};
use crate::optim::Schedule;
use crate::process;
use crate::progress::{Figures, Progress};
use crate::report::evidence::{Evidence, HeldOut};
use crate::step::{Stage, Stats, Step, StepReport};

/// How long the record and the report may hold up the word of what went wrong.
const CLOSING_MAX: Duration = Duration::from_secs(10);

/// Trains as `config` says, as one of the ranks of `world`. What comes of it lies in the folder `config.out`. A run that is asked to stop saves,
/// and ends with [`Error::Stopped`]; asked before its first step it ends the process at once, as [`World::fail`] does. One that is resumed and
/// finished already is left as it is, its record completed where it lacks its end.
///
/// Behind an error other than [`Error::Stopped`] and [`Error::NonFinite`] the process is expected to end: threads of the run may still wait for a
/// disk or for another rank, so its memory, and the lock of its folder, are kept until then.
pub fn train(config: &Config, world: &World) -> Result<()> {
    let stops = world.catch_stop();
    match in_phase(Phase::Setup, || setup::prepare(config, world, stops))? {
        Some(trainer) => trainer.run(),
        None => Ok(()),
    }
}

/// A training run, on one rank.
struct Trainer<'a> {
    config: &'a Config,
    world: &'a World,
    plan: Plan,
    task: Task,
    schedule: Schedule,
    loader: Loader,
    held_out: InOrder,
    held_out_rows: u64,
    /// What they are, for the report.
    shown: HeldOut,
    step: Step,
    main: Group,
    /// Dropped before the record, whose lock keeps others out of the folder.
    saving: Saving,
    /// Rank 0 alone keeps the record and shows how things are going.
    desk: Option<Desk>,
    done: Done,
    pulse: Pulse,
    /// What of it was this rank's.
    share: Share,
}

/// What rank 0 writes and shows.
struct Desk {
    record: Record,
    progress: Progress,
}

impl Trainer<'_> {
    /// Trains. The record's last line says how it ended, also where that was an error.
    fn run(mut self) -> Result<()> {
        let trained = self.all_steps().and_then(|()| self.save_last(self.plan.steps));
        if matches!(trained, Err(Error::NonFinite(_))) {
            // What was good is not lost because it was still being written.
            _ = self.saving.saver.finish().and_then(|_| self.tell_saved());
        }
        // Only of a run that went well are all ranks there to be asked.
        let result = trained.and_then(|saved| self.audit().map(|()| saved));
        let (reason, exit_code) = match &result {
            Ok(_) => ("done".to_string(), 0),
            Err(error) => (error.to_string(), error.exit_code()),
        };
        let all_know = matches!(result, Err(Error::Stopped(_) | Error::NonFinite(_)));
        let has_failed = result.is_err() && !all_know;
        // What made it fail, as a disk that is stuck, may hold up these as well.
        let ending = has_failed.then(|| self.world.fail_after(CLOSING_MAX, &reason, exit_code));
        let closed = self.close(&reason, exit_code);
        let report = self.report();
        drop(ending);
        if has_failed {
            // Threads of it may wait for what never comes: the cause has to be told before anybody waits for them, and the process ends then.
            std::mem::forget(self);
            return result.map(drop);
        }
        if all_know {
            // The first to leave ends the others, and the record has to be closed. What went wrong first is what counts.
            _ = self.world.barrier();
        }
        let saved = result?;
        closed?;
        if let (Some(desk), Some(folder)) = (&mut self.desk, &saved) {
            let (model, record) = (folder.join(MODEL_FILE), self.config.out.join(EVENTS_FILE));
            desk.progress.note(&format!("model {}, record {}", model.display(), record.display()));
            report.iter().for_each(|report| desk.progress.note(&format!("report {}", report.display())));
            desk.progress.finish();
        }
        Ok(())
    }

    fn all_steps(&mut self) -> Result<()> {
        let (steps, eval_every) = (self.plan.steps, self.plan.eval_every);
        let taken = self.done.steps;
        if taken > 0 && self.saving.saved != Some(taken) {
            // From a checkpoint that had been put aside: whoever comes next is to go on from it, too.
            self.save(taken)?;
            self.saving.saver.finish()?;
            self.tell_saved()?;
        }
        if taken < steps {
            // Who was asked to stop while it was set up.
            self.stop_if_asked(taken, true)?;
        }
        for step0 in taken..steps {
            let number = step0 + 1;
            let logs = number == 1 || number == steps || number % self.config.log_every == 0;
            self.take_step(step0, logs)?;
            if number == steps {
                break;
            }
            let evaluates = eval_every > 0 && number % eval_every == 0;
            let is_best = evaluates && in_phase(Phase::Evaluation, || self.evaluate(number))?;
            let saves = self.saving_is_due(number, is_best);
            if saves {
                self.save(number)?;
            }
            self.stop_if_asked(number, evaluates || saves)?;
        }
        in_phase(Phase::Evaluation, || self.evaluate(steps)).map(drop)
    }

    /// One step, from its rows to its line in the record.
    fn take_step(&mut self, step0: u64, logs: bool) -> Result<()> {
        let number = step0 + 1;
        let learning_rate = self.schedule.learning_rate(number);
        let began = Instant::now();
        let batch = in_phase(Phase::Step, || self.loader.load(step0))?;
        self.done.held_up.data += began.elapsed();
        let (rows, epoch) = (batch.rows, batch.epoch);
        self.share.count(batch);
        self.step.run(batch, learning_rate, logs)?;
        self.done.held_up.reductions += self.step.reducer().last_time().exposed;
        self.done.count(rows);
        faults::rows(number, self.loader.rows());
        if let Some(desk) = &self.desk {
            desk.progress.step(number);
        }
        if logs { in_phase(Phase::Log, || self.log(number, epoch, learning_rate)) } else { Ok(()) }
    }

    /// Ends the run behind step `number` if it was asked to stop and all ranks know: saved, so that it can go on. `now`: they find out also where
    /// no beat is due.
    fn stop_if_asked(&mut self, number: u64, now: bool) -> Result<()> {
        match self.pulse.beat(number, now)? {
            Some(signal) => Err(self.stop(number, signal)?),
            None => Ok(()),
        }
    }

    /// Reads what the last step found out; ends the run if it was not finite.
    fn log(&mut self, number: u64, epoch: u64, learning_rate: f64) -> Result<()> {
        faults::at(Place::Log)?;
        self.tell_saved()?;
        let report: StepReport = self.step.report(true)?;
        if let Some(bad_step) = report.bad_step {
            return Err(self.explain_nonfinite(bad_step, report.own_bad_step)?);
        }
        let Rates { step_ms, samples_per_s, data_ms, reduce_ms, save_ms } = self.done.rates();
        // On GPUs the host waits for none of them.
        let reduce_ms = (self.step.model().params.device() == Device::Cpu).then_some(reduce_ms);
        let loss = report.stats.loss();
        self.done.last_loss = Some(loss);
        let accuracy = self.counts_answers().then(|| report.stats.accuracy());
        if let Some(desk) = &mut self.desk {
            let grad_norm = report.grad_norm;
            let epoch = epoch + 1;
            let lr = learning_rate;
            let event = StepEvent {
                step: number,
                epoch,
                loss,
                lr,
                grad_norm,
                samples_per_s,
                step_ms,
                data_ms,
                reduce_ms,
                save_ms,
            };
            desk.progress.figures(&Figures { step: number, epoch, loss, accuracy, samples_per_s });
            desk.record.step(&event)?;
        }
        Ok(())
    }

    /// Tries the model on held-out rows, over all ranks, if there are such rows. Whether no model before it was as good.
    fn evaluate(&mut self, number: u64) -> Result<bool> {
        if self.held_out_rows == 0 {
            return Ok(false);
        }
        self.compare_replicas(number)?;
        // What the report shows is that of the last one.
        let mut evidence = Evidence::of(&self.task).filter(|_| number == self.plan.steps);
        let stats = match &mut evidence {
            None => self.step.evaluate(&mut self.held_out, &self.main)?,
            Some(evidence) => {
                let mut see = |batch: &_, output: &_| evidence.see(batch, output);
                self.step.evaluate_with(&mut self.held_out, &self.main, &mut see)?
            }
        };
        self.done.evaluation = Some(stats);
        let event = EvalEvent { step: number, loss: stats.loss(), accuracy: self.accuracy() };
        let is_best = self.done.evaluated(Best { step: number, loss: event.loss, accuracy: event.accuracy });
        if let Some(desk) = &mut self.desk {
            desk.progress.note(&format!("step {number}: on held-out rows {}", describe(&stats, event.accuracy)));
            desk.record.eval(&event)?;
        }
        evidence.map_or(Ok(()), |evidence| self.keep(evidence, number))?;
        self.done.restart_clock();
        Ok(is_best)
    }

    /// Ends the run where ranks hold different models after step `number`: memory or a link that flips bits, or a mistake. Their
    /// gradients are one sum, so every bit should be the same.
    fn compare_replicas(&mut self, number: u64) -> Result<()> {
        self.done.compared = Some(number);
        if self.world.size() == 1 {
            return Ok(());
        }
        self.step.gather()?;
        let mut lines = String::new();
        for stage in self.step.stages() {
            for (name, hash) in stage.model().params.value_hashes()? {
                lines += &format!("{name} with the hash {hash:016x}\n");
            }
        }
        let way_out = "One rank's memory or GPU, or a link between them, has changed bits: run again without that rank's machine, and test it \
                       (nvidia-smi -q -d ECC, dcgmi diag). Nothing was saved.";
        Ok(self.world.handshake(&[Field::must_match(format!("the model after step {number}"), lines, way_out)])?)
    }

    /// Whether right answers can be counted.
    fn counts_answers(&self) -> bool {
        matches!(self.task, Task::Classification { .. })
    }

    /// That of the last evaluation.
    fn accuracy(&self) -> Option<f64> {
        self.done.evaluation.filter(|_| self.counts_answers()).map(|stats| stats.accuracy())
    }

    /// Sums up what all ranks moved between devices and to each other.
    fn audit(&mut self) -> Result<()> {
        let devices: Vec<Device> = self.step.stages().iter().map(Stage::device).collect();
        let audit = audit::audit(self.world, self.share, &devices)?;
        if let (Some(audit), Some(desk)) = (audit, &mut self.desk) {
            desk.progress.note(&audit.to_string());
            desk.record.placement(&audit)?;
        }
        Ok(())
    }

    /// The record's last line, on rank 0.
    fn close(&mut self, reason: &str, exit_code: u8) -> Result<()> {
        let accuracy = self.accuracy();
        let Some(desk) = &mut self.desk else { return Ok(()) };
        let seconds = self.done.started.elapsed().as_secs_f64();
        let end = End {
            reason,
            exit_code,
            steps: self.done.steps,
            samples: self.done.samples,
            seconds,
            samples_per_s: if self.done.rates_count {
                self.done.samples_here as f64 / seconds.max(1e-9)
            } else {
                f64::NAN
            },
            loss: self.done.last_loss,
            eval_loss: self.done.evaluation.map(|stats| stats.loss()),
            accuracy,
            peak_mb: process::peak_mb(),
            device_peak_mb: self
                .step
                .stages()
                .iter()
                .filter_map(|stage| process::device_peak_mb(stage.device()))
                .reduce(f64::max),
        };
        desk.record.end(&end, &Ledger::of_process())
    }
}

/// `loss 0.0312, accuracy 99.10%`
fn describe(stats: &Stats, accuracy: Option<f64>) -> String {
    let accuracy = accuracy.map_or(String::new(), |accuracy| format!(", accuracy {:.2}%", accuracy * 100.0));
    format!("loss {:.4}{accuracy}", stats.loss())
}
