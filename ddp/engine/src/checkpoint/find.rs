//! The checkpoints of a run: `OUT/checkpoints/step-%08d`.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::errors::reason;
use super::layout::{checkpoints, name, steps};
use super::manifest::{Opened, is_of_another_version, open};
use crate::error::{Error, Result};

/// Checkpoints that cannot be used, each with the reason.
pub type Skipped = Vec<(PathBuf, String)>;

/// Why a checkpoint is skipped. An error if it may be intact but cannot be read: skipping it would
/// lose work.
fn damage(folder: &Path, error: Error) -> Result<String> {
    let older = "or name an older checkpoint of the run";
    match error {
        // It is not a checkpoint, or lacks the file.
        Error::Io { ref source, .. }
            if matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory
            ) =>
        {
            Ok(error.to_string())
        }
        Error::Io {
            action,
            path,
            source,
            ..
        } => Err(Error::Io {
            action,
            path,
            source,
            help: format!("check that it can be read, {older}"),
        }),
        Error::Data(text) if is_of_another_version(folder) => Err(Error::Data(format!(
            "{text}; it is intact, but of another version of this program: use that version, {older}"
        ))),
        Error::Data(text) => Ok(reason(folder, &text).to_string()),
        other => Err(other),
    }
}

/// How often a folder is listed again when a checkpoint was gone before it was opened: a running
/// job removes old checkpoints.
pub(super) const LISTED_MAX: u32 = 20;

/// Waits before the next listing: hosts see changes in a shared folder late.
fn nap(listed: u32) {
    std::thread::sleep(Duration::from_millis(20) * listed);
}

/// The newest intact checkpoint of a run, and the damaged ones that were skipped, with the reason.
pub fn newest(out: &Path) -> Result<(Option<Opened>, Skipped)> {
    let checkpoints = checkpoints(out);
    for listed in 1.. {
        if let Some(found) = newest_of(&checkpoints, &steps(&checkpoints)?, listed == LISTED_MAX)? {
            return Ok(found);
        }
        nap(listed);
    }
    unreachable!("the last attempt returns")
}

/// The newest intact checkpoint of these steps. None if one disappeared, unless this `is_last`
/// attempt ignores that.
pub(super) fn newest_of(
    checkpoints: &Path,
    steps: &BTreeSet<u64>,
    is_last: bool,
) -> Result<Option<(Option<Opened>, Skipped)>> {
    let mut skipped = Vec::new();
    for &step in steps.iter().rev() {
        let folder = checkpoints.join(name(step));
        match open(&folder) {
            Ok(opened) if opened.state.step == step => {
                return Ok(Some((Some(opened), skipped)));
            }
            Ok(opened) => {
                let why = format!(
                    "it holds step {}, and its name says {step}",
                    opened.state.step
                );
                skipped.push((folder, why));
            }
            Err(_) if is_gone(&folder) && !is_last => return Ok(None),
            Err(error) => {
                let why = damage(&folder, error)?;
                skipped.push((folder, why));
            }
        }
    }
    Ok(Some((None, skipped)))
}

/// Whether the folder does not exist (any more).
pub fn is_gone(folder: &Path) -> bool {
    fs::metadata(folder).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// A checkpoint of a run, and why it was chosen.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// The checkpoint, every byte checked.
    pub opened: Opened,
    /// The reason, for people.
    pub why: String,
}

/// The checkpoint with the lowest validation loss if it is intact, else the newest. Warns of
/// checkpoints that are skipped.
pub fn best(out: &Path) -> Result<Chosen> {
    let mut warned = BTreeSet::new();
    for listed in 1.. {
        let (newest, skipped) = newest(out)?;
        for (folder, why) in &skipped {
            if warned.insert(folder.clone()) {
                tracing::warn!("skipped the checkpoint {}: {why}", folder.display());
            }
        }
        let newest = newest.ok_or_else(|| {
            let (got, help) = match skipped.first() {
                None => ("none".to_string(), "train first"),
                Some((_, why)) => (format!("none that is intact: {why}"), "train again"),
            };
            Error::Data(format!(
                "{}: expected an intact checkpoint in it, got {got}; help: {help}, or give another \
                 folder",
                out.display()
            ))
        })?;
        if let Some(chosen) = best_or(newest, &skipped, out, listed == LISTED_MAX)? {
            return Ok(chosen);
        }
        nap(listed);
    }
    unreachable!("the last attempt returns")
}

/// The best checkpoint according to the newest one, or the newest. None if the best disappeared
/// because there is a newer one that was not `skipped`, unless this `is_last` attempt ignores that.
pub(super) fn best_or(
    newest: Opened,
    skipped: &Skipped,
    out: &Path,
    is_last: bool,
) -> Result<Option<Chosen>> {
    let chosen = |opened: Opened, why: &str| {
        Ok(Some(Chosen {
            opened,
            why: why.into(),
        }))
    };
    let Some(best) = newest.state.best else {
        return chosen(newest, "the newest; none was evaluated");
    };
    if best.step == newest.state.step {
        return chosen(newest, "the best by validation, and the newest");
    }
    let checkpoints = checkpoints(out);
    let folder = checkpoints.join(name(best.step));
    let why_not = match open(&folder) {
        Ok(opened) => return chosen(opened, "the best by validation"),
        Err(_) if is_gone(&folder) => {
            let is_skipped = |step: &u64| {
                let folder = checkpoints.join(name(*step));
                skipped.iter().any(|(skipped, _)| *skipped == folder)
            };
            let steps = steps(&checkpoints)?;
            let is_newest = steps.range(newest.state.step + 1..).all(is_skipped);
            if !is_newest && !is_last {
                return Ok(None);
            }
            "it is missing".to_string()
        }
        Err(error) => error.to_string(),
    };
    tracing::warn!(
        "the best model by validation was that of step {}, but {why_not}: using the newest",
        best.step
    );
    chosen(newest, "the newest")
}
