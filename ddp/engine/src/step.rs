//! The training step: `Step::run` is all of it, from top to bottom.
//!
//! Rows -> forward -> loss -> backward, which reduces each gradient over the ranks as soon as it is
//! complete -> join -> clip -> update. After the first step nothing here allocates, the host reads
//! nothing back, and nothing crosses devices but what a split model plans.
//!
//! `prepare` and `update` are the halves of `run`: what a step does with the other ranks, and what
//! each rank then does by itself.
//!
//! What varies from step to step is sent ahead (`step/scalars.rs`). The work is the same every time
//! and reads that on the device, so on a GPU it is captured once and then launched
//! (`step/graphs.rs`). Whether the model is on one device or split over several is its own matter
//! (`step/model.rs`).

mod builder;
mod evaluate;
mod graphs;
mod model;
mod scalars;
mod stage;
mod stats;

use std::sync::{Arc, Weak};

use ddp_comm::{Field, Group};
use ddp_data::sampler::Shards;
use ddp_data::{Batch, Origin};
use ddp_kernels::graph::Graph;
use ddp_kernels::stream::synchronize;
use ddp_kernels::trace;
use ddp_kernels::transfer::{Phase, announced, forbid_transfers, in_phase};
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::Loss;
use ddp_nn::models::Model;
use ddp_nn::optim::{Optimizer, UpdatePart};
use ddp_nn::params::Params;
use ddp_nn::pass::observe;

pub use self::builder::StepBuilder;
pub(crate) use self::builder::{GRADIENT_GROUPS, gradient_group};
use self::graphs::{CAPTURED, StepGraphs, StepMode};
pub use self::graphs::{GraphChoice, check_graph};
use self::model::TrainedModel;
pub(crate) use self::model::several_in_a_shard;
use self::stage::StagePass;
pub use self::stage::{Stage, StageSpec};
pub use self::stats::{Stats, StepReport};
use crate::digest::LayerDigest;
use crate::error::{Error, Result};
use crate::faults::{self, FaultPoint};
use crate::reducer::ReducerOptions;

/// How steps are taken. The default: no clipping, seed 0, graphs on a GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepOptions {
    /// How gradients are reduced.
    pub reducer: ReducerOptions,
    /// The largest norm of all gradients together; 0 for no limit.
    pub clip_norm: f64,
    /// The seed of random numbers, which are drawn by sample and step.
    pub seed: u64,
    /// Whether steps on the batches of a [`Loader`](ddp_data::Loader) are captured as graphs.
    pub graph: GraphChoice,
}

/// How far a step is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepEnd {
    /// Only what it does with the other ranks; the update comes later.
    Prepared,
    Updated,
}

/// A model in training, on one rank.
#[derive(Debug)]
pub struct Step {
    model: TrainedModel,
    loss: Arc<dyn Loss>,
    seed: u64,
    /// (4), on the last device: [`Stats`] of held-out rows.
    held_out_stats: Tensor,
    /// i64 (1): the first step with a non-finite loss on this rank; 0 for none.
    own_bad_step: Tensor,
    graphs: StepGraphs,
    measures_norm: bool,
    /// Ranges of outputs in evaluations; none if they count as they are.
    output_ranges: Vec<[f32; 2]>,
    /// How many of this rank's rows memory is taken for, if they were as long as rows may be.
    reserved: usize,
    /// Origins of batches that all ranks have alike, while their loaders live. None if the ranks
    /// compare their data elsewhere.
    compared: Option<Vec<Weak<Origin>>>,
}

impl Step {
    /// Steps of `model` with the ranks of `group`, which all call this together. Models of other
    /// shapes are an error that names the first parameter that differs; all ranks get the values
    /// and buffers of rank 0.
    pub fn new(
        model: Model,
        loss: Box<dyn Loss>,
        optimizer: Optimizer,
        group: Group,
        options: &StepOptions,
    ) -> Result<Step> {
        let part = StageSpec {
            model,
            optimizer,
            group,
        };
        Step::over(vec![part], loss, options)
    }

    /// Steps of a model whose layers are split over several devices. `parts` are in the order of
    /// the layers, as [`Model::split`](ddp_nn::models::Model::split) returns them. Inputs are on
    /// the first device, targets on the last. Ranks are compared as in `new`.
    pub fn over(parts: Vec<StageSpec>, loss: Box<dyn Loss>, options: &StepOptions) -> Result<Step> {
        let mut step = Step::of_agreeing(parts, loss.into(), options)?;
        step.stages().iter().try_for_each(Stage::begin_alike)?;
        step.compared = Some(Vec::new());
        Ok(step)
    }

