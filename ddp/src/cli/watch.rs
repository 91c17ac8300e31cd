//! The flags of `ddp-train watch`.

use std::path::PathBuf;

use clap::Args;

/// Printed after the help of `watch`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train watch out                   a live view; q ends it, and the run continues
  ssh gpu-box -t ddp-train watch out    the same over ssh
  ddp-train watch out | cat             one summary, since there is no terminal";

/// The flags of `watch`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct WatchFlags {
    /// The folder of a run, during the run or after: what --out was
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}
