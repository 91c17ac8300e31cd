//! The flags of `ddp-train doctor`.

use std::path::PathBuf;

use clap::Args;

use super::number;

/// The flags of `doctor`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct DoctorFlags {
    /// As lines of JSON
    #[arg(long)]
    pub json: bool,
    /// The folder that runs are to be saved in: its disk is tried
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub out: PathBuf,
    /// Look only, and measure nothing
    #[arg(long)]
    pub quick: bool,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "60", value_parser = number, allow_negative_numbers = true)]
    #[arg(env = "DDP_TIMEOUT_S", hide_env_values = true)]
    pub timeout_s: f64,
}
