//! Connections: NCCL makes them on the host, at a communicator's first collective and at the first
//! send or receive between two ranks. That call returns only once the other ranks make theirs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::comm::Comm;
use super::transfer::{Call, CallKind};
use crate::machine::LockedMachine;

/// The rank that a call needs a connection to; its own stands for all, which collectives need.
fn other_end(comm: &Comm, call: &Call) -> usize {
    match call.kind {
        CallKind::Send(peer) | CallKind::Receive(peer) => peer,
        _ => comm.rank,
    }
}

fn is_connected(comm: &Comm, other: usize) -> bool {
    let asks = |rank: usize, to: usize| {
        let asked = &comm.segment.member(rank).connects[to];
        asked.load(Ordering::Acquire) != 0
    };
    if other == comm.rank {
        return (0..comm.segment.ranks()).all(|rank| asks(rank, rank));
    }
    asks(comm.rank, other) && asks(other, comm.rank)
}

/// Makes the connections that calls of a group lack. Waits for the other ranks without a limit and
/// without the machine's lock, until the communicator is aborted.
pub(super) fn connect<'a>(
    held: &mut LockedMachine,
    calls: impl Iterator<Item = (&'a Arc<Comm>, &'a Call)>,
) {
    let lacking: Vec<(Arc<Comm>, usize)> = calls
        .map(|(comm, call)| (comm.clone(), other_end(comm, call)))
        .filter(|(comm, other)| !is_connected(comm, *other))
        .collect();
    for (comm, other) in &lacking {
        let asked = &comm.segment.member(comm.rank).connects[*other];
        asked.store(1, Ordering::Release);
        comm.segment.ring_bell();
    }
    if lacking.is_empty() {
        return;
    }
    held.without(|| {
        for (comm, other) in &lacking {
            loop {
                let heard = comm.segment.bell();
                if is_connected(comm, *other) || comm.is_aborted() {
                    break;
                }
                comm.segment.sleep(heard, Duration::from_millis(100));
            }
        }
    });
}
