//! Ranks that each have a GPU, over NCCL: sums and moves of tensors on a stream, eagerly or captured in a graph.
//!
//! A call enters the tensors' memory as an operation does (`ddp_kernels::foreign`), gives its work to the stream, and returns. So that
//! nobody has to wait for a driver to learn what went wrong, the device itself says before and after each call that it is there
//! (`ddp_kernels::progress`), and a thread of each rank watches what it says (`nccl/watch.rs`).
//!
//! * `library.rs`: NCCL's functions, and what its refusals mean.
//! * `join.rs`: how ranks come together: the same version, one id, a deadline; `environment.rs`: settings before that.
//! * `communicator.rs`: NCCL's handle; `turns.rs`: what the groups of one device share.
//! * `warm.rs`: every operation once, before anything depends on it.
//! * `watch.rs`: how what goes wrong on the device ends the job.
//! * `names.rs`, `compare.rs`: what calls are called, and whether ranks make the same; pure.
//!
//! The communicator blocks: one that does not would start a thread a call, and its stream could not be used until it was polled. Sums
//! only, and never NCCL's average, which multiplies by 1/N first. Every rank gets the same bits; they are those of NCCL's
//! order, which follows the machine and the length, not those of the host.

mod communicator;
mod compare;
pub(crate) mod environment;
mod join;
mod library;
mod names;
mod turns;
mod warm;
mod watch;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use ddp_kernels::error::Error as TensorError;
use ddp_kernels::foreign::{self, OPERANDS_MAX, Operand};
use ddp_kernels::progress::Progress;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Tensor};

use self::communicator::Communicator;
pub(crate) use self::join::join;
use self::turns::Turn;
pub(crate) use self::watch::Watches;
use self::watch::{Common, Watch};
use crate::collective::{Call, Collective, Operation, Reduce};
use crate::error::{Argument, Error, Result};
use crate::shared::COLLECTIVES;

/// How long the end of a group may wait for its work, and for NCCL.
const END_MAX: Duration = Duration::from_secs(3);
/// How long it may wait for the other ranks to come to its end too: an error on one must not look like lateness to the others.
const LEAVE_MAX: Duration = Duration::from_millis(100);

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
    watch: Arc<Watch>,
}

/// What one call at a time may change.
#[derive(Default)]
struct State {
    /// The stream of the last eager call.
    last: Option<Stream>,
    /// Calls that will start together.
    grouped: Option<Vec<Pending>>,
    /// How many collectives were called eagerly, and a hash of all of them.
    called: (u64, u64),
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
            return Err(Error::Broken {
                action: format!("make another call on group {group}"),
                reason: why.clone(),
                way_out: "A group cannot be used after an error in it: end this rank with the first error.".into(),
            });
        }
        // Where its host is, for the watches of other ranks to tell.
        let (board, local_rank, channel) = (&self.common.failure.board, self.common.local_rank, self.common.channel);
        let capture = foreign::capture(first.stream);
        board.enter(local_rank, channel, first);
        let started = self.start_sound(state, calls, capture);
        self.common.host_left();
        board.exit(local_rank, channel);
        let mut error = match started {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        // Nothing of a capture runs before its graph is launched, and what could not be captured makes no graph.
        let is_of_capturing = matches!(&error, Error::Tensor(TensorError::Capture { .. } | TensorError::Cuda(_)));
        if capture.is_none() || !is_of_capturing {
            state.broken = Some(error.to_string());
        }
        if let (Some(_), Error::Nccl(failure)) = (capture, &mut error) {
            failure.way_out.push_str(" --graph off runs steps without graphs.");
        }
        Err(error)
    }

    fn start_sound(&self, state: &mut State, calls: &[Call<'_>], capture: Option<u64>) -> Result<()> {
        let first = &calls[0];
        let (stream, site) = (first.stream, first.site);
        let (lane, key) = (names::lane(calls), names::key(calls));
        let (pages, local_rank) = (&self.common.pages, self.common.local_rank);
        if !pages.is_named(local_rank, key) {
            pages.name(local_rank, key, names::peer(calls), &names::text(calls));
        }
        let timeout = calls.iter().map(|call| call.timeout).max().unwrap_or_default();
        self.common.wait_for(key, timeout, capture.is_some());
        self.common.host_enters(key, timeout);
        let mut turn = turns::of(self.device);
        turn.follow(stream)?;
        let place = match capture {
            None => {
                if state.last.as_ref() != Some(stream) {
                    state.last = Some(stream.clone());
                }
                0
            }
            Some(capture) => {
                self.was_captured.store(true, Ordering::Relaxed);
                let count = if state.capture.0 == capture { state.capture.1 + 1 } else { 1 };
                state.capture = (capture, count);
                count
            }
        };
        self.progress.begin(lane, key, place, stream, site)?;
        match calls {
            [call] => self.submit(calls, &[operand(call)], &turn)?,
            calls => self.submit(calls, &calls.iter().map(operand).collect::<Vec<_>>(), &turn)?,
        }
        self.progress.end(lane, stream, site)?;
        if capture.is_none() {
            if lane == COLLECTIVES {
                state.called = names::chained(state.called, key);
            }
            self.common.until(key, || Ok(stream.record()?))?;
        }
        Ok(())
    }

    fn submit(&self, calls: &[Call<'_>], operands: &[Operand<'_>], turn: &Turn) -> Result<()> {
        let first = &calls[0];
        foreign::enter(first.operation.name(), first.stream, first.site, operands, |place| {
            let given = self.communicator.start(calls, (self.rank, self.size), &place, turn);
            given.map_err(|fault| self.communicator.functions.error(names::text(calls), fault))
        })
    }
}

fn operand<'a>(call: &Call<'a>) -> Operand<'a> {
    let tensor = call.tensor.expect("barriers do not come here");
    Operand { role: "tensor", tensor, writes: !matches!(call.operation, Operation::Send { .. }) }
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

    fn called(&self) -> (u64, u64) {
        self.state().called
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
    /// Gives the communicator back, if that can be done without waiting for what may never happen: NCCL waits for the other ranks, of which one
    /// may be on its way to an error, or to wait for this one elsewhere. So only where all ranks are known here and all leave now.
    /// Never of one whose calls a graph may hold: NCCL would wait for the graph's end, and nobody here knows when that is; such a one is
    /// watched on. The process's end frees it as well.
    fn drop(&mut self) {
        if self.was_captured.load(Ordering::Relaxed) {
            return;
        }
        self.watch.stop();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let is_sound = state.broken.is_none() && !self.common.failure.board.is_aborted() && !std::thread::panicking();
        if !is_sound || !self.common.all_leave(LEAVE_MAX) {
            return;
        }
        let (communicator, last, device) = (Arc::clone(&self.communicator), state.last.take(), self.device);
        let (done, is_done) = mpsc::channel();
        let started = std::thread::Builder::new().name("nccl end".into()).spawn(move || {
            // SAFETY: the group is dropped, so nobody calls it; its watch has ended, and no graph has its calls.
            if unsafe { communicator.end(last, device, END_MAX) } {
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
