//! What a trainer calls: collectives on tensors, checked, numbered, with the caller's line and a deadline.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ddp_kernels::Tensor;
use ddp_kernels::error::Site;
use ddp_kernels::stream::Stream;

use crate::collective::{Call, Collective, Operation, REDUCIBLE, Reduce};
use crate::error::{Argument, Error, Line, Result};

/// Ranks that act together, seen from one of them. A handle: clones share the numbering.
///
/// Calls on one group are made in the same order on all ranks, by one thread at a time; two threads of a rank that both
/// communicate use two groups.
#[derive(Clone, Debug)]
pub struct Group {
    ranks: Arc<dyn Collective>,
    name: &'static str,
    timeout: Duration,
    /// The number of the next call.
    sequence: Arc<AtomicU64>,
}

impl Group {
    /// A group over an implementation. `World` makes the ones a trainer uses.
    pub fn new(ranks: Arc<dyn Collective>, name: &'static str, timeout: Duration) -> Group {
        Group { ranks, name, timeout, sequence: Arc::new(AtomicU64::new(0)) }
    }

    /// A group of one.
    pub fn alone() -> Group {
        Group::new(Arc::new(crate::single::Single), "alone", Duration::from_secs(600))
    }

    /// The same group with another deadline: a handle that shares the numbering of calls. For a call in which one rank is
    /// known to come late.
    pub fn with_timeout(&self, timeout: Duration) -> Group {
        Group { timeout, ..self.clone() }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// How many ranks.
    pub fn size(&self) -> usize {
        self.ranks.size()
    }

    /// How bytes travel: "shared memory", "mpi" …
    pub fn transport(&self) -> &'static str {
        self.ranks.transport()
    }

    /// Every rank's `tensor` becomes the reduction of all of them.
    #[track_caller]
    pub fn all_reduce(&self, tensor: &Tensor, reduce: Reduce, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::AllReduce(reduce), Some(tensor), stream, Location::caller())?;
        self.ranks.all_reduce(&call, tensor, reduce)
    }

    /// `tensor` is as many equal slices as ranks; this rank's becomes its reduction over all ranks, the others are
    /// left unspecified.
    #[track_caller]
    pub fn reduce_scatter(&self, tensor: &Tensor, reduce: Reduce, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::ReduceScatter(reduce), Some(tensor), stream, Location::caller())?;
        self.ranks.reduce_scatter(&call, tensor, reduce)
    }

    /// `tensor` is as many equal slices as ranks; each rank gives its own and gets the others.
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::AllGather, Some(tensor), stream, Location::caller())?;
        self.ranks.all_gather(&call, tensor)
    }

    /// Every rank's `tensor` becomes that of `root`.
    #[track_caller]
    pub fn broadcast(&self, tensor: &Tensor, root: usize, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::Broadcast { root }, Some(tensor), stream, Location::caller())?;
        self.ranks.broadcast(&call, tensor, root)
    }

    /// Gives `tensor` to the `receive` that rank `to` makes.
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::Send { to }, Some(tensor), stream, Location::caller())?;
        self.ranks.send(&call, tensor, to)
    }

    /// Fills `tensor` from the `send` that rank `from` makes.
    #[track_caller]
    pub fn receive(&self, tensor: &Tensor, from: usize, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::Receive { from }, Some(tensor), stream, Location::caller())?;
        self.ranks.receive(&call, tensor, from)
    }

    /// Returns when all ranks have come here.
    #[track_caller]
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        let call = self.call(Operation::Barrier, None, stream, Location::caller())?;
        self.ranks.barrier(&call)
    }

    /// Checks what can be checked without the others, and numbers the call.
    fn call<'a>(
        &self,
        operation: Operation,
        tensor: Option<&'a Tensor>,
        stream: &'a Stream,
        site: Site,
    ) -> Result<Call<'a>> {
        if let Some(tensor) = tensor {
            self.check(operation, tensor, stream, site)?;
        }
        let sequence = match operation {
            Operation::Send { .. } | Operation::Receive { .. } => 0,
            _ => self.sequence.fetch_add(1, Ordering::Relaxed),
        };
        Ok(Call { operation, tensor, stream, sequence, timeout: self.timeout, group: self.name, site })
    }

    fn check(&self, operation: Operation, tensor: &Tensor, stream: &Stream, at: Site) -> Result<()> {
        let refuse = |what: String, expected: String, got: String, way_out: &str| {
            let (operation, way_out) = (operation.to_string(), way_out.to_string());
            Err(Error::Argument(Box::new(Argument { operation, what, expected, got, way_out, at })))
        };
        let size = self.size();
        if tensor.is_transposed() {
            let way_out = "Call .contiguous() on it first.";
            return refuse("tensor".into(), "rows in order".into(), format!("{tensor}, transposed"), way_out);
        }
        if tensor.device() != stream.device() {
            let expected = format!("a tensor on {}, the stream's device", stream.device());
            return refuse(
                "tensor".into(),
                expected,
                tensor.to_string(),
                "Move the tensor, or use a stream of its device.",
            );
        }
        match operation {
            Operation::AllReduce(_) | Operation::ReduceScatter(_) if !REDUCIBLE.contains(&tensor.dtype()) => {
                let expected = "f32, bf16, f16, f64 or i64".to_string();
                return refuse("tensor".into(), expected, tensor.to_string(), "Cast it with .to_dtype(…) first.");
            }
            Operation::ReduceScatter(_) | Operation::AllGather if !tensor.count().is_multiple_of(size) => {
                let expected = format!("a multiple of {size} elements, one slice a rank");
                return refuse("tensor".into(), expected, tensor.to_string(), "Pad it.");
            }
            Operation::Broadcast { root: peer } | Operation::Send { to: peer } | Operation::Receive { from: peer } => {
                if peer >= size {
                    return refuse(
                        "rank".into(),
                        format!("0 to {}", size - 1),
                        peer.to_string(),
                        "Ranks count from 0.",
                    );
                }
                if peer == self.rank() && !matches!(operation, Operation::Broadcast { .. }) {
                    let way_out = "Use copy_from for a copy within a rank.";
                    return refuse("rank".into(), "another rank".into(), format!("{peer}, this one"), way_out);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl fmt::Display for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if let Some(tensor) = self.tensor {
            write!(f, " of {tensor}")?;
        }
        write!(f, " (call {} of group {}, at {})", self.sequence, self.group, Line(self.site))
    }
}
