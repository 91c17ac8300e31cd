//! The flags of `ddp-train inspect`.

use std::path::PathBuf;

use clap::Args;

use crate::config::TaskKind;

/// What stands below the help of `inspect`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train inspect out                                   a run: how it ended, its checkpoints
  ddp-train inspect out/checkpoints/step-00000790         a checkpoint: every byte is checked
  ddp-train inspect out/checkpoints/step-00000790/model.safetensors
  ddp-train inspect train.csv --labels species            data: would training take them?
  ddp-train inspect digits.npz#x_train --json

All of the data is read, and nothing is changed, but for data that cannot be mapped: those are converted once and kept, as \
training does.

Exit codes: 0 all is well, 65 something is damaged or would be refused, 74 it cannot be read.";

/// The flags of `inspect`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct InspectFlags {
    /// A run's folder, a checkpoint, a model file, or data (as --data takes them)
    #[arg(value_name = "PATH")]
    pub path: String,
    /// Where the labels of data are, as for training
    #[arg(long, value_name = "SPEC")]
    pub labels: Option<String>,
    /// Whether they are classes or numbers, as for training
    #[arg(long, value_name = "TASK")]
    pub task: Option<TaskKind>,
    /// Where data that cannot be mapped are kept converted [default: beside them]
    #[arg(long, value_name = "DIR")]
    #[arg(env = "DDP_CACHE_DIR", hide_env_values = true)]
    pub cache_dir: Option<PathBuf>,
    /// One line of JSON in place of text
    #[arg(long)]
    pub json: bool,
}
