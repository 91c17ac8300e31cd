//! Communication of a GPU's memory: on a stream of their own, which goes first where it and the layers' both could. Nothing here waits
//! on the host, and all of it can be captured in a graph.
//!
//! Who waits for whom. A bucket's reduction comes after the point of the compute stream (the device's current stream) at which
//! the bucket was started, so after its gradients; the layers below go on beside it. `join` lets the compute stream wait for the
//! point after the last reduction: clipping and the optimizer see sums. The next step's first write to a gradient is on the compute
//! stream after that, so it needs no wait of its own.
//!
//! A gather of values comes after the point of the compute stream at which it was started, so after the update of this rank's
//! slices in the step before; the layers' first use of a value waits for the point after its gather (`wait_for`). The others' values
//! that it overwrites were last read before that point too.

use std::cell::{Cell, RefCell};

use ddp_comm::Group;
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::{Device, Tensor};

use super::{Job, sum};
use crate::error::Result;

/// Communication of a GPU's memory.
#[derive(Debug)]
pub(super) struct DeviceLane {
    device: Device,
    jobs: Vec<Job>,
    group: Group,
    /// None where jobs are a part of the compute stream's work.
    own: Option<Stream>,
    /// By job: the point after it, if it is a gather, and was started since the last join.
    after: RefCell<Vec<Option<Event>>>,
    /// Tensors that are being summed: nobody else may be given their memory before the join.
    held: RefCell<Vec<Tensor>>,
    /// Whether anything was started on the own stream since the last join.
    is_ahead: Cell<bool>,
}

impl DeviceLane {
    /// A lane for these jobs on memory of `device`.
    pub(super) fn new(
        group: Group,
        device: Device,
        jobs: Vec<Job>,
        overlaps: bool,
    ) -> Result<DeviceLane> {
        let own = if overlaps && group.size() > 1 {
            Some(Stream::urgent(device)?)
        } else {
            None
        };
        let after = RefCell::new(vec![None; jobs.len()]);
        Ok(DeviceLane {
            device,
            jobs,
            group,
            own,
            after,
            held: RefCell::default(),
            is_ahead: Cell::new(false),
        })
    }

    /// Whether jobs have a stream of their own.
    pub(super) fn has_stream(&self) -> bool {
        self.own.is_some()
    }

    /// Starts job `index`.
    pub(super) fn start(&self, index: usize) -> Result<()> {
        let job = &self.jobs[index];
        self.run(|group, stream| job.run(group, stream))?;
        if let (Job::Gather(_), Some(own)) = (job, &self.own) {
            self.after.borrow_mut()[index] = Some(own.record()?);
        }
        Ok(())
    }

    /// Starts the sum of another tensor.
    pub(super) fn start_sum(&self, tensor: &Tensor) -> Result<()> {
        self.held.borrow_mut().push(tensor.clone());
        self.run(|group, stream| sum(tensor, group, stream))
    }

    /// Lets the compute stream wait for gather `index`.
    pub(super) fn wait_for(&self, index: usize) -> Result<()> {
        match &self.after.borrow()[index] {
            Some(event) => Ok(Stream::current(self.device)?.wait(event)?),
            None => Ok(()),
        }
    }

    /// Gives `body`'s work to the stream that jobs run on, after what the compute stream was given so far.
    fn run(&self, body: impl FnOnce(&Group, &Stream) -> Result<()>) -> Result<()> {
        let compute = Stream::current(self.device)?;
        let Some(own) = &self.own else {
            return body(&self.group, &compute);
        };
        own.wait(&compute.record()?)?;
        self.is_ahead.set(true);
        own.scope(|| body(&self.group, own))
    }

    /// Lets the compute stream wait for all that was started.
    pub(super) fn join(&self) -> Result<()> {
        self.after.borrow_mut().fill(None);
        self.held.borrow_mut().clear();
        match &self.own {
            Some(own) if self.is_ahead.replace(false) => {
                Ok(Stream::current(self.device)?.wait(&own.record()?)?)
            }
            _ => Ok(()),
        }
    }

    /// Forgets what was started: it was captured, and will not run.
    pub(super) fn abandon(&self) {
        self.after.borrow_mut().fill(None);
        self.held.borrow_mut().clear();
        self.is_ahead.set(false);
    }
}
