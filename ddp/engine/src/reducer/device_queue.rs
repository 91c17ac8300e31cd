//! Communication of a GPU's memory: on a stream with priority over that of the layers. Nothing here
//! waits on the host, and all of it can be captured in a graph.
//!
//! A job comes after the point of the compute stream (the device's current one) at which it was
//! started: a reduction after its gradients, a gather after the update of this rank's slices and
//! after the last read of the values that it overwrites. `join` orders the compute stream after the
//! last job, so clipping and optimizer see sums, and the next step may write gradients again. The
//! first use of a value waits for its gather (`wait_for`).

use std::cell::{Cell, RefCell};

use ddp_comm::Group;
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::trace;
use ddp_kernels::{Device, Tensor};

use super::job::{self, CommJob, CommQueue};
use crate::error::Result;

/// Communication of a GPU's memory.
#[derive(Debug)]
pub(super) struct DeviceQueue {
    device: Device,
    jobs: Vec<CommJob>,
    group: Group,
    /// For jobs that another job of the step follows.
    followed: Group,
    /// None if jobs go to the compute stream.
    own: Option<Stream>,
    /// By job: the point after it, if layers wait for it and it was started since the last join.
    after: RefCell<Vec<Option<Event>>>,
    /// Small tensors that the next sum of a bucket takes along.
    small: RefCell<Vec<Tensor>>,
    /// Those that are being summed: their memory may not be reused before the join.
    held: RefCell<Vec<Tensor>>,
    /// Whether the own stream got work since the last join.
    is_ahead: Cell<bool>,
}

impl DeviceQueue {
    /// A queue for these jobs on memory of `device`.
    pub(super) fn new(
        group: Group,
        device: Device,
        jobs: Vec<CommJob>,
        overlap: bool,
    ) -> Result<DeviceQueue> {
        let has_own = overlap && group.size() > 1;
        let own = has_own.then(|| Stream::urgent(device)).transpose()?;
        Ok(DeviceQueue {
            device,
            after: RefCell::new(vec![None; jobs.len()]),
            jobs,
            followed: group.followed(),
            group,
            own,
            small: RefCell::default(),
            held: RefCell::default(),
            is_ahead: Cell::new(false),
        })
    }

    /// The stream for a job, after what the compute stream has so far.
    fn stream(&self) -> Result<Stream> {
        let compute = Stream::current(self.device)?;
        let Some(own) = &self.own else {
            return Ok(compute);
        };
        own.wait(&compute.record()?)?;
        self.is_ahead.set(true);
        Ok(own.clone())
    }

    fn forget(&self) {
        self.after.borrow_mut().fill(None);
        self.small.borrow_mut().clear();
        self.held.borrow_mut().clear();
    }
}

impl CommQueue for DeviceQueue {
    fn overlaps(&self) -> bool {
        self.own.is_some()
    }

    fn begin(&self) {
        self.forget();
        self.is_ahead.set(false);
    }

    fn start(&self, job: usize, is_followed: bool) -> Result<()> {
        let (index, job, stream) = (job, &self.jobs[job], self.stream()?);
        // Messages between pairs of ranks have marks apart from the collectives that follow.
        let has_messages = matches!(job, CommJob::Sum(bucket) if bucket.has_messages());
        let along = is_followed && !has_messages;
        let group = if along { &self.followed } else { &self.group };
        let (mut small, mut held) = (self.small.borrow_mut(), self.held.borrow_mut());
        let first = held.len();
        if matches!(job, CommJob::Sum(_)) {
            held.append(&mut small);
        }
        let run = || job.run(group, &held[first..], &stream);
        trace::record_stream(&stream, job.label(index), run)?;
        if let Some(own) = self.own.as_ref().filter(|_| job.is_awaited()) {
            self.after.borrow_mut()[index] = Some(own.record()?);
        }
        Ok(())
    }

    fn start_sum(&self, tensor: &Tensor) -> Result<()> {
        self.small.borrow_mut().push(tensor.clone());
        Ok(())
    }

    fn wait_for(&self, job: usize) -> Result<()> {
        match &self.after.borrow()[job] {
            Some(event) => Ok(Stream::current(self.device)?.wait(event)?),
            None => Ok(()),
        }
    }

    fn join(&self) -> Result<()> {
        // Of a stage without trained parameters, or after the last bucket.
        for tensor in self.small.borrow().iter() {
            let stream = self.stream()?;
            let sum = || job::sum(tensor, &self.group, &stream);
            trace::record_stream(&stream, job::SMALL_SUM, sum)?;
        }
        self.forget();
        match &self.own {
            Some(own) if self.is_ahead.replace(false) => {
                Ok(Stream::current(self.device)?.wait(&own.record()?)?)
            }
            _ => Ok(()),
        }
    }
}
