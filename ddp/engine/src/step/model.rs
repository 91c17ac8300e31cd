//! This rank's model in training. Its layers are on one device, or split over several: a stage for
//! each, which a step does not see.
//!
//! In a forward, activations go from each stage to the next, and in a backward their gradient goes
//! back: one tensor per pair of neighbours. The host waits for neither.
//!
//! A tied parameter is owned by the first stage that uses it. Later ones borrow it: they get its
//! values once a step. In a backward each adds to the sum so far, in the order of an unsplit model,
//! and the owner, which is last, has it reduced.
//!
//! Each device sums the squares of its gradients by quantum, and these sums go to the last device:
//! 8 bytes for 1,024 gradients. There they are in the order of a model on one device (the last
//! layers first), so the norm has the same bits. Scale and flags of the step go back.

mod split;

use ddp_comm::Group;
use ddp_data::{Batch, Micro};
use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::ops::{self, StepMarks};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::{DType, Tensor};
use ddp_nn::Loss;
use ddp_nn::optim::UpdatePart;
use ddp_nn::params::ALIGNMENT_BYTES;
use ddp_nn::pass::observe;

use super::scalars::StepScalars;
use super::stage::{Stage, StagePass, StageSpec};
use super::stats;
use crate::digest::LayerDigest;
use crate::error::{Error, Result};
use crate::reducer::ReducerOptions;
use crate::setting::{MICRO_BATCH, SAME_BITS, ZERO};

/// What varies from step to step is sent to the device.
const SCALARS: Label = Label::new(Lane::Copies, "send scalars");
/// The squares of the gradients.
const MEASURE: Label = Label::new(Lane::Optimizer, "norm");
/// Scale, norm and marks of non-finite steps.
const DECIDE: Label = Label::new(Lane::Optimizer, "clip");
/// The optimizer's update.
const UPDATE: Label = Label::new(Lane::Optimizer, "update");

/// The refusal of shards with up to so many micro-batches under ZeRO-2.
pub(crate) fn several_in_a_shard(count: usize) -> Error {
    Error::Usage(format!(
        "{ZERO} 2 with {SAME_BITS}: expected shards of one micro-batch, got up to {count}: sums over \
         ranks must come last; help: give a larger {MICRO_BATCH}, more shards, or {ZERO} 1"
    ))
}

/// A model, its optimizer, and what sums its gradients over the ranks.
#[derive(Debug)]
pub(super) struct TrainedModel {
    /// From the input to the output: at least one.
    pub(super) stages: Vec<Stage>,
    /// f64, on the last of several devices: where the sums of squares of all gradients meet.
    squares: Option<Tensor>,
}

impl TrainedModel {
    /// Gradients are reduced as `reducer` says, and clipped to the norm `clip_norm`; 0 for no
    /// limit.
    pub(super) fn new(
        parts: Vec<StageSpec>,
        reducer: ReducerOptions,
        clip_norm: f64,
    ) -> Result<TrainedModel> {
        let stages = parts
            .into_iter()
            .map(|part| Stage::new(part, reducer, clip_norm));
        let stages = stages.collect::<Result<Vec<_>>>()?;
        let squares = match &stages[..] {
            [] => {
                let text =
                    "parts of a step: expected at least one, got none; help: give the model a part";
                return Err(Error::Usage(text.into()));
            }
            [_] => None,
            [.., last] => {
                let counts = stages.iter().map(|stage| stage.clip.partials().count());
                let all = Tensor::zeros(&[counts.sum()], DType::F64, last.device())?;
                Some(all.named("squares of all gradients"))
            }
        };
        Ok(TrainedModel { stages, squares })
    }

    /// The stage of the output. Loss and statistics are on its device.
    pub(super) fn last(&self) -> &Stage {
        self.stages.last().expect("a model has a stage")
    }

    pub(super) fn last_mut(&mut self) -> &mut Stage {
        self.stages.last_mut().expect("a model has a stage")
    }

    /// The ranks that train together.
    pub(super) fn group(&self) -> &Group {
        self.last().reducer.group()
    }

