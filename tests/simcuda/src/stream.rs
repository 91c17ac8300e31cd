//! Streams: first-in first-out queues of a device, their entries, and the order that the null
//! stream adds.
//!
//! A stream is an actor of the race detector. An entry keeps the clock of the host call that queued
//! it and joins that clock to the stream's when its turn comes. Queuing never runs anything (see
//! [`crate::scheduler`]), except that a machine with more than [`PENDING_MAX`] pending pieces
//! blocks, as a real queue would.

pub mod calls;
mod handle;
mod null;
mod operations;
#[cfg(test)]
pub(crate) mod tests;
mod waits;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::thread::ThreadId;

use cudarc::driver::sys::{CUresult, CUstream};

pub(crate) use self::handle::{HandleKind, decode, encode};
pub(crate) use self::null::legacy_of;
pub use self::operations::Operation;
pub(crate) use self::waits::is_ignored;
use crate::event::{Completion, Record};
use crate::graph::capture::{self, StreamCapture};
use crate::graph::launch::Launch;
use crate::machine::{Machine, host_actor};
use crate::nccl::Flight;
use crate::race::{Actor, Clock, OperationId};
use crate::report::{self, Stack};
use crate::scheduler::{self, Scheduler};
pub use crate::scheduler::{synchronize_device, synchronize_stream};
use crate::work::{Failure, Work};
use crate::{faults, memory};

/// Streams are numbered in order of creation over all devices; numbers are not reused.
pub type StreamId = usize;

/// How many pieces may be pending before a call waits for room.
pub const PENDING_MAX: usize = 4096;

/// Bookkeeping that needs the machine when its turn comes: stream-ordered allocation and free.
pub type Turn = Box<dyn FnOnce(&mut Machine, Actor, OperationId) -> Result<(), Failure> + Send>;

/// A function of the host that a stream calls.
#[derive(Clone, Copy)]
pub struct HostFunction {
    pub(crate) function: unsafe extern "C" fn(*mut std::ffi::c_void),
    /// An opaque address that belongs to the callee.
    pub(crate) argument: usize,
}

/// An entry of a queue.
pub(crate) enum Action {
    Work(Arc<dyn Work>),
    /// None once it was taken to run.
    Turn(Option<Turn>),
    /// None while it is being called without the lock.
    Host(Option<HostFunction>),
    Record(Arc<Record>),
    Wait(Arc<Record>),
    /// None only while one of its nodes runs.
    Graph(Option<Box<Launch>>),
    /// It stays at the front until the other ranks have done their part.
    Nccl(Arc<Flight>),
    /// A launch that never ends.
    Hang,
}

/// One place in a queue.
pub(crate) struct Entry {
    /// Its place among all entries of all streams.
    pub(crate) sequence: u64,
    pub(crate) operation: Arc<Operation>,
    /// What the host knew when it queued this.
    pub(crate) host: Clock,
    /// The simulated time up to which the host had waited.
    pub(crate) host_ns: u64,
    /// What the null stream's rules put before this.
    pub(crate) after: Vec<Arc<Record>>,
    pub(crate) action: Action,
}

/// Which kind of stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The null stream: in order with every blocking stream of its device.
    Legacy,
    /// In order with the null stream.
    Blocking,
    /// Created with CU_STREAM_NON_BLOCKING.
    Free,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) order: Order,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) actor: Actor,
    pub(crate) queue: VecDeque<Entry>,
    /// How many entries it was ever given, without markers.
    pub(crate) given: u64,
    /// The record after everything up to `given`, if any.
    marker: Option<(u64, Arc<Record>)>,
    /// How far the null stream is ordered after this one, and this one after the null stream.
    null_is_behind: u64,
    is_behind_null: u64,
    /// The simulated time of its last completion.
    pub(crate) time_ns: u64,
    pub(crate) capture: Option<StreamCapture>,
    /// Who destroyed it. Its entries still run.
    pub(crate) destroyed: Option<Arc<Operation>>,
    retired: bool,
}

/// All streams of the machine.
#[derive(Default)]
pub struct Streams {
    pub(crate) all: Vec<Stream>,
    /// The null stream of a device, once it was used.
    legacy: HashMap<usize, StreamId>,
    per_thread: HashMap<(ThreadId, usize), StreamId>,
    /// Those that have something in them.
    pub(crate) busy: BTreeSet<StreamId>,
    pub(crate) pending: usize,
    pub(crate) scheduler: Scheduler,
    next_sequence: u64,
    operations: operations::Operations,
    waits: waits::Waits,
}

/// The stream of a handle. Null and CU_STREAM_LEGACY are the current device's null stream.
pub fn resolve(machine: &mut Machine, handle: CUstream) -> Result<StreamId, CUresult> {
    // The two numbers that cuda.h gives to CU_STREAM_LEGACY and CU_STREAM_PER_THREAD.
    match handle as usize {
        0 | 1 => null::legacy(machine),
        2 => null::per_thread(machine),
        _ => {
            let Some(stream) = decode(HandleKind::Stream, handle)
                .filter(|stream| *stream < machine.streams.all.len())
            else {
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            };
            if let Some(destroyer) = machine.streams.all[stream].destroyed.clone() {
                let message = format!(
                    "stream {stream} is used after it was destroyed\n  destroyed in {}",
                    destroyer.stack
                );
                report::finding(machine, report::Kind::Handle, message);
                return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
            }
            Ok(stream)
        }
    }
}

