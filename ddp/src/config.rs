//! What a run is: one validated `Config`, made from flags or a TOML file. The rest of the program sees only this.
//!
//! `Flags` (in `cli.rs`) is what people wrote, all of it optional; `Config::resolve` fills in the defaults and checks everything
//! that can be checked without the data; `Config::plan` checks the rest.

pub mod bench;
pub(crate) mod check;
mod device;
pub mod using;
pub mod values;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use bench::{AddmmConfig, AllreduceConfig, BenchConfig, BenchOperation, MlpBenchConfig, ProductShape, Sweep};
pub use check::timeout;
pub use using::UseConfig;
pub use values::{
    Activation, DeviceChoice, FloatType, GraphChoice, List, LogLevel, ModelKind, Normalize, OptimizerKind, Overlap,
    Precision, Resident, Resume, Schedule, TaskKind, When,
};

pub(crate) use device::{check_graph, described, find_devices, is_simulated, name_of};

use self::check::{WHOLE_MAX, refuse, warmup_too_long};
use crate::cli::Flags;
use crate::data::{Data, DataSpec, Sampler};
use crate::error::{Error, Result};

/// A training run, every value settled and checked. Serialises as flags with their values, and reads back as itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Flags", into = "Flags")]
pub struct Config {
    /// Which family of models.
    pub model: ModelKind,
    /// Widths of the hidden layers; none for a linear model.
    pub hidden: Vec<usize>,
    /// Between the layers.
    pub activation: Activation,
    /// The probability of dropping an element behind an activation.
    pub dropout: f64,
    /// What to train on.
    pub data: DataSpec,
    /// What is to be learned from files.
    pub labels: Option<String>,
    /// Files to evaluate on.
    pub val_data: Option<DataSpec>,
    /// Their labels.
    pub val_labels: Option<String>,
    /// The part of the rows that is kept for evaluation.
    pub val_split: f64,
    /// Whether labels are classes or numbers; none for what they look like.
    pub task: Option<TaskKind>,
    /// What is done to features.
    pub normalize: Normalize,
    /// Where files that cannot be mapped are kept converted.
    pub cache_dir: Option<PathBuf>,
    /// Rows of the global batch.
    pub batch_size: u64,
    /// The most rows of a rank that go through the model at a time; none for all.
    pub micro_batch: Option<usize>,
    /// For how long.
    pub length: Length,
    /// Whether an epoch's short batch is left out.
    pub drop_last: bool,
    /// The rule and its constants.
    pub optimizer: Optimizer,
    /// The peak of the learning rate.
    pub lr: f64,
    /// Where the schedule ends.
    pub min_lr: f64,
    /// Of matrices alone.
    pub weight_decay: f64,
    /// How the learning rate goes on after the warm-up.
    pub schedule: Schedule,
    /// Steps until the peak; none for a tenth of all steps, at most 100.
    pub warmup_steps: Option<u64>,
    /// The largest norm of all gradients together; 0 for any.
    pub grad_clip: f64,
    /// The part of the target that all classes share.
    pub label_smoothing: f64,
    /// A weight a class; empty for none.
    pub class_weights: Vec<f64>,
    /// Parameters whose names begin with one of these are left as they are.
    pub freeze: Vec<String>,
    /// Where.
    pub device: DeviceChoice,
    /// How many devices a rank has, over which the layers are split.
    pub devices_per_rank: usize,
    /// Whether several ranks may have the same GPU.
    pub share_gpus: bool,
    /// In what the model computes.
    pub dtype: Precision,
    /// Whether the data lie on the GPU.
    pub data_on_device: Resident,
    /// Whether a step is captured once and launched as a whole.
    pub graph: GraphChoice,
    /// Threads of a rank; none for its share of the cores.
    pub threads: Option<usize>,
    /// What everything random in training derives from.
    pub seed: u64,
    /// The folder of this run.
    pub out: PathBuf,
    /// Steps between checkpoints; none for an epoch's, 0 for only at the end.
    pub checkpoint_every: Option<u64>,
    /// How many checkpoints are kept.
    pub keep: u64,
    /// Whether a run goes on, and from where.
    pub resume: Resume,
    /// Whether it goes on although flags have changed that alter what is computed.
    pub override_: bool,
    /// The model to begin with.
    pub init_from: Option<PathBuf>,
    /// Whether event files for TensorBoard are written.
    pub tensorboard: bool,
    /// Steps between evaluations; none for an epoch's, 0 for only at the end.
    pub eval_every: Option<u64>,
    /// Steps between lines of the record.
    pub log_every: u64,
    /// How large a bucket of gradients may be, in MB of 10⁶ bytes.
    pub bucket_mb: f64,
    /// What travels between ranks.
    pub reduce_dtype: FloatType,
    /// How much is kept once over all ranks, in place of once a rank: nothing (0), the optimizer's moments (1).
    pub zero: u64,
    /// How long a rank waits for the others, in seconds.
    pub timeout_s: f64,
    /// When progress is shown.
    pub progress: When,
    /// Whether gradients are reduced while backward runs.
    pub overlap: Overlap,
    /// What is logged.
    pub log_level: LogLevel,
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// So many steps. None at all saves the untrained model.
    Steps(u64),
    /// So many times through the data.
    Epochs(u64),
}

