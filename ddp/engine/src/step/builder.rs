//! Says step by step how a model is trained.

use ddp_comm::World;
use ddp_kernels::Seed;
use ddp_nn::Loss;
use ddp_nn::models::Model;
use ddp_nn::optim::{Optimizer, Rule};

use super::{GraphChoice, Step, StepOptions};
use crate::error::Result;
use crate::reducer::{self, ReducerOptions};

/// How a model is trained: with [`StepOptions::default`], unless it is told otherwise.
#[derive(Debug)]
pub struct StepBuilder {
    model: Model,
    loss: Box<dyn Loss>,
    rule: Rule,
    options: StepOptions,
}

impl Step {
    /// Steps of `model` on this loss, with `AdamW` or another [`Rule`].
    pub fn builder(model: Model, loss: impl Loss + 'static, rule: impl Into<Rule>) -> StepBuilder {
        StepBuilder {
            model,
            loss: Box::new(loss),
            rule: rule.into(),
            options: StepOptions::default(),
        }
    }
}

impl StepBuilder {
    /// Scales gradients whose norm, all of them together, is larger.
    pub fn clip_norm(mut self, norm: f64) -> StepBuilder {
        self.options.clip_norm = norm;
        self
    }

    /// The seed of what layers draw in training, as dropout does.
    pub fn seed(mut self, seed: Seed) -> StepBuilder {
        self.options.seed = seed.0;
        self
    }

    /// Whether steps are captured as graphs.
    pub fn graph(mut self, choice: GraphChoice) -> StepBuilder {
        self.options.graph = choice;
        self
    }

    /// How gradients are reduced.
    pub fn reducer(mut self, options: ReducerOptions) -> StepBuilder {
        self.options.reducer = options;
        self
    }

    /// Steps with all ranks, which call this together: they compare their models, and get the
    /// values of rank 0.
    #[track_caller]
    pub fn build(self, world: &World) -> Result<Step> {
        let (params, options) = (&self.model.params, &self.options);
        let device = params.device();
        let group = match device.is_accelerator() {
            true => world.gpu_group("gradients", device)?,
            false => world.group("gradients")?,
        };
        let owned = reducer::owned(params, &group, options.reducer);
        let optimizer = Optimizer::of_slices(self.rule, params, &owned)?;
        Step::new(self.model, self.loss, optimizer, group, options)
    }
}
