//! What follows from the settings of a run: defaults, and the parts that the trainer builds.

use std::path::{Path, PathBuf};

use ddp_data::text::TOKENIZER_FILE;
use ddp_data::{DataRequest, LeftOpen, TableSettings};
use ddp_nn::optim::{ParameterGroup, Rule};

use super::Config;
use super::values::Packing;
use crate::error::Result;
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

/// A setting of optimizers and its field. Which optimizer has it, and its default, is declared in
/// `ddp_nn::optim`.
pub(super) type Constant = (&'static str, fn(&mut Config) -> &mut Option<f64>);

/// The settings of all optimizers that are numbers.
pub(super) const CONSTANTS: [Constant; 7] = [
    ("lr", |config| &mut config.lr),
    ("adam-lr", |config| &mut config.adam_lr),
    ("weight-decay", |config| &mut config.weight_decay),
    ("beta1", |config| &mut config.beta1),
    ("beta2", |config| &mut config.beta2),
    ("eps", |config| &mut config.eps),
    ("momentum", |config| &mut config.momentum),
];

impl Config {
    /// The length of the run: 5 epochs by default.
    pub fn length(&self) -> Length {
        match self.steps {
            Some(steps) => Length::Steps(steps),
            None => Length::Epochs(self.epochs.unwrap_or(5)),
        }
    }

    /// After how many evaluations without a better one the run ends, if it does.
    pub fn patience(&self) -> Option<u64> {
        self.stop_after.filter(|most| *most > 0)
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
        self.with_defaults().lr.expect("every optimizer has a rate")
    }

    /// With the defaults that follow from other settings filled in.
    pub fn with_defaults(&self) -> Config {
        let mut config = self.clone();
        for (name, field) in CONSTANTS {
            let value = field(&mut config);
            *value = value.or(self.optimizer.default_of(name));
        }
        config
    }

    /// The optimizer's update rule.
    pub fn rule(&self) -> Rule {
        let mut config = self.clone();
        let given = CONSTANTS.map(|(name, field)| (name, *field(&mut config)));
        let given = |name: &str| match name {
            "nesterov" => self.nesterov.then_some(1.0),
            _ => given.iter().find(|(known, _)| *known == name)?.1,
        };
        Rule {
            decayed: self.decay,
            ..self.optimizer.rule(&given)
        }
    }

    /// The groups of parameters, whose rates are factors of the peak.
    pub(crate) fn groups(&self) -> Result<Vec<ParameterGroup>> {
        let peak = self.peak_lr();
        let groups = self.group.iter().flat_map(|all| &all.0).map(|group| {
            let rate = group.lr.map(|lr| lr / peak);
            Ok(ParameterGroup::new(
                &group.pattern,
                rate,
                group.weight_decay,
            )?)
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
            lora: self.lora.clone(),
            recompute_parts: self.recompute_parts,
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
    pub fn data_request(&self) -> DataRequest {
        let initial = self.init_from.as_deref();
        DataRequest {
            labels: self.labels.clone(),
            val_data: self.val_data.clone(),
            val_labels: self.val_labels.clone(),
            val_split: self.val_split.unwrap_or_default(),
            stratify: self.stratify.unwrap_or_default(),
            seed: self.seed,
            task: self.task,
            context: self.model.context(),
            vocabulary: self.model.vocabulary(),
            tokenizer: self.tokenizer.clone().or(initial.and_then(tokenizer_of)),
            loss_on: self.loss_on,
            packed: match self.packing {
                Packing::On => true,
                Packing::Off => false,
                // A model that is split over devices takes one document a row.
                Packing::Auto => {
                    self.devices_per_rank == 1 && self.model.value("position") == "rope"
                }
            },
            shortens: self.model.generates(),
            table: TableSettings {
                drop: self.drop.clone(),
                categorical: self.categorical.clone().unwrap_or_default(),
                missing: self.missing.unwrap_or_default(),
            },
            normalize: self.normalize.unwrap_or_default(),
            clips_targets: !self.plain,
            left_open: self.left_open(),
            cache_dir: self.cache_dir.clone(),
            ..DataRequest::new(self.data.clone())
        }
    }
}

impl Config {
    /// What tables choose.
    fn left_open(&self) -> LeftOpen {
        let open = LeftOpen {
            categorical: self.categorical.is_none(),
            missing: self.missing.is_none(),
            normalize: self.normalize.is_none(),
            val_split: self.val_split.is_none(),
            stratify: self.stratify.is_none(),
            task: self.task.is_none(),
        };
        if self.plain {
            LeftOpen::default()
        } else {
            open
        }
    }
}

/// The tokenizer of a model that training begins with, if it has one.
fn tokenizer_of(model: &Path) -> Option<PathBuf> {
    let file = model.join(TOKENIZER_FILE);
    file.is_file().then_some(file)
}
