//! The flags of `ddp-train report`.

use std::path::PathBuf;

use clap::Args;

/// The flags of `report`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct ReportFlags {
    /// The folder of a run: what --out was
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}
