//! One training step: a map of everything.
//!
//! rows -> forward -> loss -> backward, each gradient reduced over the ranks as soon as it is complete -> join -> clip ->
//! optimizer. After the first step nothing here allocates, nothing crosses between devices, and nothing is read back by the
//! host: losses and norms stay where they are until somebody logs them.
//!
//! A model may be split over several devices. Then it has a stage for each (`step/stage.rs`): activations and their gradients cross
//! between neighbours, and what all of them have to know before they update is found out on the last (`step/verdict.rs`).
//!
//! A step is two things: a few numbers that differ from step to step are sent ahead (`step/numbers.rs`); then comes the work,
//! which is the same each time and reads them on the device. So on a GPU the work can be captured once, and launched as a whole
//! from then on (`step/replay.rs`).

mod numbers;
mod replay;
mod stage;
mod verdict;

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, announced, forbid_transfers, in_phase};
use ddp_kernels::{DType, Device, Tensor, ops};

pub use self::replay::{GraphChoice, check_graph};
use self::replay::{Graphs, Way};
use self::stage::Through;
pub use self::stage::{Part, Stage};
use self::verdict::Verdict;
use crate::error::{Error, Result};
use crate::faults::{self, Place};
use crate::reducer::{Reducer, ReducerOptions};
use ddp_data::{Batch, InOrder, Micro};
use ddp_nn::Loss;
use ddp_nn::models::Model;
use ddp_nn::optim::Optimizer;
use ddp_nn::pass::Listener;

/// How steps are taken.
#[derive(Clone, Copy, Debug)]
pub struct StepOptions {
    /// How gradients are reduced.
    pub reducer: ReducerOptions,
    /// The largest norm of all gradients together; 0 for any.
    pub clip_norm: f64,
    /// The seed of what is drawn by sample and step.
    pub seed: u64,
    /// Whether the work of a step is captured once and launched as a whole: that of batches that a [`Loader`](ddp_data::Loader)
    /// loads.
    pub graph: GraphChoice,
}

impl Default for StepOptions {
    /// No clipping, seed 0, gradients reduced by the defaults, captured on a GPU.
    fn default() -> StepOptions {
        StepOptions {
            reducer: ReducerOptions::default(),
            clip_norm: 0.0,
            seed: 0,
            graph: GraphChoice::Auto,
        }
    }
}

/// A model in training, on one rank.
#[derive(Debug)]
pub struct Step {
    /// In the order of the layers, from the input on: at least one.
    stages: Vec<Stage>,
    loss: Box<dyn Loss>,
    seed: u64,
    /// f32 [4], on the last device: over the global batch, once joined: the sum of losses, of weights, right answers, rows.
    stats: Tensor,
    /// The same over held-out rows.
    held_out_stats: Tensor,
    verdict: Verdict,
    graphs: Graphs,
    /// i64 [1]: the first step whose loss was not finite on this rank; 0 for none.
    own_bad_step: Tensor,
}

/// What became of some rows, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stats {
    /// The sum of their losses.
    pub loss_sum: f64,
    /// What to divide it by for the mean.
    pub weight_sum: f64,
    /// How many are predicted right.
    pub correct: f64,
    /// How many count.
    pub rows: f64,
}

/// What a step found out, as the host reads it for a log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Over the global batch.
    pub stats: Stats,
    /// The norm of the mean gradients, before clipping; none if it was not asked for.
    pub grad_norm: Option<f64>,
    /// The first step that was not finite on any rank; from then on the model is left as it was.
    pub bad_step: Option<u64>,
    /// The same for this rank's own rows.
    pub own_bad_step: Option<u64>,
}

impl Step {
    /// Steps of `model` with the ranks of `group`.
    pub fn new(
        model: Model,
        loss: Box<dyn Loss>,
        optimizer: Optimizer,
        group: Group,
        options: &StepOptions,
    ) -> Result<Step> {
        Step::over(
            vec![Part {
                model,
                optimizer,
                group,
            }],
            loss,
            options,
        )
    }

