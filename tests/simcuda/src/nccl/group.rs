//! Groups: calls between ncclGroupStart and ncclGroupEnd of one thread are issued at its end, one
//! piece of work per communicator.

use std::cell::RefCell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;

use super::comm::{Comm, Flight, Piece};
use super::connect::connect;
use super::entry::call;
use super::flight::takes_off;
use super::launch_order::next_place;
use super::meeting::{self, Coming};
use super::refusal::{Refusal, code};
use super::transfer::Call;
use super::users;
use crate::event::{Event, State};
use crate::graph::{Captured, capture};
use crate::handle::{EventId, StreamId};
use crate::machine::{LockedMachine, Machine};
use crate::memory;
use crate::stream::{self, Action};

/// The pending calls of a thread's group.
#[derive(Default)]
struct Open {
    depth: usize,
    calls: Vec<(Arc<Comm>, Call, StreamId)>,
    comings: Vec<(*mut *mut Comm, Coming)>,
    /// The first error: then nothing of the group is issued.
    failed: Option<Refusal>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

/// Whether this thread is in a group.
pub(super) fn is_open() -> bool {
    OPEN.with_borrow(|open| open.depth > 0)
}

/// A rank of this thread joins at the end of the group.
pub(super) fn defer_init(to: &mut MaybeUninit<*mut Comm>, coming: Coming) {
    OPEN.with_borrow_mut(|open| open.comings.push((to.as_mut_ptr(), coming)));
}

/// Makes a call, or keeps it for the end of the group.
pub(super) fn make(
    machine: &mut LockedMachine,
    comm: Arc<Comm>,
    call: Call,
    stream: StreamId,
) -> Result<(), Refusal> {
    if is_open() {
        OPEN.with_borrow_mut(|open| open.calls.push((comm, call, stream)));
        return Ok(());
    }
    connect(machine, [(&comm, &call, stream)].into_iter())?;
    submit(machine, &comm, vec![call], &[stream], next_place())
}

/// A faulty call is not issued, and neither is its group.
pub(super) fn fail(refusal: &Refusal) {
    OPEN.with_borrow_mut(|open| {
        if open.depth > 0 && open.failed.is_none() {
            open.failed = Some(refusal.clone());
        }
    });
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    call("ncclGroupStart", |_| {
        OPEN.with_borrow_mut(|open| open.depth += 1);
        Ok(())
    })
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let code = end();
    if !is_open() {
        users::leave();
    }
    code
}

fn end() -> c_int {
    call("ncclGroupEnd", |held| {
        let closed = OPEN.with_borrow_mut(|open| match open.depth {
            0 => Err(Refusal::new(
                code::INVALID_USAGE,
                "there was no ncclGroupStart before",
            )),
            1 => Ok(Some(std::mem::take(open))),
            _ => {
                open.depth -= 1;
                Ok(None)
            }
        })?;
        let Some(Open {
            calls,
            comings,
            failed,
            ..
        }) = closed
        else {
            return Ok(());
        };
        if let Some(failed) = failed {
            return Err(failed);
        }
        init_all(held, comings)?;
        submit_all(held, calls)
    })
}

/// All ranks of this thread arrive before it waits for any.
fn init_all(
    held: &mut LockedMachine,
    comings: Vec<(*mut *mut Comm, Coming)>,
) -> Result<(), Refusal> {
    let mut come = Vec::with_capacity(comings.len());
    for (to, coming) in comings {
        come.push((to, meeting::come(coming)?));
    }
    held.without(|| come.iter().for_each(|(_, come)| meeting::meet(come)));
    for (to, come) in come {
        let comm = meeting::found(held, come)?;
        // SAFETY: NCCL's documentation has the caller keep the place that it gave until the end of
        // the group.
        unsafe { to.write(comm) };
    }
    Ok(())
}

/// One piece of work per communicator, in the order of first calls.
fn submit_all(
    machine: &mut LockedMachine,
    calls: Vec<(Arc<Comm>, Call, StreamId)>,
) -> Result<(), Refusal> {
    let needed = calls.iter();
    connect(
        machine,
        needed.map(|(comm, call, stream)| (comm, call, *stream)),
    )?;
    let mut pieces: Vec<(Arc<Comm>, Vec<Call>, Vec<StreamId>)> = Vec::new();
    for (comm, call, stream) in calls {
        match pieces
            .iter_mut()
            .find(|(other, ..)| Arc::ptr_eq(other, &comm))
        {
            Some((_, calls, streams)) => {
                calls.push(call);
                if !streams.contains(&stream) {
                    streams.push(stream);
                }
            }
            None => pieces.push((comm, vec![call], vec![stream])),
        }
    }
    pieces.into_iter().try_for_each(|(comm, calls, streams)| {
        submit(machine, &comm, calls, &streams, next_place())
    })
}

/// Queues a piece in the first of its streams; the others are ordered before and after it.
fn submit(
    machine: &mut Machine,
    comm: &Arc<Comm>,
    calls: Vec<Call>,
    streams: &[StreamId],
    place: u64,
) -> Result<(), Refusal> {
    comm.check_usable()?;
    for stream in streams {
        stream::check_usable(machine, *stream)?;
    }
    let piece = Arc::new(Piece {
        comm: comm.clone(),
        calls,
    });
    let captures: Vec<_> = streams
        .iter()
        .map(|stream| capture::of(machine, *stream))
        .collect();
    if captures.iter().any(|capture| *capture != captures[0]) {
        let message = "the streams of a group are not all in the same capture, or not all in none";
        return Err(Refusal::new(code::INVALID_USAGE, message));
    }
    if captures[0].is_some() {
        capture(machine, &piece, streams)
    } else {
        queue(machine, &piece, streams, place)
    }
}

fn queue(
    machine: &mut Machine,
    piece: &Arc<Piece>,
    streams: &[StreamId],
    place: u64,
) -> Result<(), Refusal> {
    let (own, others) = (streams[0], &streams[1..]);
    let device = piece.comm.device;
    let describe = piece.describe();
    let operation = stream::new_operation(machine, &describe, Some(own), device, None);
    memory::begin(machine, &operation, &piece.ranges())?;
    for other in others {
        let record = stream::marker(machine, *other);
        let operation =
            stream::new_operation(machine, "order of a group of NCCL", Some(own), device, None);
        stream::give(machine, own, operation, Action::Wait(record));
    }
    let struck = machine.faults.strike_queued_nccl(device);
    let flight = Flight::new(piece.clone(), own, struck);
    takes_off(machine, &flight, place, &operation.stack);
    if let Some(serial) = piece.comm.books().serial {
        machine.events.all[serial].state = State::Recorded(flight.end.clone());
    }
    stream::give(machine, own, operation, Action::Nccl(flight.clone()));
    for other in others {
        let operation = stream::new_operation(
            machine,
            "order of a group of NCCL",
            Some(*other),
            device,
            None,
        );
        stream::give(machine, *other, operation, Action::Wait(flight.end.clone()));
    }
    Ok(())
}

fn capture(machine: &mut Machine, piece: &Arc<Piece>, streams: &[StreamId]) -> Result<(), Refusal> {
    let (own, others) = (streams[0], &streams[1..]);
    let (id, _) = capture::place(machine, own)?;
    let mut before = Vec::new();
    for other in others {
        before.extend(capture::place(machine, *other)?.1);
    }
    capture::follow(machine, own, &before);
    capture::add(
        machine,
        own,
        &piece.describe(),
        Captured::Nccl(piece.clone()),
    )?;
    let kernel = capture::place(machine, own)?.1[0];
    let mut earlier = piece.comm.captured(id);
    let mut latest = kernel;
    if machine.config.nccl_events {
        let serial = serial_event(machine, &piece.comm);
        let mut add = |describe, what, dependencies| {
            capture::add_internal(machine, own, describe, what, dependencies)
        };
        if earlier.is_none() {
            earlier = Some(add("event wait of NCCL", Captured::Wait(serial), vec![])?);
        }
        latest = add(
            "event record of NCCL",
            Captured::Record(serial),
            vec![kernel],
        )?;
    }
    if let Some(earlier) = earlier {
        capture::run_after(machine, own, kernel, earlier);
    }
    let (_, tail) = capture::place(machine, own)?;
    piece.comm.set_captured(id, latest);
    // Everything before it in the other streams precedes the node.
    for other in others {
        capture::follow(machine, *other, &tail);
    }
    Ok(())
}

/// The event by which NCCL orders the graphs and the eager calls of a communicator: each graph
/// waits for it first (an external wait), and each call records it (src/misc/strongstream.cc of
/// NCCL 2.30.7, whose communicators allow graphs and eager calls side by side by default).
fn serial_event(machine: &mut Machine, comm: &Comm) -> EventId {
    let mut books = comm.books();
    let last = books.last.clone();
    *books.serial.get_or_insert_with(|| {
        machine.events.all.push(Event {
            device: comm.device,
            has_timing: false,
            state: last.map_or(State::Never, State::Recorded),
            destroyed: None,
        });
        machine.events.all.len() - 1
    })
}
