//! Where reductions run: on a thread of their own, or, with `--overlap off`, in `join`.
//!
//! Either way they run one after the other in the order in which they were started.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::{Tensor, ops, threads};

use crate::error::{Error, Result};
use crate::faults::{self, Place};

/// One tensor to be summed over the ranks.
#[derive(Clone, Debug)]
pub struct Job {
    tensor: Tensor,
    /// What travels in its place, if it is narrowed on the way.
    narrow: Option<Tensor>,
}

impl Job {
    /// Sums `tensor` as it is.
    pub fn plain(tensor: Tensor) -> Job {
        Job { tensor, narrow: None }
    }

    /// Sums `tensor` by way of `narrow`, of as many elements.
    pub fn narrowed(tensor: Tensor, narrow: Tensor) -> Job {
        Job { tensor, narrow: Some(narrow) }
    }

    fn run(&self, group: &Group, stream: &Stream) -> Result<()> {
        faults::at(Place::Reduction)?;
        let Some(narrow) = &self.narrow else {
            return sum(&self.tensor, group, stream);
        };
        ops::cast_into(narrow, &self.tensor)?;
        sum(narrow, group, stream)?;
        Ok(ops::cast_into(&self.tensor, narrow)?)
    }
}

fn sum(tensor: &Tensor, group: &Group, stream: &Stream) -> Result<()> {
    Ok(group.all_reduce(tensor, Reduce::Sum, stream)?)
}

/// The most small jobs between two joins, beside the buckets.
const EXTRA_JOBS: usize = 8;

/// The reductions of one step, in order.
#[derive(Debug)]
struct Queue {
    /// What to reduce: a bucket, or something else.
    started: Vec<Entry>,
    /// How many are done.
    done: usize,
    /// When each bucket's reduction began and ended.
    times: Vec<(Instant, Instant)>,
    busy: Duration,
    error: Option<Error>,
    closed: bool,
}

#[derive(Clone, Debug)]
enum Entry {
    Bucket(usize),
    Other(Tensor),
}

/// What the two threads share.
#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when there is more to do.
    more: Condvar,
    /// Signalled when all is done.
    idle: Condvar,
    buckets: Vec<Job>,
    group: Group,
    stream: Stream,
}

/// Where reductions run.
#[derive(Debug)]
pub struct Lane {
    shared: Arc<Shared>,
    /// Whether a thread of its own takes from the queue; else `join` does.
    threaded: bool,
}

impl Lane {
    /// A lane for these buckets.
    pub fn new(group: Group, stream: Stream, buckets: Vec<Job>, threaded: bool) -> Result<Lane> {
        let now = Instant::now();
        let queue = Queue {
            started: Vec::with_capacity(buckets.len() + EXTRA_JOBS),
            done: 0,
            times: vec![(now, now); buckets.len()],
            busy: Duration::ZERO,
            error: None,
            closed: false,
        };
        let threaded = threaded && group.size() > 1;
        let (more, idle) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { queue: Mutex::new(queue), more, idle, buckets, group, stream });
        if threaded {
            let shared = shared.clone();
            threads::spawn("reducer", move || shared.serve()).map_err(|source| Error::Io {
                action: "start",
                path: "the thread that reduces gradients".into(),
                source,
                way_out: "Raise the limit on threads (ulimit -u), or train with --overlap off.".into(),
            })?;
        }
        Ok(Lane { shared, threaded })
    }

    /// Whether a thread of its own reduces.
    pub fn has_thread(&self) -> bool {
        self.threaded
    }

    /// Starts the reduction of bucket `index`.
    pub fn start_bucket(&self, index: usize) -> Result<()> {
        self.push(Entry::Bucket(index))
    }

    /// Starts the reduction of another tensor.
    pub fn start(&self, tensor: Tensor) -> Result<()> {
        self.push(Entry::Other(tensor))
    }

    fn push(&self, entry: Entry) -> Result<()> {
        let mut queue = self.shared.lock();
        if let Some(error) = queue.error.take() {
            return Err(error);
        }
        if queue.started.len() == queue.started.capacity() {
            queue.started.reserve(EXTRA_JOBS);
        }
        queue.started.push(entry);
        drop(queue);
        if self.threaded {
            self.shared.more.notify_one();
        }
        Ok(())
    }

    /// Waits until all that was started is done, and makes room for the next step.
    pub fn join(&self) -> Result<()> {
        if !self.threaded {
            while self.shared.run_next() {}
        }
        let mut queue = self.shared.lock();
        while queue.done < queue.started.len() && queue.error.is_none() {
            queue = self.shared.idle.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.started.clear();
        queue.done = 0;
        queue.error.take().map_or(Ok(()), Err)
    }

    /// Forgets what was started since the last join. For a lane without a thread, which has begun none of it.
    pub fn abandon(&self) {
        assert!(!self.threaded, "a thread may be reducing it");
        let mut queue = self.shared.lock();
        queue.started.clear();
        queue.done = 0;
        queue.error = None;
    }

    /// How long the reductions since the last call took.
    pub fn busy(&self) -> Duration {
        std::mem::take(&mut self.shared.lock().busy)
    }

    /// When each bucket's last reduction began and ended.
    pub fn bucket_times(&self) -> Vec<(Instant, Instant)> {
        self.shared.lock().times.clone()
    }
}

impl Drop for Lane {
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
                self.lock().error.get_or_insert_with(|| Error::Internal(text.into()));
                self.idle.notify_one();
            }
            let mut queue = self.lock();
            while queue.done == queue.started.len() || queue.error.is_some() {
                if queue.closed {
                    return;
                }
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Runs the next reduction, if there is one.
    fn run_next(&self) -> bool {
        let queue = self.lock();
        if queue.error.is_some() || queue.closed {
            return false;
        }
        let Some(entry) = queue.started.get(queue.done).cloned() else { return false };
        drop(queue);

        let started = Instant::now();
        let result = match &entry {
            Entry::Bucket(index) => self.buckets[*index].run(&self.group, &self.stream),
            Entry::Other(tensor) => sum(tensor, &self.group, &self.stream),
        };
        let ended = Instant::now();

        let mut queue = self.lock();
        if let Entry::Bucket(index) = entry {
            queue.times[index] = (started, ended);
        }
        queue.busy += ended - started;
        queue.done += 1;
        queue.error = result.err();
        if queue.done == queue.started.len() || queue.error.is_some() {
            self.idle.notify_one();
        }
        queue.error.is_none()
    }
}
