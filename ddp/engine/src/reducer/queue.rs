//! What the reducer asks of its queue of communication.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use ddp_kernels::Tensor;

use crate::error::Result;

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

    /// When each job last began and ended. Empty if only the device knows.
    fn times(&self) -> Vec<(Instant, Instant)> {
        Vec::new()
    }
}
