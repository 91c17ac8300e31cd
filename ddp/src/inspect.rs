//! `ddp-train inspect`: what is in a checkpoint, a model file, a run's folder or a dataset, and whether it is sound.
//!
//! Each kind has a file that finds out and says it twice: as a sheet for people, and as JSON. What is damaged is named, and ends
//! with an error behind what could be said.

mod checkpoint;
mod dataset;
mod model;
mod run;
mod sheet;

use std::fmt::Display;
use std::path::Path;

use self::sheet::Found;
use crate::checkpoint::MODEL_FILE;
use crate::cli::InspectFlags;
use crate::error::Result;
use crate::record::EVENTS_FILE;
use crate::using::choose::is_checkpoint;

/// Says what is in it.
pub fn inspect(
    flags: &InspectFlags,
    say: &mut dyn FnMut(&dyn Display) -> Result<()>,
) -> Result<()> {
    let found = find(flags)?;
    if flags.json {
        say(&found.json)?
    } else {
        say(&found.sheet)?
    }
    found.trouble.map_or(Ok(()), Err)
}

fn find(flags: &InspectFlags) -> Result<Found> {
    let path = Path::new(&flags.path);
    let is_named_model = path.file_name().is_some_and(|name| name == MODEL_FILE);
    if path.is_file() && flags.labels.is_none() && (is_named_model || model::is_model(path)) {
        return model::found(path);
    }
    if path.is_dir() {
        if is_checkpoint(path) {
            return checkpoint::found(path);
        }
        if path.join(EVENTS_FILE).exists() || path.join("checkpoints").is_dir() {
            return run::found(path);
        }
    }
    dataset::found(flags)
}
