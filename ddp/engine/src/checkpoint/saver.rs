//! Saving while training continues: `save` copies to a snapshot, and a thread writes that.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_comm::World;
use ddp_kernels::heartbeat;
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::{Phase, in_phase};

use super::folders::{self, clear_up};
use super::snapshot::Snapshot;
use super::state::{FORMAT, State};
use super::writer::{CheckpointWriter, SaveJob};
use crate::error::{Error, Result};
use crate::exchange;
use crate::step::Step;
use ddp_data::text::Vocabulary;
use ddp_kernels::files;

/// How often a wait looks for progress.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How often a long wait is logged.
const LOGGED_EVERY: Duration = Duration::from_secs(60);

/// A checkpoint is written, while training continues.
const WRITE: Label = Label::new(Lane::Saving, "write checkpoint");

/// Saves checkpoints. All ranks make the same calls at the same steps. Its thread has a group of
/// ranks, "saving". Dropping it waits for the thread as long as that makes progress.
#[derive(Debug)]
pub struct Saver {
    rank: usize,
    ranks: usize,
    /// None once this is dropped, which ends the thread.
    jobs: Option<mpsc::Sender<SaveJob>>,
    done: mpsc::Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    /// Whether the thread works, and does not wait for other ranks.
    is_at_work: Arc<AtomicBool>,
    /// Allocated for the first checkpoint; the thread owns it while it writes.
    snapshot: Option<Snapshot>,
    /// The best model so far, which is not written yet.
    remembered: Option<SaveJob>,
    /// The step that is being written, and when that began.
    writing: Option<(u64, Instant)>,
    /// How long it waits without progress.
    patience: Duration,
    checkpoints: PathBuf,
    last: Option<PathBuf>,
    /// Durable checkpoints that `written` has not returned yet.
    written: Vec<(u64, PathBuf)>,
}

/// The outcome of a job.
struct Done {
    step: u64,
    snapshot: Snapshot,
    folder: Result<PathBuf>,
}

impl Saver {
    /// For the run in the folder `out`, of which the newest `keep` checkpoints and the best are
    /// kept. Removes what a killed run left, so the caller must hold the metrics log's lock. All
    /// ranks call it together.
    pub fn new(world: &World, out: &Path, keep: u64) -> Result<Saver> {
        Saver::of_run(world, out, keep, None, None)
    }

    /// The same. `metrics_log`, a file and its path, is made durable before each checkpoint; a lock
    /// on it lasts as long as this handle. `tokenizer` is put into each.
    pub(crate) fn of_run(
        world: &World,
        out: &Path,
        keep: u64,
        metrics_log: Option<(File, PathBuf)>,
        tokenizer: Option<Arc<Vocabulary>>,
    ) -> Result<Saver> {
        let (rank, ranks) = (world.rank(), world.size());
        let group = world.group("saving")?;
        let checkpoints = folders::checkpoints(out);
        let cleared = if rank == 0 { clear_up(out) } else { Ok(()) };
        exchange::outcomes(&group, cleared)?;
        let is_at_work = Arc::default();
        let writer = CheckpointWriter {
            checkpoints: checkpoints.clone(),
            generation: world.generation(),
            keep,
            group,
            is_at_work: Arc::clone(&is_at_work),
            metrics_log,
            tokenizer,
        };
        let (jobs, to_write) = mpsc::channel();
        let (written, done) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("saver".into())
            .spawn(move || serve(&writer, &to_write, &written));
        let thread = thread.map_err(|error| ddp_comm::Error::no_thread("saver", &error))?;
        Ok(Saver {
            rank,
            ranks,
            jobs: Some(jobs),
            done,
            thread: Some(thread),
            is_at_work,
            snapshot: None,
            remembered: None,
            writing: None,
            patience: world.timeout(),
            checkpoints,
            last: None,
            written: Vec::new(),
        })
    }

    /// Copies values and moments to the snapshot and starts writing them. Waits for the previous
    /// checkpoint first. Rank 0 writes the model, and every rank its moments under ZeRO-1, else
    /// rank 0. `state.best` is kept besides the newest. All ranks call it together.
    pub fn save(&mut self, step: &mut Step, state: State) -> Result<()> {
        in_phase(Phase::Checkpoint, || self.begin(step, state))
    }

    /// Copies values and moments, as `save` does, but writes them only before the first checkpoint
    /// whose `state.best` they are.
    pub(crate) fn remember(&mut self, step: &mut Step, state: State) -> Result<()> {
        let before = self.remembered.take().map(|job| job.snapshot);
        self.remembered = Some(self.copied(step, state, before)?);
        Ok(())
    }

    /// Writes what is remembered, if it is of the step `best`.
    pub(crate) fn write_remembered(&mut self, best: Option<u64>) -> Result<()> {
        let is_best = |job: &mut SaveJob| Some(job.state.step) == best;
        match self.remembered.take_if(is_best) {
            Some(job) => self.send(job),
            None => Ok(()),
        }
    }

