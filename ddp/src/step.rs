//! One training step: a map of everything.
//!
//! rows -> forward -> loss -> backward, each gradient reduced over the ranks as soon as it is complete -> join -> clip ->
//! optimizer. After the first step nothing here allocates, nothing crosses between devices, and nothing is read back by the
//! host: losses and norms stay where they are until somebody logs them.
//!
//! A step is two things: a few numbers that differ from step to step are sent ahead (`step/numbers.rs`); then comes the work,
//! which is the same each time and reads them on the device. So on a GPU the work can be captured once, and launched as a whole
//! from then on (`step/replay.rs`).

mod numbers;
mod replay;

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, announced, forbid_transfers, in_phase};
use ddp_kernels::{DType, Device, Tensor, ops};

use self::numbers::Numbers;
use self::replay::{Graphs, Way};
use crate::config::GraphChoice;
use crate::data::{Batch, InOrder, Micro};
use crate::error::Result;
use crate::faults::{self, Place};
use crate::models::Model;
use crate::nn::pass::Listener;
use crate::nn::{Loss, Pass, PassOptions, Saved, Scratch};
use crate::optim::{Clip, Optimizer};
use crate::reducer::{Reducer, ReducerOptions};

/// How steps are taken.
#[derive(Clone, Copy, Debug)]
pub struct StepOptions {
    /// How gradients are reduced.
    pub reducer: ReducerOptions,
    /// The largest norm of all gradients together; 0 for any.
    pub clip_norm: f64,
    /// The seed of what is drawn by sample and step.
    pub seed: u64,
    /// Whether the work of a step is captured once and launched as a whole: that of batches that a [`Loader`](crate::data::Loader)
    /// loads.
    pub graph: GraphChoice,
}

impl Default for StepOptions {
    /// No clipping, seed 0, gradients reduced by the defaults, captured where one rank trains on a GPU.
    fn default() -> StepOptions {
        StepOptions { reducer: ReducerOptions::default(), clip_norm: 0.0, seed: 0, graph: GraphChoice::Auto }
    }
}

