//! Where communication runs: beside the layers, in the order in which it was started. Of host memory on a thread of its
//! own (`host.rs`), of a GPU's on a stream of its own (`device.rs`).

mod device;
mod host;

use std::ops::Range;
use std::time::{Duration, Instant};

use ddp_comm::{Group, Reduce};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor, ops};

use self::device::DeviceLane;
use self::host::HostLane;
use crate::error::Result;
use crate::faults::{self, Place};

/// What is done with a part of an arena, step after step.
#[derive(Clone, Debug)]
pub(super) enum Job {
    /// It becomes the sum over the ranks.
    Sum {
        /// The part.
        tensor: Tensor,
        /// What travels in its place, if it is narrowed on the way.
        narrow: Option<Tensor>,
    },
    /// This rank's slice of it becomes the sum over the ranks; the others' slices are left unspecified.
    SumSlice {
        /// The part.
        tensor: Tensor,
        /// This rank's slice of it.
        own: Tensor,
        /// As above, and this rank's slice of that.
        narrow: Option<Box<(Tensor, Tensor)>>,
    },
    /// Each rank gives its slice and gets the others'.
    Gather(Tensor),
}

impl Job {
    /// Sums `tensor`; travels as `dtype`.
    pub(super) fn sum(tensor: Tensor, dtype: DType) -> Result<Job> {
        Ok(Job::Sum {
            narrow: narrow_copy(&tensor, dtype)?,
            tensor,
        })
    }

    /// Sums these elements of `tensor`, this rank's slice; travels as `dtype`.
    pub(super) fn sum_slice(tensor: Tensor, own: Range<usize>, dtype: DType) -> Result<Job> {
        let narrow = match narrow_copy(&tensor, dtype)? {
            Some(narrow) => Some(Box::new((narrow.clone(), narrow.slice(own.clone())?))),
            None => None,
        };
        Ok(Job::SumSlice {
            own: tensor.slice(own)?,
            tensor,
            narrow,
        })
    }

    pub(super) fn run(&self, group: &Group, stream: &Stream) -> Result<()> {
        match self {
            Job::Gather(tensor) => return Ok(group.all_gather(tensor, stream)?),
            Job::Sum { .. } | Job::SumSlice { .. } => faults::at(Place::Reduction)?,
        }
        match self {
            Job::Sum {
                tensor,
                narrow: None,
            } => sum(tensor, group, stream)?,
            Job::Sum {
                tensor,
                narrow: Some(narrow),
            } => {
                ops::cast_into(narrow, tensor)?;
                sum(narrow, group, stream)?;
                ops::cast_into(tensor, narrow)?;
            }
            Job::SumSlice {
                tensor,
                narrow: None,
                ..
            } => group.reduce_scatter(tensor, Reduce::Sum, stream)?,
            Job::SumSlice {
                tensor,
                own,
                narrow: Some(copies),
            } => {
                let (narrow, narrow_own) = &**copies;
                ops::cast_into(narrow, tensor)?;
                group.reduce_scatter(narrow, Reduce::Sum, stream)?;
                ops::cast_into(own, narrow_own)?;
            }
            Job::Gather(_) => unreachable!("returned above"),
        }
        Ok(())
    }
}

/// Memory for `tensor` in fewer bytes, if less is to travel.
fn narrow_copy(tensor: &Tensor, dtype: DType) -> Result<Option<Tensor>> {
    if dtype == tensor.dtype() {
        return Ok(None);
    }
    let narrow = Tensor::empty(&[tensor.count()], dtype, tensor.device())?;
    Ok(Some(narrow.named(tensor.name().unwrap_or("gradients"))))
}

fn sum(tensor: &Tensor, group: &Group, stream: &Stream) -> Result<()> {
    Ok(group.all_reduce(tensor, Reduce::Sum, stream)?)
}

/// Where communication runs.
#[derive(Debug)]
pub(super) struct Lane(Kind);

#[derive(Debug)]
enum Kind {
    Host(HostLane),
    Device(DeviceLane),
}

impl Lane {
    /// A lane for these jobs, on memory of `device`. If it `overlaps`, they run beside the layers.
    pub(super) fn new(
        group: Group,
        device: Device,
        jobs: Vec<Job>,
        overlaps: bool,
    ) -> Result<Lane> {
        Ok(Lane(match device {
            Device::Cpu => Kind::Host(HostLane::new(
                group,
                Stream::default_of(device)?,
                jobs,
                overlaps,
            )?),
            _ => Kind::Device(DeviceLane::new(group, device, jobs, overlaps)?),
        }))
    }

    /// Whether jobs run beside the layers.
    pub(super) fn overlaps(&self) -> bool {
        match &self.0 {
            Kind::Host(lane) => lane.has_thread(),
            Kind::Device(lane) => lane.has_stream(),
        }
    }

    /// Starts job `index`, after all that has been given to the device's current stream.
    pub(super) fn start(&self, index: usize) -> Result<()> {
        match &self.0 {
            Kind::Host(lane) => lane.start(index),
            Kind::Device(lane) => lane.start(index),
        }
    }

    /// Starts the sum of another tensor, likewise.
    pub(super) fn start_sum(&self, tensor: &Tensor) -> Result<()> {
        match &self.0 {
            Kind::Host(lane) => lane.start_sum(tensor.clone()),
            Kind::Device(lane) => lane.start_sum(tensor),
        }
    }

    /// What is given to the device's current stream from now on comes after job `index`, which was started since the last join. On the
    /// CPU this waits.
    pub(super) fn wait_for(&self, index: usize) -> Result<()> {
        match &self.0 {
            Kind::Host(lane) => lane.wait_for(index),
            Kind::Device(lane) => lane.wait_for(index),
        }
    }

    /// What is given to the device's current stream from now on comes after all that was started. On the CPU this waits.
    pub(super) fn join(&self) -> Result<()> {
        match &self.0 {
            Kind::Host(lane) => lane.join(),
            Kind::Device(lane) => lane.join(),
        }
    }

    /// Forgets what was started since the last join. For a lane that has begun none of it: without a thread, or captured.
    pub(super) fn abandon(&self) {
        match &self.0 {
            Kind::Host(lane) => lane.abandon(),
            Kind::Device(lane) => lane.abandon(),
        }
    }

    /// How long all that has run since the last call took; zero where only a device knows.
    pub(super) fn busy(&self) -> Duration {
        match &self.0 {
            Kind::Host(lane) => lane.busy(),
            Kind::Device(_) => Duration::ZERO,
        }
    }

    /// When each job last began and ended; none where only a device knows.
    pub(super) fn times(&self) -> Vec<(Instant, Instant)> {
        match &self.0 {
            Kind::Host(lane) => lane.times(),
            Kind::Device(_) => Vec::new(),
        }
    }
}
