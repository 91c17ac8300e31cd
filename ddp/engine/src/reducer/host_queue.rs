//! Communication of host memory: on a separate thread, or without overlap on the thread that waits
//! for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ddp_comm::Group;
use ddp_kernels::panics;
use ddp_kernels::stream::Stream;
use ddp_kernels::trace;
use ddp_kernels::transfer::{self, Phase, current_phase, in_phase};
use ddp_kernels::{Device, Tensor};

use super::job::{self, CommJob, CommQueue};
use crate::error::{Error, Result};

/// The most sums of small tensors between two joins.
const SUMS_MAX: usize = 8;

/// The jobs since the last join, in order.
#[derive(Debug, Default)]
struct JobQueue {
    /// Each with the phase of the run under which it is booked.
    started: Vec<(QueueEntry, Phase)>,
    /// How many are done.
    done: usize,
    busy: Duration,
    error: Option<Error>,
    closed: bool,
}

#[derive(Clone, Debug)]
enum QueueEntry {
    Job(usize),
    Sum(Tensor),
}

/// What the two threads share.
#[derive(Debug)]
struct SharedQueue {
    queue: Mutex<JobQueue>,
    /// Signalled when there is more to do.
    more: Condvar,
    /// Signalled when something is done.
    idle: Condvar,
    jobs: Vec<CommJob>,
    group: Group,
    stream: Stream,
}

/// Communication of host memory.
#[derive(Debug)]
pub(super) struct HostQueue {
    shared: Arc<SharedQueue>,
    /// Whether a separate thread runs the jobs; otherwise `wait_for` and `join` do.
    threaded: bool,
    thread: Option<JoinHandle<()>>,
}

impl HostQueue {
    /// A queue for these jobs.
    pub(super) fn new(group: Group, jobs: Vec<CommJob>, overlap: bool) -> Result<HostQueue> {
        let stream = Stream::default_of(Device::Cpu)?;
        let queue = JobQueue {
            started: Vec::with_capacity(jobs.len() + SUMS_MAX),
            ..JobQueue::default()
        };
        let threaded = overlap && group.size() > 1;
        let shared = Arc::new(SharedQueue {
            queue: Mutex::new(queue),
            more: Condvar::new(),
            idle: Condvar::new(),
            jobs,
            group,
            stream,
        });
        let serve = || {
            let shared = shared.clone();
            transfer::spawn("reducer", move || shared.serve())
                .map_err(|error| ddp_comm::Error::no_thread("reducer", &error))
        };
        let thread = threaded.then(serve).transpose()?;
        Ok(HostQueue {
            shared,
            threaded,
            thread,
        })
    }

    fn push(&self, entry: QueueEntry) -> Result<()> {
        let mut queue = self.shared.lock();
        if let Some(error) = queue.error.take() {
            return Err(error);
        }
        if queue.started.len() == queue.started.capacity() {
            queue.started.reserve(SUMS_MAX);
        }
        queue.started.push((entry, current_phase()));
        drop(queue);
        if self.threaded {
            self.shared.more.notify_one();
        }
        Ok(())
    }
}

impl CommQueue for HostQueue {
    fn overlaps(&self) -> bool {
        self.threaded
    }

    fn start(&self, job: usize, _is_followed: bool) -> Result<()> {
        self.push(QueueEntry::Job(job))
    }

    fn start_sum(&self, tensor: &Tensor) -> Result<()> {
        self.push(QueueEntry::Sum(tensor.clone()))
    }

    fn wait_for(&self, job: usize) -> Result<()> {
        let mut queue = self.shared.lock();
        let mut started = queue.started.iter();
        // With ZeRO-2 a job may have been started several times.
        let is_it = |entry: &QueueEntry| matches!(entry, QueueEntry::Job(index) if *index == job);
        let Some(position) = started.rposition(|(entry, _)| is_it(entry)) else {
            return Ok(());
        };
        while queue.done <= position && queue.error.is_none() {
            queue = if self.threaded {
                wait(&self.shared.idle, queue)
            } else {
                drop(queue);
                self.shared.run_next();
                self.shared.lock()
            };
        }
        queue.error.take().map_or(Ok(()), Err)
    }