/// An optimizer and the constants that it alone has.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Optimizer {
    Adamw { beta1: f64, beta2: f64, eps: f64 },
    Sgd { momentum: f64 },
}

/// A run in steps, once the data are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The order of rows.
    pub sampler: Sampler,
    /// Steps of the whole run.
    pub steps: u64,
    /// Of these, until the peak of the learning rate.
    pub warmup_steps: u64,
    /// Steps between evaluations; 0 for only at the end.
    pub eval_every: u64,
    /// Steps between checkpoints; 0 for only at the end.
    pub checkpoint_every: u64,
}

impl Config {
    /// Settles and checks what was written.
    pub fn resolve(flags: Flags) -> Result<Config> {
        let optimizer = resolve_optimizer(&flags)?;
        let (lr, weight_decay) = match optimizer {
            Optimizer::Adamw { .. } => (1e-3, 0.01),
            Optimizer::Sgd { .. } => (0.1, 0.0),
        };
        let length = match (flags.steps, flags.epochs) {
            (Some(steps), None) => Length::Steps(steps),
            (None, epochs) => Length::Epochs(epochs.unwrap_or(5)),
            (Some(steps), Some(epochs)) => {
                return Err(refuse(
                    "--steps",
                    steps,
                    "either --steps or --epochs",
                    &format!("Leave --epochs {epochs} out"),
                ));
            }
        };
        let config = Config {
            model: flags.model.unwrap_or_default(),
            hidden: flags.hidden.map_or_else(|| vec![256, 128], |list| list.0),
            activation: flags.activation.unwrap_or_default(),
            dropout: flags.dropout.unwrap_or(0.0),
            data: flags.data.unwrap_or_default(),
            labels: flags.labels,
            val_data: flags.val_data,
            val_labels: flags.val_labels,
            val_split: flags.val_split.unwrap_or(0.0),
            task: flags.task,
            normalize: flags.normalize.unwrap_or_default(),
            cache_dir: flags.cache_dir,
            batch_size: flags.batch_size.unwrap_or(128),
            micro_batch: flags.micro_batch,
            length,
            drop_last: flags.drop_last.unwrap_or(false),
            optimizer,
            lr: flags.lr.unwrap_or(lr),
            min_lr: flags.min_lr.unwrap_or(0.0),
            weight_decay: flags.weight_decay.unwrap_or(weight_decay),
            schedule: flags.schedule.unwrap_or_default(),
            warmup_steps: flags.warmup_steps,
            grad_clip: flags.grad_clip.unwrap_or(0.0),
            label_smoothing: flags.label_smoothing.unwrap_or(0.0),
            class_weights: flags.class_weights.map_or_else(Vec::new, |list| list.0),
            freeze: flags.freeze.map_or_else(Vec::new, |list| list.0),
            device: flags.device.unwrap_or_default(),
            devices_per_rank: flags.devices_per_rank.unwrap_or(1),
            share_gpus: flags.share_gpus.unwrap_or(false),
            dtype: flags.dtype.unwrap_or_default(),
            data_on_device: flags.data_on_device.unwrap_or_default(),
            graph: flags.graph.unwrap_or_default(),
            threads: flags.threads,
            seed: flags.seed.unwrap_or(0),
            out: flags.out.unwrap_or_else(|| "out".into()),
            checkpoint_every: flags.checkpoint_every,
            keep: flags.keep.unwrap_or(3),
            resume: flags.resume.unwrap_or_default(),
            override_: flags.override_.unwrap_or(false),
            init_from: flags.init_from,
            tensorboard: flags.tensorboard.unwrap_or(false),
            eval_every: flags.eval_every,
            log_every: flags.log_every.unwrap_or(10),
            bucket_mb: flags.bucket_mb.unwrap_or(4.0),
            reduce_dtype: flags.reduce_dtype.unwrap_or_default(),
            zero: flags.zero.unwrap_or(0),
            timeout_s: flags.timeout_s.unwrap_or(600.0),
            progress: flags.progress.unwrap_or_default(),
            overlap: flags.overlap.unwrap_or_default(),
            log_level: flags.log_level.unwrap_or_default(),
        };
        config.check()?;
        Ok(config)
    }

