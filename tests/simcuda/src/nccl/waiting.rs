//! Waiting for other ranks. A waiting call that finds nothing to run because NCCL work lacks other
//! ranks says so in the shared memory, and sleeps until something happens there.

use std::sync::Arc;
use std::time::Duration;

use super::comm::Comm;
use crate::machine::{LockedMachine, Machine};

/// Publishes for all communicators which ranks they wait for; returns one that waits, if any.
pub(super) fn say(machine: &Machine) -> Option<Arc<Comm>> {
    let mut waiting = None;
    for comm in machine.nccl.live() {
        let Some(oldest) = comm.oldest() else {
            continue;
        };
        if oldest.is_underway() {
            comm.want(&oldest.lacks());
            waiting = Some(comm.clone());
        }
    }
    waiting
}

/// A non-waiting call found nothing to run.
pub(crate) fn say_what_lacks(machine: &Machine) {
    say(machine);
}

/// Nothing to run: sleeps without the lock until something happens or `longest` passes.
pub(crate) fn idle(held: &mut LockedMachine, longest: Duration) {
    let Some(comm) = say(held) else {
        held.without(|| std::thread::sleep(longest));
        return;
    };
    let heard = comm.segment.bell();
    // Sleeps even if a flight can run: the caller's goal may not need it, and another thread of
    // this process can make the call that it needs only without the lock.
    held.without(|| comm.segment.sleep(heard, longest));
}

fn can_any_run(machine: &Machine) -> bool {
    machine
        .nccl
        .live()
        .filter_map(|comm| comm.oldest())
        .any(|oldest| oldest.is_underway() && oldest.can_run())
}

/// As [`idle`], but keeps the lock: for the end of the process. False: no other rank is waited for.
pub(crate) fn await_others(machine: &mut Machine, longest: Duration) -> bool {
    let is_waiting = |comm: &&Arc<Comm>| {
        comm.oldest().is_some_and(|oldest| {
            !oldest.is_stuck() && !oldest.lacks().iter().all(|rank| comm.is_here(*rank))
        })
    };
    let Some(comm) = machine.nccl.live().find(is_waiting).cloned() else {
        return can_any_run(machine);
    };
    say(machine);
    let heard = comm.segment.bell();
    if !can_any_run(machine) {
        comm.segment.sleep(heard, longest);
    }
    true
}
