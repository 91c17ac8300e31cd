//! Contexts: the primary context of each device, which one is current on a thread, and peer access.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};

use cudarc::driver::sys::{CUcontext, CUdriverProcAddressQueryResult as Query};

use crate::device;
use crate::error::CUresult;
use crate::machine::{self, LockedMachine, Machine, Out, current, put};
use crate::report::{self, FindingKind};
use crate::scheduler;

/// Handles are addresses where nothing is mapped, so that mixing up kinds of handles is noticed.
const FIRST_HANDLE: usize = 0x5c00_0000;

fn handle_of(device: usize) -> CUcontext {
    (FIRST_HANDLE + device * 0x100) as CUcontext
}

/// The device whose primary context `handle` is.
pub fn resolve(machine: &mut Machine, handle: CUcontext) -> Result<usize, CUresult> {
    let found = (0..machine.devices.len()).find(|device| handle_of(*device) == handle);
    let Some(device) = found.filter(|device| machine.devices[*device].had_context) else {
        return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
    };
    if machine.devices[device].holders == 0 {
        let message = format!(
            "the context of device {device} is used after its last holder gave it back (cuDevicePrimaryCtxRelease)"
        );
        report::finding(machine, FindingKind::Handle, message);
        return Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    Ok(device)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, CUcontext>, device: c_int) -> CUresult {
    machine::call("cuDevicePrimaryCtxRetain", |machine| {
        let device = device::resolve(machine, device)?;
        if let Some(code) = machine.devices[device].lost {
            return Err(code);
        }
        put(context, handle_of(device))?;
        machine.devices[device].holders += 1;
        machine.devices[device].had_context = true;
        Ok(())
    })
}

/// See the driver's documentation. The last holder's release waits for the device; memory it still
/// has is not freed.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> CUresult {
    machine::call_waiting(
        "cuDevicePrimaryCtxRelease_v2",
        |machine: &mut LockedMachine| {
            let device = device::resolve(machine, device)?;
            if machine.devices[device].holders == 0 {
                return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
            }
            if machine.devices[device].holders == 1 && machine.devices[device].lost.is_none() {
                scheduler::synchronize_device(machine, device)?;
            }
            machine.devices[device].holders -= 1;
            Ok(())
        },
    )
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<'_, CUcontext>) -> CUresult {
    machine::call("cuCtxGetCurrent", |machine| {
        put(
            context,
            current::current(machine).map_or(std::ptr::null_mut(), handle_of),
        )
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    machine::call("cuCtxSetCurrent", |machine| {
        let device = if context.is_null() {
            None
        } else {
            Some(resolve(machine, context)?)
        };
        current::set(device);
        Ok(())
    })
}

thread_local! {
    /// The contexts that cuCtxPopCurrent returns to.
    static PUSHED: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) };
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    machine::call("cuCtxPushCurrent_v2", |machine| {
        let device = resolve(machine, context)?;
        PUSHED.with_borrow_mut(|pushed| pushed.push(current::set(Some(device))));
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<'_, CUcontext>) -> CUresult {
    machine::call("cuCtxPopCurrent_v2", |machine| {
        let popped = machine::current_device(machine)?;
        if context.is_some() {
            put(context, handle_of(popped))?;
        }
        current::set(PUSHED.with_borrow_mut(Vec::pop).flatten());
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<'_, u32>,
    active: Out<'_, c_int>,
) -> CUresult {
    machine::call("cuDevicePrimaryCtxGetState", |machine| {
        let device = device::resolve(machine, device)?;
        put(flags, 0)?;
        put(active, c_int::from(machine.devices[device].holders > 0))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<'_, c_int>) -> CUresult {
    machine::call("cuCtxGetDevice", |machine| {
        put(device, machine::current_device(machine)? as c_int)
    })
}

/// See the driver's documentation. Either result pointer may be null.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(
    least: Out<'_, c_int>,
    greatest: Out<'_, c_int>,
) -> CUresult {
    machine::call("cuCtxGetStreamPriorityRange", |machine| {
        machine::current_device(machine)?;
        if least.is_some() {
            put(least, 0)?;
        }
        if greatest.is_some() {
            put(greatest, -5)?;
        }
        Ok(())
    })
}

/// See the driver's documentation. The current context gets access to `peer`'s memory, except pool
/// memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) -> CUresult {
    machine::call("cuCtxEnablePeerAccess", |machine| {
        let device = machine::current_device(machine)?;
        let peer = resolve(machine, peer)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if device == peer {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        if !device::can_access(machine, device, peer) {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        if machine.memory.enable_peer(device, peer) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        }
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDisablePeerAccess(peer: CUcontext) -> CUresult {
    machine::call("cuCtxDisablePeerAccess", |machine| {
        let device = machine::current_device(machine)?;
        let peer = resolve(machine, peer)?;
        if machine.memory.disable_peer(device, peer) {
            Ok(())
        } else {
            Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
        }
    })
}

/// See the driver's documentation. Finds what this library exports, except functions that the fault
/// plan removes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: Out<'_, *mut c_void>,
    _version: c_int,
    _flags: u64,
    status: Out<'_, Query>,
) -> CUresult {
    machine::call("cuGetProcAddress_v2", |machine| {
        if symbol.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the driver's documentation requires a zero-terminated string.
        let name = unsafe { CStr::from_ptr(symbol) };
        let found = if machine.faults.is_missing(&name.to_string_lossy()) {
            std::ptr::null_mut()
        } else {
            own_symbol(name)
        };
        put(function, found)?;
        let is_missing = found.is_null();
        if status.is_some() {
            put(
                status,
                if is_missing {
                    Query::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
                } else {
                    Query::CU_GET_PROC_ADDRESS_SUCCESS
                },
            )?;
        }
        if is_missing {
            Err(CUresult::CUDA_ERROR_NOT_FOUND)
        } else {
            Ok(())
        }
    })
}

/// The newest version of an entry point of this library, by its unversioned name.
fn own_symbol(name: &CStr) -> *mut c_void {
    // SAFETY: `Dl_info` is plain data for which zeros are valid. dladdr fills it with strings that
    // live as long as the library that contains this function. RTLD_NOLOAD returns a handle to an
    // already loaded library; keeping it open keeps nothing else alive.
    let library = unsafe {
        let mut own: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(own_symbol as *const c_void, &mut own) == 0 {
            return std::ptr::null_mut();
        }
        libc::dlopen(own.dli_fname, libc::RTLD_NOLOAD | libc::RTLD_NOW)
    };
    if library.is_null() {
        return std::ptr::null_mut();
    }
    let versions = ["_v3", "_v2", ""]
        .into_iter()
        .map(|version| [name.to_bytes(), version.as_bytes(), b"\0"].concat());
    // SAFETY: the handle is open, and each name is zero-terminated.
    let mut found =
        versions.map(|versioned| unsafe { libc::dlsym(library, versioned.as_ptr().cast()) });
    found
        .find(|found| !found.is_null())
        .unwrap_or(std::ptr::null_mut())
}
