//! Names of a checkpoint's folder and files.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::errors::unreadable;
use crate::error::Result;

/// The file with the model.
pub const MODEL_FILE: &str = "model.safetensors";
/// The file with everything but tensors.
pub const STATE_FILE: &str = "state.json";
/// The file with sizes and checksums of the others.
pub const MANIFEST_FILE: &str = "manifest.json";

/// The optimizer's file of part `part` of `parts`.
pub(super) fn optimizer_file(part: usize, parts: usize) -> String {
    match parts {
        1 => "optimizer.safetensors".into(),
        _ => format!("optimizer-{part:05}-of-{parts:05}.safetensors"),
    }
}

/// The folder of a run's checkpoints.
pub(super) fn checkpoints(out: &Path) -> PathBuf {
    out.join("checkpoints")
}

/// The folder of the checkpoint of step `step` in a run's folder.
pub fn folder(out: &Path, step: u64) -> PathBuf {
    checkpoints(out).join(name(step))
}

/// The name of the folder of step `step`.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a folder with such a name.
pub(super) fn step_of(folder: &str) -> Option<u64> {
    let step = folder.strip_prefix("step-")?.parse().ok()?;
    (name(step) == folder).then_some(step)
}

/// The steps that have a folder.
pub(super) fn steps(checkpoints: &Path) -> Result<BTreeSet<u64>> {
    let entries = match fs::read_dir(checkpoints) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(unreadable(checkpoints))?,
    };
    let mut steps = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(unreadable(checkpoints))?.file_name();
        steps.extend(step_of(&name.to_string_lossy()));
    }
    Ok(steps)
}
