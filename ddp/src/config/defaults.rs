//! Defaults that follow from other settings.

use super::settings::Config;
use super::values::OptimizerKind;
use crate::trainer::Length;

/// An optimizer with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Optimizer {
    Adamw {
        beta1: f64,
        beta2: f64,
        eps: f64,
    },
    Sgd {
        momentum: f64,
        nesterov: bool,
    },
    Muon {
        momentum: f64,
        adam_lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
    },
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

    /// The optimizer with its constants or their defaults.
    pub fn optimizer(&self) -> Optimizer {
        match self.optimizer {
            OptimizerKind::Adamw => Optimizer::Adamw {
                beta1: self.beta1.unwrap_or(0.9),
                beta2: self.beta2.unwrap_or(0.999),
                eps: self.eps.unwrap_or(1e-8),
            },
            OptimizerKind::Sgd => Optimizer::Sgd {
                momentum: self.momentum.unwrap_or(0.9),
                nesterov: self.nesterov,
            },
            OptimizerKind::Muon => Optimizer::Muon {
                momentum: self.momentum.unwrap_or(0.95),
                adam_lr: self.adam_lr.unwrap_or(3e-4),
                beta1: self.beta1.unwrap_or(0.9),
                beta2: self.beta2.unwrap_or(0.95),
                eps: self.eps.unwrap_or(1e-10),
            },
        }
    }

    /// The peak of the learning rate, by default the optimizer's.
    pub fn peak_lr(&self) -> f64 {
        self.lr.unwrap_or(match self.optimizer {
            OptimizerKind::Adamw => 0.001,
            OptimizerKind::Sgd => 0.1,
            OptimizerKind::Muon => 0.02,
        })
    }

    /// The weight decay, by default the optimizer's.
    pub fn decay_rate(&self) -> f64 {
        self.weight_decay.unwrap_or(match self.optimizer {
            OptimizerKind::Adamw | OptimizerKind::Muon => 0.01,
            OptimizerKind::Sgd => 0.0,
        })
    }

    /// With the defaults that follow from other settings filled in.
    pub fn settled(&self) -> Config {
        let mut config = Config {
            lr: Some(self.peak_lr()),
            weight_decay: Some(self.decay_rate()),
            ..self.clone()
        };
        if self.batch_tokens.is_none() {
            config.batch_size = Some(self.batch_rows());
        }
        if let Length::Epochs(epochs) = self.length() {
            config.epochs = Some(epochs);
        }
        match self.optimizer() {
            Optimizer::Adamw { beta1, beta2, eps } => {
                (config.beta1, config.beta2, config.eps) = (Some(beta1), Some(beta2), Some(eps));
            }
            Optimizer::Sgd { momentum, .. } => config.momentum = Some(momentum),
            Optimizer::Muon {
                momentum,
                adam_lr,
                beta1,
                beta2,
                eps,
            } => {
                (config.momentum, config.adam_lr) = (Some(momentum), Some(adam_lr));
                (config.beta1, config.beta2, config.eps) = (Some(beta1), Some(beta2), Some(eps));
            }
        }
        config
    }
}