    /// Steps of a model whose layers are split over several devices: `parts` in the order of the layers, as
    /// [`Model::split`](ddp_nn::models::Model::split) makes them, each with a group of its own. Features lie on the first device,
    /// targets on the last.
    pub fn over(parts: Vec<Part>, loss: Box<dyn Loss>, options: &StepOptions) -> Result<Step> {
        let stages = parts
            .into_iter()
            .map(|part| Stage::new(part, options))
            .collect::<Result<Vec<_>>>()?;
        let last = stages.last().ok_or_else(|| {
            Error::Usage("a step over no devices: give it a part at least".into())
        })?;
        let (device, dtype) = (last.device(), last.model.params.master_dtype());
        let graphs = match stages.len() {
            1 => Graphs::new(options.graph, device, last.reducer.group().size())?,
            _ => Graphs::of_several(options.graph, stages.len())?,
        };
        // Counts of many rows are exact in f64, which accelerators only store. In f32 they are up to 2²⁴.
        let held_out_dtype = if device == Device::Cpu {
            DType::F64
        } else {
            dtype
        };
        Ok(Step {
            graphs,
            verdict: Verdict::new(&stages, options.clip_norm)?,
            loss,
            seed: options.seed,
            stats: Tensor::zeros(&[4], dtype, device)?.named("loss statistics"),
            held_out_stats: Tensor::zeros(&[4], held_out_dtype, device)?
                .named("evaluation statistics"),
            own_bad_step: Tensor::zeros(&[1], DType::I64, device)?
                .named("this rank's first bad step"),
            stages,
        })
    }

    /// Takes one step on this rank's part of a global batch. `measure_norm` asks for the gradients' norm also where
    /// nothing is clipped.
    pub fn run(&mut self, batch: &Batch, learning_rate: f64, measure_norm: bool) -> Result<()> {
        in_phase(Phase::Step, || {
            forbid_transfers(|| {
                self.send_numbers(batch, learning_rate)?;
                let before_launch = || {
                    self.stages
                        .iter_mut()
                        .try_for_each(|stage| stage.reducer.begin_replay())
                };
                match self.graphs.way(batch, measure_norm, before_launch)? {
                    Way::Launched => Ok(()),
                    Way::Eagerly => self.work(batch, measure_norm),
                    Way::Capture(kind) => self.capture(kind, batch, measure_norm),
                }
            })
        })
    }

    /// All that differs from one step to the next, ahead of the work.
    fn send_numbers(&mut self, batch: &Batch, learning_rate: f64) -> Result<()> {
        faults::begin(number_of(batch));
        self.send_positions(batch)?;
        self.stages
            .iter_mut()
            .try_for_each(|stage| stage.send_rates(number_of(batch), learning_rate))
    }

    fn send_positions(&mut self, batch: &Batch) -> Result<()> {
        // For the largest share that any rank has of such a batch: whether graphs are forgotten must be the same on all ranks.
        let ranks = self.last().reducer.group().size();
        let most = batch.micro_count_max(ranks);
        if most > self.last().numbers.room() {
            self.graphs.forget();
            self.stages
                .iter_mut()
                .try_for_each(|stage| stage.make_room(most))?;
        }
        self.stages
            .iter_mut()
            .try_for_each(|stage| stage.numbers.send_positions(number_of(batch), batch))
    }

    /// The step itself: the same in every step on batches of this size in this memory. On a GPU nothing in it waits, writes from
    /// the host, or takes a number from it.
    fn work(&mut self, batch: &Batch, measure_norm: bool) -> Result<()> {
        self.stages
            .iter_mut()
            .try_for_each(|stage| stage.reducer.begin())?;
        ops::zero(&self.stats)?;
        for index in 0..batch.micro_count() {
            self.forward_backward(batch, &batch.micro(index)?, index)?;
        }
        if batch.mine == 0 {
            self.take_part_without_rows()?;
        }
        self.stages
            .iter_mut()
            .try_for_each(|stage| stage.reducer.join())?;
        self.verdict
            .reach(&mut self.stages, &self.stats, measure_norm)?;
        faults::at(Place::Optimizer)?;
        self.verdict.update(&self.stages)
    }

