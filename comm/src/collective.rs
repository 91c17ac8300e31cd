//! The trait that every implementation of collectives provides.
//!
//! A call names the stream whose work it follows. On GPUs it may return before the work is done; on
//! the CPU the work is done when it returns. All ranks make the same calls on a group, in the same
//! order.

pub(crate) mod group;
pub(crate) mod handshake;
pub(crate) mod single;
pub(crate) mod tree;

use std::fmt;
use std::time::Duration;

use ddp_kernels::error::Site;
use ddp_kernels::progress::StopWord;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor, ops};

use crate::collective::tree::{Addend, SumTree};
use crate::error::{Error, Line, Result};

pub use ddp_kernels::sums::Reduce;

/// What the ranks are asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
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
        f.write_str(self.name())?;
        match self {
            Operation::AllReduce(reduce) | Operation::ReduceScatter(reduce) => {
                write!(f, " {reduce}")
            }
            Operation::Broadcast { root: rank } | Operation::Receive { from: rank } => {
                write!(f, " from rank {rank}")
            }
            Operation::Send { to } => write!(f, " to rank {to}"),
            Operation::AllGather | Operation::Barrier => Ok(()),
        }
    }
}

impl Operation {
    /// The method's name.
    pub(crate) fn name(&self) -> &'static str {
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

    /// The other rank of a send or receive.
    pub(crate) fn peer(&self) -> Option<usize> {
        match self {
            Operation::Send { to: peer } | Operation::Receive { from: peer } => Some(*peer),
            _ => None,
        }
    }
}

/// The dtypes that can be reduced. All others only move: all_gather, broadcast, send, receive.
pub(crate) const REDUCIBLE: [DType; 4] = [DType::F32, DType::BF16, DType::F64, DType::I64];

/// One call on a group, as implementations and error messages see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) operation: Operation,
    /// None for a barrier. Contiguous, and on `stream`'s device (`Group` has checked both).
    pub(crate) tensor: Option<&'a Tensor>,
    /// The stream whose work this call follows.
    pub(crate) stream: &'a Stream,
    /// The number of this call on its group, from 0; equal on all ranks. 0 for send and receive.
    pub(crate) sequence: u64,
    /// How long to wait for the other ranks.
    pub(crate) timeout: Duration,
    /// Whether another call on the group follows soon (`Group::followed`).
    pub(crate) is_followed: bool,
    /// The group's name: "main", "gradients" …
    pub(crate) group: &'static str,
    /// The caller's source line.
    pub(crate) site: Site,
    /// How a reduction adds.
    pub(crate) sum: Sum<'a>,
}

/// How a reduction adds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sum<'a> {
    /// The tensors of all ranks, in the order of the transport: in host memory that of the ranks.
    Transport,
    /// Partial sums over shards, in the order of their tree.
    Tree(Partials<'a>),
}

/// What a sum along the tree of shards is made of, as this rank sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partials<'a> {
    /// (R, E): this rank's partial sums. One that is not in here is in the call's tensor (E).
    pub(crate) rows: &'a Tensor,
    /// Those of all ranks, in order.
    pub(crate) order: &'a [Addend],
    /// The tree.
    pub(crate) tree: &'a SumTree,
}

impl Partials<'_> {
    /// How many partial sums of a rank there must be room for.
    pub(crate) fn places(&self) -> usize {
        1 + self.order.iter().map(|part| part.row).max().unwrap_or(0)
    }
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if let Some(tensor) = self.tensor {
            write!(f, " of {tensor}")?;
        }
        let (sequence, group, line) = (self.sequence, self.group, Line(self.site));
        write!(f, " (call {sequence} of group {group}, at {line})")
    }
}