    /// As `over`, for ranks that compare models and data themselves.
    pub(crate) fn of_agreeing(
        parts: Vec<StageSpec>,
        loss: Arc<dyn Loss>,
        options: &StepOptions,
    ) -> Result<Step> {
        let model = TrainedModel::new(parts, options.reducer, options.clip_norm)?;
        let last = model.last();
        let (device, dtype) = (last.device(), last.model().params.master_dtype());
        // f64 counts any number of rows exactly, f32 up to 2²⁴. Accelerators only store f64.
        let held_out_dtype = if device == Device::Cpu {
            DType::F64
        } else {
            dtype
        };
        let devices = model.stages.len();
        let (ranks, shards) = (model.group().size(), model.shards());
        Ok(Step {
            loss,
            seed: options.seed,
            held_out_stats: Tensor::zeros(&[4 * stats::rows(shards)], held_out_dtype, device)?
                .named("evaluation statistics"),
            own_bad_step: Tensor::zeros(&[1], DType::I64, device)?
                .named("this rank's first bad step"),
            graphs: StepGraphs::new(options.graph, device, devices, shards.unwrap_or(ranks))?,
            model,
            measures_norm: false,
            output_ranges: Vec::new(),
            reserved: 0,
            compared: None,
        })
    }

    /// Ends its threads, and waits for its devices, after the ranks have lost one. Returns the last
    /// step that is complete on a GPU, 0 for none: weights and moments are those after it, if it
    /// was taken by `run`. On the CPU, None: a step is complete when it returns.
    pub(crate) fn halt(&mut self) -> Result<Option<u64>> {
        let stages = self.model.stages.iter_mut();
        stages.for_each(|stage| stage.reducer.halt());
        self.synchronize()?;
        // They hold calls of the group.
        self.graphs.forget();
        let flags = &self.model.last().bad_step;
        if !flags.device().is_accelerator() {
            return Ok(None);
        }
        announced("the last complete step", || {
            let now = flags.to_vec::<i64>()?;
            if let [-1, found, step] = now[..] {
                flags.copy_from(&Tensor::from_slice(&[0, found, step], &[3], Device::Cpu)?)?;
            }
            if now[0] <= 0 && now[1] == 0 {
                // Garbage of calls that were ended is no bad step.
                self.own_bad_step
                    .copy_from(&Tensor::zeros(&[1], DType::I64, Device::Cpu)?)?;
            }
            Ok(Some(now[2] as u64))
        })
    }

    /// Waits for the steps so far. An error if a rank was lost: the last ones may be incomplete.
    pub(crate) fn settle(&self) -> Result<()> {
        self.synchronize()?;
        Ok(self.model.group().check_ranks()?)
    }

    fn synchronize(&self) -> Result<()> {
        let mut devices = self.devices().into_iter();
        Ok(devices.try_for_each(synchronize)?)
    }

    /// Continues with the ranks of `groups`, one for each stage.
    pub(crate) fn regroup(&mut self, groups: Vec<Group>, options: &StepOptions) -> Result<()> {
        let device = self.model.last().device();
        let stages = &mut self.model.stages;
        let devices = stages.len();
        for (stage, group) in stages.iter_mut().zip(groups) {
            stage.regroup(group, options.reducer)?;
        }
        let ranks = self.model.shards().unwrap_or(self.model.group().size());
        self.graphs = StepGraphs::new(options.graph, device, devices, ranks)?;
        Ok(())
    }

    /// Replaces the optimizers, one for each stage, by those of other slices.
    pub(crate) fn take_optimizers(&mut self, optimizers: Vec<Optimizer>) -> Result<()> {
        let mut stages = self.model.stages.iter_mut().zip(optimizers);
        stages.try_for_each(|(stage, optimizer)| stage.take_optimizer(optimizer))
    }

