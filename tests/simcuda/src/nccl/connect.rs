//! Connections: NCCL makes those of an algorithm at the communicator's first collective that uses
//! it, and those to another rank at the first send or receive. That call takes device memory, and
//! returns only once the other ranks make theirs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::comm::Comm;
use super::refusal::{Refusal, code};
use super::segment::{LINKS, RANKS_MAX};
use super::transfer::{Call, CallKind};
use crate::graph::capture;
use crate::handle::StreamId;
use crate::machine::{LockedMachine, Machine};
use crate::report::{self, FindingKind};

/// What the connections of an algorithm or a rank take. Real ones take 10 MiB for each of 2 to 32
/// channels (NCCL issue 1685); these devices are smaller, too.
pub(super) const CONNECTION_BYTES: u64 = 1 << 20;
/// Up to here sums take the algorithm of low latency. NCCL computes the limit from the machine.
const TREE_BYTES_MAX: u64 = 32 << 10;
/// Tree, ring and NVLink switches.
const ALGORITHMS: [&str; LINKS - RANKS_MAX] = ["tree", "ring", "NVLS"];

/// The link that a call needs: a rank, or an algorithm's place after all of these.
fn link(comm: &Comm, call: &Call) -> usize {
    let algorithm = match call.kind {
        CallKind::Send(peer) | CallKind::Receive(peer) => return peer,
        CallKind::AllReduce(_) if call.bytes() <= TREE_BYTES_MAX => 0,
        CallKind::AllReduce(_) | CallKind::ReduceScatter(_) | CallKind::AllGather
            if comm.nvls.is_some() && call.bytes() > TREE_BYTES_MAX =>
        {
            2
        }
        _ => 1,
    };
    RANKS_MAX + algorithm
}

fn is_connected(comm: &Comm, link: usize) -> bool {
    let asks = |rank: usize, link: usize| {
        let asked = &comm.segment.member(rank).connects[link];
        asked.load(Ordering::Acquire) != 0
    };
    if link >= RANKS_MAX {
        return (0..comm.segment.ranks()).all(|rank| asks(rank, link));
    }
    asks(comm.rank, link) && asks(link, comm.rank)
}

/// Makes the connections that calls of a group lack. Waits for the other ranks without a limit and
/// without the machine's lock, until the communicator is aborted.
pub(super) fn connect<'a>(
    held: &mut LockedMachine,
    calls: impl Iterator<Item = (&'a Arc<Comm>, &'a Call, StreamId)>,
) -> Result<(), Refusal> {
    let mut lacking: Vec<(Arc<Comm>, usize)> = Vec::new();
    for (comm, call, stream) in calls {
        let link = link(comm, call);
        if comm.segment.ranks() == 1 || is_connected(comm, link) {
            continue;
        }
        ask(held, comm, call, (link, stream))?;
        lacking.push((comm.clone(), link));
    }
    if lacking.is_empty() {
        return Ok(());
    }
    held.without(|| {
        for (comm, link) in &lacking {
            loop {
                let heard = comm.segment.bell();
                if is_connected(comm, *link) || comm.is_aborted() {
                    break;
                }
                comm.segment.sleep(heard, Duration::from_millis(100));
            }
        }
    });
    Ok(())
}

/// This rank's part of the connections of all algorithms.
pub(super) fn algorithms(machine: &mut Machine, comm: &Comm) -> Result<(), Refusal> {
    let known = if comm.nvls.is_some() { 3 } else { 2 };
    (0..known).try_for_each(|algorithm| make(machine, comm, RANKS_MAX + algorithm))
}

fn name(link: usize) -> String {
    match link.checked_sub(RANKS_MAX) {
        None => format!("connection with rank {link}"),
        Some(algorithm) => format!("{} collective", ALGORITHMS[algorithm]),
    }
}

/// A call asks for a connection.
fn ask(
    machine: &mut Machine,
    comm: &Comm,
    call: &Call,
    (link, stream): (usize, StreamId),
) -> Result<(), Refusal> {
    if comm.segment.member(comm.rank).connects[link].load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    if capture::of(machine, stream).is_some() {
        let message = format!(
            "{} within a capture is the first {} of {}: NCCL makes connections there, which \
             takes memory and waits for all ranks\n  way out: make the same call once before",
            call.describe(),
            name(link),
            comm.describe()
        );
        report::finding(machine, FindingKind::Capture, message);
    }
    make(machine, comm, link)
}

/// This rank's part of a connection, with its memory.
fn make(machine: &mut Machine, comm: &Comm, link: usize) -> Result<(), Refusal> {
    let memory = &mut machine.memory;
    if memory.take_directly(comm.device, CONNECTION_BYTES).is_err() {
        // NCCL's words.
        let name = name(link);
        let message = format!("Cuda failure 2 'out of memory' ({CONNECTION_BYTES} bytes: {name})");
        return Err(Refusal::new(code::UNHANDLED_CUDA_ERROR, message));
    }
    let bytes = &comm.buffer_bytes;
    bytes.fetch_add(CONNECTION_BYTES, Ordering::Relaxed);
    let asked = &comm.segment.member(comm.rank).connects[link];
    asked.store(1, Ordering::Release);
    comm.segment.ring_bell();
    Ok(())
}
