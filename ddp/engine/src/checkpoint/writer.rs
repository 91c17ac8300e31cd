//! Writes a checkpoint, on the thread `saver` of every rank: under another name, synced, then
//! renamed.
//!
//! Rank 0 makes the folder and writes the model. Ranks with moments write those. Rank 0 checks that
//! it sees all files, writes the state, and last the manifest. An error on any rank ends all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ddp_comm::Group;

use super::folders::{
    self, MANIFEST_FILE, MODEL_FILE, REPLACED, STATE_FILE, UNFINISHED, optimizer_file, prune,
};
use super::manifest::{FileEntry, Manifest, open};
use super::snapshot::{FilePart, Snapshot};
use super::state::State;
use crate::error::{Error, Result};
use crate::exchange;
use crate::faults::{self, FaultPoint};
use crate::setting::{OUT, RESUME, ZERO};
use ddp_data::text::Vocabulary;
use ddp_kernels::files;

/// How long a network file system may take to show a file of another host.
const SEEN_MAX: Duration = Duration::from_secs(5);

/// A checkpoint to write.
#[derive(Debug)]
pub(super) struct SaveJob {
    pub(super) snapshot: Snapshot,
    pub(super) state: State,
}

/// Writes checkpoints, on one rank.
#[derive(Debug)]
pub(super) struct CheckpointWriter {
    /// OUT/checkpoints.
    pub(super) checkpoints: PathBuf,
    /// The generation of the ranks: a rank that was frozen must not write to the folder of those
    /// that continued.
    pub(super) generation: u64,
    /// How many of the newest checkpoints are kept.
    pub(super) keep: u64,
    /// All ranks; used by this thread only.
    pub(super) group: Group,
    /// Whether it works, and does not wait for other ranks.
    pub(super) is_at_work: Arc<AtomicBool>,
    /// On rank 0: the file that must be durable first, and its path.
    pub(super) metrics_log: Option<(File, PathBuf)>,
    /// The tokenizer of the model's tokens.
    pub(super) tokenizer: Option<Arc<Vocabulary>>,
}

impl CheckpointWriter {
    /// Writes a checkpoint, removes those that are no longer kept, and returns its folder.
    pub(super) fn write(&self, job: &SaveJob) -> Result<PathBuf> {
        let name = folders::name(job.state.step);
        let aside = format!("{UNFINISHED}{}-{name}", self.generation);
        let aside = self.checkpoints.join(aside);
        let folder = self.checkpoints.join(name);
        let attempt = self.attempt(job, &aside, &folder);
        if attempt.as_ref().is_err_and(Error::is_rank_lost) && self.is_first() && folder.is_dir() {
            // It is whole: only the other ranks could not be told.
            return Ok(folder);
        }
        if attempt.is_err() && self.is_first() {
            // The first error is the one to report.
            let _ = files::remove_folder(&aside);
        }
        attempt.map(|()| folder)
    }

    fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    fn attempt(&self, job: &SaveJob, aside: &Path, folder: &Path) -> Result<()> {
        self.at_work(|| faults::at_step(FaultPoint::Save, job.state.step))?;
        let first = |work: &dyn Fn() -> Result<()>| {
            if self.is_first() {
                return self.at_work(work);
            }
            Ok(())
        };
        if job.state.world.optimizer_parts == 1 {
            let all = || {
                self.begin(aside)?;
                self.complete(job, aside, folder, self.write_mine(job, aside)?)
            };
            return exchange::outcomes(&self.group, first(&all)).map(drop);
        }
        exchange::outcomes(&self.group, first(&|| self.begin(aside)))?;
        let mine = self.at_work(|| self.write_mine(job, aside));
        let files = exchange::outcomes(&self.group, mine)?.concat();
        let complete = || self.complete(job, aside, folder, files.clone());
        exchange::outcomes(&self.group, first(&complete)).map(drop)
    }

