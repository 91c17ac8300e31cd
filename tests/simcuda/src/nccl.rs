//! NCCL: communicators of ranks in one or several processes of this machine, and collectives as
//! stream work.
//!
//! The ranks share memory that the unique id names (`segment`). A call is checked and becomes part
//! of a piece of work (`flight`). When its turn in its stream comes, it runs as far as the other
//! ranks allow (`transfer`). A background thread runs this process's part when another process
//! waits for it (`progress`). README.md lists what is modelled and what is stricter than hardware.

pub mod calls;
pub mod comm;
mod element;
mod flight;
pub mod group;
mod progress;
mod segment;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;

use self::comm::Comm;
pub(crate) use self::flight::{Flight, Piece, Ran};
pub(crate) use self::progress::{await_others, idle, say_what_lacks};
use crate::context;
use crate::event::Record;
use crate::machine::{Held, Machine};
use crate::race::Clock;
use crate::report;
use crate::scheduler;
use crate::stream::{HandleKind, StreamId, decode};

/// What ncclGetVersion says: 2.27.7.
const VERSION: c_int = 22707;

/// Codes of NCCL.
pub(crate) mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
    pub(crate) const SYSTEM_ERROR: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 4;
    pub(crate) const INVALID_USAGE: i32 = 5;
}

/// A call that fails: what it returns, and what ncclGetLastError says.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: i32,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(code::INVALID_ARGUMENT, message)
    }
}

impl From<CUresult> for Refusal {
    fn from(code: CUresult) -> Self {
        Self::new(
            code::UNHANDLED_CUDA_ERROR,
            format!("the CUDA driver says {code:?}"),
        )
    }
}

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
}

/// What this process must still do for `flight` to complete.
pub(crate) fn needed(machine: &Machine, flight: &Flight) -> Vec<Arc<Record>> {
    let mut needed: Vec<Arc<Record>> = flight.previous().cloned().into_iter().collect();
    if flight.end.is_complete() {
        return needed;
    }
    let comm = &flight.piece.comm;
    let siblings = machine
        .nccl
        .live()
        .filter(|other| other.segment.nonce == comm.segment.nonce && other.rank != comm.rank);
    // Only the oldest of each: this one may wait for it, and the next is looked up when it is done.
    needed.extend(
        siblings
            .filter_map(|sibling| sibling.oldest())
            .map(|oldest| oldest.end.clone()),
    );
    needed
}

/// A turn of a captured piece, for a launch in `stream` that may still fail.
pub(crate) fn flight(
    machine: &mut Machine,
    piece: &Arc<Piece>,
    stream: StreamId,
) -> Result<Arc<Flight>, CUresult> {
    if piece.comm.is_aborted() {
        return Err(CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
    let struck = machine.faults.strike_queued_nccl(piece.comm.device);
    Ok(Flight::new(piece.clone(), stream, struck))
}

/// A turn that is certain: it is the next one of its communicator.
pub(crate) fn takes_off(flight: &Arc<Flight>) {
    flight.piece.comm.takes_off(flight);
}

/// The communicator of a handle.
fn resolve(machine: &mut Machine, handle: *mut Comm) -> Result<Arc<Comm>, Refusal> {
    let index =
        decode(HandleKind::Communicator, handle).filter(|index| *index < machine.nccl.comms.len());
    let Some(index) = index else {
        return Err(Refusal::argument("the communicator is none"));
    };
    match &machine.nccl.comms[index] {
        Some(comm) => Ok(comm.clone()),
        None => {
            let message = format!("communicator {index} is used after it was destroyed or aborted");
            report::finding(machine, report::Kind::Handle, &message);
            Err(Refusal::argument(message))
        }
    }
}

/// Every NCCL entry point. Errors are kept for ncclGetLastError.
fn call(name: &'static str, body: impl FnOnce(&mut Held) -> Result<(), Refusal>) -> c_int {
    let mut held = Held::take();
    held.nccl.has_called(name);
    let outcome = match refusal(&mut held, name) {
        Some(refusal) => Err(refusal),
        None => body(&mut held),
    };
    let code = match &outcome {
        Ok(()) => code::SUCCESS,
        Err(Refusal { code, message }) => {
            set_last_error(&format!("{name}: {message}"));
            *code
        }
    };
    if held.config.trace {
        match &outcome {
            Ok(()) => eprintln!("simcuda: {name}"),
            Err(refusal) => eprintln!("simcuda: {name} -> {}: {}", refusal.code, refusal.message),
        }
    }
    code
}

fn refusal(machine: &mut Machine, name: &'static str) -> Option<Refusal> {
    if scheduler::in_host_function() {
        let message = format!("{name} is called from a host function of a stream");
        report::finding(machine, report::Kind::ForbiddenCall, &message);
        return Some(Refusal::new(code::INVALID_USAGE, message));
    }
    let device = context::current(machine);
    let code = machine.faults.before_nccl_call(name, device)?;
    Some(Refusal::new(code, "fails by the plan of faults"))
}

const LAST_ERROR_BYTES: usize = 2048;
static LAST_ERROR: [AtomicU8; LAST_ERROR_BYTES] = [const { AtomicU8::new(0) }; LAST_ERROR_BYTES];

/// Keeps the text of the last error. The machine's lock is held, so one thread writes.
fn set_last_error(message: &str) {
    let text = message
        .bytes()
        .filter(|byte| *byte != 0)
        .take(LAST_ERROR_BYTES - 1)
        .chain([0]);
    for (place, byte) in LAST_ERROR.iter().zip(text) {
        place.store(byte, Ordering::Relaxed);
    }
}

/// See NCCL's documentation. Returns the last error of the process.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut Comm) -> *const c_char {
    LAST_ERROR.as_ptr().cast()
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: Option<&mut c_int>) -> c_int {
    call("ncclGetVersion", |_| {
        *version.ok_or_else(|| Refusal::argument("no place for the version"))? = VERSION;
        Ok(())
    })
}

/// See NCCL's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    const TEXTS: [&CStr; 8] = [
        c"no error",
        c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        c"internal error - please report this issue to the NCCL developers",
        c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        c"remote process exited or there was a network error",
        c"NCCL operation in progress",
    ];
    usize::try_from(code)
        .ok()
        .and_then(|code| TEXTS.get(code))
        .map_or(c"unknown result code", |text| text)
        .as_ptr()
}
