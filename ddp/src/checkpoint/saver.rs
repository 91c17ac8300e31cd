//! Checkpoints while training goes on: `save` copies what there is to a snapshot, and a thread of its own writes that.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_comm::World;
use ddp_kernels::transfer::{Phase, in_phase};

use super::exchange;
use super::prune::clean;
use super::snapshot::Snapshot;
use super::state::FORMAT;
use super::writer::{Job, Writer};
use super::{State, find};
use crate::error::{Error, Result};
use crate::files;
use crate::step::Step;

/// How long anybody waits for what is being written: a large model to a slow disk takes its time.
pub(crate) const SAVING_MAX: Duration = Duration::from_secs(6 * 3600);
/// How often somebody who waits hears what for.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// One a rank: all ranks make the same calls, at the same steps. Its thread has a group of its own, "saving". Dropped, it waits for what is being
/// written, but no longer than ranks wait for each other.
#[derive(Debug)]
pub struct Saver {
    rank: usize,
    ranks: usize,
    /// Gone when this is dropped, which ends the thread.
    jobs: Option<mpsc::Sender<Job>>,
    done: mpsc::Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    /// Made for the first checkpoint; the thread has it while it writes.
    snapshot: Option<Snapshot>,
    /// The step that is being written, and since when.
    writing: Option<(u64, Instant)>,
    /// What has to be durable before a checkpoint is, with its path.
    record: Option<(Arc<File>, PathBuf)>,
    /// How long it waits when it is dropped, and at most otherwise.
    patience: Duration,
    patience_max: Duration,
    checkpoints: PathBuf,
    last: Option<PathBuf>,
    /// Durable, and not yet told of.
    written: Vec<(u64, PathBuf)>,
    held_up: Duration,
}

/// What became of a job.
struct Done {
    step: u64,
    snapshot: Snapshot,
    folder: Result<PathBuf>,
}

impl Saver {
    /// For the run in the folder `out`, of whose checkpoints the newest `keep` stay, and the best. All ranks. Removes what a run that was killed has
    /// left half done, so it comes after the record is open, which locks the folder.
    pub fn new(world: &World, out: &Path, keep: u64) -> Result<Saver> {
        let (rank, ranks) = (world.rank(), world.size());
        let group = world.group("saving")?.with_timeout(SAVING_MAX.max(world.timeout()));
        let checkpoints = find::checkpoints(out);
        exchange::all(&group, if rank == 0 && checkpoints.is_dir() { clean(&checkpoints) } else { Ok(()) })?;
        let writer = Writer { checkpoints: checkpoints.clone(), keep, group };
        let (jobs, to_write) = mpsc::channel();
        let (written, done) = mpsc::channel();
        let thread =
            std::thread::Builder::new().name("saver".into()).spawn(move || serve(&writer, &to_write, &written));
        let thread = thread.map_err(files::failed("start the thread that writes to", out))?;
        Ok(Saver {
            rank,
            ranks,
            jobs: Some(jobs),
            done,
            thread: Some(thread),
            snapshot: None,
            writing: None,
            record: None,
            patience: world.timeout(),
            patience_max: SAVING_MAX.max(world.timeout()),
            checkpoints,
            last: None,
            written: Vec::new(),
            held_up: Duration::ZERO,
        })
    }

    /// What is in `record` when a checkpoint is saved will be durable before that checkpoint is. A lock that is on the file lasts as long as anything
    /// is being written.
    pub fn write_behind(&mut self, record: File, path: &Path) {
        self.record = Some((Arc::new(record), path.to_path_buf()));
    }

    /// All ranks, at the same step: copies values and moments aside (rank 0 the model; under ZeRO-1 every rank its moments, else rank 0), and lets
    /// training go on while they are written. Waits first for the one before, if that is not done. `state.best` says which to keep besides the newest.
    /// In how many parts the optimizer's moments are, and since which step, is filled in here.
    pub fn save(&mut self, step: &mut Step, state: State) -> Result<()> {
        let began = Instant::now();
        let saved = in_phase(Phase::Checkpoint, || self.begin(step, state));
        self.held_up += began.elapsed();
        saved
    }

