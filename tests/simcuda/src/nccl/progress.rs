//! Progress for other ranks.
//!
//! Work runs in this process's waiting calls. A rank that another process waits for has its part
//! run by a background thread, under the same lock and policy, because its own host may be waiting
//! in MPI for just that. The thread also runs everything possible if the host has called nothing
//! for a quarter of a second: it may hang, while a real device would continue. Otherwise that
//! thread runs nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::comm::Comm;
use super::segment::sleep_on;
use super::waiting::say;
use crate::machine::LockedMachine;
use crate::scheduler;

/// How long a rank must be wanted before its thread runs anything: usually its own host is about
/// to.
const PATIENCE: Duration = Duration::from_millis(2);

/// How often a thread checks whether its communicator is closed and its host still calls.
const LOOK: Duration = Duration::from_millis(100);

/// A host that called nothing for so long is busy or hangs; a device would have done the queued
/// work by now.
const SILENCE: Duration = Duration::from_millis(250);

/// Starts the thread of a communicator.
pub(super) fn spawn(comm: Arc<Comm>) {
    let thread = std::thread::Builder::new().name("simcuda-nccl".to_owned());
    if let Err(error) = thread.spawn(move || serve(&comm)) {
        eprintln!(
            "simcuda: no thread for a communicator ({error}): other ranks may wait forever for this one"
        );
    }
}

/// Runs what can run if the host has not called for long. False: nothing to run.
fn run_for_silent_host(comm: &Arc<Comm>) -> bool {
    let mut held = LockedMachine::take();
    let is_live = held.nccl.live().any(|live| Arc::ptr_eq(live, comm));
    if !is_live
        || held.nccl.silence() < SILENCE
        || !scheduler::run_all(&mut held, |held| held.nccl.silence() < SILENCE)
    {
        return false;
    }
    say(&held);
    true
}

/// Progresses whenever another process waits for this rank.
fn serve(comm: &Arc<Comm>) {
    let own = comm.segment.member(comm.rank);
    while !comm.is_closed.load(Ordering::SeqCst) {
        let called = own.called.load(Ordering::SeqCst);
        if !comm.segment.is_wanted(comm.rank) {
            if !run_for_silent_host(comm) {
                sleep_on(&own.called, called, LOOK);
            }
            continue;
        }
        std::thread::sleep(PATIENCE);
        if !comm.segment.is_wanted(comm.rank) {
            continue;
        }
        let Some(oldest) = comm.oldest() else {
            // It is wanted for a call that was not made yet: that call wakes this thread. Earlier
            // calls may have work left.
            if !run_for_silent_host(comm) {
                sleep_on(&own.called, called, LOOK);
            }
            continue;
        };
        let heard = comm.segment.bell();
        let mut held = LockedMachine::take();
        if !held.nccl.live().any(|live| Arc::ptr_eq(live, comm)) {
            return;
        }
        scheduler::run_towards(&mut held, oldest.end.clone(), |_| {
            !comm.segment.is_wanted(comm.rank)
        });
        say(&held);
        drop(held);
        if comm.segment.is_wanted(comm.rank) && !run_for_silent_host(comm) {
            comm.segment.sleep(heard, PATIENCE);
        }
    }
}
