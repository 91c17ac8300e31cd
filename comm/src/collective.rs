//! The one trait behind every movement of tensors between ranks.
//!
//! Its types are those of a GPU: a call names the stream whose work it follows, and may return before it is done. On the
//! CPU a call has done its work when it returns. All ranks make the same calls on a group in the same order.

use std::fmt;
use std::time::Duration;

use ddp_kernels::error::Site;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;

/// How the elements of all ranks become one. Sums add in the order of the ranks, in f32 for bf16 and f16 (rounded once at
/// the end), so that every rank holds the same bits and so does every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// The largest; NaN if any is NaN.
    Max,
    /// The smallest; NaN if any is NaN.
    Min,
}

/// What is asked of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Operation {
    AllReduce(Reduce),
    ReduceScatter(Reduce),
    AllGather,
    Broadcast { root: usize },
    Send { to: usize },
    Receive { from: usize },
    Barrier,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::AllReduce(reduce) => write!(f, "all_reduce {}", reduce.name()),
            Operation::ReduceScatter(reduce) => write!(f, "reduce_scatter {}", reduce.name()),
            Operation::AllGather => f.write_str("all_gather"),
            Operation::Broadcast { root } => write!(f, "broadcast from rank {root}"),
            Operation::Send { to } => write!(f, "send to rank {to}"),
            Operation::Receive { from } => write!(f, "receive from rank {from}"),
            Operation::Barrier => f.write_str("barrier"),
        }
    }
}

impl Operation {
    /// The method's name.
    pub fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce(_) => "all_reduce",
            Operation::ReduceScatter(_) => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::Broadcast { .. } => "broadcast",
            Operation::Send { .. } => "send",
            Operation::Receive { .. } => "receive",
            Operation::Barrier => "barrier",
        }
    }
}

impl Reduce {
    /// In messages: sum, max, min.
    pub fn name(self) -> &'static str {
        match self {
            Reduce::Sum => "sum",
            Reduce::Max => "max",
            Reduce::Min => "min",
        }
    }
}

/// The dtypes that can be reduced. Everything else moves as bytes: all_gather, broadcast, send and receive take any.
pub const REDUCIBLE: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F64, DType::I64];

/// One call on a group, as implementations and error messages see it.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// What is asked.
    pub operation: Operation,
    /// The elements it is about; none for a barrier. Contiguous, and on `stream`'s device (`Group` has checked both).
    pub tensor: Option<&'a Tensor>,
    /// The stream whose work this call follows.
    pub stream: &'a Stream,
    /// The number of this call on its group, from 0: equal on all ranks that are in step. Sends and receives count by pair.
    pub sequence: u64,
    /// How long to wait for the others.
    pub timeout: Duration,
    /// The group's name: "main", "gradients" …
    pub group: &'static str,
    /// The caller's source line.
    pub site: Site,
}

impl Call<'_> {
    /// Lends the bytes of a tensor in host memory, in this call's name.
    pub(crate) fn lend<R>(&self, tensor: &Tensor, body: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
        tensor.with_bytes(self.operation.name(), self.site, body)?
    }

    /// As `lend`, for writing.
    pub(crate) fn lend_mut<R>(&self, tensor: &Tensor, body: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
        tensor.with_bytes_mut(self.operation.name(), self.site, body)?
    }
}

/// Ranks that move and reduce tensors together, seen from one of them. `Group` is what callers use: it has checked the
/// tensor, and numbers the calls.
///
/// An implementation returns [`Error::Timeout`](crate::Error::Timeout) naming the ranks that did not arrive within
/// `call.timeout`, [`Error::OutOfStep`](crate::Error::OutOfStep) when ranks make different calls, and
/// [`Error::PeerFailed`](crate::Error::PeerFailed) soon after another rank has failed.
pub trait Collective: Send + Sync + fmt::Debug {
    /// How bytes travel: "shared memory", "mpi", "shared memory and mpi", "nccl", "alone".
    fn transport(&self) -> &'static str;
    /// The GPU whose tensors this moves; none for tensors in host memory.
    fn device(&self) -> Option<Device> {
        None
    }
    /// The same ranks in host memory, where this one moves tensors on GPUs: for words that the host waits for.
    fn on_host(&self) -> Option<&dyn Collective> {
        None
    }
    /// How many collectives this rank has called, and a hash of all of them, where calls return before they are done: what ranks may compare
    /// where they meet. Those in a graph are not among them.
    fn called(&self) -> (u64, u64) {
        (0, 0)
    }
    /// Runs `body`; calls that it makes may start together when it returns.
    fn grouped(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        body()
    }
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// How many ranks.
    fn size(&self) -> usize;

    /// Every rank's `tensor` becomes the reduction of all of them.
    fn all_reduce(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()>;
    /// `tensor` is `size` equal slices; this rank's slice becomes its reduction over all ranks, the others are left
    /// unspecified. In place, as a sharded optimizer wants it.
    fn reduce_scatter(&self, call: &Call<'_>, tensor: &Tensor, reduce: Reduce) -> Result<()>;
    /// `tensor` is `size` equal slices; each rank gives its own and gets the others.
    fn all_gather(&self, call: &Call<'_>, tensor: &Tensor) -> Result<()>;
    /// Every rank's `tensor` becomes that of `root`.
    fn broadcast(&self, call: &Call<'_>, tensor: &Tensor, root: usize) -> Result<()>;
    /// Gives `tensor` to the `receive` that rank `to` makes. May return once the bytes are on their way.
    fn send(&self, call: &Call<'_>, tensor: &Tensor, to: usize) -> Result<()>;
    /// Fills `tensor` from the `send` that rank `from` makes.
    fn receive(&self, call: &Call<'_>, tensor: &Tensor, from: usize) -> Result<()>;
    /// Returns when all ranks have come here.
    fn barrier(&self, call: &Call<'_>) -> Result<()>;
}
