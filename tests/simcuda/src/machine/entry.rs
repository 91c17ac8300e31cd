//! Every entry point goes through [`call`] or [`call_waiting`], which take the lock, consult the
//! fault plan, trace, and turn errors into codes.
//!
//! Conventions of entry points: handles and enums come in as plain integers or raw pointers and are
//! checked. Results are written through [`Out`], which may be null or uninitialised, so that no
//! entry point needs unsafe for it.

use std::mem::MaybeUninit;

use super::current;
use super::{LockedMachine, Machine, lose_device};
use crate::error::CUresult;
use crate::report::{self, FindingKind};
use crate::scheduler;

/// Every entry point. `body` runs under the lock.
pub fn call(
    name: &'static str,
    body: impl FnOnce(&mut Machine) -> Result<(), CUresult>,
) -> CUresult {
    call_waiting(name, |held| body(held))
}

/// An entry point that may wait: `body` may give the lock up between pieces of work.
pub fn call_waiting(
    name: &'static str,
    body: impl FnOnce(&mut LockedMachine) -> Result<(), CUresult>,
) -> CUresult {
    call_library(name, |code| code, body)
        .err()
        .unwrap_or(CUresult::CUDA_SUCCESS)
}

/// An entry point of a library above the driver with its own codes: `code` converts the driver's.
pub fn call_library<E: std::fmt::Debug>(
    name: &'static str,
    code: impl Fn(CUresult) -> E,
    body: impl FnOnce(&mut LockedMachine) -> Result<(), E>,
) -> Result<(), E> {
    let mut held = LockedMachine::take();
    held.nccl.has_called(name);
    let device = current::current(&held);
    let outcome = match refusal(&mut held, name, device) {
        Some(refused) => Err(code(refused)),
        None => body(&mut held),
    };
    if name.ends_with("Synchronize") {
        held.memory.release_at_synchronize();
    }
    if held.config.trace {
        match &outcome {
            Ok(()) => eprintln!("simcuda: {name}"),
            Err(error) => eprintln!("simcuda: {name} -> {error:?}"),
        }
    }
    outcome
}

/// Why a call fails before it starts: the fault plan, no cuInit, or a device that was lost.
fn refusal(machine: &mut Machine, name: &'static str, device: Option<usize>) -> Option<CUresult> {
    // Answered by the library alone, whatever the state of the device.
    const ALWAYS: [&str; 5] = [
        "cuInit",
        "cuGetErrorName",
        "cuGetErrorString",
        "cuDriverGetVersion",
        "cuGetProcAddress_v2",
    ];
    if scheduler::in_host_function() {
        // "A host function must not make any CUDA API calls."
        report::finding(
            machine,
            FindingKind::ForbiddenCall,
            format!("{name} is called from a host function of a stream"),
        );
        return Some(CUresult::CUDA_ERROR_NOT_PERMITTED);
    }
    if let Some(refused) = machine.faults.before_call(name, device) {
        if refused.is_sticky
            && let Some(device) = device
        {
            lose_device(
                machine,
                device,
                refused.code,
                &format!("{name} fails by the plan of faults"),
            );
        }
        return Some(refused.code);
    }
    let is_driver = name.starts_with("cu") && !name.starts_with("cublas");
    if !is_driver || ALWAYS.contains(&name) {
        return None;
    }
    if !machine.initialised {
        return Some(CUresult::CUDA_ERROR_NOT_INITIALIZED);
    }
    let is_of_no_context = name.starts_with("cuDevice")
        || ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxGetDevice"].contains(&name);
    if is_of_no_context {
        return None;
    }
    match device {
        Some(device) => machine.devices[device].lost,
        None if needs_no_context(name) => None,
        None => Some(CUresult::CUDA_ERROR_INVALID_CONTEXT),
    }
}

/// Whether a call works on a thread without a current context: those whose documentation does not
/// list CUDA_ERROR_INVALID_CONTEXT. A handle that names its context does not help any other call.
fn needs_no_context(name: &str) -> bool {
    const OTHERS: [&str; 9] = [
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuEventQuery",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuStreamIsCapturing",
        "cuStreamGetCaptureInfo_v2",
        "cuStreamGetCaptureInfo_v3",
        "cuThreadExchangeStreamCaptureMode",
    ];
    ["cuGraph", "cuMemPool"]
        .iter()
        .any(|room| name.starts_with(room))
        || OTHERS.contains(&name)
}

/// Where a call writes a result: null is an error, and the old contents do not matter.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Writes a result back.
pub fn put<T>(out: Out<'_, T>, value: T) -> Result<(), CUresult> {
    out.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.write(value);
    Ok(())
}
