//! What operations may touch: checked when they are queued and again when they run.

use std::ops::Range;

use super::{Moment, Owner, Turn, Violation};
use crate::error::CUresult;
use crate::handle::OperationId;
use crate::machine::Machine;
use crate::race::{Actor, Clock};
use crate::report::{self, FindingKind};
use crate::stream::Operation;
use crate::work::{Address, Failure, Reads, Touched};

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
            let moment = machine.race.moment(actor);
            let pools = &mut machine.memory.pools;
            pools.has_run(pool, allocation.bytes(), actor, moment);
        }
    }
}

/// An operation has run: what it used of unwritten memory, and what it has written.
pub fn follow_contents(
    machine: &mut Machine,
    operation: &Operation,
    reads: Reads,
    touched: &Touched,
) {
    let unwritten = &mut machine.memory.unwritten;
    let read = match reads {
        Reads::Watched => touched.unwritten.clone(),
        Reads::Copied => None,
        Reads::Used => touched
            .reads
            .iter()
            .find_map(|range| unwritten.within(range).next())
            .map(|range| (range, "reads memory that nothing has written".to_owned())),
    };
    let copied = touched.reads.first().zip(touched.writes.first());
    let holes: Vec<Range<Address>> = match copied.filter(|_| reads == Reads::Copied) {
        Some((from, to)) if machine.memory.device_range.contains(&to.start) => unwritten
            .within(from)
            .map(|hole| to.start + hole.start - from.start..to.start + hole.end - from.start)
            .collect(),
        _ => Vec::new(),
    };
    let written = || touched.writes.iter().chain(&touched.atomics);
    let all = written().map(|range| range.start).min()..written().map(|range| range.end).max();
    // Mostly nothing is left to be written there.
    if let (Some(start), Some(end)) = (all.start, all.end)
        && unwritten.within(&(start..end)).next().is_some()
    {
        written().for_each(|range| unwritten.remove(range));
    }
    holes.into_iter().for_each(|hole| unwritten.add(hole));
    if let Some((range, how)) = read {
        let message = format!(
            "{operation}\n  {how}\n  bytes: {}, and nothing has written them since (a copy of such bytes \
             does not count)\n  {}",
            machine.memory.describe(&range),
            operation.origin()
        );
        machine.memory.unwritten.told.push(message);
    }
}

/// Nothing is queued any more, so no late write explains these reads.
pub fn settle_unwritten(machine: &mut Machine) {
    for message in std::mem::take(&mut machine.memory.unwritten.told) {
        report::finding(machine, FindingKind::Unwritten, message);
    }
}
