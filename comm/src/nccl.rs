//! Ranks that each have a GPU, over NCCL: sums and moves of tensors on a stream, eagerly or captured in a graph.
//!
//! A call enters the tensors' memory as an operation does (`ddp_kernels::foreign`), gives its work to the stream, and returns. So that
//! nobody has to wait for a driver to learn what went wrong, the device itself says before and after each call that it is there
//! (`ddp_kernels::progress`), and a thread of each rank watches what it says (`nccl/watch.rs`).
//!
//! * `library.rs`: NCCL's functions, and what its refusals mean.
//! * `join.rs`: how ranks come together: the same version, one id, a deadline; `environment.rs`: settings before that.
//! * `warm.rs`: every operation once, before anything depends on it.
//! * `names.rs`, `compare.rs`: what calls are called, and whether ranks make the same; pure.
//!
//! The communicator blocks: one that does not would start a thread a call, and its stream could not be used until it was polled. Sums
//! only, and never NCCL's average, which multiplies by 1/N first. Every rank gets the same bits; they are those of NCCL's
//! order, which follows the machine and the length, not those of the host.

mod compare;
#[cfg(feature = "mpi")]
pub(crate) mod environment;
mod join;
mod library;
mod names;
mod warm;
mod watch;

use std::collections::HashSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use cudarc::nccl::sys::{ncclComm_t, ncclRedOp_t};
use ddp_kernels::foreign::{self, OPERANDS_MAX, Operand, Place};
use ddp_kernels::progress::Progress;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor};

use self::library::{Fault, Functions, nccl, type_of};
use self::watch::{Common, Watch};
use crate::collective::{Call, Collective, Operation, Reduce};
use crate::error::{Argument, Error, Result};
pub(crate) use join::join;

/// How long the end of a group may wait for its work, and for NCCL.
const END_MAX: Duration = Duration::from_secs(3);

/// A group of ranks with a GPU each, seen from one of them.
pub(crate) struct Nccl {
    communicator: Arc<Communicator>,
    /// The same ranks in host memory.
    host: Arc<dyn Collective>,
    device: Device,
    rank: usize,
    size: usize,
    progress: Progress,
    common: Arc<Common>,
    state: Mutex<State>,
    /// Whether a graph may hold calls of this group.
    was_captured: AtomicBool,
    watch: Option<Watch>,
}

/// What one call at a time may change. Its lock is also what keeps calls on the communicator apart.
#[derive(Default)]
struct State {
    /// The stream of the last call.
    last: Option<Stream>,
    /// Calls that will start together.
    grouped: Option<Vec<Pending>>,
    /// The keys of calls whose names were written down.
    named: HashSet<u32>,
    /// The capture under way, and how many calls it has.
    capture: (u64, u32),
    /// Why the group cannot be used any more.
    broken: Option<String>,
}

/// A call that waits for others to start with.
struct Pending {
    operation: Operation,
    tensor: Tensor,
    stream: Stream,
    sequence: u64,
    timeout: Duration,
    group: &'static str,
    site: ddp_kernels::error::Site,
}