    /// Takes the step as one that is captured, or eagerly if it cannot be.
    fn capture(&mut self, kind: replay::Kind, batch: &Batch, measure_norm: bool) -> Result<()> {
        // The work needs all of the step but its graphs.
        let mut graphs = std::mem::replace(&mut self.graphs, Graphs::none());
        let group = self.last().reducer.group().clone();
        let captured = graphs.capture(
            kind,
            || self.work(batch, measure_norm),
            |well| Ok(group.all_agree(well)?),
        );
        self.graphs = graphs;
        if captured? {
            return Ok(());
        }
        self.stages
            .iter_mut()
            .for_each(|stage| stage.reducer.abandon());
        self.work(batch, measure_norm)
    }

    /// One micro-batch: its loss, and its part of the gradients. The last one completes them.
    fn forward_backward(&mut self, batch: &Batch, micro: &Micro, index: usize) -> Result<()> {
        let last = index + 1 == batch.micro_count();
        let through = Through {
            training: true,
            micro_batch: index,
            last,
            seed: self.seed,
            reduces: true,
        };
        faults::at(Place::Forward)?;
        let number = self.last().numbers.step().clone();
        let Step {
            stages,
            loss,
            stats,
            own_bad_step,
            ..
        } = self;
        through.run(stages, &micro.x, &mut |pass, output| {
            let gradient = loss.gradient(pass, output, &micro.targets, stats)?;
            if last {
                // Before it is summed over the ranks: whose rows were it?
                ops::mark_nonfinite(own_bad_step, stats, &number)?;
                pass.reduce(stats)?;
            }
            Ok(Some(gradient))
        })
    }

    /// The gradients and losses of no rows are zero, and the others wait for them: in the order in which a backward completes them.
    fn take_part_without_rows(&mut self) -> Result<()> {
        let stats = self.stats.clone();
        self.last_mut().reducer.reduce(&stats)?;
        self.stages
            .iter_mut()
            .rev()
            .try_for_each(|stage| stage.reducer.all_ready_with_zeros())
    }

    /// What the last step found out. Waits for it: for logs, not for every step.
    pub fn report(&self, norm_was_measured: bool) -> Result<StepReport> {
        announced("the log", || {
            let stats = Stats::read(&self.stats)?;
            let flag = |flag: &Tensor| -> Result<Option<u64>> {
                let step = flag.to_vec::<i64>()?[0];
                Ok((step != 0).then_some(step as u64))
            };
            let clip = self.verdict.clip();
            let norm = if norm_was_measured || clip.is_on() {
                Some(read(clip.out())?[1])
            } else {
                None
            };
            let (bad_step, own_bad_step) =
                (flag(self.verdict.bad_step())?, flag(&self.own_bad_step)?);
            Ok(StepReport {
                stats,
                grad_norm: norm,
                bad_step,
                own_bad_step,
            })
        })
    }

    /// Makes the values whole on this rank: all ranks call it together, before values are looked at outside of a step. Only ZeRO-1 leaves anything
    /// to do.
    pub fn gather(&mut self) -> Result<()> {
        self.stages
            .iter_mut()
            .try_for_each(|stage| stage.reducer.gather_all(&stage.model.params))
    }

    /// The losses of held-out rows: those of all ranks together.
    pub fn evaluate(&mut self, batches: &mut InOrder, group: &Group) -> Result<Stats> {
        self.evaluate_with(batches, group, &mut |_, _| Ok(()))
    }

    /// As `evaluate`; `each` is called with every batch of this rank and what the model gives for it, on the last device.
    pub fn evaluate_with(
        &mut self,
        batches: &mut InOrder,
        group: &Group,
        each: &mut dyn FnMut(&Batch, &Tensor) -> Result<()>,
    ) -> Result<Stats> {
        self.gather()?;
        let stats = self.held_out_stats.clone();
        ops::zero(&stats)?;
        let through = Through {
            training: false,
            micro_batch: 0,
            last: true,
            seed: self.seed,
            reduces: false,
        };
        for index in 0..batches.count() {
            let batch = batches.load(index)?;
            let loss = &self.loss;
            through.run(&mut self.stages, &batch.x, &mut |pass, output| {
                loss.compute(pass, output, &batch.targets, &stats)?;
                each(batch, output)?;
                Ok(None)
            })?;
        }
        // Ranks whose group is of host memory add them up there.
        let device = group.device().unwrap_or(Device::Cpu);
        let stats = announced("the evaluation's result", || match device {
            Device::Cpu => stats.to((device, DType::F64)),
            _ => Ok(stats),
        })?;
        group.all_reduce(&stats, Reduce::Sum, &Stream::default_of(device)?)?;
        announced("the evaluation's result", || Stats::read(&stats))
    }