    /// (4), on the last device: [`Stats`](super::Stats) of this rank's rows, and after the join of
    /// all rows.
    pub(super) fn stats(&self) -> &Tensor {
        &self.last().scalars.stats
    }

    /// (4), on the last device: the statistics of a shard.
    pub(super) fn stats_of(&self, shard: usize) -> Result<Tensor> {
        stats::row_of(&self.last().scalars.all_stats, shard)
    }

    /// Into how many shards each batch is cut, if the bits are the same on any number of ranks.
    pub(super) fn shards(&self) -> Option<usize> {
        self.last().reducer.shards()
    }

    /// `x` on the first device, where it has the alignment that it would have on any number of
    /// ranks: cuBLASLt's choice of an algorithm depends on that.
    pub(super) fn aligned(&mut self, micro: &Micro, batch: &Batch) -> Result<Tensor> {
        let x = &micro.x;
        let offset = (micro.first - batch.first) as usize * x.bytes() / micro.rows.max(1);
        let is_aligned = self.shards().is_none() || offset.is_multiple_of(ALIGNMENT_BYTES);
        if is_aligned || !x.device().is_accelerator() {
            return Ok(x.clone());
        }
        let copy = self.stages[0].scratch.take(x.shape(), x.dtype())?;
        copy.copy_from(x)?;
        Ok(copy)
    }

    /// i64 (1), on the last device: the number of the step.
    pub(super) fn step(&self) -> &Tensor {
        &self.last().scalars.step
    }

    /// Sends what the work of the step on `batch` reads. Returns whether the memory for it moved.
    pub(super) fn send_scalars(&mut self, batch: &Batch, learning_rate: f64) -> Result<bool> {
        let moved = self.make_room(batch)?;
        for stage in &mut self.stages {
            let device = stage.device();
            let (scalars, optimizer) = (&mut stage.scalars, &stage.optimizer);
            let send = || scalars.send(optimizer, batch, learning_rate);
            trace::record_on(device, SCALARS, send)?;
        }
        Ok(moved)
    }

    /// As `send_scalars`, without the optimizer's.
    pub(super) fn send_positions(&mut self, batch: &Batch) -> Result<bool> {
        let moved = self.make_room(batch)?;
        for stage in &mut self.stages {
            stage.scalars.send_positions(batch)?;
        }
        Ok(moved)
    }

    /// Makes room for the scalars of `batch`. Returns whether memory moved.
    fn make_room(&mut self, batch: &Batch) -> Result<bool> {
        // The room is for any rank's rows, so that memory moves on all ranks in the same step.
        let room = batch.micro_count_max(self.group().size());
        let moves = room > self.last().scalars.room();
        for stage in self.stages.iter_mut().filter(|_| moves) {
            let shards = stage.reducer.shards();
            stage.scalars = StepScalars::new(&mut stage.optimizer, room, shards)?;
        }
        Ok(moves)
    }

    /// Takes the memory of a pass over rows of this length, as many as the largest micro-batch of
    /// `batch` has, so that those of shorter rows fit into it: as a step, but nothing reads what it
    /// computes.
    pub(super) fn reserve(&mut self, batch: &Batch, length: usize, loss: &dyn Loss) -> Result<()> {
        let micros = (0..batch.micro_count()).map(|index| Ok(batch.micro(index)?.rows));
        let rows = micros.collect::<Result<Vec<_>>>()?.into_iter().max();
        let shape = [rows.unwrap_or(0), length];
        let zeros = |like: &Tensor| Tensor::zeros(&shape, like.dtype(), like.device());
        let (x, targets) = (zeros(&batch.x)?, zeros(&batch.targets)?);
        let how = StagePass {
            training: true,
            micro_batch: 0,
            accumulates: false,
            last: false,
            seed: 0,
            by_position: loss.is_by_position(),
            reserves: true,
        };
        let (output, stats) = (self.forward(&how, &x)?, self.stats().zeros_like()?);
        let gradient = self.loss_gradient(&how, loss, [&output, &targets, &stats])?;
        self.backward(&how, gradient)
    }

