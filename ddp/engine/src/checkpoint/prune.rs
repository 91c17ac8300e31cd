//! Which checkpoints stay: the newest, and the best by validation. Removes what killed runs left.
//!
//! Unknown names are left alone. A checkpoint is renamed to `.removing-…` before it is removed, so
//! that no reader finds half of one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::layout::{self, MANIFEST_FILE};
use crate::error::Result;
use ddp_data::disk as files;

/// Before a checkpoint has its name.
pub(super) const UNFINISHED: &str = ".unfinished-";
/// When it has lost its name.
const REMOVING: &str = ".removing-";

/// While another takes its name.
pub(super) const REPLACED: &str = ".replaced-";

/// Which of the checkpoints of `steps` to remove after step `newest` was written: all older ones
/// but the newest `keep` and the best.
pub(super) fn goes(steps: &BTreeSet<u64>, newest: u64, keep: u64, best: Option<u64>) -> Vec<u64> {
    let older = steps.iter().copied().filter(|&step| step < newest).rev();
    // The newest is one of them.
    let keep = usize::try_from(keep.max(1) - 1).unwrap_or(usize::MAX);
    let mut gone: Vec<u64> = older
        .skip(keep)
        .filter(|step| Some(*step) != best)
        .collect();
    // The oldest first: what an error leaves is the newer.
    gone.reverse();
    gone
}

/// Removes the checkpoints that need not stay.
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
