//! The flags of `ddp-train doctor`.

use clap::Args;

/// The flags of `doctor`.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct DoctorFlags {
    /// As lines of JSON
    #[arg(long)]
    pub json: bool,
}
