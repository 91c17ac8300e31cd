//! The flags of `ddp-tools`' commands, except benchmarks, and the examples in their help.

use std::path::PathBuf;

use clap::Args;
use ddp_tools::warm_up::GpuArchitecture;

use super::{PlaceFlags, number, whole};
use crate::config::TIMEOUT_S;

/// Printed after the help of `report`.
pub(crate) const REPORT_EXAMPLES: &str = "\
Examples:
  ddp-train report out                            make out/report.html again
  ddp-train report one two three --out page.html  one page with the curves of three runs";

/// The flags of `report`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct ReportFlags {
    /// Folders of runs: what --out was
    #[arg(value_name = "DIR", required = true)]
    pub folders: Vec<PathBuf>,
    /// File for the page; for several runs it shows the curves in the same charts [default:
    /// report.html in the folder of the run]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// File for a picture (SVG) of the first curves, instead of the page
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Printed after the help of `watch`.
pub(crate) const WATCH_EXAMPLES: &str = "\
Examples:
  ddp-train watch out                   a live view; Ctrl-C ends it, and the run continues
  ssh gpu-box -t ddp-train watch out    the same over ssh
  ddp-train watch out | cat             one summary, since there is no terminal";

/// The flags of `watch`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct WatchFlags {
    /// The folder of a run, during the run or after: what --out was
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Printed after the help of `inspect`.
pub(crate) const INSPECT_EXAMPLES: &str = "\
Examples:
  ddp-train inspect out                                   a run: how it ended, its checkpoints
  ddp-train inspect out --lines 40                        the head that its log had at line 40
  ddp-train inspect out/checkpoints/step-00000785         a checkpoint: every byte is checked
  ddp-train inspect out/checkpoints/step-00000785/model.safetensors

Exit codes: 0 all is well, 65 damaged or refused, 74 unreadable.";

/// The flags of `inspect`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct InspectFlags {
    /// A run's folder, a checkpoint, a Hugging Face folder or a model file
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// Of a run: the head of the first N lines of its log [default: of all]
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::MAX), allow_negative_numbers = true)]
    pub lines: Option<u64>,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// Printed after the help of `compare`.
pub(crate) const COMPARE_EXAMPLES: &str = "\
Examples:
  ddp-train compare one two                        the first step and layer in which they differ
  ddp-train compare one two --json                 the same as one line of JSON
  ddp-train compare one two --replay               the first operation whose output differs
  ddp-train report one two --out both.html         a page with curves of how far they are apart

Only steps that both runs logged are compared: --log-every 1 names the exact step.

Exit codes: 0 the same, 1 they differ, 2 wrong flags, 65 a damaged log, 74 unreadable.";

/// The flags of `compare`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct CompareFlags {
    /// The folder of a run: what --out was
    #[arg(value_name = "A")]
    pub first: PathBuf,
    /// The folder of the run to compare it with
    #[arg(value_name = "B")]
    pub second: PathBuf,
    /// Repeat the steps around the first difference, from the last checkpoint of both before it,
    /// and find the first operation whose output differs
    #[arg(long)]
    pub replay: bool,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The flags of `warm-up`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct WarmUpFlags {
    /// Kinds of GPUs to compile for, as sm_80,sm_90 [default: those of this machine]
    #[arg(long = "for", value_name = "SM", value_delimiter = ',')]
    pub architectures: Vec<GpuArchitecture>,
}

/// The flags of `doctor`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct DoctorFlags {
    /// Print lines of JSON
    #[arg(long)]
    pub json: bool,
    /// Folder for runs, whose disk is tested
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Skip the measurements
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub places: PlaceFlags,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "60", value_parser = number(TIMEOUT_S), allow_negative_numbers = true)]
    #[arg(env = "DDP_TIMEOUT_S", hide_env_values = true)]
    pub timeout_s: f64,
}
