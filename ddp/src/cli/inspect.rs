//! The flags of `ddp-train inspect`.

use std::path::PathBuf;

use clap::Args;

use super::flags::choice;
use crate::config::{Missing, TaskKind};

/// Printed after the help of `inspect`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train inspect out                                   a run: how it ended, its checkpoints
  ddp-train inspect out/checkpoints/step-00000785         a checkpoint: every byte is checked
  ddp-train inspect out/checkpoints/step-00000785/model.safetensors
  ddp-train inspect train.csv --labels species            data: would training accept them?
  ddp-train inspect digits.npz#x_train --json

All data are read, and nothing is changed; files that cannot be memory-mapped are converted once and cached, as in training.

Exit codes: 0 all is well, 65 damaged or refused, 74 unreadable.";

/// The flags of `inspect`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct InspectFlags {
    /// A run's folder, a checkpoint, a model file, or data (as --data takes them)
    #[arg(value_name = "PATH")]
    pub path: String,
    /// Labels, in the form of --labels in training
    #[arg(long, value_name = "SPEC")]
    pub labels: Option<String>,
    /// Whether labels are classes or numbers, as in training
    #[arg(long, value_name = "TASK", value_parser = choice::<TaskKind>())]
    pub task: Option<TaskKind>,
    /// Columns of tables that are not features, as in training
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub drop: Vec<String>,
    /// Columns of tables whose values are categories, as in training
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub categorical: Vec<String>,
    /// What happens where a number is missing, as in training
    #[arg(long, value_name = "HOW", default_value = "error", value_parser = choice::<Missing>())]
    pub missing: Missing,
    /// Folder for converted copies of files that cannot be memory-mapped
    /// [default: beside the files, else ~/.cache/ddp-train/data]
    #[arg(long, value_name = "DIR")]
    #[arg(env = "DDP_CACHE_DIR", hide_env_values = true)]
    pub cache_dir: Option<PathBuf>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}