impl<'a> Call<'a> {
    /// The tensor of a call that is not a barrier.
    pub(crate) fn tensor(&self) -> &'a Tensor {
        self.tensor.expect("only a barrier has no tensor")
    }

    /// Runs `body` on the bytes of a tensor in host memory.
    pub(crate) fn with_bytes<R>(
        &self,
        tensor: &Tensor,
        body: impl FnOnce(&[u8]) -> Result<R>,
    ) -> Result<R> {
        tensor.with_bytes(self.operation.name(), self.site, body)?
    }

    /// As `with_bytes`, for writing.
    pub(crate) fn with_bytes_mut<R>(
        &self,
        tensor: &Tensor,
        body: impl FnOnce(&mut [u8]) -> Result<R>,
    ) -> Result<R> {
        tensor.with_bytes_mut(self.operation.name(), self.site, body)?
    }

    /// The error of ranks that did not arrive, and showed no progress for the call's timeout, in a
    /// wait that lasted `total`.
    pub(crate) fn timed_out(&self, missing: Vec<usize>, total: Duration) -> Error {
        Error::Timeout {
            call: self.to_string(),
            missing,
            waited: self.timeout,
            total,
        }
    }

    /// The error of rank `peer`, which made another call.
    pub(crate) fn out_of_step(&self, peer: usize, theirs: String) -> Error {
        Error::OutOfStep {
            call: self.to_string(),
            peer,
            theirs,
        }
    }
}

/// On GPUs: how the ranks of a group agree whether their steps were stopped, because calls ended
/// without a result.
#[derive(Debug)]
pub struct StopVote {
    /// Set before calls end without a result.
    pub word: StopWord,
    /// f32 (1): this rank's vote; once it is summed over the ranks, how many were stopped. If there
    /// are any, a step does not count.
    pub stopped: Tensor,
}

impl StopVote {
    pub(crate) fn new(word: StopWord, device: Device) -> Result<StopVote> {
        let stopped = Tensor::zeros(&[1], DType::F32, device)?.named("ranks stopped");
        Ok(StopVote { word, stopped })
    }

    /// Sets `stopped` to this rank's vote: 1 if it was stopped, now or as the `flags` of its steps
    /// (`ops::STEP_FLAGS`) say, else 0.
    pub fn vote(&self, flags: &Tensor) -> Result<()> {
        Ok(ops::vote_stopped(&self.stopped, flags, Some(self.word))?)
    }
}

/// Ranks that move and reduce tensors together, seen from one of them. `Group` is what callers
/// use: it has checked the tensors, and numbers the calls.
///
/// An implementation returns [`Error::Timeout`](crate::Error::Timeout) with the ranks that did not
/// arrive within `call.timeout`, [`Error::OutOfStep`](crate::Error::OutOfStep) if ranks make
/// different calls, and [`Error::PeerFailed`](crate::Error::PeerFailed) soon after a rank failed.
pub(crate) trait Collective: Send + Sync + fmt::Debug {
    /// An error if the generation has ended: calls that return before they are done may have no
    /// result.
    fn check_ranks(&self) -> Result<()> {
        Ok(())
    }
    /// How steps stop before calls end without a result.
    fn stop_vote(&self) -> Option<&StopVote> {
        None
    }
    /// How bytes travel: "shared memory", "shared memory and tcp", "nccl", "alone".
    fn transport(&self) -> &'static str;
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// How many ranks.
    fn size(&self) -> usize;
    /// Makes these calls: one, or on GPUs several that start together on one stream.
    fn run(&self, calls: &[Call<'_>]) -> Result<()>;
    /// The GPU whose tensors this moves; None for tensors in host memory.
    fn device(&self) -> Option<Device> {
        None
    }
    /// The same ranks in host memory, if this moves tensors on GPUs.
    fn on_host(&self) -> Option<&dyn Collective> {
        None
    }
    /// How many collectives this rank has called outside of graphs, and a hash of them all, if
    /// calls return before they are done: ranks compare it where they meet.
    fn history(&self) -> (u64, u64) {
        (0, 0)
    }
}
