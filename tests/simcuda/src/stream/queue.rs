//! What happens to the queues themselves: streams are made and retired, entries come and go, and
//! markers say how far a stream was given work.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Action, Entry, Operation, Order, Stream};
use crate::event::{Completion, Record};
use crate::handle::{OperationId, StreamId};
use crate::machine::Machine;
use crate::race::{Actor, Clock};
use crate::report::Stack;

/// The device of a stream.
pub(crate) fn device_of(machine: &Machine, stream: StreamId) -> usize {
    machine.streams.all[stream].device
}

/// The actor of a stream.
pub(crate) fn actor_of(machine: &Machine, stream: StreamId) -> Actor {
    machine.streams.all[stream].actor
}

/// Whether work for `stream` goes into a graph instead of running.
pub(crate) fn is_capturing(machine: &Machine, stream: StreamId) -> bool {
    machine.streams.all[stream].capture.is_some()
}

/// Names what a host call does, for findings: `cuMemFree of 0x…`.
pub(crate) fn note(machine: &mut Machine, describe: &str, device: usize) -> OperationId {
    new_operation(machine, describe, None, device, None).id
}

/// What was queued under this name; None if it is too long ago.
pub(crate) fn operation(machine: &Machine, id: OperationId) -> Option<Arc<Operation>> {
    machine.streams.operations.get(id)
}

pub(crate) fn new_operation(
    machine: &mut Machine,
    describe: &str,
    stream: Option<StreamId>,
    device: usize,
    captured: Option<Arc<Operation>>,
) -> Arc<Operation> {
    new_operation_at(
        machine,
        describe,
        stream,
        device,
        Stack::capture(),
        captured,
        false,
    )
}

pub(crate) fn new_operation_at(
    machine: &mut Machine,
    describe: &str,
    stream: Option<StreamId>,
    device: usize,
    stack: Stack,
    captured: Option<Arc<Operation>>,
    keeps_priority: bool,
) -> Arc<Operation> {
    let kept = captured.as_ref().filter(|_| keeps_priority);
    let priority = match (kept, stream) {
        (Some(captured), _) => captured.priority,
        (None, Some(stream)) => machine.streams.all[stream].priority,
        (None, None) => 0,
    };
    machine
        .streams
        .operations
        .make(describe, stream, (device, priority), stack, captured)
}

pub(super) fn push(machine: &mut Machine, stream: StreamId, mut entry: Entry) {
    let streams = &mut machine.streams;
    entry.sequence = streams.next_sequence;
    match &entry.action {
        Action::Record(record) => record.queued_at(entry.sequence),
        Action::Graph(Some(launch)) => launch.queued_at(entry.sequence),
        Action::Nccl(flight) => flight.end.queued_at(entry.sequence),
        _ => {}
    }
    streams.next_sequence += 1;
    streams.pending += 1;
    streams.busy.insert(stream);
    streams.all[stream].queue.push_back(entry);
}

/// A record after everything that `stream` was given so far.
pub(crate) fn marker(machine: &mut Machine, stream: StreamId) -> Arc<Record> {
    let Stream {
        given,
        marker,
        device,
        ..
    } = &machine.streams.all[stream];
    let (given, device) = (*given, *device);
    if let Some((at, record)) = marker
        && *at == given
    {
        return record.clone();
    }
    let record = Arc::new(Record::new(stream));
    if machine.streams.all[stream].queue.is_empty() {
        complete_record(machine, stream, &record);
    } else {
        let operation = new_operation(machine, "marker", Some(stream), device, None);
        let entry = Entry {
            sequence: 0,
            operation,
            host: Clock::default(),
            host_ns: 0,
            after: Vec::new(),
            action: Action::Record(record.clone()),
        };
        push(machine, stream, entry);
    }
    machine.streams.all[stream].marker = Some((given, record.clone()));
    record
}

/// The stream has reached `record`: the record keeps the stream's clock and time.
pub(crate) fn complete_record(machine: &mut Machine, stream: StreamId, record: &Record) {
    let Stream {
        actor,
        time_ns,
        retired,
        ..
    } = &machine.streams.all[stream];
    let time_ns = *time_ns;
    let clock = if *retired {
        Clock::default()
    } else {
        machine.race.snapshot(*actor)
    };
    record.complete(Completion { clock, time_ns });
}

/// Removes the front entry: it is done.
pub(crate) fn pop(machine: &mut Machine, stream: StreamId) -> Option<Entry> {
    let streams = &mut machine.streams;
    let entry = streams.all[stream].queue.pop_front()?;
    streams.pending -= 1;
    if streams.all[stream].queue.is_empty() {
        streams.busy.remove(&stream);
        retire_if_over(machine, stream);
    }
    Some(entry)
}

/// A destroyed stream stops being an actor once it is empty.
pub(super) fn retire_if_over(machine: &mut Machine, id: StreamId) {
    let Stream {
        destroyed,
        queue,
        retired,
        actor,
        ..
    } = &mut machine.streams.all[id];
    if destroyed.is_some() && queue.is_empty() && !*retired {
        // Its last moment stays known: a device synchronisation waits for destroyed streams too.
        let actor = *actor;
        *retired = true;
        let last = machine.race.snapshot(actor);
        let stream = &mut machine.streams.all[id];
        if let Some((at, record)) = &stream.marker
            && *at == stream.given
        {
            record.complete(Completion {
                clock: last,
                time_ns: stream.time_ns,
            });
        } else {
            let record = Record::new(id);
            record.complete(Completion {
                clock: last,
                time_ns: stream.time_ns,
            });
            stream.marker = Some((stream.given, Arc::new(record)));
        }
        machine.race.retire(actor);
    }
}

/// Makes a stream and returns its number.
pub(crate) fn create(
    machine: &mut Machine,
    device: usize,
    order: Order,
    flags: u32,
    priority: i32,
) -> StreamId {
    let actor = machine.race.actor();
    machine.streams.all.push(Stream {
        device,
        order,
        flags,
        priority,
        actor,
        queue: VecDeque::new(),
        given: 0,
        marker: None,
        null_is_behind: 0,
        is_behind_null: 0,
        time_ns: 0,
        capture: None,
        destroyed: None,
        retired: false,
    });
    machine.streams.all.len() - 1
}

/// Counts a wait of the product, and says whether it is the one to ignore.
pub(crate) fn is_wait_ignored(machine: &mut Machine, function: &'static str) -> bool {
    let Machine {
        streams, config, ..
    } = machine;
    streams.waits.is_ignored(config, function)
}