/// The device of a stream.
pub fn device_of(machine: &Machine, stream: StreamId) -> usize {
    machine.streams.all[stream].device
}

/// The actor of a stream.
pub fn actor_of(machine: &Machine, stream: StreamId) -> Actor {
    machine.streams.all[stream].actor
}

/// Whether work for `stream` goes into a graph instead of running.
pub fn is_capturing(machine: &Machine, stream: StreamId) -> bool {
    machine.streams.all[stream].capture.is_some()
}

/// Refuses the potentially unsafe call `name` (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and a finding)
/// while a capture forbids it to the calling thread: its own capture unless relaxed, and global
/// captures of other threads, depending on the thread's mode.
pub fn forbid_in_capture(machine: &mut Machine, name: &'static str) -> Result<(), CUresult> {
    capture::forbid(machine, name)
}

/// For a call that a capturing `stream` cannot take: breaks the capture, reports a finding, and
/// returns the code (900, or 901 if it was broken before). `call` names the call and may suggest an
/// alternative.
pub fn refuse_in_capture(machine: &mut Machine, stream: StreamId, call: &str) -> CUresult {
    capture::unsupported(machine, stream, call)
}

/// Gives work to a stream, or to the graph if the stream is capturing.
pub fn enqueue(
    machine: &mut Machine,
    stream: StreamId,
    work: Arc<dyn Work>,
) -> Result<(), CUresult> {
    enqueue_operation(machine, stream, work).map(|_| ())
}

/// As [`enqueue`], with a name for reports.
pub fn enqueue_operation(
    machine: &mut Machine,
    stream: StreamId,
    work: Arc<dyn Work>,
) -> Result<OperationId, CUresult> {
    check_usable(machine, stream)?;
    if is_capturing(machine, stream) {
        return capture::add(
            machine,
            stream,
            &work.describe(),
            capture::Captured::Work(work.clone()),
        );
    }
    let device = device_of(machine, stream);
    let faults::Injected { work, hangs } = machine.faults.inject(device, work);
    let operation = new_operation(machine, &work.describe(), Some(stream), device, None);
    memory::begin(
        machine,
        device,
        operation.id,
        &operation.describe,
        &operation.stack,
        &work.known_ranges(),
    )?;
    let action = if hangs {
        Action::Hang
    } else {
        Action::Work(work)
    };
    Ok(give(machine, stream, operation, action))
}

/// Queues bookkeeping of the simulator: `turn` is called when its turn comes. Not for capturing
/// streams (900).
pub fn enqueue_with(
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
    Ok(give(machine, stream, operation, Action::Turn(Some(turn))))
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
        return capture::add(
            machine,
            stream,
            &describe,
            capture::Captured::Host(function),
        )
        .map(|_| ());
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

/// Names what a host call does, for findings: `cuMemFree of 0x…`.
pub fn note(machine: &mut Machine, describe: &str, device: usize) -> OperationId {
    new_operation(machine, describe, None, device, None).id
}

/// What was queued under this name; None if it is too long ago.
pub fn operation(machine: &Machine, id: OperationId) -> Option<Arc<Operation>> {
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
    )
}

pub(crate) fn new_operation_at(
    machine: &mut Machine,
    describe: &str,
    stream: Option<StreamId>,
    device: usize,
    stack: Stack,
    captured: Option<Arc<Operation>>,
) -> Arc<Operation> {
    machine
        .streams
        .operations
        .make(describe, stream, device, stack, captured)
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
    id
}

fn push(machine: &mut Machine, stream: StreamId, mut entry: Entry) {
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
fn retire_if_over(machine: &mut Machine, id: StreamId) {
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

/// The streams that the null stream waits for; none for any other stream.
pub(crate) fn blocking_of_null(machine: &Machine, stream: StreamId) -> Vec<StreamId> {
    let Stream { device, order, .. } = &machine.streams.all[stream];
    if *order == Order::Legacy {
        null::blocking(machine, *device)
    } else {
        Vec::new()
    }
}

/// Drops everything of a lost device: waits on it must end and report the loss.
pub(crate) fn abandon(machine: &mut Machine, device: usize) {
    let ids: Vec<StreamId> = machine
        .streams
        .busy
        .iter()
        .copied()
        .filter(|id| device_of(machine, *id) == device)
        .collect();
    for stream in ids {
        while let Some(entry) = pop(machine, stream) {
            match entry.action {
                Action::Record(record) => record.abandon(),
                Action::Graph(Some(launch)) => scheduler::abandon_launch(machine, &launch),
                Action::Nccl(flight) => {
                    flight.abandon();
                    memory::finish(machine, entry.operation.id, Clock::default());
                }
                Action::Work(_) | Action::Hang => {
                    memory::finish(machine, entry.operation.id, Clock::default())
                }
                Action::Turn(_) | Action::Host(_) | Action::Wait(_) | Action::Graph(None) => {}
            }
        }
    }
}
