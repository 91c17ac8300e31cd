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

use self::sheet::Inspected;
use crate::checkpoint::{MODEL_FILE, is_checkpoint};
use crate::config::Config;
use crate::error::Result;
use crate::metrics_log::EVENTS_FILE;
use crate::output::Say;

/// Prints what is in a file or folder; data are read with these settings.
pub fn inspect(name: &str, settings: &Config, as_json: bool, say: Say<'_>) -> Result<()> {
    let Inspected(sheet, json, problem) = find(name, settings)?;
    match as_json {
        true => say(&json)?,
        false => say(&sheet)?,
    }
    problem.map_or(Ok(()), Err)
}

fn find(name: &str, settings: &Config) -> Result<Inspected> {
    let path = Path::new(name);
    let is_named_model = path.file_name().is_some_and(|name| name == MODEL_FILE);
    let has_labels = settings.labels.is_some();
    if path.is_file() && !has_labels && (is_named_model || model::is_model(path)) {
        return model::found(path);
    }
    if path.is_dir() && is_checkpoint(path) {
        return checkpoint::found(path);
    }
    if path.join(EVENTS_FILE).exists() || path.join("checkpoints").is_dir() {
        return run::found(path);
    }
    dataset::found(name, settings)
}
