//! Giving work to a stream: checks, planned faults, the null stream's order, and a capture instead
//! of a queue.

use std::sync::Arc;

use super::queue::{device_of, is_capturing, new_operation, push};
use super::{Action, Entry, Operation, null};
use crate::error::CUresult;
use crate::faults::Injected;
use crate::graph::{Captured, capture};
use crate::handle::{OperationId, StreamId};
use crate::machine::{Machine, current_device, host_actor};
use crate::memory::{self, Turn};
use crate::report::{self, FindingKind};
use crate::scheduler;
use crate::work::{HostFunction, Work};

/// Gives work to a stream, or to the graph if the stream is capturing.
pub(crate) fn enqueue(
    machine: &mut Machine,
    stream: StreamId,
    work: Arc<dyn Work>,
) -> Result<(), CUresult> {
    enqueue_operation(machine, stream, work).map(|_| ())
}

/// As [`enqueue`], with a name for reports.
pub(crate) fn enqueue_operation(
    machine: &mut Machine,
    stream: StreamId,
    work: Arc<dyn Work>,
) -> Result<OperationId, CUresult> {
    check_usable(machine, stream)?;
    if is_capturing(machine, stream) {
        let describe = work.describe();
        return capture::add(machine, stream, &describe, Captured::Work(work));
    }
    let device = device_of(machine, stream);
    let Injected { work, hangs, fails } = machine.faults.inject(device, work);
    machine.streams.is_to_fail |= fails;
    let operation = new_operation(machine, &work.describe(), Some(stream), device, None);
    memory::begin(machine, &operation, &work.known_ranges())?;
    let action = if hangs {
        Action::Hang
    } else {
        Action::Work(work)
    };
    Ok(give(machine, stream, operation, action))
}

/// Queues the allocation or the free of memory of a pool. Refused by a capturing stream (900).
pub(crate) fn enqueue_turn(
    machine: &mut Machine,
    stream: StreamId,
    describe: &str,
    turn: Turn,
) -> Result<OperationId, CUresult> {
    check_usable(machine, stream)?;
    if is_capturing(machine, stream) {
        return Err(capture::unsupported(machine, stream, describe));
    }
    let operation = new_operation(
        machine,
        describe,
        Some(stream),
        device_of(machine, stream),
        None,
    );
    Ok(give(machine, stream, operation, Action::Turn(turn)))
}

/// Queues a host function.
pub(crate) fn enqueue_host(
    machine: &mut Machine,
    stream: StreamId,
    function: HostFunction,
) -> Result<(), CUresult> {
    check_usable(machine, stream)?;
    let describe = format!("host function {:#x}", function.function as usize);
    if is_capturing(machine, stream) {
        return capture::add(machine, stream, &describe, Captured::Host(function)).map(drop);
    }
    let operation = new_operation(
        machine,
        &describe,
        Some(stream),
        device_of(machine, stream),
        None,
    );
    give(machine, stream, operation, Action::Host(Some(function)));
    Ok(())
}

/// A launch or matmul needs the context of its stream to be current: "a kernel launch will fail if
/// it is issued to a stream that is not associated to the current device" (CUDA C++ Programming
/// Guide, "Stream and Event Behavior").
pub(crate) fn check_current(
    machine: &mut Machine,
    device: usize,
    what: impl FnOnce() -> String,
) -> Result<(), CUresult> {
    let current = current_device(machine)?;
    if current == device {
        return Ok(());
    }
    let message = format!(
        "{} is for device {device}, but the current context is that of device {current}\n  help: make the context of device {device} current on this thread before the call (cuCtxSetCurrent)",
        what()
    );
    report::finding(machine, FindingKind::WrongDevice, message);
    Err(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}

/// Errors common to all calls that queue to `stream`: a lost device, and a null stream that would
/// have to wait for a capturing stream.
pub(crate) fn check_usable(machine: &mut Machine, stream: StreamId) -> Result<(), CUresult> {
    if let Some(lost) = machine.devices[device_of(machine, stream)].lost {
        return Err(lost);
    }
    capture::check_implicit(machine, stream)
}

/// Puts an action at the end of a stream that is not capturing.
pub(crate) fn give(
    machine: &mut Machine,
    stream: StreamId,
    operation: Arc<Operation>,
    action: Action,
) -> OperationId {
    let host = host_actor(machine);
    let host = machine.race.snapshot(host);
    let after = null::orders(machine, stream);
    let id = operation.id;
    machine.streams.all[stream].given += 1;
    let host_ns = machine.timeline.host_ns;
    push(
        machine,
        stream,
        Entry {
            sequence: 0,
            operation,
            host,
            host_ns,
            after,
            action,
        },
    );
    scheduler::make_room(machine);
    if machine.streams.is_to_fail {
        scheduler::perhaps_fail(machine);
    }
    id
}
