//! Groups of ranks: collectives on tensors, checked and numbered, with the caller's line and a
//! deadline.

mod bytes;
mod checks;

use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ddp_kernels::error::Site;
use ddp_kernels::panics;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor, transfer};

use crate::collective::single::Single;
use crate::collective::tree::SumTree;
use crate::collective::{Call, Collective, Operation, Partials, Reduce, StopVote, Sum};
use crate::error::{Argument, Cause, Disagreement, Error, Result, SAME_CALLS};

/// Ranks that act together, seen from one of them. A handle: clones share the numbering of calls.
///
/// Calls on a group are made in the same order on all ranks, by one thread at a time. Two threads
/// of a rank that both communicate use two groups.
///
/// A group is for tensors in host memory (`World::group`), or for tensors on one GPU a rank
/// (`World::gpu_group`). On a GPU a call gives its work to the stream and returns, and may be
/// captured in a graph. There the tensor's name is part of the call (not for broadcast, send and
/// receive): ranks that reduce two tensors of one size in different orders would add up the wrong
/// values.
///
/// On GPUs, different calls are detected among the ranks of one host. Ranks of several hosts
/// compare their calls in `all_agree`; in between only the timeout ends calls that do not match.
#[derive(Clone, Debug)]
pub struct Group {
    ranks: Arc<dyn Collective>,
    name: &'static str,
    timeout: Duration,
    counters: Arc<Counters>,
    /// See `followed`.
    is_followed: bool,
}

/// What all handles of a group share.
#[derive(Debug, Default)]
struct Counters {
    /// The number of the next call.
    next: AtomicU64,
    /// The same for the host side of a GPU group. It counts apart: a failed capture has made some
    /// of its calls and not others, and ranks must be able to agree just then.
    next_on_host: AtomicU64,
    /// Held by the call in host memory that runs. After an error: why there can be no more.
    broken: Mutex<Option<Cause>>,
    /// Calls that will start together (`Group::grouped`).
    pending: Mutex<Option<Vec<Pending>>>,
}

/// A call that will start together with others.
#[derive(Debug)]
struct Pending {
    operation: Operation,
    tensor: Tensor,
    stream: Stream,
    sequence: u64,
    site: Site,
}

impl Group {
    /// A group over an implementation.
    pub(crate) fn new(ranks: Arc<dyn Collective>, name: &'static str, timeout: Duration) -> Group {
        Group {
            ranks,
            name,
            timeout,
            counters: Arc::default(),
            is_followed: false,
        }
    }

    /// A handle for calls that are each followed by another call on the group, such as all buckets
    /// of a step but the last. A GPU then marks only where they begin: the mark of the next call
    /// shows that they have ended. If no call follows within the timeout, a hang is reported.
    pub fn followed(&self) -> Group {
        Group {
            is_followed: true,
            ..self.clone()
        }
    }

    /// A group of one rank.
    pub fn alone() -> Group {
        Group::new(
            Arc::new(Single::default()),
            "alone",
            Duration::from_secs(600),
        )
    }

    /// An error if calls on this group no longer have results, because a rank was lost
    /// ([`Error::is_rank_lost`]). On GPUs, where calls return before they are done, earlier calls
    /// may have none either.
    pub fn check_ranks(&self) -> Result<()> {
        self.ranks.check_ranks()
    }

    /// On GPUs: how steps stop before calls end without a result. None if the job ends then.
    pub fn stop_vote(&self) -> Option<&StopVote> {
        self.ranks.stop_vote()
    }

    /// The name that it was made with.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// A handle with another name.
    pub(crate) fn called(&self, name: &'static str) -> Group {
        Group {
            name,
            ..self.clone()
        }
    }

    /// Whether this is its only handle, and calls on it still work.
    pub(crate) fn is_unused(&self) -> bool {
        let works = matches!(self.counters.broken.lock().as_deref(), Ok(None));
        works && Arc::strong_count(&self.counters) == 1
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.size()
    }

