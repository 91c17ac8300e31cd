//! One training step: a map of everything.
//!
//! rows -> forward -> loss -> backward, each gradient reduced over the ranks as soon as it is complete -> join -> clip ->
//! optimizer. After the first step nothing here allocates, nothing crosses between devices, and nothing is read back by the
//! host: losses and norms stay where they are until somebody logs them.

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, announced, forbid_transfers, in_phase};
use ddp_kernels::{DType, Device, Tensor, ops};

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
}

impl Default for StepOptions {
    /// No clipping, seed 0, gradients reduced by the defaults.
    fn default() -> StepOptions {
        StepOptions { reducer: ReducerOptions::default(), clip_norm: 0.0, seed: 0 }
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
    /// i64 [1]: the number of this step, from 1.
    number: Tensor,
    /// i64 [2]: the step, and the row of the global batch where a pass begins.
    position: Tensor,
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
        Ok(Step {
            clip: Clip::new(options.clip_norm, &model.params)?,
            reducer: Reducer::new(&model.params, group, options.reducer)?,
            scratch: Scratch::new(device),
            saved: Saved::default(),
            seed: options.seed,
            stats: Tensor::zeros(&[4], dtype, device)?.named("loss statistics"),
            number: Tensor::zeros(&[1], DType::I64, device)?.named("step"),
            position: Tensor::zeros(&[2], DType::I64, device)?.named("position"),
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
                self.begin(batch)?;
                for index in 0..batch.micro_count() {
                    self.forward_backward(batch, &batch.micro(index)?, index)?;
                }
                if batch.mine == 0 {
                    self.take_part_without_rows()?;
                }
                self.reducer.join()?;
                self.clip(measure_norm)?;
                self.update(number_of(batch), learning_rate)
            })
        })
    }

    fn begin(&mut self, batch: &Batch) -> Result<()> {
        faults::begin(number_of(batch));
        self.reducer.begin();
        set(&self.number, &[number_of(batch) as i64])?;
        Ok(ops::zero(&self.stats)?)
    }

    /// One micro-batch: its loss, and its part of the gradients. The last one completes them.
    fn forward_backward(&mut self, batch: &Batch, micro: &Micro, index: usize) -> Result<()> {
        set(&self.position, &[number_of(batch) as i64, micro.first as i64])?;
        let last = index + 1 == batch.micro_count();
        let (seed, position) = (self.seed, &self.position);
        let options = PassOptions { training: true, accumulate: index > 0, last, seed, position };
        let Step { model, loss, scratch, saved, reducer, stats, .. } = self;
        let mut pass = Pass::new(&model.params, scratch, saved, options, reducer);

        faults::at(Place::Forward)?;
        let output = model.forward(&mut pass, &micro.x)?;
        let gradient = loss.gradient(&mut pass, &output, &micro.targets, stats)?;
        if last {
            // Before it is summed over the ranks: whose rows were it?
            ops::mark_nonfinite(&self.own_bad_step, stats, &self.number)?;
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
        ops::mark_nonfinite(&self.bad_step, &self.stats, &self.number)?;
        // A gradient may overflow where the loss does not; the norm tells, or else a look at all of them.
        let gradients = if measure_norm || self.clip.is_on() { self.clip.out() } else { self.model.params.gradients() };
        Ok(ops::mark_nonfinite(&self.bad_step, gradients, &self.number)?)
    }

    fn update(&mut self, number: u64, learning_rate: f64) -> Result<()> {
        faults::at(Place::Optimizer)?;
        let scale = Some(self.clip.out());
        self.optimizer.update(&self.model.params, number, learning_rate, scale, Some(&self.bad_step))
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
        // Counts of many rows are exact in f64, which accelerators only store.
        let (device, dtype) = (self.stats.device(), self.stats.dtype());
        let dtype = if device == Device::Cpu { DType::F64 } else { dtype };
        let stats = Tensor::zeros(&[4], dtype, device)?.named("evaluation statistics");
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
        for index in 0..batch.micro_count() {
            let micro = batch.micro(index)?;
            set(&self.position, &[number_of(batch) as i64, micro.first as i64])?;
            let (seed, position) = (self.seed, &self.position);
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
        let options =
            PassOptions { training: false, accumulate: false, last: true, seed: self.seed, position: &self.position };
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

/// A few numbers, brought to the host.
fn read(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_dtype(DType::F64)?.to_vec()?)
}

/// Writes what changes from step to step where the operations of the step read it.
fn set(tensor: &Tensor, values: &[i64]) -> Result<()> {
    Ok(tensor.with_slice_mut(|slots: &mut [i64]| slots.copy_from_slice(values))?)
}
