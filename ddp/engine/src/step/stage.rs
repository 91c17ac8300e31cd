//! A stage: the layers of a model that are on one device, and everything a step needs there.
//! Usually there is one, the whole model.

use ddp_comm::{Field, Group};
use ddp_kernels::ops::STEP_FLAGS;
use ddp_kernels::stream::Stream;
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};
use ddp_nn::models::Model;
use ddp_nn::optim::{Clip, Optimizer};
use ddp_nn::params::{ParamId, Parameter};
use ddp_nn::pass::Listener;
use ddp_nn::{Pass, PassOptions, Saved, Scratch};

use super::scalars::StepScalars;
use crate::digest::DeviceDigests;
use crate::error::{Error, Result};
use crate::reducer::{Reducer, ReducerOptions};
use crate::setting::{OPTIMIZER, ZERO};

/// What a stage is made from.
#[derive(Debug)]
pub struct StageSpec {
    /// The layers on its device, and their parameters.
    pub model: Model,
    /// Updates these parameters.
    pub optimizer: Optimizer,
    /// The ranks over which their gradients are summed. Each stage has its own group.
    pub group: Group,
}

/// The layers of a model that are on one device, in training.
#[derive(Debug)]
pub struct Stage {
    pub(super) model: Model,
    pub(super) optimizer: Optimizer,
    pub(super) reducer: Reducer,
    pub(super) scalars: StepScalars,
    /// Measures the gradients; scale and norm of those of the whole model.
    pub(super) clip: Clip,
    /// Of the last step that measured the norm.
    pub(super) digests: DeviceDigests,
    /// i64 (3): the flags of the step, of the whole model (`ops::STEP_FLAGS`).
    pub(super) bad_step: Tensor,
    pub(super) scratch: Scratch,
    saved: Saved,
    /// Hears of the gradients of a pass that only takes memory, and does nothing.
    ignore: fn(ParamId) -> ddp_nn::Result<()>,
}

/// The settings of a forward and its backward, the same for all stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagePass {
    /// Whether layers behave as in training: dropout drops.
    pub(super) training: bool,
    /// The index of the micro-batch.
    pub(super) micro_batch: usize,
    /// Whether gradients are added to those before: those of an earlier micro-batch of its shard.
    pub(super) accumulates: bool,
    /// Whether it is the last micro-batch: its backward completes the gradients.
    pub(super) last: bool,
    /// The seed of random numbers.
    pub(super) seed: u64,
    /// See `Loss::is_by_position`.
    pub(super) by_position: bool,
    /// Whether it only takes the memory of a pass, so that no other rank hears of it.
    pub(super) reserves: bool,
}

impl StagePass {
    /// What a trace shows a part of the forward as.
    pub(super) fn label(&self, name: &'static str) -> Label {
        if self.training {
            return Label::new(Lane::Forward, name).at(self.micro_batch);
        }
        Label::new(Lane::Evaluation, name)
    }
}

impl Stage {
    pub(super) fn new(part: StageSpec, options: ReducerOptions, clip_norm: f64) -> Result<Stage> {
        let device = part.model.params.device();
        let reducer = Reducer::new(&part.model.params, part.group, options)?;
        let mut optimizer = part.optimizer;
        reducer.check_optimizer(&optimizer)?;
        if reducer.frees_gradients() && optimizer.rule().hidden.is_some() {
            return Err(Error::Usage(format!(
                "{ZERO} 2: expected an optimizer of elements, got one of whole matrices, which needs \
                 all gradients; help: use {ZERO} 1, or {OPTIMIZER} adamw"
            )));
        }
        share(&mut optimizer, &part.model, &reducer)?;
        let clip = Clip::of_slices(clip_norm, &part.model.params, reducer.owned())?;
        Ok(Stage {
            digests: DeviceDigests::new(&part.model.params)?,
            model: part.model,
            clip,
            bad_step: Tensor::zeros(&[STEP_FLAGS], DType::I64, device)?.named("first bad step"),
            scalars: StepScalars::new(&mut optimizer, 1, options.shards)?,
            optimizer,
            reducer,
            scratch: Scratch::new(device),
            saved: Saved::default(),
            ignore: |_| Ok(()),
        })
    }

    /// Trains with the ranks of `group` from now on.
    pub(super) fn regroup(&mut self, group: Group, options: ReducerOptions) -> Result<()> {
        self.reducer.halt();
        let params = &self.model.params;
        self.reducer = Reducer::new(params, group, options)?;
        self.clip = self.clip.slice_anew(params, self.reducer.owned())?;
        self.saved = Saved::default();
        Ok(())
    }

    /// Updates by this optimizer from now on, of other slices.
    pub(super) fn take_optimizer(&mut self, mut optimizer: Optimizer) -> Result<()> {
        optimizer.count_from(self.optimizer.since());
        share(&mut optimizer, &self.model, &self.reducer)?;
        self.optimizer = optimizer;
        Ok(())
    }

