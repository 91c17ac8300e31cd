//! Waiting for other ranks, and progress on their behalf.
//!
//! Work runs in this process's waiting calls. If such a call finds nothing to run because NCCL work
//! lacks other ranks, it says so in the shared memory and sleeps until something happens there. A
//! rank that another process waits for has its part run by a background thread, under the same lock
//! and policy, because its own host may be waiting in MPI for just that. The thread also runs
//! everything possible if the host has called nothing for a quarter of a second: it may hang, while
//! a real device would continue. Otherwise that thread runs nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::comm::Comm;
use super::segment::sleep_on;
use crate::machine::{Held, Machine};
use crate::scheduler;

/// How long a rank must be wanted before its thread runs anything: usually its own host is about
/// to.
const PATIENCE: Duration = Duration::from_millis(2);

/// How often a thread checks whether its communicator is closed and its host still calls.
const LOOK: Duration = Duration::from_millis(100);

/// A host that called nothing for so long is busy or hangs; a device would have done the queued
/// work by now.
const SILENCE: Duration = Duration::from_millis(250);

/// Publishes which ranks of other processes `comm` waits for.
pub(super) fn want(comm: &Comm, lacks: &[usize]) {
    let own = comm.segment.member(comm.rank);
    for rank in 0..comm.segment.ranks() {
        let wants = u32::from(lacks.contains(&rank) && !comm.is_here(rank));
        if own.wants[rank].swap(wants, Ordering::SeqCst) < wants {
            comm.segment.call(rank);
        }
    }
}

/// Publishes for all communicators which ranks they wait for; returns one that waits, if any.
fn say(machine: &Machine) -> Option<Arc<Comm>> {
    let mut waiting = None;
    for comm in machine.nccl.live() {
        let Some(oldest) = comm.oldest() else {
            continue;
        };
        if oldest.is_underway() {
            want(comm, &oldest.lacks());
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
pub(crate) fn idle(held: &mut Held, longest: Duration) {
    let Some(comm) = say(held) else {
        held.without(|| std::thread::sleep(longest));
        return;
    };
    let heard = comm.segment.bell();
    // Events up to here have already rung; later ones end the sleep.
    if can_any_run(held) {
        return;
    }
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

/// Starts the thread of a communicator.
pub(super) fn spawn(comm: Arc<Comm>) {
    let thread = std::thread::Builder::new().name("simcuda-nccl".to_owned());
    if let Err(error) = thread.spawn(move || serve(&comm)) {
        eprintln!(
            "simcuda: no thread for a communicator ({error}): other ranks may wait for this one for ever"
        );
    }
}

/// Runs what can run if the host has not called for long. False: nothing to run.
fn run_for_silent_host(comm: &Arc<Comm>) -> bool {
    let mut held = Held::take();
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
        let mut held = Held::take();
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
