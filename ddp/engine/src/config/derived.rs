//! What follows from the settings of a run: defaults, and the parts that the trainer builds.

use ddp_data::{DataRequest, TableSettings};
use ddp_kernels::choice::Choice;
use ddp_kernels::ops::{AdamwConstants, SgdConstants};
use ddp_nn::optim::{Group, Rule};

use super::Config;
use super::values::OptimizerKind;
use crate::error::Result;
use crate::hugging_face;
use crate::model::ModelOptions;
use crate::tasks::LossOptions;

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// In steps. 0 saves the untrained model.
    Steps(u64),
    /// In passes through the data.
    Epochs(u64),
}

/// A constant of optimizers.
pub(super) struct Constant {
    pub(super) name: &'static str,
    pub(super) field: fn(&mut Config) -> &mut Option<f64>,
    /// Its defaults in the order of `OptimizerKind::ALL`: adamw, sgd, muon. None where the
    /// optimizer does not have it.
    defaults: [Option<f64>; 3],
}

/// The constants of all optimizers.
pub(super) const CONSTANTS: [Constant; 7] = [
    Constant::new("lr", |c| &mut c.lr, [Some(1e-3), Some(0.1), Some(0.02)]),
    Constant::new("adam-lr", |c| &mut c.adam_lr, [None, None, Some(3e-4)]),
    Constant::new(
        "weight-decay",
        |c| &mut c.weight_decay,
        [Some(0.01), Some(0.0), Some(0.01)],
    ),
    Constant::new("beta1", |c| &mut c.beta1, [Some(0.9), None, Some(0.9)]),
    Constant::new("beta2", |c| &mut c.beta2, [Some(0.999), None, Some(0.95)]),
    Constant::new("eps", |c| &mut c.eps, [Some(1e-8), None, Some(1e-10)]),
    Constant::new(
        "momentum",
        |c| &mut c.momentum,
        [None, Some(0.9), Some(0.95)],
    ),
];

impl Constant {
    const fn new(
        name: &'static str,
        field: fn(&mut Config) -> &mut Option<f64>,
        defaults: [Option<f64>; 3],
    ) -> Constant {
        Constant {
            name,
            field,
            defaults,
        }
    }

    pub(super) fn applies_to(&self, optimizer: OptimizerKind) -> bool {
        self.default_for(optimizer).is_some()
    }

    fn default_for(&self, optimizer: OptimizerKind) -> Option<f64> {
        self.defaults[optimizer as usize]
    }

    /// The names of the optimizers that have it.
    pub(super) fn owners(&self) -> Vec<&'static str> {
        let all = OptimizerKind::ALL.iter();
        let owners = all.filter(|(kind, ..)| self.applies_to(*kind));
        owners.map(|(_, name, _)| *name).collect()
    }
}

impl Config {
    /// The length of the run: 5 epochs by default.
    pub fn length(&self) -> Length {
        match self.steps {
            Some(steps) => Length::Steps(steps),
            None => Length::Epochs(self.epochs.unwrap_or(5)),
        }
    }

    /// Rows of a global batch: 128 by default.
    pub fn batch_rows(&self) -> u64 {
        match (self.batch_tokens, self.model.context()) {
            (Some(tokens), Some(context)) => tokens / context as u64,
            _ => self.batch_size.unwrap_or(128),
        }
    }

    /// The peak of the learning rate, by default the optimizer's.
    pub fn peak_lr(&self) -> f64 {
        self.settled().lr.expect("every optimizer has a rate")
    }

    /// With the defaults that follow from other settings filled in.
    pub fn settled(&self) -> Config {
        let mut config = self.clone();
        for constant in &CONSTANTS {
            let field = (constant.field)(&mut config);
            *field = field.or(constant.default_for(self.optimizer));
        }
        if self.batch_tokens.is_none() {
            config.batch_size = Some(self.batch_rows());
        }
        if let Length::Epochs(epochs) = self.length() {
            config.epochs = Some(epochs);
        }
        config
    }

    /// The optimizer's update rule.
    pub fn rule(&self) -> Rule {
        let settled = self.settled();
        // A constant that the optimizer does not have is not read.
        let of = |constant: Option<f64>| constant.unwrap_or_default();
        let (weight_decay, decayed) = (of(settled.weight_decay), self.decay);
        let adamw = AdamwConstants {
            beta1: of(settled.beta1),
            beta2: of(settled.beta2),
            epsilon: of(settled.eps),
        };
        let sgd = |nesterov| SgdConstants {
            momentum: of(settled.momentum),
            nesterov,
        };
        match self.optimizer {
            OptimizerKind::Adamw => Rule::AdamW {
                constants: adamw,
                weight_decay,
                decayed,
            },
            OptimizerKind::Sgd => Rule::Sgd {
                constants: sgd(self.nesterov),
                weight_decay,
                decayed,
            },
            OptimizerKind::Muon => Rule::Muon {
                constants: sgd(true),
                adamw,
                adamw_rate: of(settled.adam_lr) / of(settled.lr),
                weight_decay,
                decayed,
            },
        }
    }

    /// The groups of parameters, whose rates are factors of the peak.
    pub(crate) fn groups(&self) -> Result<Vec<Group>> {
        let peak = self.peak_lr();
        let groups = self.group.0.iter().map(|group| {
            let rate = group.lr.map(|lr| lr / peak);
            Ok(Group::new(&group.pattern, rate, group.weight_decay)?)
        });
        groups.collect()
    }

    /// The model and its loss.
    pub fn model_options(&self) -> ModelOptions {
        ModelOptions {
            spec: self.model.clone(),
            precision: self.dtype,
            seed: self.seed,
            loss: self.loss_options(),
        }
    }

    /// Options of the loss.
    pub(crate) fn loss_options(&self) -> LossOptions {
        LossOptions {
            label_smoothing: self.label_smoothing,
            class_weights: self.class_weights.clone(),
        }
    }

    /// The request for the data.
    pub(crate) fn data_request(&self) -> DataRequest {
        // The model that training begins with has no gradient for some tokens.
        let initial = self.init_from.as_deref();
        let trained_from = initial.filter(|_| self.steps != Some(0));
        DataRequest {
            data: self.data.clone(),
            labels: self.labels.clone(),
            val_data: self.val_data.clone(),
            val_labels: self.val_labels.clone(),
            val_split: self.val_split,
            seed: self.seed,
            task: self.task,
            context: self.model.context(),
            vocabulary: self.model.vocabulary(),
            untrained_token: trained_from.and_then(hugging_face::untrained_token),
            table: TableSettings {
                drop: self.drop.clone(),
                categorical: self.categorical.clone(),
                missing: self.missing,
            },
            normalize: self.normalize,
            normalizes_targets: true,
            cache_dir: self.cache_dir.clone(),
            trained: None,
        }
    }
}