    fn begin(&mut self, step: &mut Step, mut state: State) -> Result<()> {
        self.wait()?;
        step.gather()?;
        let shares = step.stages().iter().any(|stage| stage.model().params.shares() > 1);
        state.format = FORMAT;
        state.world.optimizer_parts = if shares { self.ranks } else { 1 };
        state.optimizer_since = step.optimizer().since();
        state.check().map_err(|why| Error::Internal(format!("the state of a checkpoint {why}")))?;
        let is_first = self.rank == 0;
        let mut snapshot = match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => Snapshot::new(step, is_first, is_first || shares)?,
        };
        snapshot.fill(step)?;
        let jobs = self.jobs.as_ref().expect("it is not dropped");
        let step = state.step;
        jobs.send(Job { snapshot, state, record: self.record.clone() }).map_err(|_| ended())?;
        self.writing = Some((step, Instant::now()));
        Ok(())
    }

    /// An error of the background, if there is one by now. Does not wait.
    pub fn check(&mut self) -> Result<()> {
        match self.done.try_recv() {
            Ok(done) => self.take(done),
            Err(mpsc::TryRecvError::Empty) => Ok(()),
            Err(mpsc::TryRecvError::Disconnected) => Err(ended()),
        }
    }

    /// Waits until the last one is durable, on all ranks. Where it lies.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        let began = Instant::now();
        let waited = self.wait();
        self.held_up += began.elapsed();
        waited?;
        Ok(self.last.clone())
    }

    /// Those that have become durable since this was last asked: the step, and where each lies. `check`, `save` and `finish` find out.
    pub fn written(&mut self) -> Vec<(u64, PathBuf)> {
        std::mem::take(&mut self.written)
    }

    /// How long training has been held up by saving so far: by snapshots, and by waiting for what was still being written.
    pub fn held_up(&self) -> Duration {
        self.held_up
    }

    fn wait(&mut self) -> Result<()> {
        let Some((step, began)) = self.writing else { return Ok(()) };
        let waits_since = Instant::now();
        let done = loop {
            match self.done.recv_timeout(SAID_EVERY.min(self.patience_max)) {
                Ok(done) => break done,
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) if waits_since.elapsed() >= self.patience_max => {
                    return Err(self.stuck(step));
                }
                Err(RecvTimeoutError::Timeout) => self.say_what_for(step, began),
            }
        };
        self.take(done)
    }

    fn say_what_for(&self, step: u64, began: Instant) {
        if self.rank == 0 {
            let (folder, seconds) = (self.checkpoints.join(find::name(step)), began.elapsed().as_secs());
            tracing::warn!(
                "waiting for {}, which has been being written for {seconds} s: is its disk stuck?",
                folder.display()
            );
        }
    }

    fn stuck(&self, step: u64) -> Error {
        let waited = format!("it was not done after {} s", self.patience_max.as_secs());
        files::failed("write", &self.checkpoints.join(find::name(step)))(std::io::Error::new(
            ErrorKind::TimedOut,
            waited,
        ))
    }

    fn take(&mut self, done: Done) -> Result<()> {
        self.writing = None;
        self.snapshot = Some(done.snapshot);
        let folder = done.folder?;
        self.last = Some(folder.clone());
        self.written.push((done.step, folder));
        Ok(())
    }
}

/// Writes one checkpoint after the other, until the saver is dropped.
fn serve(writer: &Writer, jobs: &mpsc::Receiver<Job>, done: &mpsc::Sender<Done>) {
    in_phase(Phase::Checkpoint, || {
        for job in jobs {
            let folder = writer.write(&job);
            let Job { snapshot, state, .. } = job;
            // Nobody listens where the saver is being dropped.
            let _ = done.send(Done { step: state.step, snapshot, folder });
        }
    });
}

fn ended() -> Error {
    Error::Internal("the thread that writes checkpoints has ended".into())
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some((step, _)) = self.writing
            && matches!(self.done.recv_timeout(self.patience), Err(RecvTimeoutError::Timeout))
        {
            let folder = self.checkpoints.join(find::name(step));
            tracing::warn!("{} is still being written, and is not waited for any longer", folder.display());
            return;
        }
        if let Some(thread) = self.thread.take() {
            // Its panic has been told of.
            let _ = thread.join();
        }
    }
}
