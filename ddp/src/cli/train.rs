//! The flags of training. Every one is optional here, so that flags can be laid over the environment and a file; the defaults are
//! settled in `config.rs`.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{count, number, spec, whole};
use crate::config::{
    Activation, DeviceChoice, FloatType, GraphChoice, List, LogLevel, ModelKind, Normalize, OptimizerKind, Overlap,
    Precision, Resident, Resume, Schedule, TaskKind, When,
};
use crate::data::DataSpec;

pub(super) const MODEL: &str = "Model";
pub(super) const DATA: &str = "Data";
pub(super) const LENGTH: &str = "Batches and length";
pub(super) const OPTIMIZATION: &str = "Optimization";
pub(super) const MACHINE: &str = "Machine";
pub(super) const RANKS: &str = "Between ranks";
pub(super) const CHECKPOINTS: &str = "Stopping and going on";
pub(super) const OUTPUT: &str = "Output";

/// The flags of training, as they were written. In a TOML file the same names without the dashes in front.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Flags {
    /// Family of models [default: mlp]
    #[arg(long, value_name = "NAME", help_heading = MODEL)]
    pub model: Option<ModelKind>,
    /// Widths of the hidden layers; none for a linear model [default: 256,128]
    #[arg(long, value_name = "WIDTHS", help_heading = MODEL, allow_hyphen_values = true)]
    pub hidden: Option<List<usize>>,
    /// Between the layers [default: relu]
    #[arg(long, value_name = "NAME", help_heading = MODEL)]
    pub activation: Option<Activation>,
    /// Probability of dropping an element behind an activation [default: 0]
    #[arg(long, value_name = "P", help_heading = MODEL, value_parser = number, allow_negative_numbers = true)]
    pub dropout: Option<f64>,
    /// Layers or parameters to leave as they are, by name: 0 or 2.bias, with commas between [default: none]
    #[arg(long, value_name = "NAMES", help_heading = MODEL)]
    pub freeze: Option<List<String>>,

    /// What to train on: a file (.npy, .npz, .csv, .tsv, .parquet, .safetensors, .bin, IDX; csv, npy and IDX also .gz), a folder of
    /// files or a pattern, with #NAME behind it for one of several arrays. Or built in: glyphs, synthetic:classification,
    /// synthetic:regression or synthetic:row-number, with options behind it, as in glyphs,rows=50000 (rows, held-out, seed;
    /// features, classes or outputs, noise) [default: glyphs,rows=20000,held-out=2000,seed=0]
    #[arg(long, value_name = "SPEC", help_heading = DATA, value_parser = spec)]
    pub data: Option<DataSpec>,
    /// What is to be learned from files: a column or an array of --data by its name, or another file [default: the last column of the
    /// first table; y beside x, labels beside features or images, and the like]
    #[arg(long, value_name = "SPEC", help_heading = DATA)]
    pub labels: Option<String>,
    /// Files to evaluate on, as --data [default: none]
    #[arg(long, value_name = "SPEC", help_heading = DATA, value_parser = spec)]
    pub val_data: Option<DataSpec>,
    /// Their labels, where these are not called as those of --data [default: as they are]
    #[arg(long, value_name = "SPEC", help_heading = DATA)]
    pub val_labels: Option<String>,
    /// Part of the rows of --data to keep for evaluation, chosen by --seed; instead of --val-data [default: 0]
    #[arg(long, value_name = "F", help_heading = DATA, value_parser = number, allow_negative_numbers = true)]
    pub val_split: Option<f64>,
    /// Whether labels are classes or numbers [default: classes where they are whole numbers or texts]
    #[arg(long, value_name = "TASK", help_heading = DATA)]
    pub task: Option<TaskKind>,
    /// What is done to features: nothing, brought to 0 to 1 as a whole, or each to mean 0 and deviation 1 [default: none]
    #[arg(long, value_name = "HOW", help_heading = DATA)]
    pub normalize: Option<Normalize>,
    /// Where files that cannot be mapped are kept in a form that can [default: beside them, else a folder of the user's]
    #[arg(long, value_name = "DIR", help_heading = DATA)]
    pub cache_dir: Option<PathBuf>,

    /// Rows of a step, over all ranks [default: 128]
    #[arg(long, value_name = "ROWS", help_heading = LENGTH, value_parser = whole, allow_negative_numbers = true)]
    pub batch_size: Option<u64>,
    /// Most rows of a rank that go through the model at a time [default: all of them]
    #[arg(long, value_name = "ROWS", help_heading = LENGTH, value_parser = count, allow_negative_numbers = true)]
    pub micro_batch: Option<usize>,
    /// Steps to train for, 0 to save the untrained model; instead of --epochs
    #[arg(long, value_name = "N", help_heading = LENGTH, value_parser = whole, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Times to go through the data [default: 5]
    #[arg(long, value_name = "N", help_heading = LENGTH, value_parser = whole, allow_negative_numbers = true)]
    pub epochs: Option<u64>,
    /// Leave out an epoch's last batch where it is short [default: false]
    #[arg(long, value_name = "BOOL", help_heading = LENGTH, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub drop_last: Option<bool>,

    /// Rule of the update [default: adamw]
    #[arg(long, value_name = "NAME", help_heading = OPTIMIZATION)]
    pub optimizer: Option<OptimizerKind>,
    /// Peak of the learning rate [default: 0.001 for adamw, 0.1 for sgd]
    #[arg(long, value_name = "RATE", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Where the schedule ends [default: 0]
    #[arg(long, value_name = "RATE", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub min_lr: Option<f64>,
    /// How the learning rate goes on after the warm-up [default: cosine]
    #[arg(long, value_name = "NAME", help_heading = OPTIMIZATION)]
    pub schedule: Option<Schedule>,
    /// Steps up to the peak [default: a tenth of all, at most 100]
    #[arg(long, value_name = "N", help_heading = OPTIMIZATION, value_parser = whole, allow_negative_numbers = true)]
    pub warmup_steps: Option<u64>,
    /// Decay of matrices; vectors do not decay [default: 0.01 for adamw, 0 for sgd]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub weight_decay: Option<f64>,
    /// Of adamw: memory of the gradients' mean [default: 0.9]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub beta1: Option<f64>,
    /// Of adamw: memory of their squares' mean [default: 0.999]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub beta2: Option<f64>,
    /// Of adamw: what is added to the root [default: 1e-8]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub eps: Option<f64>,
    /// Of sgd: how much of the last update goes on [default: 0.9]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub momentum: Option<f64>,
    /// Largest norm of all gradients together; 0 turns clipping off [default: 0]
    #[arg(long, value_name = "NORM", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub grad_clip: Option<f64>,
    /// Part of the target that all classes share [default: 0]
    #[arg(long, value_name = "X", help_heading = OPTIMIZATION, value_parser = number, allow_negative_numbers = true)]
    pub label_smoothing: Option<f64>,
    /// A weight for each class, with commas between [default: none]
    #[arg(long, value_name = "WEIGHTS", help_heading = OPTIMIZATION, allow_hyphen_values = true)]
    pub class_weights: Option<List<f64>>,
    /// What everything random in training derives from [default: 0]
    #[arg(long, value_name = "N", help_heading = OPTIMIZATION, value_parser = whole, allow_negative_numbers = true)]
    pub seed: Option<u64>,

    /// Where to train: cpu, cuda (each rank on GPUs of its own), cuda:N (one rank alone, on that one), or auto: cuda if
    /// every rank can, else cpu [default: auto]
    #[arg(long, value_name = "DEVICE", help_heading = MACHINE)]
    pub device: Option<DeviceChoice>,
    /// GPUs of each rank, over which the layers are split: for a model that is too large for one [default: 1]
    #[arg(long, value_name = "N", help_heading = MACHINE, value_parser = count, allow_negative_numbers = true)]
    pub devices_per_rank: Option<usize>,
    /// Let several ranks have the same GPU where there are too few: for tests, never for speed [default: false]
    #[arg(long, value_name = "BOOL", help_heading = MACHINE, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub share_gpus: Option<bool>,
    /// In what the model computes: tf32 and bf16 need a GPU; parameters, gradients and moments are kept in f32 in any case
    /// [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = MACHINE)]
    pub dtype: Option<Precision>,
    /// Keep all data in the GPU's memory and gather batches there; auto does where they fit [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = MACHINE)]
    pub data_on_device: Option<Resident>,
    /// On a GPU: capture a step once, and launch it as a whole from then on [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = MACHINE)]
    pub graph: Option<GraphChoice>,
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", help_heading = MACHINE, value_parser = count, allow_negative_numbers = true)]
    pub threads: Option<usize>,

    /// Size of a bucket of gradients, in MB: what is reduced at a time [default: 4]
    #[arg(long, value_name = "MB", help_heading = RANKS, value_parser = number, allow_negative_numbers = true)]
    pub bucket_mb: Option<f64>,
    /// Type in which gradients travel [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = RANKS)]
    pub reduce_dtype: Option<FloatType>,
    /// What ranks divide among them in place of each keeping all of it (ZeRO): 0 nothing, 1 the optimizer's moments
    /// [default: 0]
    #[arg(long, value_name = "LEVEL", help_heading = RANKS, value_parser = whole, allow_negative_numbers = true)]
    pub zero: Option<u64>,
    /// Reduce gradients beside the backward pass, while it runs [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = RANKS)]
    pub overlap: Option<Overlap>,
    /// Seconds that a rank waits for the others before the job ends with code 77 [default: 600]
    #[arg(long, value_name = "S", help_heading = RANKS, value_parser = number, allow_negative_numbers = true)]
    pub timeout_s: Option<f64>,

    /// Steps between checkpoints; 0 for only at the end [default: an epoch]
    #[arg(long, value_name = "N", help_heading = CHECKPOINTS, value_parser = whole, allow_negative_numbers = true)]
    pub checkpoint_every: Option<u64>,
    /// How many checkpoints are kept: the newest; the best by validation is kept besides [default: 3]
    #[arg(long, value_name = "N", help_heading = CHECKPOINTS, value_parser = whole, allow_negative_numbers = true)]
    pub keep: Option<u64>,
    /// Go on with a run: never, auto (from the newest whole checkpoint in --out, from the start if there is none), or from
    /// this checkpoint of it [default: never]
    #[arg(long, value_name = "WHICH", help_heading = CHECKPOINTS)]
    pub resume: Option<Resume>,
    /// Resume although flags have changed that alter what is computed; begin anew where no checkpoint can be used [default: false]
    #[arg(long = "override", value_name = "BOOL", help_heading = CHECKPOINTS, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    #[serde(rename = "override")]
    pub override_: Option<bool>,
    /// Begin with the values of this model.safetensors, whose names and shapes must be the model's
    #[arg(long, value_name = "FILE", help_heading = CHECKPOINTS)]
    pub init_from: Option<PathBuf>,

    /// Folder of this run; it must not hold a run already, unless that is resumed [default: out]
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub out: Option<PathBuf>,
    /// Steps between evaluations on held-out rows; 0 for only at the end [default: an epoch]
    #[arg(long, value_name = "N", help_heading = OUTPUT, value_parser = whole, allow_negative_numbers = true)]
    pub eval_every: Option<u64>,
    /// Steps between lines of the record [default: 10]
    #[arg(long, value_name = "N", help_heading = OUTPUT, value_parser = whole, allow_negative_numbers = true)]
    pub log_every: Option<u64>,
    /// Write OUT/tensorboard besides, for TensorBoard [default: false]
    #[arg(long, value_name = "BOOL", help_heading = OUTPUT, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true")]
    pub tensorboard: Option<bool>,
    /// When progress is shown [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = OUTPUT)]
    pub progress: Option<When>,
    /// What is logged on standard error [default: info]
    #[arg(long, value_name = "LEVEL", help_heading = OUTPUT)]
    pub log_level: Option<LogLevel>,
}
