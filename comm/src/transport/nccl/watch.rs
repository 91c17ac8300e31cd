//! A thread of each group that notices when calls hang, differ or fail, and ends the job with the
//! reason. It reads the marks that the device makes (`ddp_kernels::progress`), tells them to the
//! ranks of its host (`shared/gpu_page.rs`), and compares. It takes no lock that a call may hold
//! and asks nothing of CUDA, so a stuck thread, driver or device cannot stop it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::panics;
use ddp_kernels::progress::ProgressBoard;

use super::common::{Common, OTHER_HOSTS_GRACE};
use super::communicator::Communicator;
use super::compare;
use super::hang::View;
use crate::background::{Background, Cancelled};
use crate::error::{EXIT_PEER_LOST, Result, Seconds};
use crate::process::Peer;
use crate::transport::failure::GRACE;
use crate::transport::shared::{COLLECTIVES, LANES, LaneMarks, Marks};
use crate::waited::{Waited, wait_until};

/// How often the watch looks.
const PERIOD: Duration = Duration::from_millis(100);
/// How long an error of NCCL waits for a better reason: when a rank ends, NCCL may say that a
/// connection is closed before the launcher or the watch of processes says which rank it was.
const FAULT_GRACE: Duration = Duration::from_secs(1);

/// The watches of a world. They outlive their groups, whose calls graphs may hold.
#[derive(Debug, Default)]
pub(crate) struct Watches(Mutex<Vec<Background>>);

impl Watches {
    pub(super) fn start(
        &self,
        common: &Arc<Common>,
        communicator: &Arc<Communicator>,
        board: ProgressBoard,
    ) -> Result<()> {
        let mut watch = Watch {
            common: Arc::clone(common),
            communicator: Arc::clone(communicator),
            board,
            lanes: Default::default(),
            host: Wait::default(),
            aborted: Duration::ZERO,
            faulty: Duration::ZERO,
        };
        let body = move |cancelled: &Cancelled| watch.run(cancelled);
        let watch = Background::start("nccl watch", body)?;
        panics::lock(&self.0).push(watch);
        Ok(())
    }

    /// Ends them all: they use what the world has.
    pub(crate) fn stop(&self) {
        panics::lock(&self.0).clear();
    }
}

/// For how long something has been in one call.
#[derive(Debug, Default)]
struct Wait {
    call: Option<u64>,
    waited: Duration,
}

impl Wait {
    /// For how long it has been in `call`, `passed` after the last look.
    fn after(&mut self, call: Option<u64>, passed: Duration) -> Duration {
        let is_same = call.is_some() && call == self.call;
        self.waited = if is_same {
            self.waited + passed
        } else {
            Duration::ZERO
        };
        self.call = call;
        self.waited
    }
}

/// The watch of one group.
struct Watch {
    common: Arc<Common>,
    communicator: Arc<Communicator>,
    board: ProgressBoard,
    /// For how long the device has been in a call of each lane.
    lanes: [Wait; LANES],
    /// For how long the host has been in a call of NCCL.
    host: Wait,
    /// For how long the job has been over.
    aborted: Duration,
    /// For how long NCCL has reported an error.
    faulty: Duration,
}

impl Watch {
    fn run(&mut self, cancelled: &Cancelled) {
        let (mut waited, mut total) = (Waited::new(), Duration::ZERO);
        while !cancelled.within(PERIOD) && !self.has_generation_ended() {
            let now = waited.after(PERIOD);
            self.look(now - total);
            total = now;
        }
        if self.has_generation_ended() {
            self.abandon(cancelled);
        } else {
            _ = self.compare();
        }
    }

    fn has_generation_ended(&self) -> bool {
        let ended = self.common.failure.ended();
        ended.is_some_and(|cause| cause.ends_generation())
    }

    /// Ends the calls of this rank, for which others wait no more, until the watch is cancelled. If
    /// they do not end, or the rank shows no progress, this rank is lost as well.
    fn abandon(&self, cancelled: &Cancelled) {
        // Before any call ends without a result.
        self.board.stop_word().set();
        let (common, own) = (&self.common, self.common.local_rank());
        common.pages.set_stopped(own);
        // A call that this rank's host is in may return by itself, and an abort frees memory in
        // which GPUs of other ranks may be reading what they would still use.
        let is_ready = || {
            let live = |peer: &&Peer| !peer.process.has_ended();
            let mut peers = common.failure.peers.iter().filter(live);
            Ok(common.is_idle() && peers.all(|peer| common.pages.has_stopped(peer.local_rank)))
        };
        _ = wait_until(GRACE, is_ready);
        let (communicator, (done, is_done)) = (Arc::clone(&self.communicator), mpsc::channel());
        // Not joined: it may never end.
        let thread = std::thread::Builder::new().name("nccl abort".into());
        _ = thread.spawn(move || done.send(communicator.abort()));
        let (mut has_aborted, mut began) = (false, Waited::new());
        loop {
            // The ranks that wait for this one leave it the time.
            heartbeat::beat(Work::Computes);
            let sign = common.failure.board.beats(own).total();
            if !has_aborted {
                has_aborted = is_done.recv_timeout(PERIOD).is_ok();
            } else if cancelled.within(PERIOD) {
                return;
            }
            let waited = began.after(PERIOD);
            if common.failure.board.beats(own).total() != sign {
                began = Waited::new();
            } else if waited > common.timeout {
                let what = if has_aborted {
                    "the GPU has not done its work"
                } else {
                    "ncclCommAbort has not returned"
                };
                let (group, within) = (common.group, Seconds(common.timeout));
                let text = format!(
                    "cannot end the calls of group {group}: {what} after {within}; help: test this \
                     GPU (nvidia-smi -q, dcgmi diag)"
                );
                common.failure.leave(&text, EXIT_PEER_LOST);
            }
        }
    }

