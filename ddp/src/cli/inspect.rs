//! The flags of `ddp-train inspect`.

use std::path::PathBuf;

use clap::Args;

/// The flags of `inspect`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct InspectFlags {
    /// A checkpoint, a model file, a run's folder, or data (as --data takes them)
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
}