    /// Begins a step: no gradient is complete.
    pub(super) fn begin(&mut self) -> Result<()> {
        let mut stages = self.stages.iter_mut();
        stages.try_for_each(|stage| stage.reducer.begin())?;
        self.lend_values()
    }

    /// Begins one of the backwards of a step.
    pub(super) fn begin_round(&mut self) {
        let stages = self.stages.iter_mut();
        stages.for_each(|stage| stage.reducer.begin_round());
    }

    /// Whether memory of gradients is used again within a backward: ZeRO-2.
    pub(super) fn frees_gradients(&self) -> bool {
        self.stages
            .iter()
            .any(|stage| stage.reducer.frees_gradients())
    }

    /// With ZeRO-2 every micro-batch is reduced, so a rank with fewer of them adds zeros. With
    /// shards, several micro-batches in one are refused: sums over ranks must come last.
    pub(super) fn level_rounds(&mut self, batch: &Batch) -> Result<()> {
        if !self.frees_gradients() {
            return Ok(());
        }
        if self.shards().is_none() {
            let most = batch.micro_count_max(self.group().size());
            for _ in batch.micro_count().max(1)..most {
                let mut stages = self.stages.iter_mut().rev();
                stages.try_for_each(|stage| stage.reducer.add_zeros())?;
            }
            return Ok(());
        }
        let mut shards = batch.shards().numbers();
        if let Some(shard) = shards.find(|shard| batch.micros_of(*shard).len() > 1) {
            return Err(several_in_a_shard(batch.micros_of(shard).len()));
        }
        Ok(())
    }

    /// Begins a step that is launched as a graph.
    pub(super) fn begin_launch(&mut self) {
        for stage in &mut self.stages {
            stage.reducer.begin_launch();
        }
    }

    /// The output, on the last device, for `x` on the first.
    pub(super) fn forward(&mut self, how: &StagePass, x: &Tensor) -> Result<Tensor> {
        heartbeat::beat(Work::Computes);
        let (first, others) = self.stages.split_first_mut().expect("a model has a stage");
        let mut output = first.forward(how, x)?;
        for stage in others {
            let input = stage.bring(output, "activations to the next device")?;
            output = stage.forward(how, &input)?;
        }
        Ok(output)
    }

    /// The gradient of the sum of losses by the output of the forward before. Losses are added to
    /// `stats`.
    pub(super) fn loss_gradient(
        &mut self,
        how: &StagePass,
        loss: &dyn Loss,
        of: [&Tensor; 3],
    ) -> Result<Tensor> {
        self.move_gradients(self.stages.len() - 1, how, false)?;
        let (model, mut pass) = self.last_mut().pass(how, false);
        let gradient = || model.loss_gradient(&mut pass, loss, of);
        let device = of[2].device();
        Ok(trace::record_on(device, how.label("loss"), gradient)?)
    }

    /// The loss of each row of the output of the forward before. They are added to `stats`.
    pub(super) fn losses(
        &mut self,
        how: &StagePass,
        loss: &dyn Loss,
        of: [&Tensor; 3],
    ) -> Result<Tensor> {
        let (model, mut pass) = self.last_mut().pass(how, false);
        let losses = || model.losses(&mut pass, loss, of);
        Ok(trace::record_on(of[2].device(), how.label("loss"), losses)?)
    }

    /// The backward of the forward before, from the gradient of its output. The reducers hear of
    /// complete gradients.
    pub(super) fn backward(&mut self, how: &StagePass, mut gradient: Tensor) -> Result<()> {
        for index in (0..self.stages.len()).rev() {
            if index + 1 < self.stages.len() {
                self.move_gradients(index, how, false)?;
            }
            let (before, rest) = self.stages.split_at_mut(index);
            let (stage, wants_input_gradient) = (&mut rest[0], before.iter().any(Stage::trains));
            if !wants_input_gradient && !stage.trains() {
                break;
            }
            let here = stage.bring(gradient, "gradients to the device before")?;
            let next = stage.backward(how, &here, wants_input_gradient)?;
            self.move_gradients(index, how, true)?;
            match next {
                Some(next) => gradient = next,
                None => break,
            }
        }
        Ok(())
    }

