//! The loop around the step: the log, evaluations, and the model at the end.

pub(crate) mod model;
mod nonfinite;
mod setup;
mod shown;

use std::fmt::Display;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ddp_comm::{Field, Group, World};
use ddp_kernels::Device;
use ddp_kernels::transfer::{Ledger, Phase, in_phase};

use crate::audit::{self, Share};
use crate::checkpoint;
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

/// How long the other ranks wait for the one that saves.
const SAVING_MAX: Duration = Duration::from_secs(6 * 3600);

/// Trains as `config` says, as one of the ranks of `world`. What comes of it lies in the folder `config.out`.
pub fn train(config: &Config, world: &World) -> Result<()> {
    in_phase(Phase::Setup, || setup::prepare(config, world))?.run()
}

/// Checks everything that can be without training, and says what the run will take.
pub fn dry_run(_config: &Config, _world: &World, _say: &mut dyn FnMut(&dyn Display) -> Result<()>) -> Result<()> {
    Err(Error::Internal("--dry-run is not there yet".into()))
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
    /// Rank 0 alone keeps the record and shows how things are going.
    desk: Option<Desk>,
    done: Done,
    /// What of it was this rank's.
    share: Share,
}

/// What rank 0 writes and shows.
struct Desk {
    record: Record,
    progress: Progress,
}

/// What has been done so far, and how fast.
struct Done {
    started: Instant,
    steps: u64,
    samples: u64,
    last_loss: Option<f64>,
    evaluation: Option<Stats>,
    /// Since when, and how much: what is not a step does not count.
    since: Instant,
    steps_since: u64,
    samples_since: u64,
    /// What of that time the host spent waiting for rows, for reductions, and for checkpoints.
    held_up: HeldUp,
    /// Whether how fast it went says anything: not on a simulated GPU.
    rates_count: bool,
}

/// Where the host waited.
#[derive(Clone, Copy, Debug, Default)]
struct HeldUp {
    data: Duration,
    reductions: Duration,
    saving: Duration,
}

/// What steps took, in milliseconds each, since the last reading.
struct Rates {
    step_ms: f64,
    samples_per_s: f64,
    data_ms: f64,
    reduce_ms: f64,
    save_ms: f64,
}

impl Done {
    fn nothing(rates_count: bool) -> Done {
        let now = Instant::now();
        let (steps, samples, steps_since, samples_since) = (0, 0, 0, 0);
        let (last_loss, evaluation) = (None, None);
        Done {
            started: now,
            steps,
            samples,
            last_loss,
            evaluation,
            since: now,
            steps_since,
            samples_since,
            held_up: HeldUp::default(),
            rates_count,
        }
    }

    /// A step over so many rows.
    fn count(&mut self, rows: u64) {
        self.steps += 1;
        self.samples += rows;
        self.steps_since += 1;
        self.samples_since += rows;
    }

    /// What steps took since the last reading; no numbers where they would say nothing.
    fn rates(&mut self) -> Rates {
        let elapsed_s = if self.rates_count { self.since.elapsed().as_secs_f64().max(1e-9) } else { f64::NAN };
        let steps = self.steps_since.max(1) as f64;
        let each = |time: Duration| if self.rates_count { time.as_secs_f64() * 1e3 / steps } else { f64::NAN };
        let rates = Rates {
            step_ms: elapsed_s * 1e3 / steps,
            samples_per_s: self.samples_since as f64 / elapsed_s,
            data_ms: each(self.held_up.data),
            reduce_ms: each(self.held_up.reductions),
            save_ms: each(self.held_up.saving),
        };
        self.restart_clock();
        rates
    }

    fn restart_clock(&mut self) {
        (self.since, self.steps_since, self.samples_since) = (Instant::now(), 0, 0);
        self.held_up = HeldUp::default();
    }
}

