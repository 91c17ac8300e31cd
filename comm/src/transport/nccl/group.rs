//! Calls on a group of GPUs.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ddp_kernels::Device;
use ddp_kernels::error::Error as TensorError;
use ddp_kernels::foreign::{self, Operand};
use ddp_kernels::progress::DeviceProgress;

use super::common::Common;
use super::communicator::Communicator;
use super::names;
use super::turns::{self, Turn};
use crate::collective::{Call, Collective, Operation, StopVote};
use crate::error::{Error, Problem, Remedy, Result};
use crate::transport::shared::COLLECTIVES;

/// A group of ranks with a GPU each, seen from one of them.
pub(super) struct NcclGroup {
    pub(super) communicator: Arc<Communicator>,
    /// The same ranks in host memory.
    pub(super) host: Arc<dyn Collective>,
    pub(super) device: Device,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) progress: DeviceProgress,
    pub(super) stop_vote: Option<StopVote>,
    pub(super) common: Arc<Common>,
    pub(super) state: Mutex<GroupState>,
}

/// What one call at a time may change.
#[derive(Default)]
pub(super) struct GroupState {
    /// How many collectives were called eagerly, and a hash of them all.
    history: (u64, u64),
    /// The number of the current capture, and how many of its calls were made.
    capture: (u64, u32),
    /// Why the group cannot be used any more.
    broken: Option<String>,
}

impl GroupState {
    /// The position of a call in its graph, from 1; 0 for an eager call.
    fn position(&mut self, capture: Option<u64>) -> u32 {
        let Some(capture) = capture else { return 0 };
        let before = if self.capture.0 == capture {
            self.capture.1
        } else {
            0
        };
        self.capture = (capture, before + 1);
        before + 1
    }
}

impl NcclGroup {
    fn state(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = PoisonError::into_inner(poisoned);
            let panicked = || "a panic in one of its calls".into();
            state.broken.get_or_insert_with(panicked);
            state
        })
    }

    /// Prepares these calls: names them, waits for this thread's turn, and marks their begin.
    fn begin(
        &self,
        state: &mut GroupState,
        calls: &[Call<'_>],
    ) -> Result<MutexGuard<'static, Turn>> {
        let (first, lane, key) = (&calls[0], names::lane(calls), names::key(calls));
        let (pages, local_rank) = (&self.common.pages, self.common.local_rank());
        if !pages.is_named(local_rank, key) {
            pages.name(local_rank, key, names::peer(calls), &names::text(calls));
        }
        let mut turn = turns::of(self.device);
        turn.follow(first.stream)?;
        let position = state.position(foreign::capture(first.stream));
        self.progress
            .begin(lane, key, position, first.stream, first.site)?;
        Ok(turn)
    }

    /// Marks the end of these calls, unless the next one's begin does.
    fn end(&self, state: &mut GroupState, calls: &[Call<'_>]) -> Result<()> {
        let (first, lane) = (&calls[0], names::lane(calls));
        if !first.is_followed {
            self.progress.end(lane, first.stream, first.site)?;
        }
        if lane == COLLECTIVES && foreign::capture(first.stream).is_none() {
            state.history = names::chained(state.history, names::key(calls));
        }
        Ok(())
    }

    /// Records the error of these calls. The group cannot be used after it, unless a capture
    /// failed: nothing of a capture runs before its graph is launched.
    fn failed(&self, state: &mut GroupState, calls: &[Call<'_>], mut error: Error) -> Error {
        let is_capturing = foreign::capture(calls[0].stream).is_some();
        let is_of_capture = matches!(
            &error,
            Error::Tensor(TensorError::Capture { .. } | TensorError::Cuda(_))
        );
        if !(is_capturing && is_of_capture) {
            state.broken = Some(error.to_string());
        }
        if let (true, Error::Nccl(failure)) = (is_capturing, &mut error) {
            failure.remedy = Some(Remedy::NoGraphs);
        }
        error
    }
}

impl Collective for NcclGroup {
    fn transport(&self) -> &'static str {
        "nccl"
    }

    fn device(&self) -> Option<Device> {
        Some(self.device)
    }

    fn on_host(&self) -> Option<&dyn Collective> {
        Some(&*self.host)
    }

    fn check_ranks(&self) -> Result<()> {
        self.common.failure.check()
    }

    fn stop_vote(&self) -> Option<&StopVote> {
        self.stop_vote.as_ref()
    }

    fn history(&self) -> (u64, u64) {
        self.state().history
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    /// Gives the calls to their stream; several start together.
    fn run(&self, calls: &[Call<'_>]) -> Result<()> {
        let (first, mut state) = (&calls[0], self.state());
        self.common.failure.check()?;
        if let Some(why) = &state.broken {
            let action = format!("make another call on group {}", first.group);
            let help = "A group cannot be used after an error: end this rank with the first error";
            return Err(Error::Broken(Problem::new(action, why, help)));
        }
        let (communicator, ranks) = (&self.communicator, (self.rank, self.size));
        let (name, stream, site) = (first.operation.name(), first.stream, first.site);
        // The watches of other ranks report which call this host is in, and that of this rank does
        // not abort the communicator before it has looked: so the generation is checked after that.
        self.common.enter(first);
        let checked = self.common.failure.check();
        let begun = checked.and_then(|()| self.begin(&mut state, calls));
        let outcome = begun.and_then(|turn| {
            let entered = match calls {
                [call] => foreign::enter(name, stream, site, &[operand(call)])?,
                calls => {
                    let operands: Vec<_> = calls.iter().map(operand).collect();
                    foreign::enter(name, stream, site, &operands)?
                }
            };
            let started = communicator.start(calls, ranks, &entered, &turn);
            started.map_err(|fault| communicator.functions.error(names::text(calls), fault))?;
            drop(entered);
            self.end(&mut state, calls)
        });
        self.common.exit();
        outcome.map_err(|error| self.failed(&mut state, calls, error))
    }
}

fn operand<'a>(call: &Call<'a>) -> Operand<'a> {
    Operand {
        role: "tensor",
        tensor: call.tensor(),
        writes: !matches!(call.operation, Operation::Send { .. }),
    }
}

impl fmt::Debug for NcclGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} on {}", self.rank, self.size, self.device)
    }
}
