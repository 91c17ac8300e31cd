//! The flags of `ddp-train eval` and `ddp-train predict`.

use std::path::PathBuf;

use clap::Args;

use super::{count, number, spec};
use crate::config::{DeviceChoice, LogLevel};
use crate::data::DataSpec;

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
    pub device: DeviceChoice,
    /// Let several ranks have the same GPU
    #[arg(long)]
    pub share_gpus: bool,
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub threads: Option<usize>,
    /// Where data that cannot be mapped are kept converted [default: beside them]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "600", value_parser = number, allow_negative_numbers = true)]
    pub timeout_s: f64,
    /// What is logged on standard error
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}

/// The flags of `eval`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct EvalFlags {
    /// What both have.
    #[command(flatten)]
    pub using: UsingFlags,
    /// Where the labels are, as for training
    #[arg(long, value_name = "SPEC")]
    pub labels: Option<String>,
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
}
