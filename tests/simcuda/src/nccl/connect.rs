//! Connections: NCCL makes those of an algorithm at the communicator's first collective that uses
//! it, and those to another rank at the first send or receive. That call takes device memory, and
//! returns only once the other ranks make theirs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::comm::Comm;
use super::launch_order;
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

fn asks(comm: &Comm, rank: usize, link: usize) -> bool {
    let asked = &comm.segment.member(rank).connects[link];
    asked.load(Ordering::Acquire) != 0
}

fn is_connected(comm: &Comm, link: usize) -> bool {
    if link >= RANKS_MAX {
        return (0..comm.segment.ranks()).all(|rank| asks(comm, rank, link));
    }
    asks(comm, comm.rank, link) && asks(comm, link, comm.rank)
}

/// Whether `rank` has not asked for the connection of `other` that is `link`.
fn lacks(comm: &Comm, rank: usize, other: usize, link: usize) -> bool {
    match link {
        RANKS_MAX.. => !asks(comm, rank, link),
        _ => rank == link && !asks(comm, rank, other),
    }
}

/// Whether `rank` waits for `other` to ask for a connection.
fn awaits(comm: &Comm, rank: usize, other: usize) -> bool {
    let is_waiting = comm.segment.member(rank).connecting.load(Ordering::SeqCst) > 0;
    let lacks = |link: usize| asks(comm, rank, link) && lacks(comm, other, rank, link);
    is_waiting && (0..LINKS).any(lacks)
}

/// Whether another rank waits for an algorithm that this one does not use: their calls differ,
/// which is found once they are made.
fn differs(comm: &Comm, link: usize) -> bool {
    let asks_for_another = |rank: usize| {
        (RANKS_MAX..LINKS).any(|other| asks(comm, rank, other) && !asks(comm, comm.rank, other))
    };
    link >= RANKS_MAX
        && (0..comm.segment.ranks()).any(|rank| !asks(comm, rank, link) && asks_for_another(rank))
}

/// Makes the connections that calls of a group lack. Waits for the other ranks without a limit and
/// without the machine's lock, until the communicator is aborted.
pub(super) fn connect<'a>(
    held: &mut LockedMachine,
    calls: impl Iterator<Item = (&'a Arc<Comm>, &'a Call, StreamId)>,
) -> Result<(), Refusal> {
    let mut lacking: Vec<(&Arc<Comm>, &Call, usize)> = Vec::new();
    for (comm, call, stream) in calls {
        let link = link(comm, call);
        if comm.segment.ranks() == 1 || is_connected(comm, link) {
            continue;
        }
        ask(held, comm, call, (link, stream))?;
        lacking.push((comm, call, link));
    }
    for (comm, ..) in &lacking {
        let own = comm.segment.member(comm.rank);
        own.connecting.fetch_add(1, Ordering::SeqCst);
        comm.segment.ring_bell();
    }
    let waited = lacking
        .iter()
        .try_for_each(|(comm, call, link)| wait_for(held, comm, call, *link));
    for (comm, ..) in &lacking {
        let own = comm.segment.member(comm.rank);
        own.connecting.fetch_sub(1, Ordering::SeqCst);
    }
    waited
}

/// What to say if this rank waits for the connections of its first `call` on `comm` while another
/// rank waits for those of a call on another communicator: neither will come.
fn crossing(machine: &Machine, comm: &Comm, link: usize, call: &Call) -> Option<String> {
    let others = || {
        let is_other = |other: &&Arc<Comm>| {
            other.device == comm.device && !std::ptr::eq(&***other, comm) && !other.is_aborted()
        };
        machine.nccl.live().filter(is_other)
    };
    let late = (0..comm.segment.ranks()).filter(|rank| lacks(comm, *rank, comm.rank, link));
    late.filter(|rank| *rank != comm.rank).find_map(|rank| {
        let blocks = |other: &&Arc<Comm>| {
            launch_order::same_rank(comm, rank, other).is_some_and(|same| awaits(other, same, other.rank))
        };
        others().find(blocks)?;
        Some(format!(
            "two ranks make the first collectives of two communicators in opposite orders, which hangs: each waits for the other's connection\n  rank {} first: {}\n  rank {rank} first: a call on another communicator of the same devices\n  help: one order of all calls of a device, the same on all ranks",
            comm.rank,
            call.describe(),
        ))
    })
}

fn wait_for(
    held: &mut LockedMachine,
    comm: &Arc<Comm>,
    call: &Call,
    link: usize,
) -> Result<(), Refusal> {
    loop {
        let heard = comm.segment.bell();
        if is_connected(comm, link) || differs(comm, link) || comm.is_aborted() {
            return Ok(());
        }
        if let Some(message) = crossing(held, comm, link, call) {
            report::finding(held, FindingKind::NcclOrder, &message);
            return Err(Refusal::new(code::INVALID_USAGE, message));
        }
        held.without(|| comm.segment.sleep(heard, Duration::from_millis(100)));
    }
}

/// NCCL's kernels, for the first communicator of a device. They stay.
pub(super) fn load(machine: &mut Machine, device: usize) -> Result<(), Refusal> {
    let bytes = machine.config.own.nccl;
    if machine.nccl.has_kernels.insert(device)
        && machine.memory.take_directly(device, bytes).is_err()
    {
        let message = format!("Cuda failure 2 'out of memory' ({bytes} bytes: kernels)");
        return Err(Refusal::new(code::UNHANDLED_CUDA_ERROR, message));
    }
    Ok(())
}

/// This rank's part of the connections of all algorithms.
pub(super) fn algorithms(machine: &mut Machine, comm: &Comm) -> Result<(), Refusal> {
    let known = if comm.nvls.is_some() { 3 } else { 2 };
    make(machine, comm, RANKS_MAX..RANKS_MAX + known)
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
    if asks(comm, comm.rank, link) {
        return Ok(());
    }
    if capture::of(machine, stream).is_some() {
        let message = format!(
            "{} within a capture is the first {} of {}: NCCL makes connections there, which \
             takes memory and waits for all ranks\n  help: make the same call once before",
            call.describe(),
            name(link),
            comm.describe()
        );
        report::finding(machine, FindingKind::Capture, message);
    }
    make(machine, comm, link..link + 1)
}

/// This rank's part of some connections, with their memory.
fn make(machine: &mut Machine, comm: &Comm, links: Range<usize>) -> Result<(), Refusal> {
    let bytes = links.len() as u64 * CONNECTION_BYTES;
    if machine.memory.take_directly(comm.device, bytes).is_err() {
        // NCCL's words.
        let names: Vec<String> = links.map(name).collect();
        let message = format!(
            "Cuda failure 2 'out of memory' ({bytes} bytes: {})",
            names.join(", ")
        );
        return Err(Refusal::new(code::UNHANDLED_CUDA_ERROR, message));
    }
    comm.buffer_bytes.fetch_add(bytes, Ordering::Relaxed);
    for link in links {
        let asked = &comm.segment.member(comm.rank).connects[link];
        asked.store(1, Ordering::Release);
    }
    comm.segment.ring_bell();
    Ok(())
}