    /// How bytes travel: "shared memory", "mpi", "nccl" …
    pub fn transport(&self) -> &'static str {
        self.ranks.transport()
    }

    /// The GPU whose tensors it moves; None for host memory.
    pub fn device(&self) -> Option<Device> {
        self.ranks.device()
    }

    /// Whether all ranks say `ok`. The host waits for all ranks, whatever the group is for. If
    /// ranks of a GPU group have made different calls so far: [`Error::Disagree`].
    #[track_caller]
    pub fn all_agree(&self, ok: bool) -> Result<bool> {
        let site = Location::caller();
        if self.size() == 1 {
            return Ok(ok);
        }
        let (count, hash) = self.ranks.history();
        let own = [i64::from(ok), count.cast_signed(), hash.cast_signed()];
        let (rows, columns) = (self.size(), own.len());
        let answers = Tensor::from_slice(&own.repeat(rows), &[rows, columns], Device::Cpu)?;
        let (answers, stream) = (answers.named("answers"), Stream::default_of(Device::Cpu)?);
        let call = self.number(Operation::AllGather, Some(&answers), &stream, site);
        self.run_on_host(&call)?;
        let answers = answers.to_vec::<i64>()?;
        let of = |rank: usize| &answers[columns * rank..][..columns];
        if let Some(rank) = (1..rows).find(|&rank| of(rank)[1..] != of(0)[1..]) {
            return Err(self.disagree(rank, of(rank), of(0)));
        }
        Ok((0..rows).all(|rank| of(rank)[0] == 1))
    }

    /// The error of ranks that called different collectives.
    fn disagree(&self, rank: usize, theirs: &[i64], ours: &[i64]) -> Error {
        let text = |history: &[i64]| format!("{} (hash {:016x})", history[1], history[2]);
        Error::Disagree(Box::new(Disagreement {
            field: format!("the collectives of group {}", self.name),
            rank,
            theirs: text(theirs),
            reference: 0,
            ours: text(ours),
            help: SAME_CALLS.into(),
        }))
    }

    /// Runs `body`, whose calls on this group start together when it returns: the sends and
    /// receives of a ring would otherwise wait for each other. There are at most 64, on one stream,
    /// and `body` does nothing else with their tensors. In host memory this just runs `body`;
    /// there, a send of hundreds of kilobytes waits until it is being received.
    pub fn grouped(&self, mut body: impl FnMut() -> Result<()>) -> Result<()> {
        if self.device().is_none() || self.size() == 1 || self.pending().is_some() {
            return body();
        }
        *self.pending() = Some(Vec::new());
        let outcome = body();
        let pending = self.pending().take().unwrap_or_default();
        outcome?;
        let Some(first) = pending.first() else {
            return Ok(());
        };
        Group::check_together(&pending)?;
        let call = |pending| self.pending_call(pending, &first.stream);
        self.ranks
            .run(&pending.iter().map(call).collect::<Vec<_>>())
    }

    fn pending_call<'a>(&self, pending: &'a Pending, stream: &'a Stream) -> Call<'a> {
        Call {
            operation: pending.operation,
            tensor: Some(&pending.tensor),
            stream,
            sequence: pending.sequence,
            timeout: self.timeout,
            is_followed: self.is_followed,
            group: self.name,
            site: pending.site,
            sum: Sum::Transport,
        }
    }

    fn pending(&self) -> MutexGuard<'_, Option<Vec<Pending>>> {
        panics::lock(&self.counters.pending)
    }

    /// Makes a call in host memory: one at a time, and none after an error or a panic, when its
    /// messages may still arrive.
    fn run_on_host(&self, call: &Call<'_>) -> Result<()> {
        let unusable = |after: String, exit_code: u8| Cause {
            rank: self.rank(),
            host: "this host".into(),
            exit_code,
            text: format!("group {} cannot be used after {after}", self.name),
        };
        let Ok(mut broken) = self.counters.broken.lock() else {
            let after = "a panic in one of its calls".into();
            return Err(Error::of_peer(unusable(after, 70)));
        };
        if let Some(cause) = &*broken {
            return Err(Error::of_peer(cause.clone()));
        }
        let on_host = self.ranks.on_host().unwrap_or(&*self.ranks);
        let result = on_host.run(std::slice::from_ref(call));
        // An error of the tensor comes before anything is sent.
        if let Err(error) = &result
            && !matches!(error, Error::Tensor(_))
        {
            *broken = Some(match error {
                Error::PeerFailed(cause) if cause.ends_generation() => (**cause).clone(),
                _ => unusable(format!("an error: {error}"), error.exit_code()),
            });
        }
        result
    }

    /// Every rank's `tensor` becomes the reduction of all of them.
    #[track_caller]
    pub fn all_reduce(&self, tensor: &Tensor, reduce: Reduce, stream: &Stream) -> Result<()> {
        let operation = Operation::AllReduce(reduce);
        self.run(operation, tensor, stream, Location::caller())
    }

    /// `tensor` consists of one equal slice per rank. This rank's slice becomes its reduction over
    /// all ranks; the others are left unspecified.
    #[track_caller]
    pub fn reduce_scatter(&self, tensor: &Tensor, reduce: Reduce, stream: &Stream) -> Result<()> {
        let operation = Operation::ReduceScatter(reduce);
        self.run(operation, tensor, stream, Location::caller())
    }

    /// Adds the partial sums of all ranks in the order of `tree`, in host memory. Each rank gives
    /// as many as the tree says: `rows` (R, E), and `tensor` (E) as the last one if it is not among
    /// `rows`. Every rank's `tensor` becomes the sum; with `scatter`, only this rank's slice of it
    /// does.
    #[track_caller]
    pub fn sum_along(
        &self,
        tensor: &Tensor,
        rows: &Tensor,
        tree: &SumTree,
        scatter: bool,
        stream: &Stream,
    ) -> Result<()> {
        let (operation, site) = if scatter {
            (Operation::ReduceScatter(Reduce::Sum), Location::caller())
        } else {
            (Operation::AllReduce(Reduce::Sum), Location::caller())
        };
        self.check(operation, tensor, stream, site)?;
        let (given, rank) = (tree.given_by(self.rank()), self.rank());
        let are_given = [given, given - 1].map(|rows| rows * tensor.count());
        if tree.ranks() != self.size()
            || !are_given.contains(&rows.count())
            || (rows.dtype(), rows.device()) != (tensor.dtype(), tensor.device())
        {
            let expected = format!("those of rank {rank}: {given} of {tensor}, without the last");
            let got = format!("{rows}, for {} ranks", tree.ranks());
            let help = "make them by the additions of the same tree";
            let error = Argument::error(operation, "partial sums", expected, got, help, site);
            return Err(error);
        }
        if self.size() == 1 {
            return Ok(());
        }
        for given in [tensor, rows].into_iter().filter(|it| it.count() > 0) {
            transfer::book_collective(given, site);
        }
        let order = tree.order();
        let mut call = self.number(operation, Some(tensor), stream, site);
        call.sum = Sum::Tree(Partials { rows, order, tree });
        self.run_on_host(&call)
    }

    /// `tensor` consists of one equal slice per rank. Each rank gives its own and gets the others.
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor, stream: &Stream) -> Result<()> {
        self.run(Operation::AllGather, tensor, stream, Location::caller())
    }

    /// Every rank's `tensor` becomes that of `root`.
    #[track_caller]
    pub fn broadcast(&self, tensor: &Tensor, root: usize, stream: &Stream) -> Result<()> {
        let operation = Operation::Broadcast { root };
        self.run(operation, tensor, stream, Location::caller())
    }

    /// Sends `tensor` to rank `to`, which calls `receive`.
    #[track_caller]
    pub fn send(&self, tensor: &Tensor, to: usize, stream: &Stream) -> Result<()> {
        self.run(Operation::Send { to }, tensor, stream, Location::caller())
    }

    /// Fills `tensor` with what rank `from` sends.
    #[track_caller]
    pub fn receive(&self, tensor: &Tensor, from: usize, stream: &Stream) -> Result<()> {
        let operation = Operation::Receive { from };
        self.run(operation, tensor, stream, Location::caller())
    }

    /// Returns when all ranks have arrived.
    #[track_caller]
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        let call = self.number(Operation::Barrier, None, stream, Location::caller());
        self.run_on_host(&call)
    }

    /// Checks what can be checked without the other ranks, numbers the call, and makes it, or keeps
    /// it to start together with others.
    fn run(
        &self,
        operation: Operation,
        tensor: &Tensor,
        stream: &Stream,
        site: Site,
    ) -> Result<()> {
        self.check(operation, tensor, stream, site)?;
        if self.size() > 1 {
            transfer::book_collective(tensor, site);
        }
        let call = self.number(operation, Some(tensor), stream, site);
        if self.device().is_none() {
            return self.run_on_host(&call);
        }
        if let Some(pending) = &mut *self.pending() {
            pending.push(Pending {
                operation,
                tensor: tensor.clone(),
                stream: stream.clone(),
                sequence: call.sequence,
                site,
            });
            return Ok(());
        }
        self.ranks.run(&[call])
    }

    /// The call, with its number.
    fn number<'a>(
        &self,
        operation: Operation,
        tensor: Option<&'a Tensor>,
        stream: &'a Stream,
        site: Site,
    ) -> Call<'a> {
        let is_on_host = tensor.is_none_or(|tensor| tensor.device() == Device::Cpu);
        let counter = match self.ranks.on_host() {
            Some(_) if is_on_host => &self.counters.next_on_host,
            _ => &self.counters.next,
        };
        let sequence = match operation.peer() {
            Some(_) => 0,
            None => counter.fetch_add(1, Ordering::Relaxed),
        };
        Call {
            operation,
            tensor,
            stream,
            sequence,
            timeout: self.timeout,
            is_followed: self.is_followed,
            group: self.name,
            site,
            sum: Sum::Transport,
        }
    }
}