    fn join(&self) -> Result<()> {
        if !self.threaded {
            while self.shared.run_next() {}
        }
        let mut queue = self.shared.lock();
        while queue.done < queue.started.len() && queue.error.is_none() {
            queue = wait(&self.shared.idle, queue);
        }
        queue.started.clear();
        queue.done = 0;
        queue.error.take().map_or(Ok(()), Err)
    }

    fn halt(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            // It handles panics itself.
            _ = thread.join();
        }
    }

    fn busy(&self) -> Duration {
        std::mem::take(&mut self.shared.lock().busy)
    }
}

impl Drop for HostQueue {
    fn drop(&mut self) {
        // Not joined: after an error the thread may wait for ranks that have ended.
        self.shared.close();
    }
}

impl SharedQueue {
    fn close(&self) {
        self.lock().closed = true;
        self.more.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        // Nothing panics under this lock.
        panics::lock(&self.queue)
    }

    /// Runs jobs until the queue is closed. A panic becomes an error of the step.
    fn serve(&self) {
        loop {
            let run = AssertUnwindSafe(|| while self.run_next() {});
            if catch_unwind(run).is_err() {
                let text = "the thread that reduces gradients panicked (see its message above)";
                self.lock()
                    .error
                    .get_or_insert_with(|| Error::Internal(text.into()));
                self.idle.notify_one();
            }
            let mut queue = self.lock();
            while !queue.closed && (queue.done == queue.started.len() || queue.error.is_some()) {
                queue = wait(&self.more, queue);
            }
            if queue.closed {
                return;
            }
        }
    }

    /// Runs the next job. False if there is none, or after an error.
    fn run_next(&self) -> bool {
        let queue = self.lock();
        if queue.error.is_some() || queue.closed {
            return false;
        }
        let Some((entry, phase)) = queue.started.get(queue.done).cloned() else {
            return false;
        };
        drop(queue);

        let started = Instant::now();
        let label = match &entry {
            QueueEntry::Job(index) => self.jobs[*index].label(*index),
            QueueEntry::Sum(_) => job::SMALL_SUM,
        };
        let run = || match &entry {
            QueueEntry::Job(index) => self.jobs[*index].run(&self.group, &[], &self.stream),
            QueueEntry::Sum(tensor) => job::sum(tensor, &self.group, &self.stream),
        };
        let result = in_phase(phase, || trace::record(label, run));
        let busy = started.elapsed();

        let mut queue = self.lock();
        queue.busy += busy;
        queue.done += 1;
        queue.error = result.err();
        // Only the layers' thread waits.
        self.idle.notify_one();
        queue.error.is_none()
    }
}

fn wait<'a>(signal: &Condvar, queue: MutexGuard<'a, JobQueue>) -> MutexGuard<'a, JobQueue> {
    signal.wait(queue).unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use ddp_comm::World;
    use ddp_kernels::DType;

    use super::*;

    #[test]
    fn a_queue_that_is_halted_ends_its_thread_although_jobs_are_left() {
        let worlds = World::threads(2, None, Duration::from_secs(60)).unwrap();
        let [first, second] = <[World; 2]>::try_from(worlds).unwrap();
        let mut queue =
            HostQueue::new(first.group("gradients").unwrap(), Vec::new(), true).unwrap();
        let tensors = [(); 3].map(|()| Tensor::zeros(&[3], DType::F32, Device::Cpu).unwrap());
        queue.start_sum(&tensors[0]).unwrap();
        queue.start_sum(&tensors[1]).unwrap();
        // The first of them ends well once the queue is closed.
        let (done, is_done) = mpsc::channel();
        let shared = Arc::clone(&queue.shared);
        std::thread::spawn(move || {
            queue.halt();
            _ = done.send(());
        });
        while !shared.lock().closed {
            std::thread::yield_now();
        }
        // On another thread: a queue that was closed before its first job began never takes part.
        std::thread::spawn(move || {
            let stream = Stream::default_of(Device::Cpu).unwrap();
            job::sum(&tensors[2], &second.group("gradients").unwrap(), &stream)
        });
        is_done.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
