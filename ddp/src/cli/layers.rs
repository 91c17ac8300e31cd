//! What a run's flags are laid over: the environment (`DDP_…`), and below it a TOML file.

use std::path::PathBuf;

use clap::Args;

use super::{Command, Flags};
use crate::config::Config;
use crate::error::Result;

/// Where settings come from, and what is done with them in place of training.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct LayerFlags {
    /// Read settings from this TOML file: the same names without the dashes; the environment (DDP_BATCH_SIZE=64) and flags win over it
    #[arg(long, value_name = "FILE", help_heading = "Settings")]
    pub config: Option<PathBuf>,
    /// Print all settings as TOML, and train nothing
    #[arg(long, help_heading = "Settings")]
    pub print_config: bool,
    /// Check everything, say what memory and time the run will take, and train nothing
    #[arg(long, help_heading = "Settings")]
    pub dry_run: bool,
}

/// The run that flags ask for.
pub(super) fn train(flags: Flags, _layers: &LayerFlags) -> Result<Command> {
    Ok(Command::Train(Box::new(Config::resolve(flags)?)))
}