/// NCCL's handle.
struct Communicator {
    functions: &'static Functions,
    raw: ncclComm_t,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time: `State`'s lock. Its asynchronous error may be asked for
// meanwhile.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Nccl {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic in between leaves what NCCL was given in an unknown state, which `broken` says.
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = PoisonError::into_inner(poisoned);
            state.broken.get_or_insert_with(|| "a panic in one of its calls".into());
            state
        })
    }

    /// Runs a call, or keeps it for the end of `grouped`.
    fn run(&self, call: &Call<'_>) -> Result<()> {
        let mut state = self.state();
        if let Some(grouped) = &mut state.grouped {
            let tensor = call.tensor.expect("barriers do not come here").clone();
            let Call { operation, sequence, timeout, group, site, .. } = *call;
            grouped.push(Pending { operation, tensor, stream: call.stream.clone(), sequence, timeout, group, site });
            return Ok(());
        }
        self.start(&mut state, &[*call])
    }

    /// Gives calls that start together to their stream.
    fn start(&self, state: &mut State, calls: &[Call<'_>]) -> Result<()> {
        let Some(first) = calls.first() else { return Ok(()) };
        if let Some(cause) = self.common.failure.cause() {
            return Err(Error::PeerFailed(Box::new(cause)));
        }
        if let Some(why) = &state.broken {
            let group = first.group;
            return Err(Error::Setup {
                action: format!("make another call on group {group}"),
                reason: why.clone(),
                way_out: "A group cannot be used after an error in it: end this rank with the first error.".into(),
            });
        }
        // Where its host is, for the watches of other ranks to tell.
        let (board, local_rank, channel) = (&self.common.failure.board, self.common.local_rank, self.common.channel);
        board.enter(local_rank, channel, first);
        let started = self.start_sound(state, calls);
        board.exit(local_rank, channel);
        if let Err(error) = &started {
            state.broken = Some(error.to_string());
        }
        started
    }

    fn start_sound(&self, state: &mut State, calls: &[Call<'_>]) -> Result<()> {
        let first = &calls[0];
        let (stream, site) = (first.stream, first.site);
        let (lane, key) = (names::lane(calls), names::key(calls));
        self.order(state, stream)?;
        if state.named.insert(key) {
            self.common.pages.name(self.common.local_rank, key, names::peer(calls), &names::text(calls));
        }
        self.common.wait_for(key, calls.iter().map(|call| call.timeout).max().unwrap_or_default());
        let place = match foreign::capture(stream) {
            None => 0,
            Some(capture) => {
                self.was_captured.store(true, Ordering::Relaxed);
                let count = if state.capture.0 == capture { state.capture.1 + 1 } else { 1 };
                state.capture = (capture, count);
                count
            }
        };
        self.progress.begin(lane, key, place, stream, site)?;
        match calls {
            [call] => self.submit(calls, &[operand(call)])?,
            calls => self.submit(calls, &calls.iter().map(operand).collect::<Vec<_>>())?,
        }
        self.progress.end(lane, stream, site)?;
        Ok(())
    }

    /// The group's work is in one order also where it moves from one stream to another: the device counts it. What a graph holds
    /// is put in order by its launch.
    fn order(&self, state: &mut State, stream: &Stream) -> Result<()> {
        if let Some(last) = state.last.as_ref().filter(|last| *last != stream)
            && foreign::capture(last).is_some() == foreign::capture(stream).is_some()
        {
            stream.wait(&last.record()?)?;
        }
        if state.last.as_ref() != Some(stream) {
            state.last = Some(stream.clone());
        }
        Ok(())
    }

    fn submit(&self, calls: &[Call<'_>], operands: &[Operand<'_>]) -> Result<()> {
        let first = &calls[0];
        foreign::enter(first.operation.name(), first.stream, first.site, operands, |place| {
            let given = self.communicator.start(calls, self.rank, self.size, &place);
            given.map_err(|fault| self.communicator.functions.error(names::text(calls), fault))
        })
    }
}

fn operand<'a>(call: &Call<'a>) -> Operand<'a> {
    let tensor = call.tensor.expect("barriers do not come here");
    Operand { role: "tensor", tensor, writes: !matches!(call.operation, Operation::Send { .. }) }
}

