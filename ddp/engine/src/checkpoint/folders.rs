//! The folders and files of checkpoints: names, which checkpoints are kept (the newest, and the
//! best by validation), and what killed runs left behind.
//!
//! Unknown names are left alone. A checkpoint is renamed to `.removing-…` before it is removed, so
//! that no reader finds an incomplete one.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::files::unreadable;
use crate::error::Result;
use ddp_kernels::files;

/// The folder of a run that holds its checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// The file with the model.
pub const MODEL_FILE: &str = "model.safetensors";
/// The file with everything but tensors.
pub const STATE_FILE: &str = "state.json";
/// The file with sizes and checksums of the others.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";

/// The optimizer's file of part `part` of `parts`.
pub(super) fn optimizer_file(part: usize, parts: usize) -> String {
    match parts {
        1 => "optimizer.safetensors".into(),
        _ => format!("optimizer-{part:05}-of-{parts:05}.safetensors"),
    }
}

/// The folder of a run's checkpoints.
pub(super) fn checkpoints(out: &Path) -> PathBuf {
    out.join(CHECKPOINTS)
}

/// The folder of the checkpoint of step `step` in a run's folder.
pub fn folder(out: &Path, step: u64) -> PathBuf {
    checkpoints(out).join(name(step))
}

/// The folder of a run's newest checkpoint, which may be damaged.
pub fn newest_folder(out: &Path) -> Option<PathBuf> {
    let newest = steps(&checkpoints(out)).ok()?.pop_last()?;
    Some(folder(out, newest))
}

/// Whether the folder has files of a checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    let names = [MODEL_FILE, STATE_FILE];
    names.iter().any(|name| folder.join(name).exists())
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

/// The prefix of a checkpoint that is still being written; the generation of its ranks follows.
pub(super) const UNFINISHED: &str = ".unfinished-";
/// The prefix of one that is being removed.
const REMOVING: &str = ".removing-";
/// The prefix of one that another one of the same step replaces.
pub(super) const REPLACED: &str = ".replaced-";

/// Which of the checkpoints of `steps` to remove after step `newest` was written: all older ones
/// but the newest `keep` and the best.
pub(super) fn goes(steps: &BTreeSet<u64>, newest: u64, keep: u64, best: Option<u64>) -> Vec<u64> {
    let older = steps.iter().copied().filter(|&step| step < newest).rev();
    // The newest counts as one of them.
    let keep = usize::try_from(keep.max(1) - 1).unwrap_or(usize::MAX);
    let mut gone: Vec<u64> = older
        .skip(keep)
        .filter(|step| Some(*step) != best)
        .collect();
    // The oldest first: an error then leaves the newer ones.
    gone.reverse();
    gone
}

/// Removes checkpoints that are no longer kept.
pub(super) fn prune(checkpoints: &Path, newest: u64, keep: u64, best: Option<u64>) -> Result<()> {
    let mut steps = steps(checkpoints)?;
    // A checkpoint without a manifest is damaged: it does not count, and is kept for inspection.
    steps.retain(|step| checkpoints.join(name(*step)).join(MANIFEST_FILE).exists());
    let mut gone = goes(&steps, newest, keep, best).into_iter();
    gone.try_for_each(|step| remove(checkpoints, &name(step)))
}

fn remove(checkpoints: &Path, name: &str) -> Result<()> {
    let nameless = checkpoints.join(format!("{REMOVING}{name}"));
    files::remove_folder(&nameless)?;
    files::rename(&checkpoints.join(name), &nameless)?;
    Ok(files::remove_folder(&nameless)?)
}

/// Removes what a killed run left, and restores the name of a checkpoint that was being replaced.
/// The caller holds the lock of the metrics log.
pub(crate) fn clear_up(out: &Path) -> Result<()> {
    let checkpoints = checkpoints(out);
    if !checkpoints.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(&checkpoints).map_err(files::failed("read", &checkpoints))? {
        let entry = entry.map_err(files::failed("read", &checkpoints))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let of_step = |prefix: &str| {
            // Of an unfinished one the generation comes first.
            let rest = name.strip_prefix(prefix)?;
            let rest = rest.trim_start_matches(|it: char| it.is_ascii_digit() || it == '-');
            step_of(rest).map(|_| checkpoints.join(rest))
        };
        match of_step(REPLACED).filter(|folder| !folder.exists()) {
            Some(folder) => files::rename(&entry.path(), &folder)?,
            None if [UNFINISHED, REMOVING, REPLACED]
                .into_iter()
                .any(|it| of_step(it).is_some()) =>
            {
                files::remove_folder(&entry.path())?;
            }
            None => {}
        }
    }
    Ok(())
}

/// Renames the checkpoints of the run in `out` after step `step`. The newest goes first, so that
/// the newest that is left is never older than the metrics log.
pub(crate) fn put_aside_after(out: &Path, step: u64) -> Result<()> {
    let steps = steps(&checkpoints(out))?;
    let mut newer = steps.range(step + 1..).rev();
    newer.try_for_each(|step| put_aside(&folder(out, *step)))
}

/// Renames a file or folder, if it exists, to a free name that starts with `superseded-`.
pub(crate) fn put_aside(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let numbered = |number: u32| match number {
        1 => path.with_file_name(format!("superseded-{name}")),
        _ => path.with_file_name(format!("superseded-{number}-{name}")),
    };
    let mut names = (1..).map(numbered);
    let to = names.find(|to| !to.exists()).expect("some name is free");
    files::rename(path, &to)?;
    tracing::warn!("put {} aside as {}", path.display(), to.display());
    Ok(())
}
