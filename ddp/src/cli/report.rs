//! The flags of `ddp-train report`.

use std::path::PathBuf;

use clap::Args;

/// Printed after the help of `report`.
pub(super) const EXAMPLES: &str = "\
Examples:
  ddp-train report out                            make out/report.html again
  ddp-train report one two three --out page.html  one page with the curves of three runs
  ddp-train report out --csv metrics.csv          a row for each logged step and each evaluation
  ddp-train report out --csv -                    the same on standard output";

/// The flags of `report`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct ReportFlags {
    /// Folders of runs: what --out was
    #[arg(value_name = "DIR", required = true)]
    pub folders: Vec<PathBuf>,
    /// File for the page; of several runs it shows the curves over one another
    /// [default: report.html in the folder of the run]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write the metrics of a run to this CSV file instead; - for standard output
    #[arg(long, value_name = "FILE", conflicts_with = "out")]
    pub csv: Option<PathBuf>,
}