impl Communicator {
    /// Gives calls to the stream of `place`, in which their tensors are entered.
    fn start(&self, calls: &[Call<'_>], rank: usize, size: usize, place: &Place<'_>) -> Result<(), Fault> {
        let functions = self.functions;
        let several = calls.len() > 1;
        if several {
            // SAFETY: takes nothing; what this thread calls from here on starts at the end.
            unsafe { nccl!(functions, ncclGroupStart()) }?;
        }
        let mut outcome = Ok(());
        for (call, &address) in calls.iter().zip(place.addresses) {
            outcome = self.give(call, address, rank, size, place);
            if outcome.is_err() {
                break;
            }
        }
        if several {
            // Also after a refusal: or the thread's next calls would still be part of it.
            // SAFETY: ends what began above; its calls' tensors are still entered.
            let ended = unsafe { nccl!(functions, ncclGroupEnd()) };
            outcome = outcome.and(ended);
        }
        outcome
    }

    fn give(&self, call: &Call<'_>, address: u64, rank: usize, size: usize, place: &Place<'_>) -> Result<(), Fault> {
        let (functions, raw, stream) = (self.functions, self.raw, place.stream);
        let tensor = call.tensor.expect("barriers do not come here");
        let (count, kind, sum) = (tensor.count(), type_of(tensor.dtype()), ncclRedOp_t::ncclSum);
        // Only an address, of the device's memory: never followed here.
        let at = |element: usize| {
            std::ptr::without_provenance_mut::<std::ffi::c_void>(address as usize + element * tensor.dtype().bytes())
        };
        // In place: where the slice of this rank is given and taken.
        let slice = count / size;
        let (whole, mine) = (at(0), at(rank * slice));
        // SAFETY: the communicator is alive, and nobody else calls it now (`State`'s lock). The tensor is entered on this stream, for writing where the
        // call writes, has `count` elements of this type, and the device's context is current (`foreign::enter`). A slice is one of `size` equal
        // ones (`Group::check`). Roots and peers are ranks of the group (there too).
        unsafe {
            match call.operation {
                Operation::AllReduce(_) => nccl!(functions, ncclAllReduce(whole, whole, count, kind, sum, raw, stream)),
                Operation::ReduceScatter(_) => {
                    nccl!(functions, ncclReduceScatter(whole, mine, slice, kind, sum, raw, stream))
                }
                Operation::AllGather => nccl!(functions, ncclAllGather(mine, whole, slice, kind, raw, stream)),
                Operation::Broadcast { root } => {
                    nccl!(functions, ncclBroadcast(whole, whole, count, kind, root as i32, raw, stream))
                }
                Operation::Send { to } => nccl!(functions, ncclSend(whole, count, kind, to as i32, raw, stream)),
                Operation::Receive { from } => nccl!(functions, ncclRecv(whole, count, kind, from as i32, raw, stream)),
                Operation::Barrier => unreachable!("the host waits at barriers"),
            }
        }
    }

    /// What went wrong behind this rank's back, if anything did.
    fn asynchronous_fault(&self) -> Option<Fault> {
        let mut code = library::SUCCESS;
        // SAFETY: the communicator is alive; the function may be called at any time, and writes an int of ours.
        let asked = unsafe { nccl!(self.functions, ncclCommGetAsyncError(self.raw, &mut code)) };
        let is_well = code == library::SUCCESS || code == library::IN_PROGRESS;
        match asked {
            Ok(()) if is_well => None,
            Ok(()) => Some(Fault { function: "ncclCommGetAsyncError", code }),
            Err(fault) => Some(fault),
        }
    }
}

impl Collective for Nccl {
    fn transport(&self) -> &'static str {
        "nccl"
    }

    fn device(&self) -> Option<Device> {
        Some(self.device)
    }

