//! The flags of `ddp-train inspect`.

use clap::Args;

use crate::flags::Taken;

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
    /// How the data are read, as in training.
    #[command(flatten)]
    pub settings: Taken,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}
