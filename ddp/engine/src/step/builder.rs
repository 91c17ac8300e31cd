//! Says step by step how a model is trained.

use ddp_comm::{Group, World};
use ddp_kernels::{Device, Seed};
use ddp_nn::Loss;
use ddp_nn::models::Model;
use ddp_nn::optim::{Optimizer, Rule};

use super::{GraphChoice, StageSpec, Step, StepOptions};
use crate::error::Result;
use crate::reducer::{self, ReducerOptions};

/// How a model is trained: with [`StepOptions::default`], unless it is told otherwise.
#[derive(Debug)]
pub struct StepBuilder {
    models: Vec<Model>,
    loss: Box<dyn Loss>,
    rule: Rule,
    options: StepOptions,
}

impl Step {
    /// Steps of `model` on this loss, with `AdamW` or another [`Rule`].
    pub fn builder(model: Model, loss: impl Loss + 'static, rule: impl Into<Rule>) -> StepBuilder {
        Step::builder_over(vec![model], loss, rule)
    }

    /// Steps of a model that is split over several devices, as
    /// [`Sequential::build_over`](ddp_nn::Sequential::build_over) returns it. Inputs are on the
    /// first device, targets on the last.
    pub fn builder_over(
        models: Vec<Model>,
        loss: impl Loss + 'static,
        rule: impl Into<Rule>,
    ) -> StepBuilder {
        StepBuilder {
            models,
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
        let StepBuilder {
            models,
            loss,
            rule,
            options,
        } = self;
        let part = |(index, model): (usize, Model)| -> Result<StageSpec> {
            let group = gradient_group(world, index, model.params.device())?;
            let owned = reducer::owned(&model.params, &group, options.reducer);
            let optimizer = Optimizer::of_slices(rule, &model.params, &owned)?;
            Ok(StageSpec {
                model,
                optimizer,
                group,
            })
        };
        let parts = models.into_iter().enumerate().map(part);
        Step::over(parts.collect::<Result<_>>()?, loss, &options)
    }
}

/// Names of the groups in which ranks reduce gradients, one for each of a rank's devices.
pub(crate) const GRADIENT_GROUPS: [&str; 6] = [
    "gradients",
    "gradients of part 1",
    "gradients of part 2",
    "gradients of part 3",
    "gradients of part 4",
    "gradients of part 5",
];

/// The group in which the ranks reduce the gradients of their device number `index`.
#[track_caller]
pub(crate) fn gradient_group(world: &World, index: usize, device: Device) -> Result<Group> {
    let name = GRADIENT_GROUPS[index.min(GRADIENT_GROUPS.len() - 1)];
    Ok(world.group_on(device, name)?)
}
