//! Communication of host memory: on a thread of its own, or, with `--overlap off`, in whatever waits for it.
//!
//! Either way they run one after the other in the order in which they were started.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_comm::Group;
use ddp_kernels::stream::Stream;
use ddp_kernels::transfer::{Phase, current_phase, in_phase};
use ddp_kernels::{Tensor, threads};

use super::{Job, sum};
use crate::error::{Error, Result};

/// The most small jobs between two joins, beside the buckets.
const EXTRA_JOBS: usize = 8;

/// The jobs since the last join, in order.
#[derive(Debug)]
struct Queue {
    started: Vec<Started>,
    /// How many are done.
    done: usize,
    /// When each job last began and ended.
    times: Vec<(Instant, Instant)>,
    busy: Duration,
    error: Option<Error>,
    closed: bool,
}

/// What was started, and the part of the run that it is booked under.
#[derive(Clone, Debug)]
struct Started {
    entry: Entry,
    phase: Phase,
}

#[derive(Clone, Debug)]
enum Entry {
    Job(usize),
    Sum(Tensor),
}

/// What the two threads share.
#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there is more to do.
    more: Condvar,
    /// Signalled when something is done.
    idle: Condvar,
    jobs: Vec<Job>,
    group: Group,
    stream: Stream,
}

/// Communication of host memory.
#[derive(Debug)]
pub(super) struct HostLane {
    shared: Arc<Shared>,
    /// Whether a thread of its own takes from the queue; else those who wait do.
    threaded: bool,
}

impl HostLane {
    /// A lane for these jobs.
    pub(super) fn new(
        group: Group,
        stream: Stream,
        jobs: Vec<Job>,
        threaded: bool,
    ) -> Result<HostLane> {
        let now = Instant::now();
        let queue = Queue {
            started: Vec::with_capacity(jobs.len() + EXTRA_JOBS),
            done: 0,
            times: vec![(now, now); jobs.len()],
            busy: Duration::ZERO,
            error: None,
            closed: false,
        };
        let threaded = threaded && group.size() > 1;
        let (more, idle) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            more,
            idle,
            jobs,
            group,
            stream,
        });
        if threaded {
            let shared = shared.clone();
            threads::spawn("reducer", move || shared.serve()).map_err(|source| Error::Io {
                action: "start",
                path: "the thread that reduces gradients".into(),
                source,
                help: "raise the limit on threads (ulimit -u), or train with `overlap` off".into(),
            })?;
        }
        Ok(HostLane { shared, threaded })
    }

    /// Whether a thread of its own does the jobs.
    pub(super) fn has_thread(&self) -> bool {
        self.threaded
    }

    /// Starts job `index`.
    pub(super) fn start(&self, index: usize) -> Result<()> {
        self.push(Entry::Job(index))
    }

    /// Starts the sum of another tensor.
    pub(super) fn start_sum(&self, tensor: Tensor) -> Result<()> {
        self.push(Entry::Sum(tensor))
    }

    fn push(&self, entry: Entry) -> Result<()> {
        let mut queue = self.shared.lock();
        if let Some(error) = queue.error.take() {
            return Err(error);
        }
        if queue.started.len() == queue.started.capacity() {
            queue.started.reserve(EXTRA_JOBS);
        }
        queue.started.push(Started {
            entry,
            phase: current_phase(),
        });
        drop(queue);
        if self.threaded {
            self.shared.more.notify_one();
        }
        Ok(())
    }

    /// Waits until job `index` is done, if it was started since the last join.
    pub(super) fn wait_for(&self, index: usize) -> Result<()> {
        let mut queue = self.shared.lock();
        let is_it = |started: &Started| matches!(started.entry, Entry::Job(job) if job == index);
        let Some(place) = queue.started.iter().position(is_it) else {
            return Ok(());
        };
        while queue.done <= place && queue.error.is_none() {
            queue = if self.threaded {
                self.shared
                    .idle
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner)
            } else {
                drop(queue);
                self.shared.run_next();
                self.shared.lock()
            };
        }
        queue.error.take().map_or(Ok(()), Err)
    }

    /// Waits until all that was started is done, and makes room for the next step.
    pub(super) fn join(&self) -> Result<()> {
        if !self.threaded {
            while self.shared.run_next() {}
        }
        let mut queue = self.shared.lock();
        while queue.done < queue.started.len() && queue.error.is_none() {
            queue = self
                .shared
                .idle
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        queue.started.clear();
        queue.done = 0;
        queue.error.take().map_or(Ok(()), Err)
    }

    /// Forgets what was started since the last join. For a lane without a thread, which has begun none of it.
    pub(super) fn abandon(&self) {
        assert!(!self.threaded, "a thread may be reducing it");
        let mut queue = self.shared.lock();
        queue.started.clear();
        queue.done = 0;
        queue.error = None;
    }

    /// How long all that has run since the last call took.
    pub(super) fn busy(&self) -> Duration {
        std::mem::take(&mut self.shared.lock().busy)
    }

    /// When each job last began and ended.
    pub(super) fn times(&self) -> Vec<(Instant, Instant)> {
        self.shared.lock().times.clone()
    }
}

impl Drop for HostLane {
    fn drop(&mut self) {
        // The thread is not waited for: after an error it may be waiting for ranks that are gone.
        self.shared.lock().closed = true;
        self.shared.more.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing under this lock panics half way.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's life. A panic becomes an error of the step.
    fn serve(&self) {
        loop {
            let run = AssertUnwindSafe(|| while self.run_next() {});
            if catch_unwind(run).is_err() {
                let text = "the thread that reduces gradients panicked (its message stands above)";
                self.lock()
                    .error
                    .get_or_insert_with(|| Error::Internal(text.into()));
                self.idle.notify_one();
            }
            let mut queue = self.lock();
            while queue.done == queue.started.len() || queue.error.is_some() {
                if queue.closed {
                    return;
                }
                queue = self
                    .more
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Runs what is next, if there is anything.
    fn run_next(&self) -> bool {
        let queue = self.lock();
        if queue.error.is_some() || queue.closed {
            return false;
        }
        let Some(Started { entry, phase }) = queue.started.get(queue.done).cloned() else {
            return false;
        };
        drop(queue);

        let started = Instant::now();
        let result = in_phase(phase, || match &entry {
            Entry::Job(index) => self.jobs[*index].run(&self.group, &self.stream),
            Entry::Sum(tensor) => sum(tensor, &self.group, &self.stream),
        });
        let ended = Instant::now();

        let mut queue = self.lock();
        if let Entry::Job(index) = entry {
            queue.times[index] = (started, ended);
        }
        queue.busy += ended - started;
        queue.done += 1;
        queue.error = result.err();
        // One thread waits, for this or for something later.
        self.idle.notify_one();
        queue.error.is_none()
    }
}