    /// Ends all ranks of `group` if they load batches from different data: compared at the first
    /// batch of a loader.
    fn compare_data(&mut self, origin: &Arc<Origin>, group: &Group) -> Result<()> {
        let Some(known) = &mut self.compared else {
            return Ok(());
        };
        let is_same = |known: &Weak<Origin>| known.as_ptr() == Arc::as_ptr(origin);
        if group.size() == 1 || known.iter().any(is_same) {
            return Ok(());
        }
        let help = "give every rank the same rows in the same order";
        group.handshake(&[Field::must_match("the data", origin.text()?, help)])?;
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(origin));
        Ok(())
    }

    /// Whether later steps measure the norm of the gradients, which clipping does in any case.
    pub fn measure_norm(&mut self, measures: bool) {
        self.measures_norm = measures;
    }

    /// Takes one step on this rank's part of a global batch. At the first batch of a loader, ranks
    /// compare its data.
    pub fn run(&mut self, batch: &Batch, learning_rate: f64) -> Result<()> {
        self.take(batch, learning_rate, StepEnd::Updated)
    }

    /// As `run`, but for the update: sums and whatever else it reads of the other ranks.
    pub(crate) fn prepare(&mut self, batch: &Batch, learning_rate: f64) -> Result<()> {
        self.take(batch, learning_rate, StepEnd::Prepared)
    }

    /// The update of a step that is prepared. It takes no other rank, and does not fail because one
    /// is lost.
    pub(crate) fn update(&mut self) -> Result<()> {
        in_phase(Phase::Step, || {
            forbid_transfers(|| {
                self.model.update(UpdatePart::Finish)?;
                self.model.observe("updated value of", true)
            })
        })
    }

    fn take(&mut self, batch: &Batch, learning_rate: f64, end: StepEnd) -> Result<()> {
        if let Some(origin) = batch.origin() {
            self.compare_data(origin, &self.model.group().clone())?;
        }
        self.model.group().check_ranks()?;
        in_phase(Phase::Step, || {
            forbid_transfers(|| self.take_checked(batch, learning_rate, end))
        })
    }

    fn take_checked(&mut self, batch: &Batch, learning_rate: f64, end: StepEnd) -> Result<()> {
        let measure_norm = self.measures_norm;
        let Step {
            model,
            loss,
            seed,
            own_bad_step,
            graphs,
            reserved,
            ..
        } = self;
        check_shards(batch.shards(), model.shards())?;
        faults::begin(batch.step + 1);
        if let Some(whole) = batch.whole().filter(|_| batch.mine > *reserved) {
            *reserved = batch.mine;
            if batch.x.count() < batch.mine * whole {
                model.reserve(batch, whole, &**loss)?;
            }
        }
        if model.send_scalars(batch, learning_rate)? {
            graphs.forget();
        }
        let stats = &model.stats().clone();
        let mode = graphs.mode(batch, measure_norm)?;
        if let StepMode::Launch(graph) = mode {
            faults::at_launch()?;
            model.begin_launch();
            return Ok(trace::record_on(stats.device(), CAPTURED, || {
                graph.launch()
            })?);
        }
        let group = model.group().clone();
        let is_alone = group.size() == 1;
        // The same in every step of a kind. On a GPU the host only gives it to streams.
        let mut work = || -> Result<()> {
            let own = (!is_alone).then_some(&*own_bad_step);
            model.begin()?;
            model.level_rounds(batch)?;
            model.observe("value of", true)?;
            for shard in batch.shards().numbers() {
                for pass in passes(batch, shard, *seed, loss.is_by_position()) {
                    faults::at(FaultPoint::Forward)?;
                    model.begin_round();
                    let micro = batch.micro(pass.micro_batch)?;
                    let x = model.aligned(&micro, batch)?;
                    observe(|| format!("inputs of micro-batch {}", pass.micro_batch), &x)?;
                    observe(|| "targets".into(), &micro.targets)?;
                    let output = model.forward(&pass, &x)?;
                    let of = [&output, &micro.targets, &model.stats_of(shard)?];
                    let gradient = model.loss_gradient(&pass, &**loss, of)?;
                    observe(|| "gradient of the loss".into(), &gradient)?;
                    if pass.last {
                        model.reduce_stats(own)?;
                    }
                    model.backward(&pass, gradient)?;
                }
                model.close_shard(batch, shard, own)?;
            }
            model.join()?;
            model.observe("sum of gradients of", false)?;
            let own_bad_step = is_alone.then_some(&*own_bad_step);
            let measured = model.measure(measure_norm)?;
            if measure_norm {
                model.digest_gradients()?;
            }
            model.decide(stats, own_bad_step, measured)?;
            faults::at(FaultPoint::Optimizer)?;
            model.update(UpdatePart::Prepare)?;
            if end == StepEnd::Prepared {
                return Ok(());
            }
            model.update(UpdatePart::Finish)?;
            model.observe("updated value of", true)
        };
        match mode {
            StepMode::Capture(kind) => graphs.capture(kind, &group, work),
            StepMode::Eager | StepMode::Launch(_) => work(),
        }
    }

    /// The result of the last step. Waits for it: for logs, not for every step.
    pub fn report(&self) -> Result<StepReport> {
        announced("the log", || {
            let stats = Stats::read(self.model.stats())?;
            let last = self.model.last();
            let grad_norm = if self.measures_norm || last.clip.is_on() {
                Some(stats::read(last.clip.out())?[1])
            } else {
                None
            };
            let report = StepReport {
                stats,
                grad_norm,
                bad_step: stats::read_step(&last.bad_step)?,
                own_bad_step: stats::read_step(&self.own_bad_step)?,
            };
            // If a rank was lost by now, this means nothing.
            self.model.group().check_ranks()?;
            Ok(report)
        })
    }

    /// The gradients and the trained weights of the last step, whose norm was measured, by layer,
    /// on rank 0 or on all ranks; nothing on others. `divisor` is its `weight_sum`. All ranks call
    /// it together.
    pub(crate) fn digests(&mut self, divisor: f64, on_all: bool) -> Result<[Vec<LayerDigest>; 2]> {
        let digests = announced("digests for the log", || {
            self.model.digests(divisor, on_all)
        })?;
        // If a rank was lost by now, they mean nothing.
        self.model.group().check_ranks()?;
        Ok(digests)
    }

    /// Makes the values of all parameters current on this rank. All ranks call it together before
    /// values are read outside a step. Only ZeRO has something to do.
    pub fn gather(&mut self) -> Result<()> {
        self.model.gather()?;
        match self.model.group().stop_vote() {
            // A gather that was ended leaves garbage.
            Some(_) => self.settle(),
            None => Ok(()),
        }
    }

    /// The stages of the model, one per device, from the input to the output: at least one.
    pub fn stages(&self) -> &[Stage] {
        &self.model.stages
    }

    /// The device of each stage.
    pub fn devices(&self) -> Vec<Device> {
        self.stages().iter().map(Stage::device).collect()
    }

    /// The parameters of each stage.
    pub fn params(&self) -> impl Iterator<Item = &Params> {
        self.stages().iter().map(|stage| &stage.model.params)
    }

    /// Sets the step after which the optimizers' moments were 0.
    pub(crate) fn count_moments_from(&mut self, step: u64) {
        for stage in &mut self.model.stages {
            stage.optimizer.count_from(step);
        }
    }

    /// How many graphs steps are launched from. None if steps are not captured.
    pub fn graphs(&self) -> Option<usize> {
        self.graphs.count()
    }

    /// A graph that steps are launched from, if there is one yet: to look at its nodes.
    pub fn any_graph(&self) -> Option<&Graph> {
        self.graphs.any()
    }

    /// The memory of activations on all devices, in bytes.
    pub fn activation_bytes(&self) -> usize {
        self.stages().iter().map(Stage::activation_bytes).sum()
    }
}

/// The micro-batches of a shard. The last one of all completes the gradients.
fn passes(
    batch: &Batch,
    shard: usize,
    seed: u64,
    by_position: bool,
) -> impl Iterator<Item = StagePass> {
    let (micros, is_last) = (batch.micros_of(shard), shard + 1 == batch.shards().end);
    let (first, end) = (micros.start, micros.end);
    micros.map(move |micro_batch| StagePass {
        training: true,
        micro_batch,
        accumulates: micro_batch > first,
        last: is_last && micro_batch + 1 == end,
        seed,
        by_position,
        reserves: false,
    })
}

/// Refuses batches, cut as `of` says, that are not cut into the shards of the step.
fn check_shards(of: Shards, shards: Option<usize>) -> Result<()> {
    let fits = shards.map_or(of.count() == 1, |shards| of.of == shards);
    if fits {
        return Ok(());
    }
    let wanted = shards.map_or("no shards".into(), |shards| format!("{shards} shards"));
    Err(Error::Usage(format!(
        "a step with {wanted}: expected a batch in as many shards, got {} of {}; help: give the \
         loader's .shards(…) and `shards` of ReducerOptions the same number",
        of.count(),
        of.of
    )))
}
