//! Pinned memory, and the host's accesses to it.
//!
//! The memory is mapped twice: the product has one mapping, and copies use the other. While a copy
//! is in flight (from the call until the host has waited for it), the product's pages are closed:
//! completely if the copy writes them, for writing if it reads them. An access to a closed page
//! faults, and the handler distinguishes bytes in flight (a finding) from other bytes of the page
//! (the page is opened until the next copy).
//!
//! A system call on closed memory gets EFAULT: the same mistake, without a report.

mod fault;
pub(crate) mod mapping;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

pub use self::fault::install as install_handler;
pub use self::mapping::Mapping;
use self::mapping::Protection;
use super::allocation::{Allocation, Moment, Owner};
use crate::handle::OperationId;
use crate::race::Clock;
use crate::report::Stack;
use crate::stream::Operation;
use crate::work::Address;

/// A copy that uses pinned memory.
#[derive(Debug)]
pub struct Flight {
    operation: OperationId,
    device: usize,
    /// What it is, in which stream of which device.
    named: String,
    stack: Stack,
    allocation: Arc<Allocation>,
    range: Range<Address>,
    writes: bool,
    /// What its stream knew after it; None until it has run.
    finished: Option<Clock>,
}

/// Copies that the host has not waited for.
#[derive(Debug, Default)]
pub struct InFlight {
    flights: Vec<Flight>,
}

impl InFlight {
    /// An operation has run.
    pub fn finish(&mut self, operation: OperationId, clock: Clock) {
        for flight in self
            .flights
            .iter_mut()
            .filter(|flight| flight.operation == operation)
        {
            flight.finished = Some(clock.clone());
        }
    }

    /// Whether a copy is in flight that uses this allocation.
    pub fn uses(&self, allocation: &Allocation) -> bool {
        self.flights
            .iter()
            .any(|flight| flight.allocation.range == allocation.range)
    }

    /// Names a copy in flight that uses this allocation.
    pub fn describe_user(&self, allocation: &Allocation) -> Option<String> {
        let flight = self
            .flights
            .iter()
            .find(|flight| flight.allocation.range == allocation.range)?;
        Some(flight.to_string())
    }

    /// The copy in flight that a touch of this byte collides with.
    fn collides(&self, address: Address, is_write: bool) -> Option<&Flight> {
        self.flights
            .iter()
            .find(|flight| flight.range.contains(&address) && (flight.writes || is_write))
    }

    /// A device is lost: its queues are dropped and touch nothing any more.
    pub fn drop_device(&mut self, device: usize) {
        self.let_go(|flight| flight.device == device);
    }

    /// `operation` uses `range` of `allocation` from now on.
    pub(super) fn watch(
        &mut self,
        operation: &Operation,
        allocation: Arc<Allocation>,
        range: Range<Address>,
        writes: bool,
    ) {
        self.flights.push(Flight {
            operation: operation.id,
            device: operation.device,
            named: operation.to_string(),
            stack: operation.stack.clone(),
            allocation: Arc::clone(&allocation),
            range,
            writes,
            finished: None,
        });
        self.protect(&allocation);
    }

    /// The host has learnt of something: copies that it `knows` to be done are no longer in flight.
    pub fn open_what_is_known(&mut self, knows: impl Fn(&Clock) -> bool) {
        if !self.flights.is_empty() {
            self.let_go(|flight| flight.finished.as_ref().is_some_and(&knows));
        }
    }

    fn let_go(&mut self, is_over: impl Fn(&Flight) -> bool) {
        let (over, left): (Vec<Flight>, Vec<Flight>) = std::mem::take(&mut self.flights)
            .into_iter()
            .partition(is_over);
        self.flights = left;
        for flight in over {
            self.protect(&flight.allocation);
        }
    }

    /// Closes an allocation's pages as its copies in flight require, and opens the others.
    fn protect(&self, allocation: &Allocation) {
        let Owner::Host(mapping) = &allocation.owner else {
            return;
        };
        if allocation.has_ended(Moment::Runs) {
            // Its addresses are closed for good.
            return;
        }
        mapping.protect(&allocation.range, Protection::Open);
        let mut of_it: Vec<&Flight> = self
            .flights
            .iter()
            .filter(|flight| flight.allocation.range == allocation.range)
            .collect();
        // Writers last: a page used by both kinds is closed completely.
        of_it.sort_by_key(|flight| flight.writes);
        for flight in of_it {
            mapping.protect(
                &flight.range,
                if flight.writes {
                    Protection::Closed
                } else {
                    Protection::ReadOnly
                },
            );
        }
    }
}

impl std::fmt::Display for Flight {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let use_of_it = if self.writes { "writes" } else { "reads" };
        let state = if self.finished.is_some() {
            "it has run, but the host has not waited for it"
        } else {
            "it has not run yet"
        };
        write!(
            formatter,
            "{}, which {use_of_it} bytes {}..{} of it; {state}; it was queued by {}",
            self.named,
            self.range.start - self.allocation.range.start,
            self.range.end - self.allocation.range.start,
            self.stack
        )
    }
}
