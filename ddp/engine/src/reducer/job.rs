//! Jobs: what is communicated of a bucket in every step, and what the reducer asks of the queue
//! that runs them.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use ddp_comm::{Group, Reduce};
use ddp_kernels::Tensor;
use ddp_kernels::stream::Stream;
use ddp_kernels::trace::{Label, Lane};

use super::reduced::{Reduced, Sum};
use crate::error::Result;

/// What is done with a bucket.
#[derive(Debug)]
pub(super) enum CommJob {
    /// It, or this rank's slice of it, becomes the sum over the ranks.
    Sum(Arc<Reduced>),
    /// Each rank gives its slice and gets the others.
    Gather(Tensor),
    /// Each rank gets those of rank 0.
    Broadcast(Tensor),
}

/// The sum of a small tensor, in a trace.
pub(super) const SMALL_SUM: Label = Label::new(Lane::Reductions, "sum of losses");

impl CommJob {
    /// What a trace shows job `index` as.
    pub(super) fn label(&self, index: usize) -> Label {
        let named = |name| Label::new(Lane::Reductions, name);
        match self {
            Self::Sum(bucket) if matches!(bucket.sum, Sum::Tree(_)) => {
                named("sum bucket over shards").at(index)
            }
            Self::Sum(bucket) if bucket.scatters() => named("reduce-scatter bucket").at(index),
            Self::Sum(_) => named("all-reduce bucket").at(index),
            Self::Gather(_) => named("all-gather values"),
            Self::Broadcast(_) => named("broadcast buffers"),
        }
    }

    /// Whether layers wait for it alone, before the join.
    pub(super) fn is_awaited(&self) -> bool {
        match self {
            CommJob::Sum(bucket) => bucket.is_freed(),
            CommJob::Gather(_) | CommJob::Broadcast(_) => true,
        }
    }

    /// Gives the job to `stream`, a sum together with those of the `small` tensors. On the CPU this
    /// runs it.
    pub(super) fn run(&self, group: &Group, small: &[Tensor], stream: &Stream) -> Result<()> {
        match self {
            CommJob::Sum(bucket) => bucket.run(group, small, stream),
            CommJob::Gather(values) => Ok(group.all_gather(values, stream)?),
            CommJob::Broadcast(values) => Ok(group.broadcast(values, 0, stream)?),
        }
    }
}

/// Sums a small tensor over the ranks.
pub(super) fn sum(tensor: &Tensor, group: &Group, stream: &Stream) -> Result<()> {
    Ok(group.all_reduce(tensor, Reduce::Sum, stream)?)
}

/// Runs jobs one at a time, in the order in which they are started, if possible beside the
/// layers. A job is named by its index in the list that the queue was made with.
pub(super) trait CommQueue: Debug + Send {
    /// Whether jobs run beside the layers.
    fn overlaps(&self) -> bool;

    /// Begins a step. Forgets the jobs of a capture that failed.
    fn begin(&self) {}

    /// Starts a job, after all work that the device's current stream has so far. `is_followed`:
    /// another job of the same step follows.
    fn start(&self, job: usize, is_followed: bool) -> Result<()>;

    /// Starts the sum of a small tensor over the ranks, likewise; on a GPU together with the next
    /// bucket. It may be read after the join.
    fn start_sum(&self, tensor: &Tensor) -> Result<()>;

    /// Orders later work of the device's current stream after a job, if it was started since the
    /// last join. On the CPU this waits.
    fn wait_for(&self, job: usize) -> Result<()>;

    /// Orders later work of the device's current stream after all jobs. On the CPU this waits.
    fn join(&self) -> Result<()>;

    /// Ends its thread, after the ranks have lost one: its job has failed, or fails soon.
    fn halt(&mut self) {}

    /// How long the jobs since the last call took. Zero if only the device knows.
    fn busy(&self) -> Duration {
        Duration::ZERO
    }
}
