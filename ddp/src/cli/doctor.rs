//! The flags of `ddp-train doctor`.

use std::path::PathBuf;

use clap::Args;

use crate::config::TIMEOUT_S;
use crate::flags::{PlaceFlags, number};

/// The flags of `doctor`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct DoctorFlags {
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
