//! The entry points of collectives, sends and receives: what is checked before anything is queued.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUstream;

use super::comm::Comm;
use super::element::{Reduction, Type};
use super::entry::{call, resolve};
use super::group;
use super::refusal::Refusal;
use super::transfer::{Call, CallKind};
use super::users;
use crate::handle::StreamId;
use crate::machine::{LockedMachine, Machine};
use crate::report::{self, FindingKind};
use crate::stream;
use crate::work::Address;

/// The arguments of a call.
struct Given {
    name: &'static str,
    from: Address,
    to: Address,
    count: usize,
    element: c_int,
    comm: *mut Comm,
    stream: CUstream,
}

fn make(given: Given, kind: impl FnOnce(&Comm) -> Result<CallKind, Refusal>) -> c_int {
    users::enter(given.comm as usize, given.name);
    let code = call(given.name, |held| {
        let made = checked(held, &given, kind);
        made.inspect_err(group::fail)
    });
    if !group::is_open() {
        users::leave();
    }
    code
}

fn checked(
    machine: &mut LockedMachine,
    given: &Given,
    kind: impl FnOnce(&Comm) -> Result<CallKind, Refusal>,
) -> Result<(), Refusal> {
    let Given {
        name,
        from,
        to,
        count,
        element,
        ..
    } = *given;
    let comm = resolve(machine, given.comm)?;
    comm.check_usable()?;
    let kind = kind(&comm)?;
    let element = Type::from_raw(element).ok_or_else(|| {
        Refusal::argument(format!(
            "datatype {element}: expected 0 to 9 (int8 to bfloat16); eight-bit floats are not simulated"
        ))
    })?;
    let ranks = comm.segment.ranks() as u64;
    let whole = (count as u64)
        .checked_mul(element.bytes())
        .and_then(|bytes| bytes.checked_mul(ranks));
    if whole.is_none_or(|bytes| bytes > 1 << 46) {
        return Err(Refusal::argument(format!(
            "{count} elements are more than there can be"
        )));
    }
    let call = Call {
        name,
        kind,
        element,
        count: count as u64,
        from,
        to,
    };
    let stream = stream_of(machine, given.stream, &comm, name)?;
    if count == 0 && call.is_collective() {
        return Ok(());
    }
    check_pointers(machine, &call, &comm)?;
    group::make(machine, comm, call, stream)
}

/// The stream of a call: it must be of the communicator's device.
fn stream_of(
    machine: &mut Machine,
    handle: CUstream,
    comm: &Comm,
    name: &str,
) -> Result<StreamId, Refusal> {
    // The communicator's device: NCCL makes it current.
    let stream = match handle as usize {
        0 | 1 => stream::legacy_of(machine, comm.device),
        _ => stream::resolve(machine, handle)?,
    };
    let device = stream::device_of(machine, stream);
    if device == comm.device {
        return Ok(stream);
    }
    let message = format!(
        "{name}: stream {stream} is of device {device}, the communicator (rank {}) of device {}",
        comm.rank, comm.device
    );
    report::finding(machine, FindingKind::WrongDevice, &message);
    Err(Refusal::argument(message))
}

fn check_pointers(machine: &mut Machine, call: &Call, comm: &Comm) -> Result<(), Refusal> {
    let ranks = comm.segment.ranks();
    let touched = call.touched(comm.rank, ranks);
    for (which, ranges) in [("sendbuff", &touched.reads), ("recvbuff", &touched.writes)] {
        for range in ranges {
            if range.start == 0 {
                return Err(Refusal::argument(format!("{which} is null")));
            }
            if range.start % call.element.bytes() != 0 {
                let element = call.element.name();
                return Err(Refusal::argument(format!(
                    "{which} {:#x} is not the address of an {element}",
                    range.start
                )));
            }
        }
    }
    let (Some(read), Some(written)) = (touched.reads.first(), touched.writes.first()) else {
        return Ok(());
    };
    let slice = call.bytes() * comm.rank as u64;
    let is_in_place = match call.kind {
        CallKind::ReduceScatter(_) => written.start == read.start + slice,
        CallKind::AllGather => read.start == written.start + slice,
        _ => read.start == written.start,
    };
    if !is_in_place && read.start < written.end && written.start < read.end {
        let message = format!(
            "{}: sendbuff and recvbuff overlap and are not in place, which leaves the result undefined\n  sendbuff: bytes {}\n  recvbuff: bytes {}",
            call.describe(),
            machine.memory.describe(read),
            machine.memory.describe(written)
        );
        report::finding(machine, FindingKind::Race, &message);
        return Err(Refusal::argument(message));
    }
    Ok(())
}

fn reduction(raw: c_int) -> Result<Reduction, Refusal> {
    Reduction::from_raw(raw).ok_or_else(|| {
        Refusal::argument(if raw == 4 {
            "ncclAvg is not simulated: it multiplies by 1/N before it sums, which is inexact where N is not a power of two; use ncclSum and divide"
                .to_owned()
        } else {
            format!("op {raw}: expected 0 to 3 (sum, product, max, min); operators of one's own are not simulated")
        })
    })
}

fn peer(comm: &Comm, which: &str, raw: c_int) -> Result<usize, Refusal> {
    let ranks = comm.segment.ranks();
    let found = usize::try_from(raw).ok().filter(|rank| *rank < ranks);
    found.ok_or_else(|| {
        Refusal::argument(format!(
            "{which} {raw}: expected a rank, 0 to {}",
            ranks - 1
        ))
    })
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    op: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    let (from, to) = (from as Address, to as Address);
    make(
        Given {
            name: "ncclAllReduce",
            from,
            to,
            count,
            element,
            comm,
            stream,
        },
        |_| Ok(CallKind::AllReduce(reduction(op)?)),
    )
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    op: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    let (from, to) = (from as Address, to as Address);
    make(
        Given {
            name: "ncclReduceScatter",
            from,
            to,
            count,
            element,
            comm,
            stream,
        },
        |_| Ok(CallKind::ReduceScatter(reduction(op)?)),
    )
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    op: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    let (from, to) = (from as Address, to as Address);
    make(
        Given {
            name: "ncclReduce",
            from,
            to,
            count,
            element,
            comm,
            stream,
        },
        |comm| Ok(CallKind::Reduce(reduction(op)?, peer(comm, "root", root)?)),
    )
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    let (from, to) = (from as Address, to as Address);
    make(
        Given {
            name: "ncclAllGather",
            from,
            to,
            count,
            element,
            comm,
            stream,
        },
        |_| Ok(CallKind::AllGather),
    )
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    let (from, to) = (from as Address, to as Address);
    make(
        Given {
            name: "ncclBroadcast",
            from,
            to,
            count,
            element,
            comm,
            stream,
        },
        |comm| Ok(CallKind::Broadcast(peer(comm, "root", root)?)),
    )
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    from: *const c_void,
    count: usize,
    element: c_int,
    to_rank: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    make(
        Given {
            name: "ncclSend",
            from: from as Address,
            to: 0,
            count,
            element,
            comm,
            stream,
        },
        |comm| Ok(CallKind::Send(peer(comm, "peer", to_rank)?)),
    )
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    to: *mut c_void,
    count: usize,
    element: c_int,
    from_rank: c_int,
    comm: *mut Comm,
    stream: CUstream,
) -> c_int {
    make(
        Given {
            name: "ncclRecv",
            from: 0,
            to: to as Address,
            count,
            element,
            comm,
            stream,
        },
        |comm| Ok(CallKind::Receive(peer(comm, "peer", from_rank)?)),
    )
}
