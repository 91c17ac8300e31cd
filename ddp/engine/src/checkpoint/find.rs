//! Finding a checkpoint of a run, and opening it on all ranks. A running job may remove old
//! checkpoints meanwhile: if a listed one is gone, the folder is listed again.
//!
//! Rank 0 finds it and reads all bytes; the other ranks check that they see the same. Hosts may
//! share the folder or have copies. So on several hosts the ranks of each host divide its files
//! among them and read those. All ranks compare the manifest, which has the checksums.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_comm::{Field, World};

use super::files::{reason, with_help};
use super::folders::{checkpoints, name, steps};
use super::manifest::{Opened, open, open_reading};
use crate::error::{Error, Result};
use crate::exchange;
use ddp_kernels::files::FileError;

/// Checkpoints that cannot be used, each with the reason.
pub(crate) type Skipped = Vec<(PathBuf, String)>;

/// Why a checkpoint is skipped. An error if it may be intact but cannot be read: skipping it would
/// lose work.
fn damage(folder: &Path, error: Error) -> Result<String> {
    let older = "or name an older checkpoint of the run";
    match error {
        // It is not a checkpoint, or lacks the file.
        Error::Io(io)
            if matches!(
                io.source.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory
            ) =>
        {
            Ok(io.to_string())
        }
        Error::OtherVersion(_) => {
            let intact = "it is intact, but of another version of this program: use that version";
            Err(with_help(error, &format!("{intact}, {older}")))
        }
        Error::Data(text) => Ok(reason(folder, &text).to_string()),
        other => Err(with_io_help(
            other,
            format!("check that it can be read, {older}"),
        )),
    }
}

/// The same error with another help, if it is of input or output.
fn with_io_help(error: Error, help: String) -> Error {
    match error {
        Error::Io(io) => Error::Io(FileError { help, ..io }),
        other => other,
    }
}

/// How often checkpoints are listed.
const LISTED_MAX: u32 = 20;

/// Calls `attempt` until it finds something. Its argument says whether this is the last attempt,
/// which must succeed or fail.
fn retried<T>(mut attempt: impl FnMut(bool) -> Result<Option<T>>) -> Result<T> {
    for listed in 1..LISTED_MAX {
        if let Some(found) = attempt(false)? {
            return Ok(found);
        }
        // Hosts see changes in a shared folder late.
        std::thread::sleep(Duration::from_millis(20) * listed);
    }
    Ok(attempt(true)?.expect("the last attempt returns"))
}

/// The newest intact checkpoint of a run, and the damaged ones that were skipped, with the reason.
pub fn newest(out: &Path) -> Result<(Option<Opened>, Skipped)> {
    let checkpoints = checkpoints(out);
    retried(|is_last| newest_of(&checkpoints, &steps(&checkpoints)?, is_last))
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

/// The checkpoint of the best evaluation if it is intact, else the newest. Warns of
/// checkpoints that are skipped.
pub fn best(out: &Path) -> Result<Chosen> {
    let mut warned = BTreeSet::new();
    retried(|is_last| {
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
        best_or(newest, &skipped, out, is_last)
    })
}

/// The best checkpoint according to the newest one, or the newest. None if the best disappeared
/// because there is a newer one that was not `skipped`, unless this `is_last` attempt ignores that.
pub(super) fn best_or(
    newest: Opened,
    skipped: &Skipped,
    out: &Path,
    is_last: bool,
) -> Result<Option<Chosen>> {
    let chosen = |opened: Opened, why: String| Ok(Some(Chosen { opened, why }));
    let Some(best) = newest.state.best else {
        return chosen(
            newest,
            "the newest; no rows were held out to find the best".into(),
        );
    };
    let why = format!("the best by validation {}", best.by().0.names()[1]);
    if best.step == newest.state.step {
        return chosen(newest, why + ", and the newest");
    }
    let checkpoints = checkpoints(out);
    let folder = checkpoints.join(name(best.step));
    let why_not = match open(&folder) {
        Ok(opened) => return chosen(opened, why),
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
    chosen(newest, "the newest".into())
}

/// The help if hosts have different folders.
const SHARED: &str = "the folder must be shared by all hosts, or copied to every host";

/// The checkpoint that `find` finds on rank 0, on all ranks. If a running job removes it before all
/// ranks have opened it, `find` is called again.
pub fn open_together(
    world: &World,
    mut find: impl FnMut() -> Result<Option<Opened>>,
) -> Result<Option<Opened>> {
    if world.size() == 1 {
        return find();
    }
    retried(|is_last| {
        let found = if world.rank() == 0 { find()? } else { None };
        world.barrier()?;
        let mut folder = found.as_ref().map_or(Vec::new(), |opened| {
            opened.folder.as_os_str().as_bytes().to_vec()
        });
        world.broadcast_bytes(&mut folder, 0)?;
        if folder.is_empty() {
            return Ok(Some(None));
        }
        let folder = PathBuf::from(OsString::from_vec(folder));
        let opened = found.map_or_else(|| open_here(world, &folder), Ok);
        world.barrier()?;
        if !is_last && is_removed(world, &folder, opened.is_err())? {
            return Ok(None);
        }
        let opened = opened?;
        let name = format!("the manifest of {}", folder.display());
        world.handshake(&[Field::must_match(name, &opened.manifest_blake3, SHARED)])?;
        Ok(Some(Some(opened)))
    })
}

/// Whether a rank could not open the folder because it was removed, which rank 0 sees too.
fn is_removed(world: &World, folder: &Path, has_failed: bool) -> Result<bool> {
    let all = exchange::gather(world, &[has_failed, is_gone(folder)])?;
    Ok(all[0] == [false, true] && all.contains(&[true, true]))
}

/// Opens it on a rank other than 0.
fn open_here(world: &World, folder: &Path) -> Result<Opened> {
    let (hosts, rank, ranks) = (world.hosts(), world.local_rank(), world.local_size());
    let opened = open_reading(folder, |place| hosts > 1 && place % ranks == rank);
    opened.map_err(|error| match error {
        other if hosts == 1 => other,
        Error::Data(why) => Error::Data(format!("{why}; {SHARED}")),
        other => with_io_help(other, format!("rank 0 has read it on its host; {SHARED}")),
    })
}