    /// What a rank has to get that joins, or is a step behind: everything that steps change and
    /// later ones, or the log, read. Without moments where each rank has its own.
    pub(crate) fn state(&self, with_moments: bool) -> impl Iterator<Item = &Tensor> {
        let moments = self.optimizer.moments().filter(move |_| with_moments);
        let moments = moments.map(|(_, moment)| moment);
        let of_step = [
            self.model.params.values(),
            &self.scalars.all_stats,
            self.clip.out(),
            &self.bad_step,
            &self.digests.quanta,
        ];
        moments.chain(of_step)
    }

    /// Compares with the other ranks what all must have alike, and gives all of them the values of
    /// rank 0.
    pub(super) fn begin_alike(&self) -> Result<()> {
        let (params, group) = (&self.model.params, self.reducer.group());
        if group.size() == 1 {
            return Ok(());
        }
        let help = "build the same model, with the same options, on every rank";
        // Of divided masters none has all.
        let values = if params.is_divided() {
            format!("{:016x}", params.values_hash()?)
        } else {
            "those of rank 0".into()
        };
        let rule = format!("{:?}", self.optimizer.rule());
        group.handshake(&[
            Field::must_match("the parameters' names and shapes", self.shapes(), help),
            Field::must_match("the plan of buckets", self.reducer.plan_text(), help),
            Field::must_match("the optimizer", rule, help),
            Field::must_match("the model's initial weights", values, help),
        ])?;
        if params.is_divided() {
            return Ok(());
        }
        let values = params.values();
        if values.count() > 0 {
            group.broadcast(values, 0, &Stream::current(self.device())?)?;
        }
        Ok(params.refresh(0..values.count())?)
    }

    /// A line for each parameter and buffer, in the order of the layers.
    pub(crate) fn shapes(&self) -> String {
        let params = &self.model.params;
        let line = |parameter: &Parameter| {
            let kind = match (parameter.is_buffer, parameter.is_trained()) {
                (true, _) => ", a buffer",
                (_, true) => "",
                (_, false) => ", not trained",
            };
            let (name, dtype, shape) = (&parameter.name, params.dtype(), &parameter.shape);
            format!("{name} {dtype}{shape:?}{kind}\n")
        };
        params.in_order().into_iter().map(line).collect()
    }

    /// The layers and their parameters.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The reducer of the gradients.
    pub fn reducer(&self) -> &Reducer {
        &self.reducer
    }

    /// The optimizer of the parameters, with its moments.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The device of the layers.
    pub fn device(&self) -> Device {
        self.model.params.device()
    }

    /// The memory of its activations, in bytes.
    pub fn activation_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// Whether any of its parameters is trained.
    pub(super) fn trains(&self) -> bool {
        !self.model.params.trained_part().is_empty()
    }

    /// `tensor` of the neighbouring stage, on this device.
    pub(super) fn bring(&mut self, tensor: Tensor, what: &'static str) -> Result<Tensor> {
        if tensor.device() == self.device() {
            return Ok(tensor);
        }
        let here = self.scratch.take(tensor.shape(), tensor.dtype())?;
        announced(what, || here.copy_from(&tensor))?;
        Ok(here)
    }

    /// The output for `x`, which is on this device.
    pub(super) fn forward(&mut self, how: &StagePass, x: &Tensor) -> Result<Tensor> {
        let (device, label) = (self.device(), how.label("forward"));
        let (model, mut pass) = self.pass(how, true);
        Ok(trace::record_on(device, label, || {
            model.forward(&mut pass, x)
        })?)
    }

    /// The backward of the forward before, from the gradient of its output. The reducer hears of
    /// complete gradients. Returns the gradient of the input if it is wanted.
    pub(super) fn backward(
        &mut self,
        how: &StagePass,
        gradient: &Tensor,
        wants_input_gradient: bool,
    ) -> Result<Option<Tensor>> {
        let label = Label::new(Lane::Backward, "backward").at(how.micro_batch);
        let device = self.device();
        let (model, mut pass) = self.pass(how, false);
        let backward = || {
            if wants_input_gradient {
                return model.backward_to_input(&mut pass, gradient);
            }
            model.backward(&mut pass, gradient).map(|()| None)
        };
        Ok(trace::record_on(device, label, backward)?)
    }

    /// The model, and a pass over it: a new one, or the one that the last forward began.
    pub(super) fn pass(&mut self, how: &StagePass, is_new: bool) -> (&Model, Pass<'_>) {
        let frees = self.reducer.frees_gradients();
        let options = PassOptions {
            training: how.training,
            accumulate: how.accumulates && !frees,
            last: how.last || frees,
            seed: how.seed,
            position: self.scalars.position(how.micro_batch),
        };
        let (params, scratch, saved) = (&self.model.params, &mut self.scratch, &mut self.saved);
        let start = if is_new { Pass::new } else { Pass::resume };
        let listener: &mut dyn Listener = if how.reserves {
            &mut self.ignore
        } else {
            &mut self.reducer
        };
        let pass = start(params, scratch, saved, options, listener);
        (&self.model, pass.leaving_head(how.by_position))
    }
}

/// Shares the whole matrices with the other ranks, unless each rank does all.
fn share(optimizer: &mut Optimizer, model: &Model, reducer: &Reducer) -> Result<()> {
    if reducer.options.updates_alone {
        return Ok(());
    }
    let group = reducer.group();
    Ok(optimizer.share(&model.params, group.rank(), group.size())?)
}