    /// Sums the statistics over the ranks with the next gradients. Before that, when they are those
    /// of this rank's rows, marks `own_bad_step` if they are not finite.
    pub(super) fn reduce_stats(&mut self, own_bad_step: Option<&Tensor>) -> Result<()> {
        let stats = self.last().scalars.all_stats.clone();
        if let Some(flag) = own_bad_step {
            ops::mark_nonfinite(flag, &stats, self.step())?;
        }
        // A rank that was stopped has not made the last update: its gradients are not those of the
        // others' weights.
        let group = self.group().clone();
        let last = self.last_mut();
        if let Some(stop) = group.stop_vote() {
            stop.vote(&last.bad_step)?;
            last.reducer.reduce(&stop.stopped)?;
        }
        last.reducer.reduce(&stats)
    }

    /// A shard of this rank is done: its gradients are kept, unless they go to the other ranks by
    /// now, because it is the last. Those of a shard without rows are zeros, for which other ranks
    /// wait in the order in which a backward completes them.
    pub(super) fn close_shard(
        &mut self,
        batch: &Batch,
        shard: usize,
        own_bad_step: Option<&Tensor>,
    ) -> Result<()> {
        let (shards, has_rows) = (batch.shards(), !batch.micros_of(shard).is_empty());
        let is_last = shard + 1 == shards.end;
        if is_last && !has_rows {
            self.reduce_stats(own_bad_step)?;
        }
        for Stage { reducer, .. } in self.stages.iter_mut().rev() {
            match (is_last, has_rows) {
                (false, _) => reducer.close_shard(shard - shards.first, has_rows)?,
                (true, false) => reducer.add_zeros()?,
                (true, true) => {}
            }
        }
        Ok(())
    }

    /// Waits until all gradients and the statistics are sums over the ranks.
    pub(super) fn join(&mut self) -> Result<()> {
        let mut stages = self.stages.iter_mut();
        stages.try_for_each(|stage| stage.reducer.join())?;
        stats::add_rows(&self.last().scalars.all_stats)
    }

    /// Measures the gradients, if `decide` needs that: whether it does.
    pub(super) fn measure(&mut self, measure_norm: bool) -> Result<bool> {
        // With several devices always: the norm tells the last one of a non-finite gradient. With
        // whole matrices always: one such gradient would reach all of its matrix. With ZeRO-1 and
        // the same bits always: several ranks, of which each has a slice, do.
        let always = |stage: &Stage| {
            let ReducerOptions { zero, shards, .. } = stage.reducer.options;
            stage.optimizer.rule().hidden.is_some() || zero > 0 && shards.is_some()
        };
        let wants_norm = measure_norm || self.stages.iter().any(always);
        let measured = self.squares.is_some() || self.last().clip.measures(wants_norm);
        if !measured {
            return Ok(false);
        }
        trace::record_on(self.last().device(), MEASURE, || {
            // In the order of a backward: collectives have the same order on all ranks.
            for Stage {
                model,
                reducer,
                clip,
                ..
            } in self.stages.iter_mut().rev()
            {
                clip.measure(&model.params, |partials| Ok(reducer.sum(partials)?))?;
            }
            Ok(true)
        })
    }

    /// Computes the number to multiply gradients by, their norm, and whether the step was finite,
    /// from all gradients and `stats`, which are sums over the ranks: all ranks decide alike. Marks
    /// `own_bad_step` if `stats` are not finite. The step counts only if it was not stopped on any
    /// rank.
    pub(super) fn decide(
        &mut self,
        stats: &Tensor,
        own_bad_step: Option<&Tensor>,
        measured: bool,
    ) -> Result<()> {
        trace::record_on(stats.device(), DECIDE, || {
            let weights = stats.slice(1..2)?;
            let (last, stop) = (self.last(), self.group().stop_vote());
            let squares = match &self.squares {
                Some(all) => Some(self.collect_squares(all)?),
                None => measured.then_some(last.clip.partials()),
            };
            // A gradient may overflow where the loss does not. The norm shows it, or else the
            // optimizer meets it.
            let marks = StepMarks {
                flags: &last.bad_step,
                own: own_bad_step,
                stats,
                step: self.step(),
                stop: stop.map(|it| it.word),
                stopped: stop.map(|it| &it.stopped),
            };
            last.clip.finish(squares, Some(&weights), Some(marks))?;
            observe(|| "sums of the loss".into(), stats)?;
            observe(|| "scale and norm of all gradients".into(), last.clip.out())?;
            self.share_outcome()
        })
    }