    /// Looks once, `passed` after the last time.
    fn look(&mut self, passed: Duration) {
        let common = Arc::clone(&self.common);
        if common.failure.board.has_left(common.local_rank()) {
            return;
        }
        if let Some(cause) = common.failure.cause() {
            // The host's thread may be in a call that never returns, and no other watch may run.
            self.aborted += passed;
            if common.of_processes && self.aborted > GRACE + PERIOD {
                common.failure.end(cause.exit_code);
            }
            return;
        }
        let (mine, others) = self.compare();
        let view = View {
            common: &common,
            mine: &mine,
            others: &others,
        };
        let grace = if common.knows_all() {
            Duration::ZERO
        } else {
            OTHER_HOSTS_GRACE
        };
        let timeout = common.timeout();
        let limit = timeout.saturating_add(grace);
        for (lane, marks) in mine.lanes.iter().enumerate() {
            let waited = self.lanes[lane].after(marks.current(), passed);
            if waited >= timeout {
                let (error, missing) = view.late(lane);
                if !missing.is_empty() || waited >= limit {
                    return common.failure.lose(&error, &missing);
                }
            }
        }
        // The host may be stuck in NCCL before the device has marked the call: NCCL connects ranks
        // at their first call, also in a capture. Time in which the device is in a call does not
        // count: the host may wait for room in the stream.
        let number = common.in_nccl.load(Ordering::Relaxed);
        let is_idle = mine.lanes.iter().all(|marks| marks.current().is_none());
        let call = (!number.is_multiple_of(2) && is_idle).then_some(number);
        if self.host.after(call, passed) >= limit {
            return common.failure.lose(&view.host_is_stuck(), &[]);
        }
        if let Some(fault) = self.communicator.asynchronous_fault() {
            self.faulty += passed;
            if self.faulty < FAULT_GRACE {
                return;
            }
            let error = self
                .communicator
                .functions
                .error(view.current_call(), fault);
            common.failure.lose(&error, &[]);
        } else {
            self.faulty = Duration::ZERO;
        }
    }

    /// Tells the other ranks how far this rank is, and ends the job if one of them made a different
    /// call. Returns the marks of this rank and of the others.
    fn compare(&self) -> (Marks, Vec<(usize, Marks)>) {
        let common = &self.common;
        let mine = self.marks();
        common.pages.publish(common.local_rank(), &mine);
        let others = common
            .others()
            .map(|(other, _)| (other, common.pages.read(other)));
        let others: Vec<(usize, Marks)> = others.collect();
        let board = &common.failure.board;
        let is_over = board.has_left(common.local_rank()) || board.is_aborted();
        if let Some(difference) = compare::difference(&mine, &others).filter(|_| !is_over) {
            let view = View {
                common,
                mine: &mine,
                others: &others,
            };
            common.failure.fail_with(&view.out_of_step(&difference));
        }
        (mine, others)
    }

    /// The marks of this rank's device.
    fn marks(&self) -> Marks {
        let lane = |lane: usize| {
            // In this order: a call that has ended has begun.
            let ended = self.board.ended(lane);
            let (begun, call) = self.board.begun(lane);
            LaneMarks { begun, call, ended }
        };
        Marks {
            lanes: std::array::from_fn(lane),
            ring: self.board.ring(COLLECTIVES).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_time_in_one_call_counts() {
        let (period, mut wait) = (Duration::from_millis(100), Wait::default());
        let looks = [
            (None, 0),
            // When the call began since the last look is unknown.
            (Some(1), 0),
            (Some(1), 1),
            (Some(1), 2),
            (Some(3), 0),
            (Some(3), 1),
            (None, 0),
            (None, 0),
            (Some(3), 0),
        ];
        for (call, periods) in looks {
            assert_eq!(wait.after(call, period), periods * period, "{call:?}");
        }
    }
}
