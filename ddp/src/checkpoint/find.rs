//! The checkpoints of a run: `OUT/checkpoints/step-%08d`.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::manifest::{Opened, is_of_another_version, open};
use super::model::unreadable;
use crate::error::{Error, Result};

/// The folder of a run that its checkpoints are in.
pub(super) fn checkpoints(out: &Path) -> PathBuf {
    out.join("checkpoints")
}

/// What the folder of step `step` is called.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a folder that is called as `name` calls it.
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
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<Result<Vec<_>, _>>().map_err(unreadable(checkpoints))?;
    Ok(names.iter().filter_map(|name| step_of(name)).collect())
}

/// Checkpoints that cannot be used, each with the reason.
pub type PassedOver = Vec<(PathBuf, String)>;

/// Why a checkpoint is passed over. An error where nobody can say whether it is whole: the run would go back behind it, though nothing is wrong with it.
fn damage(folder: &Path, error: Error) -> Result<String> {
    let way_out = "or name an older checkpoint of the run (--resume PATH)";
    match error {
        // It is none at all, or has no such file.
        Error::Io { ref source, .. } if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(error.to_string())
        }
        Error::Io { action, path, source, .. } => {
            Err(Error::Io { action, path, source, way_out: format!("Check that it may be read, {way_out}") })
        }
        Error::Data(text) if is_of_another_version(folder) => Err(Error::Data(format!(
            "{text}. It is whole, and of another version of ddp-train: go on with that, {way_out}"
        ))),
        Error::Data(text) => Ok(text),
        other => Err(other),
    }
}

/// The newest whole checkpoint of a run's folder, and those passed over with the reason: those that are damaged.
pub fn newest(out: &Path) -> Result<(Option<Opened>, PassedOver)> {
    let checkpoints = checkpoints(out);
    let mut passed_over = Vec::new();
    for step in steps(&checkpoints)?.into_iter().rev() {
        let folder = checkpoints.join(name(step));
        match open(&folder) {
            Ok(opened) if opened.state.step == step => return Ok((Some(opened), passed_over)),
            Ok(opened) => {
                let why = format!("it holds step {}, and its name says {step}", opened.state.step);
                passed_over.push((folder, why));
            }
            Err(error) => {
                let why = damage(&folder, error)?;
                passed_over.push((folder, why));
            }
        }
    }
    Ok((None, passed_over))
}

/// The checkpoint of a run with the least loss on held-out rows, if it is still there and whole; else the newest.
pub fn best(out: &Path) -> Result<Opened> {
    let (newest, passed_over) = newest(out)?;
    let newest = newest.ok_or_else(|| match passed_over.first() {
        Some((_, why)) => Error::Data(format!("{} has no whole checkpoint: {why}", out.display())),
        None => Error::Data(format!("{} has no checkpoint. Train first, or name another folder", out.display())),
    })?;
    let best = newest.state.best.map(|best| best.step).filter(|&step| step != newest.state.step);
    let best = best.map(|step| checkpoints(out).join(name(step))).filter(|folder| folder.exists());
    match best.map(|folder| open(&folder)) {
        None => Ok(newest),
        Some(Ok(best)) => Ok(best),
        Some(Err(error)) => {
            tracing::warn!("{error}. The newest is taken in its place");
            Ok(newest)
        }
    }
}