    /// What the run is in steps, over these data. Checks the flags that depend on them.
    pub fn plan(&self, data: &Data) -> Result<Plan> {
        self.check_task(data.train.task())?;
        self.check_rows(data.train.rows())?;
        let sampler = Sampler::new(data.train.rows(), self.batch_size, self.seed, self.drop_last)?;
        let per_epoch = sampler.steps_per_epoch();
        let steps = match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                epochs.checked_mul(per_epoch).filter(|&steps| steps <= WHOLE_MAX).ok_or_else(|| {
                    let expected = format!("at most {} times {per_epoch} steps", WHOLE_MAX / per_epoch);
                    refuse("--epochs", epochs, &expected, "Nobody lives that long: give fewer")
                })?
            }
        };
        let warmup_steps = self.warmup_steps.unwrap_or_else(|| (steps / 10).min(100));
        if warmup_steps > steps {
            return Err(warmup_too_long(warmup_steps, steps));
        }
        let eval_every = self.eval_every.unwrap_or(per_epoch);
        let checkpoint_every = self.checkpoint_every.unwrap_or(per_epoch);
        Ok(Plan { sampler, steps, warmup_steps, eval_every, checkpoint_every })
    }

    /// Refuses files that have less than one batch, where nothing but whole batches is trained on.
    fn check_rows(&self, rows: u64) -> Result<()> {
        let (DataSpec::Files(_), true) = (&self.data, self.drop_last && rows < self.batch_size) else { return Ok(()) };
        Err(Error::Data(format!(
            "--data {}: expected at least {} rows to train on, one --batch-size, since --drop-last leaves out what is less, got {rows}. Give \
             --batch-size {} or less, or more data, or leave --drop-last out",
            self.data,
            self.batch_size,
            rows.max(1)
        )))
    }

    /// Whether the parameter called `name` is left as it is: `--freeze 0` is layer 0 and all in it, `0.bias` one parameter.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.freeze.iter().any(|prefix| is_below(prefix, name))
    }

    /// Refuses a `--freeze` that names nothing: of these parameters, or at all.
    pub fn check_freeze<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
        match self.freeze.iter().find(|prefix| !names.clone().any(|name| is_below(prefix, name))) {
            None => Ok(()),
            Some(prefix) => {
                let known = names.collect::<Vec<_>>().join(", ");
                Err(refuse(
                    "--freeze",
                    prefix,
                    "the name of a layer or parameter of the model",
                    &format!("It has {known}"),
                ))
            }
        }
    }

    /// As TOML, every value settled: what OUT/config.toml holds.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a checked configuration has numbers, short texts and UTF-8 alone")
    }

    /// From TOML: what `to_toml` wrote, or less, with defaults for the rest.
    pub fn from_toml(text: &str) -> Result<Config> {
        toml::from_str(text).map_err(|error| Error::Usage(format!("configuration: {}", error.to_string().trim_end())))
    }

    /// As JSON, for the record: what does not apply is left out.
    pub fn to_json(&self) -> serde_json::Value {
        let mut json = serde_json::to_value(self).expect("a checked configuration has numbers and texts alone");
        if let Some(map) = json.as_object_mut() {
            map.retain(|_, value| !value.is_null());
        }
        json
    }

    /// What must be equal on all ranks, name and value: everything that a step's arithmetic or the order of collectives
    /// depends on. Folders, threads, what is shown and which device of its kind is a rank's may differ.
    pub fn trajectory(&self) -> Vec<(String, String)> {
        const OWN: [&str; 9] = [
            "out",
            "threads",
            "progress",
            "log-level",
            "timeout-s",
            "share-gpus",
            "device",
            "cache-dir",
            "tensorboard",
        ];
        let mut fields = vec![("device".to_string(), self.device.kind().to_string())];
        if let serde_json::Value::Object(map) = self.to_json() {
            let shared = map.into_iter().filter(|(name, _)| !OWN.contains(&name.as_str()));
            fields.extend(shared.map(|(name, value)| (name, value.to_string())));
        }
        fields
    }

    /// `trajectory` as text: a line a value.
    pub fn trajectory_text(&self) -> String {
        self.trajectory().into_iter().map(|(name, value)| format!("{name} = {value}\n")).collect()
    }
}

