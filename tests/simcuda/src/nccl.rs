//! NCCL: communicators of ranks in one or several processes of this machine, and collectives as
//! stream work.
//!
//! The ranks share memory that the unique id names (`segment`). A call is checked and becomes part
//! of a piece of work (`flight`). When its turn in its stream comes, it runs as far as the other
//! ranks allow (`transfer`). A background thread runs this process's part when another process
//! waits for it (`progress`). README.md lists what is modelled and what is stricter than hardware.

pub mod calls;
pub(crate) mod comm;
pub mod comm_calls;
mod connect;
mod element;
pub mod entry;
mod flight;
pub mod group;
mod launch_order;
mod meeting;
mod progress;
mod refusal;
mod segment;
#[cfg(test)]
mod tests;
mod transfer;
mod users;
mod waiting;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::comm::Comm;
pub(crate) use self::comm::{Flight, Piece};
pub(crate) use self::flight::{Ran, flight, takes_off};
pub(crate) use self::launch_order::next_place;
pub(crate) use self::waiting::{await_others, idle, say_what_lacks};
use crate::event::Record;
use crate::race::Clock;
use crate::report::Stack;

/// What the ranks of this process know of a meeting: who arrived, with which knowledge, and when.
#[derive(Default)]
struct Party {
    come: Vec<(usize, Clock, u64)>,
    left: usize,
}

/// All communicators of the machine.
#[derive(Default)]
pub struct Nccl {
    /// By number; None once it is closed.
    comms: Vec<Option<Arc<Comm>>>,
    /// Devices that have had a communicator.
    has_kernels: HashSet<usize>,
    /// Memory of ids that this process created.
    made: Vec<segment::Made>,
    /// By communicator and meeting.
    parties: HashMap<(u64, (u64, u64, u64)), Party>,
    /// When the product last called, without queries: a watchdog repeats those endlessly.
    last_call: Option<Instant>,
}

impl Nccl {
    /// Notes a call of the product.
    pub(crate) fn has_called(&mut self, name: &str) {
        const QUERIES: [&str; 3] = ["cuEventQuery", "cuStreamQuery", "ncclCommGetAsyncError"];
        if !QUERIES.contains(&name) {
            self.last_call = Some(Instant::now());
        }
    }

    /// Time since the product's last call.
    fn silence(&self) -> Duration {
        self.last_call.map_or(Duration::ZERO, |time| time.elapsed())
    }

    /// A rank of this process arrives at a meeting.
    fn come(
        &mut self,
        nonce: u64,
        meeting: (u64, u64, u64),
        rank: usize,
        clock: Clock,
        time_ns: u64,
    ) {
        self.parties
            .entry((nonce, meeting))
            .or_default()
            .come
            .push((rank, clock, time_ns));
    }

    /// A rank of this process leaves a meeting; returns what all `parties` knew when they arrived.
    fn leave(&mut self, nonce: u64, meeting: (u64, u64, u64), parties: usize) -> Vec<(Clock, u64)> {
        let Some(party) = self.parties.get_mut(&(nonce, meeting)) else {
            return Vec::new();
        };
        party.left += 1;
        let known = party
            .come
            .iter()
            .map(|(_, clock, time_ns)| (clock.clone(), *time_ns))
            .collect();
        if party.left >= parties {
            self.parties.remove(&(nonce, meeting));
        }
        known
    }

    /// The open ones.
    fn live(&self) -> impl Iterator<Item = &Arc<Comm>> {
        self.comms.iter().flatten()
    }

    /// Where another rank of this process called its collective `number`, if it is under way.
    fn stack_of(&self, comm: &Comm, rank: usize, number: u64) -> Option<Stack> {
        let nonce = comm.segment.nonce;
        let sibling = |other: &&Arc<Comm>| other.segment.nonce == nonce && other.rank == rank;
        let flight = self.live().find(sibling)?.oldest()?;
        let state = flight.state();
        let is_at_it = state.collectives.progress.number() == Some(number);
        state.begun_by.clone().filter(|_| is_at_it)
    }

    /// What this process must still do for `flight` to complete.
    pub(crate) fn needed(&self, flight: &Flight) -> Vec<Arc<Record>> {
        let mut needed: Vec<Arc<Record>> = flight.previous().cloned().into_iter().collect();
        if flight.end.is_complete() {
            return needed;
        }
        let comm = &flight.piece.comm;
        let siblings = self
            .live()
            .filter(|other| other.segment.nonce == comm.segment.nonce && other.rank != comm.rank);
        // Only the oldest of each: this one may wait for it, and the next is looked up afterwards.
        needed.extend(
            siblings
                .filter_map(|sibling| sibling.oldest())
                .map(|oldest| oldest.end.clone()),
        );
        needed
    }
}
