//! The flags of `ddp-train compare`.

use std::path::PathBuf;

use clap::Args;

/// Printed after the help of `compare`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train compare one two                        the first step and layer in which they part
  ddp-train compare one two --json                 the same as one line of JSON
  ddp-train compare one two --replay               the first operation whose output differs
  ddp-train report one two --out both.html         a page with curves of how far they are apart

Only steps that both runs logged are compared: --log-every 1 names the very step.

Exit codes: 0 the same, 1 they part, 2 wrong flags, 65 a damaged log, 74 unreadable.";

/// The flags of `compare`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct CompareFlags {
    /// The folder of a run: what --out was
    #[arg(value_name = "A")]
    pub first: PathBuf,
    /// The folder of the run to compare it with
    #[arg(value_name = "B")]
    pub second: PathBuf,
    /// Repeat the steps in which they part, from the last checkpoint of both before it, and find
    /// the first operation whose output differs
    #[arg(long)]
    pub replay: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}