    /// Digests the gradients, which some optimizers overwrite.
    pub(super) fn digest_gradients(&mut self) -> Result<()> {
        // In the order of a backward: collectives have the same order on all ranks.
        for stage in self.stages.iter_mut().rev() {
            let (params, reducer) = (&stage.model.params, &mut stage.reducer);
            let sum = |quanta: &Tensor| reducer.sum(quanta);
            stage.digests.take(false, params, &stage.clip, sum)?;
        }
        Ok(())
    }

    /// Completes the digests of a step. Rank 0, or every rank, gets the gradients and weights by
    /// layer.
    pub(super) fn digests(&mut self, divisor: f64, on_all: bool) -> Result<[Vec<LayerDigest>; 2]> {
        let mut all = [Vec::new(), Vec::new()];
        // In the order of a backward: collectives have the same order on all ranks.
        for stage in self.stages.iter_mut().rev() {
            let (params, reducer) = (&stage.model.params, &mut stage.reducer);
            let reads = reducer.group().rank() == 0 || on_all;
            if !reads && !stage.clip.is_shared() {
                continue;
            }
            let sum = |quanta: &Tensor| reducer.sum(quanta);
            stage.digests.take(true, params, &stage.clip, sum)?;
            if reads {
                let read = stage.digests.read(params, divisor)?;
                all = [0, 1].map(|of| [&read[of][..], &all[of]].concat());
            }
        }
        Ok(all)
    }

    /// Shows the gradients, or with `values` the values, of all parameters that are trained.
    pub(super) fn observe(&self, what: &str, values: bool) -> Result<()> {
        for params in self.stages.iter().map(|stage| &stage.model.params) {
            // The arena has the last layers first.
            for p in params.list().iter().rev().filter(|p| p.is_trained()) {
                let tensor = match params.gradient(p.id).filter(|_| !values) {
                    Some(_) if params.windows().is_some() => continue,
                    Some(gradient) => gradient,
                    None if params.has_master(p) => params.master(p.id),
                    None => params.value(p.id),
                };
                observe(|| format!("{what} {}", p.name), tensor)?;
            }
        }
        Ok(())
    }

    /// Updates the parameters: this part of it. After a bad step the optimizer does nothing.
    pub(super) fn update(&mut self, part: UpdatePart) -> Result<()> {
        // Only whole matrices have something to prepare.
        let prepares = |stage: &Stage| stage.optimizer.rule().hidden.is_some();
        if part == UpdatePart::Prepare && !self.stages.iter().any(prepares) {
            return Ok(());
        }
        trace::record_on(self.last().device(), UPDATE, || {
            for stage in self.stages.iter_mut().filter(|stage| stage.trains()) {
                let (params, reducer) = (&stage.model.params, &mut stage.reducer);
                let (scale, flags) = (Some(stage.clip.out()), Some(&stage.bad_step));
                ops::with_f32_math(stage.model.f32_math, || {
                    let optimizer = &stage.optimizer;
                    optimizer.apply_part(part, params, reducer, [scale, flags])
                })?;
            }
            Ok(())
        })
    }

    /// Makes the values of all parameters current on this rank. Only ZeRO has something to do.
    pub(super) fn gather(&mut self) -> Result<()> {
        let mut stages = self.stages.iter_mut();
        stages.try_for_each(|stage| stage.reducer.gather_all(&stage.model.params))
    }
}
