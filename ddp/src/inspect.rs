//! `ddp-train inspect`: the contents of a checkpoint, a model file, a run's folder or a dataset,
//! and whether they are intact.
//!
//! Each kind has a file, which makes a sheet for people and JSON. Damage is printed with the rest,
//! and is also the error at the end.

mod checkpoint;
mod dataset;
mod model;
mod run;
mod sheet;

use std::path::Path;

use clap::Args;

use self::sheet::Inspected;
use crate::checkpoint::MODEL_FILE;
use crate::error::Result;
use crate::flags::Taken;
use crate::metrics_log::EVENTS_FILE;
use crate::output::Say;
use crate::using::choose::is_checkpoint;

/// Printed after the help of `inspect`.
pub(crate) const EXAMPLES: &str = "\
Examples:
  ddp-train inspect out                                   a run: how it ended, its checkpoints
  ddp-train inspect out/checkpoints/step-00000785         a checkpoint: every byte is checked
  ddp-train inspect out/checkpoints/step-00000785/model.safetensors
  ddp-train inspect train.csv --labels species            data: would training accept them?
  ddp-train inspect digits.npz#x_train --json

All data are read, and nothing is changed; files that cannot be memory-mapped are converted once and cached, as in training.

Exit codes: 0 all is well, 65 damaged or refused, 74 unreadable.";

/// The flags of `inspect`.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct InspectFlags {
    /// A run's folder, a checkpoint, a model file, or data (as --data takes them)
    #[arg(value_name = "PATH")]
    pub path: String,
    /// How the data are read, as in training.
    #[command(flatten)]
    pub settings: Taken,
    /// Print one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// Prints what is in a file or folder.
pub(crate) fn inspect(flags: &InspectFlags, say: Say<'_>) -> Result<()> {
    let Inspected(sheet, json, problem) = find(flags)?;
    match flags.json {
        true => say(&json)?,
        false => say(&sheet)?,
    }
    problem.map_or(Ok(()), Err)
}

fn find(flags: &InspectFlags) -> Result<Inspected> {
    let path = Path::new(&flags.path);
    let is_named_model = path.file_name().is_some_and(|name| name == MODEL_FILE);
    let has_labels = flags.settings.labels.is_some();
    if path.is_file() && !has_labels && (is_named_model || model::is_model(path)) {
        return model::found(path);
    }
    if path.is_dir() && is_checkpoint(path) {
        return checkpoint::found(path);
    }
    if path.join(EVENTS_FILE).exists() || path.join("checkpoints").is_dir() {
        return run::found(path);
    }
    dataset::found(&flags.path, &flags.settings)
}