    fn on_host(&self) -> Option<&dyn Collective> {
        Some(&*self.host)
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn grouped(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        {
            let mut state = self.state();
            // One inside another is part of it.
            if state.grouped.is_some() {
                drop(state);
                return body();
            }
            state.grouped = Some(Vec::new());
        }
        struct Leave<'a>(&'a Nccl);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0.state().grouped = None;
            }
        }
        let leave = Leave(self);
        body()?;
        let pending = self.state().grouped.take().unwrap_or_default();
        drop(leave);
        let Some(first) = pending.first() else { return Ok(()) };
        check_together(&pending)?;
        let calls: Vec<Call<'_>> = pending.iter().map(|pending| pending.call(&first.stream)).collect();
        self.start(&mut self.state(), &calls)
    }

    fn all_reduce(&self, call: &Call<'_>, _: &Tensor, _: Reduce) -> Result<()> {
        self.run(call)
    }

    fn reduce_scatter(&self, call: &Call<'_>, _: &Tensor, _: Reduce) -> Result<()> {
        self.run(call)
    }

    fn all_gather(&self, call: &Call<'_>, _: &Tensor) -> Result<()> {
        self.run(call)
    }

    fn broadcast(&self, call: &Call<'_>, _: &Tensor, _: usize) -> Result<()> {
        self.run(call)
    }

    fn send(&self, call: &Call<'_>, _: &Tensor, _: usize) -> Result<()> {
        self.run(call)
    }

    fn receive(&self, call: &Call<'_>, _: &Tensor, _: usize) -> Result<()> {
        self.run(call)
    }

    fn barrier(&self, call: &Call<'_>) -> Result<()> {
        self.host.barrier(call)
    }
}

impl Pending {
    fn call<'a>(&'a self, stream: &'a Stream) -> Call<'a> {
        let Pending { operation, sequence, timeout, group, site, .. } = *self;
        Call { operation, tensor: Some(&self.tensor), stream, sequence, timeout, group, site }
    }
}

/// Calls that start together are on one stream, and not too many.
fn check_together(pending: &[Pending]) -> Result<()> {
    let refuse = |pending: &Pending, what: &str, expected: String, got: String| {
        let (operation, at) = (pending.operation.to_string(), pending.site);
        let way_out = "Start them in several groups.".to_string();
        Err(Error::Argument(Box::new(Argument { operation, what: what.into(), expected, got, way_out, at })))
    };
    if let Some(other) = pending.iter().find(|other| other.stream != pending[0].stream) {
        return refuse(other, "stream", "that of the first call it starts with".into(), "another".into());
    }
    if let Some(other) = pending.get(OPERANDS_MAX) {
        let expected = format!("at most {OPERANDS_MAX} that start together");
        return refuse(other, "calls", expected, pending.len().to_string());
    }
    Ok(())
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} on {} through NCCL", self.rank, self.size, self.device)
    }
}

impl Drop for Nccl {
    /// Gives the communicator back, if that can be done without waiting for what may never happen. Never of one whose calls a graph may
    /// hold: NCCL would wait for the graph's end, and nobody here knows when that is. The process's end frees it as well.
    fn drop(&mut self) {
        drop(self.watch.take());
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let is_sound = state.broken.is_none() && !self.common.failure.board.is_aborted() && !std::thread::panicking();
        if !is_sound || self.was_captured.load(Ordering::Relaxed) {
            return;
        }
        let (communicator, last, device) = (Arc::clone(&self.communicator), state.last.take(), self.device);
        let (done, is_done) = mpsc::channel();
        let started = std::thread::Builder::new().name("nccl end".into()).spawn(move || {
            if communicator.end(last, device) {
                _ = done.send(());
            }
        });
        if started.is_ok() && is_done.recv_timeout(END_MAX).is_err() {
            tracing::debug!(
                "group {}: NCCL does not end in time and is left to the end of the process",
                self.common.group
            );
        }
    }
}

impl Communicator {
    /// Waits for its work and gives it back. Whether it did.
    fn end(&self, last: Option<Stream>, device: Device) -> bool {
        let site = std::panic::Location::caller();
        if foreign::bind(device, "end of a group", site).is_err() {
            return false;
        }
        let is_idle = || match &last {
            None => true,
            Some(last) => {
                let Ok(event) = last.record() else { return false };
                let started = std::time::Instant::now();
                while !event.is_done() && started.elapsed() < END_MAX {
                    std::thread::sleep(Duration::from_millis(1));
                }
                event.is_done()
            }
        };
        // SAFETY: the group is dropped, the watch has ended, no graph has its calls, and all that it gave to streams is done: nobody uses
        // the communicator any more.
        is_idle() && unsafe { nccl!(self.functions, ncclCommDestroy(self.raw)) }.is_ok()
    }
}