impl Trainer<'_> {
    /// Trains. The record's last line says how it ended, also where that was an error.
    fn run(mut self) -> Result<()> {
        let trained = self.all_steps().and_then(|()| in_phase(Phase::Checkpoint, || self.save_together()));
        // Only of a run that went well are all ranks there to be asked.
        let result = trained.and_then(|model| self.audit().map(|()| model));
        let (reason, exit_code) = match &result {
            Ok(_) => ("done".to_string(), 0),
            Err(error) => (error.to_string(), error.exit_code()),
        };
        let closed = self.close(&reason, exit_code);
        let report = self.report();
        // What went wrong first is what counts.
        let model = result?;
        closed?;
        if let (Some(desk), Some(model)) = (&mut self.desk, &model) {
            let record = self.config.out.join(EVENTS_FILE);
            desk.progress.note(&format!("model {}, record {}", model.display(), record.display()));
            report.iter().for_each(|report| desk.progress.note(&format!("report {}", report.display())));
            desk.progress.finish();
        }
        Ok(())
    }

    fn all_steps(&mut self) -> Result<()> {
        let (steps, eval_every) = (self.plan.steps, self.plan.eval_every);
        for step0 in 0..steps {
            let number = step0 + 1;
            let logs = number == 1 || number == steps || number % self.config.log_every == 0;
            let learning_rate = self.schedule.learning_rate(number);
            let began = Instant::now();
            let batch = in_phase(Phase::Step, || self.loader.load(step0))?;
            self.done.held_up.data += began.elapsed();
            let (rows, epoch) = (batch.rows, batch.epoch);
            self.share.count(batch);
            self.step.run(batch, learning_rate, logs)?;
            self.done.held_up.reductions += self.step.reducer().last_time().exposed;
            self.done.count(rows);
            if let Some(desk) = &self.desk {
                desk.progress.step(number);
            }
            if logs {
                in_phase(Phase::Log, || self.log(number, epoch, learning_rate))?;
            }
            if eval_every > 0 && number % eval_every == 0 && number != steps {
                in_phase(Phase::Evaluation, || self.evaluate(number))?;
            }
        }
        in_phase(Phase::Evaluation, || self.evaluate(steps))
    }

    /// Reads what the last step found out; ends the run if it was not finite.
    fn log(&mut self, number: u64, epoch: u64, learning_rate: f64) -> Result<()> {
        faults::at(Place::Log)?;
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

    /// Tries the model on held-out rows, over all ranks, if there are such rows.
    fn evaluate(&mut self, number: u64) -> Result<()> {
        if self.held_out_rows == 0 {
            return Ok(());
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
        if let Some(desk) = &mut self.desk {
            desk.progress.note(&format!("step {number}: on held-out rows {}", describe(&stats, event.accuracy)));
            desk.record.eval(&event)?;
        }
        evidence.map_or(Ok(()), |evidence| self.keep(evidence, number))?;
        self.done.restart_clock();
        Ok(())
    }

    /// Ends the run where ranks hold different models after step `number`: memory or a link that flips bits, or a mistake. Their
    /// gradients are one sum, so every bit should be the same.
    fn compare_replicas(&mut self, number: u64) -> Result<()> {
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

    /// Saves the model. Nobody goes on before it is safe, for a rank that ends early ends the job; and a large model may take
    /// longer than ranks otherwise wait for each other.
    fn save_together(&mut self) -> Result<Option<PathBuf>> {
        let model = self.save()?;
        self.world.barrier_within(SAVING_MAX.max(self.world.timeout()))?;
        Ok(model)
    }

    /// Saves the model, on rank 0. All ranks make its values whole.
    fn save(&mut self) -> Result<Option<PathBuf>> {
        if self.held_out_rows == 0 {
            // Else the last evaluation has.
            self.compare_replicas(self.plan.steps)?;
        }
        self.step.gather()?;
        self.check_values()?;
        if self.desk.is_none() {
            return Ok(None);
        }
        let parts: Vec<_> = self.step.stages().iter().map(|stage| &stage.model().params).collect();
        checkpoint::save_model(&self.config.out, self.plan.steps, &parts).map(Some)
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
            samples_per_s: if self.done.rates_count { self.done.samples as f64 / seconds.max(1e-9) } else { f64::NAN },
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