    /// What the model gives for each of this rank's rows, batch by batch, as in evaluation: `each` is called with the batch and its output,
    /// f32 `[rows, O]` in host memory. All ranks call it together.
    pub fn outputs(
        &mut self,
        batches: &mut InOrder,
        each: &mut dyn FnMut(&Batch, &Tensor) -> Result<()>,
    ) -> Result<()> {
        self.gather()?;
        let through = Through {
            training: false,
            micro_batch: 0,
            last: true,
            seed: self.seed,
            reduces: false,
        };
        for index in 0..batches.count() {
            let batch = batches.load(index)?;
            through.run(&mut self.stages, &batch.x, &mut |_, output| {
                let output = announced("what the model gives", || {
                    output.to((Device::Cpu, DType::F32))
                })?;
                each(batch, &output)?;
                Ok(None)
            })?;
        }
        Ok(())
    }

    /// The loss of each of this rank's rows as the model is now: dropout and all, as in the step that `batch` was for.
    pub fn losses_of(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        let stats = self.stats.zeros_like()?;
        let mut losses = Vec::new();
        self.send_positions(batch)?;
        for index in 0..batch.micro_count() {
            let micro = batch.micro(index)?;
            let through = Through {
                training: true,
                micro_batch: index,
                last: false,
                seed: self.seed,
                reduces: false,
            };
            let loss = &self.loss;
            through.run(&mut self.stages, &micro.x, &mut |pass, output| {
                let rows = loss.compute(pass, output, &micro.targets, &stats)?.rows;
                losses.extend(announced("which rows are not finite", || read(&rows))?);
                Ok(None)
            })?;
        }
        Ok(losses)
    }

    /// The stages, one a device, from the input on.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    fn last(&self) -> &Stage {
        self.stages.last().expect("a step has a stage")
    }

    fn last_mut(&mut self) -> &mut Stage {
        self.stages.last_mut().expect("a step has a stage")
    }

    /// The model as it is: of one that is split over devices the first part.
    pub fn model(&self) -> &Model {
        self.stages[0].model()
    }

    /// The reducer: its plan, and what it took. Of a model that is split over devices the first part's.
    pub fn reducer(&self) -> &Reducer {
        self.stages[0].reducer()
    }

    /// The optimizer and its moments: of a model that is split over devices the first part's.
    pub fn optimizer(&self) -> &Optimizer {
        self.stages[0].optimizer()
    }

    /// Says that the optimizer's moments were zero behind step `step`.
    pub fn count_moments_from(&mut self, step: u64) {
        self.stages
            .iter_mut()
            .for_each(|stage| stage.optimizer.count_from(step));
    }

    /// How many graphs there are that steps are launched as; none if steps are not captured.
    pub fn graphs(&self) -> Option<usize> {
        self.graphs.is_on().then(|| self.graphs.count())
    }

    /// The memory of activations, in bytes, on all devices.
    pub fn activation_bytes(&self) -> usize {
        self.stages.iter().map(Stage::activation_bytes).sum()
    }
}

impl Stats {
    fn read(stats: &Tensor) -> Result<Stats> {
        let stats = read(stats)?;
        Ok(Stats {
            loss_sum: stats[0],
            weight_sum: stats[1],
            correct: stats[2],
            rows: stats[3],
        })
    }

    /// The mean loss; NaN where nothing counts.
    pub fn loss(&self) -> f64 {
        if self.weight_sum == 0.0 {
            f64::NAN
        } else {
            self.loss_sum / self.weight_sum
        }
    }

    /// The share of right answers; NaN of no rows.
    pub fn accuracy(&self) -> f64 {
        if self.rows == 0.0 {
            f64::NAN
        } else {
            self.correct / self.rows
        }
    }
}

/// Steps are counted from 1: 0 is the model as it began.
fn number_of(batch: &Batch) -> u64 {
    batch.step + 1
}

/// A few numbers, brought to the host and there to f64.
fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()?)
}
