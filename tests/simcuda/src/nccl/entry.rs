//! How every entry point of NCCL begins and ends, the handles of communicators, and the last error.

use std::ffi::{CStr, c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::comm::Comm;
use super::refusal::{Refusal, code};
use crate::faults::NEVER_RETURNS;
use crate::handle::{HandleKind, decode};
use crate::machine::{LockedMachine, Machine, current};
use crate::report::{self, FindingKind};
use crate::scheduler;

/// What ncclGetVersion says: 2.27.7.
const VERSION: c_int = 22707;

/// The communicator of a handle.
pub(super) fn resolve(machine: &mut Machine, handle: *mut Comm) -> Result<Arc<Comm>, Refusal> {
    let index =
        decode(HandleKind::Communicator, handle).filter(|index| *index < machine.nccl.comms.len());
    let Some(index) = index else {
        return Err(Refusal::argument("the communicator is none"));
    };
    match &machine.nccl.comms[index] {
        Some(comm) => Ok(comm.clone()),
        None => {
            let message = format!("communicator {index} is used after it was destroyed or aborted");
            report::finding(machine, FindingKind::Handle, &message);
            Err(Refusal::argument(message))
        }
    }
}

/// Every NCCL entry point. Errors are kept for ncclGetLastError.
pub(super) fn call(
    name: &'static str,
    body: impl FnOnce(&mut LockedMachine) -> Result<(), Refusal>,
) -> c_int {
    let mut held = LockedMachine::take();
    held.nccl.has_called(name);
    let outcome = match refusal(&mut held, name) {
        Some(refusal) if refusal.code == NEVER_RETURNS => held.without(|| {
            loop {
                std::thread::park();
            }
        }),
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
        report::finding(machine, FindingKind::ForbiddenCall, &message);
        return Some(Refusal::new(code::INVALID_USAGE, message));
    }
    let device = current::current(machine);
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
