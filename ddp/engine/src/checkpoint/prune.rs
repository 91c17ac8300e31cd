//! Which checkpoints stay: the newest, and the best by validation. Removes what killed runs left.
//!
//! Unknown names are left alone. A checkpoint is renamed to `.removing-…` before it is removed, so
//! that no reader finds half of one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::layout::{self, MANIFEST_FILE};
use crate::error::Result;
use ddp_kernels::files;

/// The prefix of a checkpoint that is still being written.
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
    // A checkpoint without a manifest is damaged: it does not count, and is kept for inspection.
    let is_whole = |step: &u64| {
        checkpoints
            .join(layout::name(*step))
            .join(MANIFEST_FILE)
            .exists()
    };
    let steps = layout::steps(checkpoints)?
        .into_iter()
        .filter(is_whole)
        .collect();
    goes(&steps, newest, keep, best)
        .into_iter()
        .try_for_each(|step| remove(checkpoints, &layout::name(step)))
}

fn remove(checkpoints: &Path, name: &str) -> Result<()> {
    let nameless = checkpoints.join(format!("{REMOVING}{name}"));
    files::remove_folder(&nameless)?;
    files::rename(&checkpoints.join(name), &nameless)?;
    Ok(files::remove_folder(&nameless)?)
}

/// Removes what a killed run left, and restores the name of a checkpoint that was being replaced.
/// The caller holds the lock of the folder.
pub(super) fn clean(checkpoints: &Path) -> Result<()> {
    let entries = fs::read_dir(checkpoints).map_err(files::failed("read", checkpoints))?;
    for entry in entries {
        let name = entry
            .map_err(files::failed("read", checkpoints))?
            .file_name();
        let name = name.to_string_lossy();
        let left = checkpoints.join(&*name);
        let ours = |prefix: &str| {
            name.strip_prefix(prefix)
                .filter(|rest| layout::step_of(rest).is_some())
        };
        if let Some(rest) = ours(REPLACED).filter(|rest| !checkpoints.join(rest).exists()) {
            files::rename(&left, &checkpoints.join(rest))?;
        } else if [UNFINISHED, REMOVING, REPLACED]
            .into_iter()
            .find_map(ours)
            .is_some()
        {
            files::remove_folder(&left)?;
        }
    }
    Ok(())
}

/// Renames the checkpoints of the run in `out` after step `step`. The newest goes first, so that
/// the newest that is left is never older than the record.
pub fn put_aside_after(out: &Path, step: u64) -> Result<()> {
    let steps = layout::steps(&layout::checkpoints(out))?;
    let mut newer = steps.range(step + 1..).rev();
    newer.try_for_each(|step| put_aside(&layout::folder(out, *step)))
}

/// Renames a file or folder, if it exists, to a free name that starts with `superseded-`.
pub fn put_aside(path: &Path) -> Result<()> {
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