fn resolve_optimizer(flags: &Flags) -> Result<Optimizer> {
    let belongs = |flag: &str, given: Option<f64>, owner: &str| match given {
        None => Ok(()),
        Some(value) => {
            Err(refuse(flag, value, &format!("--optimizer {owner}, whose it is"), &format!("Leave {flag} out")))
        }
    };
    match flags.optimizer.unwrap_or_default() {
        OptimizerKind::Adamw => {
            belongs("--momentum", flags.momentum, "sgd")?;
            let (beta1, beta2) = (flags.beta1.unwrap_or(0.9), flags.beta2.unwrap_or(0.999));
            Ok(Optimizer::Adamw { beta1, beta2, eps: flags.eps.unwrap_or(1e-8) })
        }
        OptimizerKind::Sgd => {
            belongs("--beta1", flags.beta1, "adamw")?;
            belongs("--beta2", flags.beta2, "adamw")?;
            belongs("--eps", flags.eps, "adamw")?;
            Ok(Optimizer::Sgd { momentum: flags.momentum.unwrap_or(0.9) })
        }
    }
}

impl TryFrom<Flags> for Config {
    type Error = Error;
    fn try_from(flags: Flags) -> Result<Config> {
        Config::resolve(flags)
    }
}

impl From<Config> for Flags {
    fn from(config: Config) -> Flags {
        let (kind, beta1, beta2, eps, momentum) = match config.optimizer {
            Optimizer::Adamw { beta1, beta2, eps } => (OptimizerKind::Adamw, Some(beta1), Some(beta2), Some(eps), None),
            Optimizer::Sgd { momentum } => (OptimizerKind::Sgd, None, None, None, Some(momentum)),
        };
        let (steps, epochs) = match config.length {
            Length::Steps(steps) => (Some(steps), None),
            Length::Epochs(epochs) => (None, Some(epochs)),
        };
        fn unless_empty<T>(list: Vec<T>) -> Option<List<T>> {
            (!list.is_empty()).then_some(List(list))
        }
        Flags {
            model: Some(config.model),
            hidden: Some(List(config.hidden)),
            activation: Some(config.activation),
            dropout: Some(config.dropout),
            data: Some(config.data),
            labels: config.labels,
            val_data: config.val_data,
            val_labels: config.val_labels,
            val_split: Some(config.val_split),
            task: config.task,
            normalize: Some(config.normalize),
            cache_dir: config.cache_dir,
            batch_size: Some(config.batch_size),
            micro_batch: config.micro_batch,
            steps,
            epochs,
            drop_last: Some(config.drop_last),
            optimizer: Some(kind),
            lr: Some(config.lr),
            min_lr: Some(config.min_lr),
            weight_decay: Some(config.weight_decay),
            beta1,
            beta2,
            eps,
            momentum,
            schedule: Some(config.schedule),
            warmup_steps: config.warmup_steps,
            grad_clip: Some(config.grad_clip),
            label_smoothing: Some(config.label_smoothing),
            class_weights: unless_empty(config.class_weights),
            freeze: unless_empty(config.freeze),
            device: Some(config.device),
            devices_per_rank: Some(config.devices_per_rank),
            share_gpus: Some(config.share_gpus),
            dtype: Some(config.dtype),
            data_on_device: Some(config.data_on_device),
            graph: Some(config.graph),
            threads: config.threads,
            seed: Some(config.seed),
            out: Some(config.out),
            checkpoint_every: config.checkpoint_every,
            keep: Some(config.keep),
            resume: Some(config.resume),
            override_: Some(config.override_),
            init_from: config.init_from,
            tensorboard: Some(config.tensorboard),
            eval_every: config.eval_every,
            log_every: Some(config.log_every),
            bucket_mb: Some(config.bucket_mb),
            reduce_dtype: Some(config.reduce_dtype),
            zero: Some(config.zero),
            timeout_s: Some(config.timeout_s),
            progress: Some(config.progress),
            overlap: Some(config.overlap),
            log_level: Some(config.log_level),
        }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::resolve(Flags::default()).expect("the defaults are right")
    }
}

/// Whether `name` is `prefix` or lies in the layer called so.
fn is_below(prefix: &str, name: &str) -> bool {
    let prefix = prefix.trim_end_matches('.');
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests;