/// A model in training, on one rank.
#[derive(Debug)]
pub struct Step {
    model: Model,
    loss: Box<dyn Loss>,
    optimizer: Optimizer,
    clip: Clip,
    reducer: Reducer,
    scratch: Scratch,
    saved: Saved,
    seed: u64,
    /// f32 [4]: over the global batch, once joined: the sum of losses, of weights, right answers, rows.
    stats: Tensor,
    /// The same over held-out rows.
    held_out_stats: Tensor,
    numbers: Numbers,
    graphs: Graphs,
    /// i64 [1]: the first step whose loss (or gradients' norm) was not finite on any rank; 0 for none.
    bad_step: Tensor,
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
        let device = model.params.device();
        let dtype = model.params.dtype();
        // Counts of many rows are exact in f64, which accelerators only store. In f32 they are up to 2²⁴.
        let held_out_dtype = if device == Device::Cpu { DType::F64 } else { dtype };
        Ok(Step {
            graphs: Graphs::new(options.graph, device, group.size())?,
            numbers: Numbers::new(device, 1)?,
            clip: Clip::new(options.clip_norm, &model.params)?,
            reducer: Reducer::new(&model.params, group, options.reducer)?,
            scratch: Scratch::new(device),
            saved: Saved::default(),
            seed: options.seed,
            stats: Tensor::zeros(&[4], dtype, device)?.named("loss statistics"),
            held_out_stats: Tensor::zeros(&[4], held_out_dtype, device)?.named("evaluation statistics"),
            bad_step: Tensor::zeros(&[1], DType::I64, device)?.named("first bad step"),
            own_bad_step: Tensor::zeros(&[1], DType::I64, device)?.named("this rank's first bad step"),
            model,
            loss,
            optimizer,
        })
    }

    /// Takes one step on this rank's part of a global batch. `measure_norm` asks for the gradients' norm also where
    /// nothing is clipped.
    pub fn run(&mut self, batch: &Batch, learning_rate: f64, measure_norm: bool) -> Result<()> {
        in_phase(Phase::Step, || {
            forbid_transfers(|| {
                self.send_numbers(batch, learning_rate)?;
                match self.graphs.way(batch, measure_norm, || self.reducer.begin_replay())? {
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
        self.numbers.send_rates(&self.optimizer, number_of(batch), learning_rate)
    }

    fn send_positions(&mut self, batch: &Batch) -> Result<()> {
        if batch.micro_count() > self.numbers.room() {
            self.graphs.forget();
            self.numbers = Numbers::new(self.stats.device(), batch.micro_count())?;
        }
        self.numbers.send_positions(number_of(batch), batch)
    }

    /// The step itself: the same in every step on batches of this size in this memory. On a GPU nothing in it waits, writes from
    /// the host, or takes a number from it.
    fn work(&mut self, batch: &Batch, measure_norm: bool) -> Result<()> {
        self.reducer.begin();
        ops::zero(&self.stats)?;
        for index in 0..batch.micro_count() {
            self.forward_backward(batch, &batch.micro(index)?, index)?;
        }
        if batch.mine == 0 {
            self.take_part_without_rows()?;
        }
        self.reducer.join()?;
        self.clip(measure_norm)?;
        self.update()
    }

    /// Takes the step as one that is captured, or eagerly if it cannot be.
    fn capture(&mut self, kind: replay::Kind, batch: &Batch, measure_norm: bool) -> Result<()> {
        // The work needs all of the step but its graphs.
        let mut graphs = std::mem::replace(&mut self.graphs, Graphs::none());
        let captured = graphs.capture(kind, || self.work(batch, measure_norm));
        self.graphs = graphs;
        if captured? {
            return Ok(());
        }
        self.reducer.abandon();
        self.work(batch, measure_norm)
    }

    /// One micro-batch: its loss, and its part of the gradients. The last one completes them.
    fn forward_backward(&mut self, batch: &Batch, micro: &Micro, index: usize) -> Result<()> {
        let last = index + 1 == batch.micro_count();
        let (seed, position) = (self.seed, self.numbers.position(index));
        let options = PassOptions { training: true, accumulate: index > 0, last, seed, position };
        let Step { model, loss, scratch, saved, reducer, stats, .. } = self;
        let mut pass = Pass::new(&model.params, scratch, saved, options, reducer);

        faults::at(Place::Forward)?;
        let output = model.forward(&mut pass, &micro.x)?;
        let gradient = loss.gradient(&mut pass, &output, &micro.targets, stats)?;
        if last {
            // Before it is summed over the ranks: whose rows were it?
            ops::mark_nonfinite(&self.own_bad_step, stats, self.numbers.step())?;
            pass.reduce(stats)?;
        }
        model.backward(&mut pass, &gradient)
    }

    /// The gradients and losses of no rows are zero, and the others wait for them.
    fn take_part_without_rows(&mut self) -> Result<()> {
        self.reducer.reduce(&self.stats)?;
        self.reducer.all_ready_with_zeros()
    }

    fn clip(&mut self, measure_norm: bool) -> Result<()> {
        let weights = self.stats.slice(1..2)?;
        self.clip.compute(&self.model.params, Some(&weights), measure_norm)?;
        // All of these are equal on all ranks, so all act alike.
        ops::mark_nonfinite(&self.bad_step, &self.stats, self.numbers.step())?;
        // A gradient may overflow where the loss does not; the norm tells, or else a look at all of them.
        let gradients = if measure_norm || self.clip.is_on() { self.clip.out() } else { self.model.params.gradients() };
        Ok(ops::mark_nonfinite(&self.bad_step, gradients, self.numbers.step())?)
    }

    fn update(&mut self) -> Result<()> {
        faults::at(Place::Optimizer)?;
        self.optimizer.apply(&self.model.params, Some(self.clip.out()), Some(&self.bad_step))
    }

    /// What the last step found out. Waits for it: for logs, not for every step.
    pub fn report(&self, norm_was_measured: bool) -> Result<StepReport> {
        announced("the log", || {
            let stats = Stats::read(&self.stats)?;
            let flag = |flag: &Tensor| -> Result<Option<u64>> {
                let step = flag.to_vec::<i64>()?[0];
                Ok((step != 0).then_some(step as u64))
            };
            let norm = if norm_was_measured || self.clip.is_on() { Some(read(self.clip.out())?[1]) } else { None };
            let (bad_step, own_bad_step) = (flag(&self.bad_step)?, flag(&self.own_bad_step)?);
            Ok(StepReport { stats, grad_norm: norm, bad_step, own_bad_step })
        })
    }

    /// The losses of held-out rows: those of all ranks together.
    pub fn evaluate(&mut self, batches: &mut InOrder, group: &Group) -> Result<Stats> {
        let stats = self.held_out_stats.clone();
        ops::zero(&stats)?;
        for index in 0..batches.count() {
            self.forward_only(batches.load(index)?, &stats)?;
        }
        group.all_reduce(&stats, Reduce::Sum, &Stream::default_of(stats.device())?)?;
        announced("the evaluation's result", || Stats::read(&stats))
    }

    /// The loss of each of this rank's rows as the model is now: dropout and all, as in the step that `batch` was for.
    pub fn losses_of(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        let stats = self.stats.zeros_like()?;
        let mut losses = Vec::new();
        self.send_positions(batch)?;
        for index in 0..batch.micro_count() {
            let micro = batch.micro(index)?;
            let (seed, position) = (self.seed, self.numbers.position(index));
            let options = PassOptions { training: true, accumulate: false, last: false, seed, position };
            let mut nobody = |_| Ok(());
            let Step { model, loss, scratch, saved, .. } = self;
            let mut pass = Pass::new(&model.params, scratch, saved, options, &mut nobody);
            let output = model.forward(&mut pass, &micro.x)?;
            let rows = loss.compute(&mut pass, &output, &micro.targets, &stats)?.rows;
            losses.extend(announced("which rows are not finite", || read(&rows))?);
        }
        Ok(losses)
    }

    fn forward_only(&mut self, batch: &Batch, stats: &Tensor) -> Result<()> {
        // Where nothing is drawn nobody asks for the position.
        let (seed, position) = (self.seed, self.numbers.position(0));
        let options = PassOptions { training: false, accumulate: false, last: true, seed, position };
        let mut nobody = |_| Ok(());
        let Step { model, loss, scratch, saved, .. } = self;
        let mut pass = Pass::new(&model.params, scratch, saved, options, &mut nobody);
        let output = model.forward(&mut pass, &batch.x)?;
        loss.compute(&mut pass, &output, &batch.targets, stats)?;
        Ok(())
    }

    /// The model as it is.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The reducer: its plan, and what it took.
    pub fn reducer(&self) -> &Reducer {
        &self.reducer
    }

    /// The optimizer and its moments.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// How many graphs there are that steps are launched as; none if steps are not captured.
    pub fn graphs(&self) -> Option<usize> {
        self.graphs.is_on().then(|| self.graphs.count())
    }

    /// The memory of activations, in bytes.
    pub fn activation_bytes(&self) -> usize {
        self.scratch.bytes()
    }
}

impl Stats {
    fn read(stats: &Tensor) -> Result<Stats> {
        let stats = read(stats)?;
        Ok(Stats { loss_sum: stats[0], weight_sum: stats[1], correct: stats[2], rows: stats[3] })
    }

    /// The mean loss; NaN where nothing counts.
    pub fn loss(&self) -> f64 {
        if self.weight_sum == 0.0 { f64::NAN } else { self.loss_sum / self.weight_sum }
    }

    /// The share of right answers; NaN of no rows.
    pub fn accuracy(&self) -> f64 {
        if self.rows == 0.0 { f64::NAN } else { self.correct / self.rows }
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
