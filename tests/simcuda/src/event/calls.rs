//! The entry points of events.

use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUstream};

use super::{Event, Record, State};
use crate::error::CUresult;
use crate::graph::{Captured, capture};
use crate::handle::{EventId, HandleKind, StreamId, decode, encode};
use crate::machine::{Machine, Out, call, call_waiting, current_device, host_joins, put};
use crate::report;
use crate::scheduler::{self, Goal};
use crate::stream::{self, Action};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
/// CU_EVENT_RECORD_EXTERNAL and CU_EVENT_WAIT_EXTERNAL: a node of the graph instead of an edge in
/// it.
const EXTERNAL: u32 = 1;

/// The event of a handle; a destroyed one is a finding.
fn resolve(machine: &mut Machine, handle: CUevent) -> Result<EventId, CUresult> {
    let event = decode(HandleKind::Event, handle)
        .filter(|event| *event < machine.events.all.len())
        .ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    if let Some(destroyer) = machine.events.all[event].destroyed.clone() {
        let message = format!(
            "event {event} is used after it was destroyed\n  destroyed in {}",
            destroyer.stack
        );
        report::finding(machine, report::FindingKind::Handle, message);
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(event)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<'_, CUevent>, flags: u32) -> CUresult {
    call("cuEventCreate", |machine| {
        // Blocking, no timing, interprocess; the last requires no timing.
        if flags > 7 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let device = current_device(machine)?;
        let has_timing = flags & DISABLE_TIMING == 0;
        machine.events.all.push(Event {
            device,
            has_timing,
            state: State::Never,
            destroyed: None,
        });
        put(
            event,
            encode(HandleKind::Event, machine.events.all.len() - 1),
        )
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    call("cuEventDestroy_v2", |machine| {
        let event = resolve(machine, event)?;
        let device = machine.events.all[event].device;
        // Queued waits and records have all they need; CUDA frees the event once they are done.
        let operation = stream::new_operation(machine, "cuEventDestroy", None, device, None);
        let event = &mut machine.events.all[event];
        event.destroyed = Some(operation);
        event.state = State::Never;
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    call("cuEventRecord", |machine| record(machine, event, stream, 0))
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: u32) -> CUresult {
    call("cuEventRecordWithFlags", |machine| {
        record(machine, event, stream, flags)
    })
}

fn record(
    machine: &mut Machine,
    event: CUevent,
    stream: CUstream,
    flags: u32,
) -> Result<(), CUresult> {
    let event = resolve(machine, event)?;
    let stream = stream::resolve(machine, stream)?;
    if flags & !EXTERNAL != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let device = stream::device_of(machine, stream);
    if machine.events.all[event].device != device {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    stream::check_usable(machine, stream)?;
    if stream::is_capturing(machine, stream) {
        if flags & EXTERNAL != 0 {
            let what = Captured::Record(event);
            return capture::add(machine, stream, "event record", what).map(drop);
        }
        let (capture, nodes) = capture::place(machine, stream)?;
        machine.events.all[event].state = State::Captured(capture, nodes);
        return Ok(());
    }
    give_record(machine, event, stream);
    Ok(())
}

fn give_record(machine: &mut Machine, event: EventId, stream: StreamId) {
    let device = stream::device_of(machine, stream);
    let operation = stream::new_operation(machine, "event record", Some(stream), device, None);
    let record = Arc::new(Record::new(stream));
    machine.events.all[event].state = State::Recorded(record.clone());
    stream::give(machine, stream, operation, Action::Record(record));
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32) -> CUresult {
    call("cuStreamWaitEvent", |machine| {
        let stream = stream::resolve(machine, stream)?;
        let event = resolve(machine, event)?;
        if flags & !EXTERNAL != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        stream::check_usable(machine, stream)?;
        let ignored = stream::is_wait_ignored(machine, "cuStreamWaitEvent");
        if flags & EXTERNAL != 0 && stream::is_capturing(machine, stream) {
            if ignored {
                return Ok(());
            }
            return capture::add(machine, stream, "event wait", Captured::Wait(event)).map(drop);
        }
        match machine.events.all[event].state.clone() {
            State::Captured(capture, nodes) => {
                capture::wait(machine, stream, capture, &nodes, ignored)
            }
            _ if stream::is_capturing(machine, stream) => Err(capture::isolation(machine, stream)),
            State::Never => Ok(()),
            State::Recorded(_) if ignored => Ok(()),
            State::Recorded(record) => {
                let device = stream::device_of(machine, stream);
                let operation =
                    stream::new_operation(machine, "event wait", Some(stream), device, None);
                stream::give(machine, stream, operation, Action::Wait(record));
                Ok(())
            }
        }
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    call_waiting("cuEventQuery", |held| {
        let event = resolve(held, event)?;
        let record = match held.events.all[event].state.clone() {
            State::Captured(capture, _) => return Err(capture::captured_event(held, capture)),
            State::Never => None,
            State::Recorded(record) => Some(record),
        };
        capture::forbid(held, "cuEventQuery")?;
        let Some(record) = record else { return Ok(()) };
        scheduler::query(held, &Goal::new(vec![record]))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    call_waiting("cuEventSynchronize", |held| {
        let event = resolve(held, event)?;
        let record = match held.events.all[event].state.clone() {
            State::Captured(capture, _) => return Err(capture::captured_event(held, capture)),
            State::Never => None,
            State::Recorded(record) => Some(record),
        };
        capture::forbid(held, "cuEventSynchronize")?;
        if stream::is_wait_ignored(held, "cuEventSynchronize") {
            return Ok(());
        }
        let Some(record) = record else { return Ok(()) };
        scheduler::wait_for(held, &Goal::new(vec![record]))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(
    milliseconds: Out<'_, f32>,
    start: CUevent,
    end: CUevent,
) -> CUresult {
    call("cuEventElapsedTime", |machine| {
        elapsed(machine, milliseconds, start, end)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(
    milliseconds: Out<'_, f32>,
    start: CUevent,
    end: CUevent,
) -> CUresult {
    call("cuEventElapsedTime_v2", |machine| {
        elapsed(machine, milliseconds, start, end)
    })
}

fn elapsed(
    machine: &mut Machine,
    milliseconds: Out<'_, f32>,
    start: CUevent,
    end: CUevent,
) -> Result<(), CUresult> {
    let mut times_ns = [0; 2];
    let [first, second] = [resolve(machine, start)?, resolve(machine, end)?];
    if machine.events.all[first].device != machine.events.all[second].device {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    for (handle, time_ns) in [start, end].into_iter().zip(&mut times_ns) {
        let event = resolve(machine, handle)?;
        let Event {
            has_timing, state, ..
        } = &machine.events.all[event];
        let record = match state {
            State::Recorded(record) if *has_timing => record.clone(),
            State::Captured(capture, _) => {
                let capture = *capture;
                return Err(capture::captured_event(machine, capture));
            }
            _ => return Err(CUresult::CUDA_ERROR_INVALID_HANDLE),
        };
        let Some(completion) = record.completion() else {
            let lost = machine.devices[machine.events.all[event].device].lost;
            return Err(lost.unwrap_or(CUresult::CUDA_ERROR_NOT_READY));
        };
        // As good as a query: the host has seen that the event was reached.
        host_joins(machine, &completion.clock);
        *time_ns = completion.time_ns;
    }
    let [start_ns, end_ns] = times_ns;
    // Through f64: the nanoseconds of a long run do not fit into f32.
    put(
        milliseconds,
        ((end_ns as f64 - start_ns as f64) * 1e-6) as f32,
    )
}
