//! What operations may touch: checked when they are queued and again when they run.

use super::{Moment, Owner, Turn, Violation};
use crate::error::CUresult;
use crate::handle::OperationId;
use crate::machine::Machine;
use crate::race::{Actor, Clock};
use crate::report::{self, FindingKind};
use crate::stream::Operation;
use crate::work::{Failure, Touched};

/// The first range that may not be touched at this moment, if any.
fn violation(
    machine: &Machine,
    operation: &Operation,
    ranges: &Touched,
    moment: Moment,
) -> Option<Violation> {
    let all = [&ranges.reads, &ranges.writes, &ranges.atomics];
    all.into_iter().flatten().find_map(|range| {
        let device = machine
            .memory
            .reached_by(operation.device, &operation.describe, range);
        machine.memory.violation(device, range, moment)
    })
}

/// Checks the ranges of a graph node that is launched again.
pub fn check_queued(machine: &Machine, device: usize, ranges: &Touched) -> Result<(), Violation> {
    let all = [&ranges.reads, &ranges.writes, &ranges.atomics];
    let violation = all
        .into_iter()
        .flatten()
        .find_map(|range| machine.memory.violation(device, range, Moment::Queued));
    violation.map_or(Ok(()), Err)
}

/// An operation is queued: its known ranges are checked, and pinned memory that it uses is watched
/// until the host has waited for it.
pub fn begin(
    machine: &mut Machine,
    operation: &Operation,
    ranges: &Touched,
) -> Result<(), CUresult> {
    if let Some(Violation { kind, message }) = violation(machine, operation, ranges, Moment::Queued)
    {
        let Operation {
            describe,
            device,
            stack,
            ..
        } = operation;
        // A copy between devices may reach another device; anything else has a wrong pointer.
        let is_copy = ["cuMemcpyPeer", "cuMemcpyDtoD", "cuMemcpyAsync"]
            .iter()
            .any(|copy| describe.starts_with(copy));
        let kind = if is_copy && kind == FindingKind::WrongDevice {
            FindingKind::PeerAccess
        } else {
            kind
        };
        report::finding(
            machine,
            kind,
            format!("{describe} on device {device}: {message}\n  queued by {stack}"),
        );
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let uses = [
        (&ranges.writes, true),
        (&ranges.atomics, true),
        (&ranges.reads, false),
    ];
    for (ranges, writes) in uses {
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let allocation = machine.memory.holding(range.start).cloned();
            if let Some(pinned) = allocation.filter(|found| matches!(found.owner, Owner::Host(_))) {
                let in_flight = &mut machine.memory.in_flight;
                in_flight.watch(operation, pinned, range.clone(), writes);
            }
        }
    }
    Ok(())
}

/// An operation has run; `clock` is what its stream knows afterwards.
pub fn finish(machine: &mut Machine, operation: OperationId, clock: Clock) {
    machine.memory.in_flight.finish(operation, clock);
}

/// Memory that existed when the work was queued may be gone when it runs: a finding.
pub fn freed_meanwhile(
    machine: &mut Machine,
    operation: &Operation,
    known: &Touched,
) -> Option<Failure> {
    let Violation { kind, message } = violation(machine, operation, known, Moment::Runs)?;
    let origin = operation.origin();
    report::finding(
        machine,
        kind,
        format!("{operation}, when it ran: {message}\n  {origin}"),
    );
    Some(Failure {
        code: CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        message,
    })
}

/// A stream, which is `actor`, has come to an allocation or a free.
pub fn take_turn(machine: &mut Machine, turn: Turn, actor: Actor, operation: OperationId) {
    match turn {
        Turn::Allocate(new) => {
            if let Some(end) = new.end().filter(|_| new.has_ended(Moment::Runs)) {
                let message =
                    format!("{new} is made when its stream comes to that, and was {end} before");
                report::finding(machine, FindingKind::UseAfterFree, message);
                return;
            }
            // Unlike `Detector::allocate`, this keeps earlier uses: no order puts them first.
            let made = Touched {
                writes: vec![new.range.clone()],
                ..Touched::default()
            };
            if let Some(race) = machine.race.access(actor, operation, &made) {
                report::race(machine, &race);
            }
        }
        Turn::Free(allocation, pool) => {
            let range = allocation.range.clone();
            if let Some(race) = machine.race.free(range, actor, operation) {
                report::race(machine, &race);
            }
            machine.memory.release(&allocation);
            let clock = machine.race.snapshot(actor);
            let pools = &mut machine.memory.pools;
            pools.has_run(pool, allocation.bytes(), actor, clock);
        }
    }
}
