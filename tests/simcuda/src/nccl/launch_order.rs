//! The order of calls on different communicators of one device. "Applications should ensure
//! operations are submitted in the same order across ranks" (NCCL User Guide, "Using multiple NCCL
//! communicators concurrently"): a collective holds a part of its device until all ranks have come.
//!
//! Each rank publishes the places of its latest collectives among all calls of its process. Whoever
//! comes last sees that two ranks have two collectives in opposite orders, in every schedule.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

use super::comm::{Comm, Flight, Made};
use super::segment::PLACES;
use crate::machine::Machine;
use crate::report::{self, FindingKind, Stack};

/// The place of the next call. Communicators of a group follow one another, too: "it is not safe
/// to assume that all calls within a group will progress without blocking each other" (issue 1279).
pub(crate) fn next_place() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

/// Notes the collectives of a flight that takes off, and compares their places with those of other
/// communicators of the device.
pub(super) fn note(machine: &mut Machine, flight: &Flight, place: u64, stack: &Stack) {
    let comm = flight.comm();
    for call in flight
        .piece
        .calls
        .iter()
        .filter(|call| call.is_collective())
    {
        let own = comm.segment.member(comm.rank);
        let number = own.made.load(Relaxed);
        own.places[(number % PLACES) as usize].store(place, Relaxed);
        own.made.store(number + 1, SeqCst);
        let made = Made {
            number,
            place,
            call: call.clone(),
            stack: stack.clone(),
        };
        let is_other =
            |other: &&Arc<Comm>| other.device == comm.device && !Arc::ptr_eq(other, comm);
        let mut others = machine.nccl.live().filter(is_other);
        let found = others.find_map(|other| against(comm, &made, other));
        drop(others);
        if let Some(message) = found {
            report::finding(machine, FindingKind::NcclOrder, message);
        }
        let latest = &mut comm.books().made;
        if latest.len() as u64 == PLACES {
            latest.pop_front();
        }
        latest.push_back(made);
    }
}

/// The place of a collective of `rank`, if it was made and is remembered.
fn place_of(comm: &Comm, rank: usize, number: u64) -> Option<u64> {
    let member = comm.segment.member(rank);
    let place = member.places[(number % PLACES) as usize].load(SeqCst);
    let made = member.made.load(SeqCst);
    (number < made && made - number < PLACES).then_some(place)
}

/// The rank in `other` of the device and process that is `rank` in `comm`.
pub(super) fn same_rank(comm: &Comm, rank: usize, other: &Comm) -> Option<usize> {
    let of = |comm: &Comm, rank: usize| {
        let member = comm.segment.member(rank);
        (member.process.load(Relaxed), member.device.load(Relaxed))
    };
    (0..other.segment.ranks())
        .filter(|same| *same != other.rank)
        .find(|same| of(other, *same) == of(comm, rank))
}

/// What to say if a rank has `made` and a collective of `other` in the opposite order.
fn against(comm: &Comm, made: &Made, other: &Comm) -> Option<String> {
    let latest = &other.books().made;
    for rank in (0..comm.segment.ranks()).filter(|rank| *rank != comm.rank) {
        let Some(theirs) = place_of(comm, rank, made.number) else {
            continue;
        };
        let Some(same) = same_rank(comm, rank, other) else {
            continue;
        };
        for earlier in latest.iter().filter(|earlier| earlier.place < made.place) {
            if place_of(other, same, earlier.number).is_some_and(|place| place > theirs) {
                return Some(format!(
                    "two ranks make collectives on two communicators in opposite orders, which can hang: each holds a part of its device until the other has come\n  rank {} first: {}\n    called by {}\n  and then, on the other communicator: {}\n    called by {}\n  rank {rank}: the second before the first\n  help: one order of all calls of a device, the same on all ranks",
                    comm.rank,
                    earlier.call.describe(),
                    earlier.stack,
                    made.call.describe(),
                    made.stack
                ));
            }
        }
    }
    None
}
