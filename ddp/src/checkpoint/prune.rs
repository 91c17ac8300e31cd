//! Which checkpoints stay: the newest, and the best by validation. And what runs that were killed left behind.
//!
//! Names that are not ours are left alone. One that goes is first called `.removing-…`: so that nobody ever finds half of it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::find;
use super::manifest::MANIFEST_FILE;
use crate::error::Result;
use crate::files;

/// Before a checkpoint has its name.
pub(super) const UNFINISHED: &str = ".unfinished-";
/// When it has lost its name.
const REMOVING: &str = ".removing-";

/// While another takes its name.
pub(super) const REPLACED: &str = ".replaced-";

/// Which of the checkpoints of `steps` go, when that of step `newest` has just been written: all up to it but the newest `keep` and the best.
pub(super) fn goes(steps: &BTreeSet<u64>, newest: u64, keep: u64, best: Option<u64>) -> Vec<u64> {
    let older = steps.iter().copied().filter(|&step| step < newest).rev();
    // The newest is one of them.
    let keep = usize::try_from(keep.max(1) - 1).unwrap_or(usize::MAX);
    let mut gone: Vec<u64> = older.skip(keep).filter(|step| Some(*step) != best).collect();
    // The oldest first: what an error leaves is the newer.
    gone.reverse();
    gone
}

/// Removes the checkpoints that need not stay.
pub(super) fn prune(checkpoints: &Path, newest: u64, keep: u64, best: Option<u64>) -> Result<()> {
    // One that lacks its manifest is damaged: it does not count, and somebody may want to look at it.
    let is_whole = |step: &u64| checkpoints.join(find::name(*step)).join(MANIFEST_FILE).exists();
    let steps = find::steps(checkpoints)?.into_iter().filter(is_whole).collect();
    goes(&steps, newest, keep, best).into_iter().try_for_each(|step| remove(checkpoints, &find::name(step)))
}

fn remove(checkpoints: &Path, name: &str) -> Result<()> {
    let nameless = checkpoints.join(format!("{REMOVING}{name}"));
    files::remove_folder(&nameless)?;
    files::rename(&checkpoints.join(name), &nameless)?;
    files::remove_folder(&nameless)
}

/// Removes what a run that ended in the middle of saving or removing has left, and gives a checkpoint its name back that was being replaced. The
/// folder's run is this one alone: its record is locked.
pub(super) fn clean(checkpoints: &Path) -> Result<()> {
    let entries = fs::read_dir(checkpoints).map_err(files::failed("read", checkpoints))?;
    for entry in entries {
        let name = entry.map_err(files::failed("read", checkpoints))?.file_name();
        let name = name.to_string_lossy();
        let left = checkpoints.join(&*name);
        let ours = |prefix: &str| name.strip_prefix(prefix).filter(|rest| find::step_of(rest).is_some());
        if let Some(rest) = ours(REPLACED).filter(|rest| !checkpoints.join(rest).exists()) {
            files::rename(&left, &checkpoints.join(rest))?;
        } else if [UNFINISHED, REMOVING, REPLACED].into_iter().find_map(ours).is_some() {
            files::remove_folder(&left)?;
        }
    }
    Ok(())
}
