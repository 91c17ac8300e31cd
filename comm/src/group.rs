//! What a trainer calls: collectives on tensors, checked, numbered, with the caller's line and a deadline.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ddp_kernels::error::Site;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor, transfer};

use crate::collective::{Call, Collective, Operation, REDUCIBLE, Reduce};
use crate::error::{Argument, Disagreement, Error, Line, Result};

/// Ranks that act together, seen from one of them. A handle: clones share the numbering.
///
/// Calls on one group are made in the same order on all ranks, by one thread at a time; two threads of a rank that both
/// communicate use two groups.
///
/// A group is for tensors in host memory (`World::group`), or for those of one GPU a rank (`World::gpu_group`). On a GPU a call gives
/// its work to the stream and returns; it may be captured in a graph. There the name of the tensor is part of the call, except where
/// one rank gives and others take: ranks that reduce two tensors of one size in different orders would add up the wrong numbers.
///
/// That ranks make different calls is found, on GPUs, among the ranks of one host. Ranks of several hosts compare what they called where they meet
/// in `all_agree`; in between only time tells: the timeout, where the calls do not fit together.
#[derive(Clone, Debug)]
pub struct Group {
    ranks: Arc<dyn Collective>,
    name: &'static str,
    timeout: Duration,
    /// The number of the next call.
    sequence: Arc<AtomicU64>,
    /// The same of what a group of GPUs does through host memory. A capture that fails has made some of its calls and not the others, and
    /// just then ranks must be able to agree.
    host_sequence: Arc<AtomicU64>,
}

impl Group {
    /// A group over an implementation. `World` makes the ones a trainer uses.
    pub fn new(ranks: Arc<dyn Collective>, name: &'static str, timeout: Duration) -> Group {
        Group { ranks, name, timeout, sequence: Arc::default(), host_sequence: Arc::default() }
    }

    /// A group of one.
    pub fn alone() -> Group {
        Group::new(Arc::new(crate::single::Single::default()), "alone", Duration::from_secs(600))
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

    /// How bytes travel: "shared memory", "mpi", "nccl" …
    pub fn transport(&self) -> &'static str {
        self.ranks.transport()
    }

    /// The GPU whose tensors it moves; none for host memory.
    pub fn device(&self) -> Option<Device> {
        self.ranks.device()
    }

    /// Whether all ranks say `ok`: what to do together where each has found out something for itself. The host waits for all ranks,
    /// whatever the group is for. On a group of GPUs ranks that have made different calls so far get [`Error::Disagree`].
    #[track_caller]
    pub fn all_agree(&self, ok: bool) -> Result<bool> {
        let site = Location::caller();
        if self.size() == 1 {
            return Ok(ok);
        }
        let ranks = self.ranks.on_host().unwrap_or(&*self.ranks);
        let (count, chain) = self.ranks.called();
        let own = [i64::from(ok), count.cast_signed(), chain.cast_signed()];
        let answers = Tensor::from_slice(&own.repeat(self.size()), &[self.size(), own.len()], Device::Cpu)?;
        let (answers, stream) = (answers.named("answers"), Stream::default_of(Device::Cpu)?);
        let call = self.number(Operation::AllGather, Some(&answers), &stream, site);
        ranks.all_gather(&call, &answers)?;
        let answers = answers.to_vec::<i64>()?;
        let of = |rank: usize| &answers[own.len() * rank..][..own.len()];
        if let Some(rank) = (1..self.size()).find(|&rank| of(rank)[1..] != of(0)[1..]) {
            return Err(self.apart(rank, of(rank), of(0)));
        }
        Ok((0..self.size()).all(|rank| of(rank)[0] == 1))
    }

    /// Ranks that called different collectives, as all of them see it.
    fn apart(&self, rank: usize, theirs: &[i64], ours: &[i64]) -> Error {
        let told = |called: &[i64]| format!("{} (hash {:016x})", called[1], called[2]);
        Error::Disagree(Box::new(Disagreement {
            field: format!("the collectives of group {}", self.name),
            rank,
            theirs: told(theirs),
            reference: 0,
            ours: told(ours),
            way_out: "All ranks must make the same calls in the same order, with tensors of the same name and length: look for a condition that \
                      differs between ranks."
                .into(),
        }))
    }

    /// Runs `body`, whose calls on this group start together when it has returned: sends and receives of a ring, which would else wait
    /// for each other. They are on one stream, at most 64, and `body` does nothing else with their tensors. In host memory this only
    /// runs `body`, and a send of much (hundreds of kilobytes) waits there until it is being received.
    pub fn grouped(&self, mut body: impl FnMut() -> Result<()>) -> Result<()> {
        self.ranks.grouped(&mut body)
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
            if self.size() > 1 {
                transfer::book_collective(tensor, site);
            }
        }
        Ok(self.number(operation, tensor, stream, site))
    }

    /// The call as the ranks see it.
    fn number<'a>(&self, operation: Operation, tensor: Option<&'a Tensor>, stream: &'a Stream, site: Site) -> Call<'a> {
        let sequence = match operation {
            Operation::Send { .. } | Operation::Receive { .. } => 0,
            _ => {
                let is_on_host = tensor.is_none_or(|tensor| tensor.device() == Device::Cpu);
                let counts_apart = is_on_host && self.ranks.on_host().is_some();
                let counter = if counts_apart { &self.host_sequence } else { &self.sequence };
                counter.fetch_add(1, Ordering::Relaxed)
            }
        };
        Call { operation, tensor, stream, sequence, timeout: self.timeout, group: self.name, site }
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
        // A rank alone moves nothing, wherever its tensors are.
        if size > 1 && self.device().unwrap_or(Device::Cpu) != tensor.device() {
            let (expected, way_out) = match self.device() {
                None => (
                    format!("a tensor in host memory, which group {} is for", self.name),
                    "Move it with .to(Device::Cpu), or use a group made by World::gpu_group.",
                ),
                Some(device) => (
                    format!("a tensor on {device}, which group {} is for", self.name),
                    "Move it there, or use a group made by World::group for tensors in host memory.",
                ),
            };
            return refuse("tensor".into(), expected, tensor.to_string(), way_out);
        }
        match operation {
            Operation::AllReduce(reduce) | Operation::ReduceScatter(reduce)
                if size > 1 && self.device().is_some() && reduce != Reduce::Sum =>
            {
                let way_out = "Reduce it in host memory, with .to(Device::Cpu) and a group made by World::group.";
                return refuse("reduction".into(), "sum, on GPUs".into(), reduce.name().into(), way_out);
            }
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
