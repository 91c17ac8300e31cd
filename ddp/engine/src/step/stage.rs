//! A stage: what of a model lives on one device, and everything that a step needs there. Usually there is one; a model split over
//! the devices of a process has one for each, in the order of its layers from the input on.
//!
//! `through` is a pass over all of them: forward on the first, its output to the next device, and so on; at the top the loss; then
//! backward the other way. What crosses is one tensor in each direction for each pair of neighbours: activations up, their gradient
//! down. Nothing on the host waits for it.

use ddp_comm::Group;
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor};

use super::StepOptions;
use super::numbers::Numbers;
use crate::error::Result;
use crate::reducer::Reducer;
use ddp_nn::models::Model;
use ddp_nn::optim::Optimizer;
use ddp_nn::params::ParamId;
use ddp_nn::pass::Listener;
use ddp_nn::{Fold, Pass, PassOptions, Saved, Scratch};

/// What a stage is made of.
#[derive(Debug)]
pub struct Part {
    /// The layers on its device, and their parameters.
    pub model: Model,
    /// What updates these.
    pub optimizer: Optimizer,
    /// The ranks that their gradients are summed over: of a model split over several devices, a group for each.
    pub group: Group,
}

/// What of a model lives on one device.
#[derive(Debug)]
pub struct Stage {
    pub(super) model: Model,
    pub(super) optimizer: Optimizer,
    pub(super) reducer: Reducer,
    pub(super) numbers: Numbers,
    scratch: Scratch,
    saved: Saved,
}

impl Stage {
    pub(super) fn new(part: Part, options: &StepOptions) -> Result<Stage> {
        let Part {
            model,
            optimizer,
            group,
        } = part;
        let device = model.params.device();
        let reducer = Reducer::new(&model.params, group, options.reducer)?;
        reducer.check_optimizer(&optimizer)?;
        Ok(Stage {
            reducer,
            numbers: Numbers::new(device, 1)?,
            scratch: Scratch::new(device),
            saved: Saved::default(),
            model,
            optimizer,
        })
    }

    /// Its layers, and their parameters.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The reducer of its gradients.
    pub fn reducer(&self) -> &Reducer {
        &self.reducer
    }

    /// The optimizer of its parameters, and its moments.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Where it lives.
    pub fn device(&self) -> Device {
        self.model.params.device()
    }

    /// The memory of its activations, in bytes.
    pub fn activation_bytes(&self) -> usize {
        self.scratch.bytes()
    }

    /// Sends the rates of step number `step`.
    pub(super) fn send_rates(&mut self, step: u64, learning_rate: f64) -> Result<()> {
        self.numbers
            .send_rates(&self.optimizer, step, learning_rate)
    }

    /// Room for the numbers of so many micro-batches. The old ones move.
    pub(super) fn make_room(&mut self, micro_batches: usize) -> Result<()> {
        self.numbers = Numbers::new(self.device(), micro_batches)?;
        Ok(())
    }

    /// Whether anything is trained in it.
    pub(super) fn trains(&self) -> bool {
        self.model.params.gradients().count() > 0
    }
}

/// A pass over all stages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Through {
    /// Whether layers do as in training: dropout drops.
    pub(super) training: bool,
    /// Which micro-batch of the batch it is of.
    pub(super) micro_batch: usize,
    /// Whether it is the last: gradients are complete.
    pub(super) last: bool,
    /// The seed of what is drawn.
    pub(super) seed: u64,
    /// Whether there is a backward that the reducers hear of.
    pub(super) reduces: bool,
}

impl Through {
    /// Takes `x` on the first device through `stages`. At the top `end` is given the output, and gives the gradient to go
    /// back with; nothing if there is no backward.
    pub(super) fn run(&self, stages: &mut [Stage], x: &Tensor, end: End<'_>) -> Result<()> {
        self.part(stages, x, false, end).map(drop)
    }

    /// As `run`, of the stages from some one on. `wanted`: whether the gradient of `x` is.
    fn part(
        &self,
        stages: &mut [Stage],
        x: &Tensor,
        wanted: bool,
        end: End<'_>,
    ) -> Result<Option<Tensor>> {
        let (stage, above) = stages
            .split_first_mut()
            .expect("a stage above, or the output has been given to the loss");
        let trains = stage.trains();
        let Stage {
            model,
            reducer,
            numbers,
            scratch,
            saved,
            ..
        } = stage;
        let options = PassOptions {
            training: self.training,
            accumulate: self.micro_batch > 0,
            last: self.last,
            seed: self.seed,
            position: numbers.position(self.micro_batch),
        };
        let mut nobody = |_: ParamId| Ok(());
        let listener: &mut dyn Listener = if self.reduces { reducer } else { &mut nobody };
        let mut pass = Pass::new(&model.params, scratch, saved, options, listener);
        let output = model.forward(&mut pass, x)?;
        let gradient = match above.first_mut() {
            None => end(&mut pass, &output)?,
            Some(next) => {
                let input = next.receive(&output)?;
                // What the backward needs of it has been saved.
                drop(output);
                let gradient = self.part(above, &input, wanted || trains, end)?;
                drop(input);
                gradient
                    .map(|gradient| bring(&mut pass, model.params.device(), &gradient))
                    .transpose()?
            }
        };
        // Nothing is trained here or below, or there is no backward at all.
        let Some(gradient) = gradient.filter(|_| wanted || trains) else {
            return Ok(None);
        };
        let fold = if wanted { Fold::Input } else { Fold::Nothing };
        Ok(model.backward_to(&mut pass, &gradient, fold)?.gradient)
    }
}

/// What is done at the top of a pass with the output.
pub(super) type End<'a> = &'a mut dyn FnMut(&mut Pass<'_>, &Tensor) -> Result<Option<Tensor>>;

impl Stage {
    /// The output of the stage below, on this one's device.
    fn receive(&mut self, output: &Tensor) -> Result<Tensor> {
        if output.device() == self.device() {
            return Ok(output.clone());
        }
        let input = self.scratch.take(output.shape(), output.dtype())?;
        announced("activations to the next device", || input.copy_from(output))?;
        Ok(input)
    }
}

/// The gradient of a stage's output, on its device.
fn bring(pass: &mut Pass<'_>, device: Device, gradient: &Tensor) -> Result<Tensor> {
    if gradient.device() == device {
        return Ok(gradient.clone());
    }
    let here = pass.take_as(gradient.shape(), gradient.dtype())?;
    announced("gradients to the device before", || {
        here.copy_from(gradient)
    })?;
    Ok(here)
}
