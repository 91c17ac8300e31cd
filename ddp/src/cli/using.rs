//! The flags of `ddp-train eval` and `ddp-train predict`.

use std::path::PathBuf;

use clap::Args;

use super::{count, number, spec};
use crate::config::{DeviceChoice, LogLevel};
use crate::data::DataSpec;

/// What stands below the help of `eval`.
pub(super) const EVAL_EXAMPLES: &str = "\
Examples:
  ddp-train eval --checkpoint out --data test.npz
  ddp-train eval --checkpoint out/checkpoints/step-00000790 --data glyphs --json
  mpirun -n 4 ddp-train eval --checkpoint out --data test.csv --labels species

Rows are normalised, columns chosen and classes named as in training; the loss is that of training, with its class weights and \
label smoothing. What comes out is the same on any number of ranks. Of data that are built in (glyphs, synthetic:…) the held-out \
rows are used, if there are any.";

/// What stands below the help of `predict`.
pub(super) const PREDICT_EXAMPLES: &str = "\
Examples:
  ddp-train predict --checkpoint out --data new.csv --out answers.csv
  ddp-train predict --checkpoint out --data new.npy --out answers.npy --probabilities
  mpirun -n 4 ddp-train predict --checkpoint out --data 'shards/*.npy' --out answers.csv --logits

A .csv has the columns row (from 0), prediction and probability, and p:CLASS and logit:CLASS for each class where they are asked \
for; of a model that gives numbers, row and prediction (prediction:0, prediction:1 … where there are several).

A .npy holds the number of each row's class as i64, or with --probabilities or --logits f32 [rows, classes]; of a model that gives \
numbers f32 [rows, numbers].

The file is the same on any number of ranks. Labels are not needed. Of data that are built in (glyphs, synthetic:…) the held-out \
rows are used, if there are any.";

/// What both have.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct UsingFlags {
    /// The model: a checkpoint's folder, or a run's (its best checkpoint by validation, else its newest)
    #[arg(long, value_name = "PATH")]
    pub checkpoint: PathBuf,
    /// The rows, as for training
    #[arg(long, value_name = "SPEC", value_parser = spec)]
    pub data: DataSpec,
    /// Rows that go through the model at a time
    #[arg(long, value_name = "ROWS", default_value = "512", value_parser = count, allow_negative_numbers = true)]
    pub batch_size: usize,
    /// Where: auto, cpu, cuda (each rank has a GPU of its own) or cuda:N (one rank alone)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    #[arg(env = "DDP_DEVICE", hide_env_values = true)]
    pub device: DeviceChoice,
    /// Let several ranks have the same GPU
    #[arg(long)]
    #[arg(env = "DDP_SHARE_GPUS", hide_env_values = true)]
    pub share_gpus: bool,
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    #[arg(env = "DDP_THREADS", hide_env_values = true)]
    pub threads: Option<usize>,
    /// Where data that cannot be mapped are kept converted [default: beside them]
    #[arg(long, value_name = "DIR")]
    #[arg(env = "DDP_CACHE_DIR", hide_env_values = true)]
    pub cache_dir: Option<PathBuf>,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "600", value_parser = number, allow_negative_numbers = true)]
    #[arg(env = "DDP_TIMEOUT_S", hide_env_values = true)]
    pub timeout_s: f64,
    /// What is logged on standard error
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    #[arg(env = "DDP_LOG_LEVEL", hide_env_values = true)]
    pub log_level: LogLevel,
}

/// The flags of `eval`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct EvalFlags {
    /// What both have.
    #[command(flatten)]
    pub using: UsingFlags,
    /// Where the labels are, as for training [default: what it learned from, by its name]
    #[arg(long, value_name = "SPEC")]
    pub labels: Option<String>,
    /// One line of JSON in place of text
    #[arg(long)]
    pub json: bool,
}

/// The flags of `predict`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct PredictFlags {
    /// What both have.
    #[command(flatten)]
    pub using: UsingFlags,
    /// The file to write: .npy or .csv
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Write the probability of every class
    #[arg(long)]
    pub probabilities: bool,
    /// Write what the model gives for every class, before softmax
    #[arg(long)]
    pub logits: bool,
    /// Put the file in the place of one that is there
    #[arg(long)]
    pub overwrite: bool,
}