    fn begin(&mut self, step: &mut Step, state: State) -> Result<()> {
        self.write_remembered(state.best.map(|best| best.step))?;
        self.wait()?;
        let snapshot = self.snapshot.take();
        let job = self.copied(step, state, snapshot)?;
        self.send(job)
    }

    /// Starts to write a copy, after the one before it.
    fn send(&mut self, job: SaveJob) -> Result<()> {
        self.wait()?;
        let step = job.state.step;
        let jobs = self.jobs.as_ref().expect("it is not dropped");
        jobs.send(job).map_err(|_| ended())?;
        self.writing = Some((step, Instant::now()));
        Ok(())
    }

    /// A copy of values and moments, in the memory of an earlier one if there is one.
    fn copied(
        &self,
        step: &mut Step,
        mut state: State,
        snapshot: Option<Snapshot>,
    ) -> Result<SaveJob> {
        step.gather()?;
        let mut stages = step.stages().iter();
        let shares = stages.any(|stage| stage.model().params.shares() > 1);
        state.format = FORMAT;
        state.world.optimizer_parts = if shares { self.ranks } else { 1 };
        state.optimizer_since = step.stages()[0].optimizer().since();
        state
            .check()
            .map_err(|why| Error::Internal(format!("the state of a checkpoint {why}")))?;
        let is_first = self.rank == 0;
        let mut snapshot = match snapshot {
            Some(snapshot) => snapshot,
            None => Snapshot::new(step, is_first, is_first || shares)?,
        };
        snapshot.fill(step)?;
        Ok(SaveJob { snapshot, state })
    }

    /// Returns an error of the thread, if there is one. Does not wait.
    pub fn check(&mut self) -> Result<()> {
        match self.done.try_recv() {
            Ok(done) => self.take(done),
            Err(mpsc::TryRecvError::Empty) => Ok(()),
            Err(mpsc::TryRecvError::Disconnected) => Err(ended()),
        }
    }

    /// Waits until the last checkpoint is durable on all ranks, and returns its folder.
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.wait()?;
        Ok(self.last.clone())
    }

    /// Checkpoints that became durable since the last call: step and folder.
    pub fn written(&mut self) -> Vec<(u64, PathBuf)> {
        std::mem::take(&mut self.written)
    }

    fn wait(&mut self) -> Result<()> {
        let Some((step, began)) = self.writing else {
            return Ok(());
        };
        // Other ranks wait a little longer for this one, so that it can say what is stuck.
        let limit = self.patience.mul_f64(0.75);
        let (mut beats, mut quiet, mut logged) = (0, Duration::ZERO, Instant::now());
        let done = loop {
            match self.done.recv_timeout(LOOK_EVERY.min(limit)) {
                Ok(done) => break done,
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            // While the thread waits for other ranks, that wait has its own limit.
            let before = std::mem::replace(&mut beats, heartbeat::total());
            quiet = if beats == before && self.is_at_work.load(Ordering::Relaxed) {
                quiet + LOOK_EVERY.min(limit)
            } else {
                Duration::ZERO
            };
            if quiet >= limit {
                return Err(self.stuck(step));
            }
            if logged.elapsed() >= LOGGED_EVERY {
                logged = Instant::now();
                self.log_wait(step, began);
            }
        };
        self.take(done)
    }

    fn log_wait(&self, step: u64, began: Instant) {
        if self.rank == 0 {
            tracing::warn!(
                "waiting for {}: writing it has taken {} s so far; help: check its disk",
                self.checkpoints.join(folders::name(step)).display(),
                began.elapsed().as_secs()
            );
        }
    }

    fn stuck(&self, step: u64) -> Error {
        let waited = format!("no progress for {} s", self.patience.as_secs());
        let timed_out = std::io::Error::new(ErrorKind::TimedOut, waited);
        let folder = self.checkpoints.join(folders::name(step));
        files::failed("write", &folder)(timed_out).into()
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
fn serve(writer: &CheckpointWriter, jobs: &mpsc::Receiver<SaveJob>, done: &mpsc::Sender<Done>) {
    in_phase(Phase::Checkpoint, || {
        for job in jobs {
            let folder = trace::record(WRITE, || writer.write(&job));
            let (step, snapshot) = (job.state.step, job.snapshot);
            let done_job = Done {
                step,
                snapshot,
                folder,
            };
            // The receiver is gone if the saver is being dropped.
            let _ = done.send(done_job);
        }
    });
}

fn ended() -> Error {
    Error::Internal("the thread that writes checkpoints has ended".into())
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.jobs = None;
        if let Err(error) = self.wait()
            && self.writing.is_some()
        {
            tracing::warn!("{error}; the process does not wait any longer");
            return;
        }
        if let Some(thread) = self.thread.take() {
            // A panic has been reported already.
            let _ = thread.join();
        }
    }
}
