//! Settings as the options of a run.

use ddp_kernels::ops::{AdamwConstants, SgdConstants};

use super::values::GroupSetting;
use super::{Config, Optimizer};
use crate::data::{DataRequest, TableSettings};
use crate::error::Result;
use crate::hugging_face;
use crate::optim::{Group, Rule};
use crate::tasks::LossOptions;
use crate::trainer::{LearningRate, ModelOptions, Reduction, RunData, RunOptions};

impl Config {
    /// The options of the run.
    pub fn run(&self) -> RunOptions {
        RunOptions {
            model: self.model_options(),
            freeze: self.freeze.clone(),
            init_from: self.init_from.clone(),
            data: RunData::Request(Box::new(self.data_request())),
            data_on_device: self.data_on_device,
            batch_size: self.batch_rows(),
            micro_batch: self.micro_batch,
            drop_last: self.drop_last,
            length: self.length(),
            rule: self.rule(),
            groups: self.groups().expect("groups are checked"),
            learning_rate: LearningRate {
                shape: self.schedule,
                peak: self.peak_lr(),
                min: self.min_lr,
                warmup_steps: self.warmup_steps,
            },
            grad_clip: self.grad_clip,
            seed: self.seed,
            graph: self.graph,
            products: self.products,
            threads: self.threads,
            reduction: Reduction {
                bucket_bytes: self.bucket_mb.map(|mb| (mb * 1e6) as usize),
                dtype: self.reduce_dtype.dtype(),
                overlap: self.overlap,
                zero: self.zero == 1,
            },
            out: self.out.clone(),
            eval_every: self.eval_every,
            sample: self.sample.clone(),
            checkpoint_every: self.checkpoint_every,
            keep: self.keep,
            log_every: self.log_every,
            trace: self.trace,
            resume: self.resume.clone(),
            override_: self.override_,
        }
    }

    /// The model and its loss.
    pub fn model_options(&self) -> ModelOptions {
        ModelOptions {
            spec: self.model.clone(),
            precision: self.dtype,
            seed: self.seed,
            loss: LossOptions {
                label_smoothing: self.label_smoothing,
                class_weights: self.class_weights.clone(),
            },
        }
    }

    fn data_request(&self) -> DataRequest {
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
            untrained_token: self.untrained_token(),
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

    /// A token that the data must not have, since the model that training begins with has no
    /// gradient for it.
    fn untrained_token(&self) -> Option<u64> {
        let path = self.init_from.as_deref().filter(|_| self.steps != Some(0));
        path.and_then(hugging_face::untrained_token)
    }

    /// The groups of parameters, whose rates are factors of the peak.
    pub(super) fn groups(&self) -> Result<Vec<Group>> {
        let group = |group: &GroupSetting| {
            let rate = group.lr.map(|lr| lr / self.peak_lr());
            Ok(Group::new(&group.pattern, rate, group.weight_decay)?)
        };
        self.group.0.iter().map(group).collect()
    }

    fn rule(&self) -> Rule {
        let (weight_decay, decayed) = (self.decay_rate(), self.decay);
        match self.optimizer() {
            Optimizer::Adamw { beta1, beta2, eps } => Rule::AdamW {
                constants: AdamwConstants {
                    beta1,
                    beta2,
                    epsilon: eps,
                },
                weight_decay,
                decayed,
            },
            Optimizer::Sgd { momentum, nesterov } => Rule::Sgd {
                constants: SgdConstants { momentum, nesterov },
                weight_decay,
                decayed,
            },
            Optimizer::Muon {
                momentum,
                adam_lr,
                beta1,
                beta2,
                eps,
            } => Rule::Muon {
                constants: SgdConstants {
                    momentum,
                    nesterov: true,
                },
                adamw: AdamwConstants {
                    beta1,
                    beta2,
                    epsilon: eps,
                },
                adamw_rate: adam_lr / self.peak_lr(),
                weight_decay,
                decayed,
            },
        }
    }
}