    fn at_work<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_at_work.store(true, Ordering::Relaxed);
        let done = work();
        self.is_at_work.store(false, Ordering::Relaxed);
        done
    }

    /// Makes the folder that all ranks write to, on rank 0.
    fn begin(&self, aside: &Path) -> Result<()> {
        files::make_folder(&self.checkpoints)?;
        // An earlier attempt may have left it.
        files::remove_folder(aside)?;
        Ok(files::make_new_folder(aside)?)
    }

    /// Writes this rank's snapshot.
    fn write_mine(&self, job: &SaveJob, aside: &Path) -> Result<Vec<FileEntry>> {
        if !self.is_first() && !is_seen(|| aside.is_dir()) {
            return Err(not_seen(aside));
        }
        let name = optimizer_file(self.group.rank(), job.state.world.optimizer_parts);
        let Snapshot { model, moments } = &job.snapshot;
        let parts = [(MODEL_FILE, model), (&*name, moments)].into_iter();
        let parts = parts.filter_map(|(name, part)| Some((name, part.as_ref()?)));
        let entry = |(name, part): (&str, &FilePart)| -> Result<FileEntry> {
            Ok(FileEntry::new(
                name,
                part.write(&aside.join(name), &self.group)?,
            ))
        };
        parts.map(entry).collect()
    }

    /// On rank 0: writes state and manifest, renames the folder, and removes old checkpoints.
    fn complete(
        &self,
        job: &SaveJob,
        aside: &Path,
        folder: &Path,
        mut entries: Vec<FileEntry>,
    ) -> Result<()> {
        let write = |name: &str, bytes: &[u8], entries: &mut Vec<FileEntry>| -> Result<()> {
            let contents = files::write_file(&aside.join(name), |output| output.write(bytes))?;
            entries.push(FileEntry::new(name, contents));
            Ok(())
        };
        for entry in &entries {
            let path = aside.join(&entry.name);
            if !is_seen(|| fs::metadata(&path).is_ok_and(|about| about.len() == entry.bytes)) {
                return Err(not_there(aside, &path));
            }
        }
        if let Some((log, path)) = &self.metrics_log {
            let synced = log.sync_data();
            synced.map_err(files::failed("make durable", path))?;
        }
        if let Some(tokenizer) = &self.tokenizer {
            let mut files = tokenizer.files();
            files.try_for_each(|(name, bytes)| write(name, bytes, &mut entries))?;
        }
        let state = &job.state;
        write(STATE_FILE, &state.to_bytes(), &mut entries)?;
        let manifest = Manifest::new(&state.program, state.step, entries);
        write(MANIFEST_FILE, &manifest.to_bytes(), &mut Vec::new())?;
        files::sync_folder(aside)?;
        self.put_in_place(&manifest, aside, folder)?;
        let best = state.best.map(|best| best.step);
        if let Err(error) = prune(&self.checkpoints, state.step, self.keep, best) {
            // This checkpoint is safe; the next one tries again.
            tracing::warn!("cannot remove older checkpoints: {error}");
        }
        Ok(())
    }

    /// Renames the checkpoint to its name, replacing another of this step: a run that resumed from
    /// an older checkpoint reaches a step twice.
    fn put_in_place(&self, manifest: &Manifest, aside: &Path, folder: &Path) -> Result<()> {
        if fs::symlink_metadata(folder).is_err() {
            return Ok(files::rename(aside, folder)?);
        }
        if open(folder).is_ok_and(|there| manifest.has_tensors_of(&there.files)) {
            return Ok(files::remove_folder(aside)?);
        }
        // If the process is killed between the two renames, the next run undoes the first.
        let name = folders::name(manifest.step);
        let replaced = self.checkpoints.join(format!("{REPLACED}{name}"));
        files::remove_folder(&replaced)?;
        files::rename(folder, &replaced)?;
        files::rename(aside, folder)?;
        Ok(files::remove_folder(&replaced)?)
    }
}

/// Waits until `look` returns true, up to `SEEN_MAX`.
fn is_seen(look: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    while !look() {
        if began.elapsed() > SEEN_MAX {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// The error of rank 0, which has made the folder `aside` and does not find `path` in it.
fn not_there(aside: &Path, path: &Path) -> Error {
    if aside.is_dir() {
        return not_seen(path);
    }
    let help = format!("leave {OUT} where it is while a run trains; {RESUME} auto continues it");
    let why = "it was there a moment ago: the run's folder was moved or removed";
    Error::io("see", path, &help)(std::io::Error::other(why))
}

fn not_seen(path: &Path) -> Error {
    let help = format!(
        "with {ZERO} 1 all ranks write to {OUT}: give a folder that all hosts share and that nobody \
         moves, or use {ZERO} 0"
    );
    let why = "another rank has written it, but this rank does not see it";
    Error::io("see", path, &help)(std::io::Error::other(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ddp_kernels::files::testing::Scratch;

    /// Another rank was named, and a folder that all hosts share.
    #[test]
    fn a_folder_that_was_moved_is_named_as_that() {
        let scratch = Scratch::new();
        let aside = scratch.path().join("aside");
        let text = || not_there(&aside, &aside.join("model")).to_string();
        assert!(
            text().contains("was moved or removed; help: leave"),
            "{}",
            text()
        );
        files::make_folder(&aside).unwrap();
        assert!(text().contains("another rank has written it"), "{}", text());
    }
}
