//! The entry points of streams. Those of captures stand with the graphs, those of events with the
//! events.

use cudarc::driver::sys::{CUdevice, CUhostFn, CUstream};

use super::queue::{create, is_wait_ignored, new_operation, retire_if_over};
use super::{Order, enqueue_host, resolve};
use crate::error::CUresult;
use crate::graph::capture;
use crate::handle::{HandleKind, encode};
use crate::machine::{Out, call, call_waiting, current_device, put};
use crate::scheduler;
use crate::work::HostFunction;

const NON_BLOCKING: u32 = 1;
/// What cuCtxGetStreamPriorityRange says: the smaller the number, the higher the priority.
const PRIORITY_LEAST: i32 = 0;
const PRIORITY_GREATEST: i32 = -5;

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<'_, CUstream>, flags: u32) -> CUresult {
    call("cuStreamCreate", |machine| {
        let created = new_stream(machine, flags, 0)?;
        put(stream, created)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(
    stream: Out<'_, CUstream>,
    flags: u32,
    priority: i32,
) -> CUresult {
    call("cuStreamCreateWithPriority", |machine| {
        let created = new_stream(
            machine,
            flags,
            priority.clamp(PRIORITY_GREATEST, PRIORITY_LEAST),
        )?;
        put(stream, created)
    })
}

fn new_stream(
    machine: &mut crate::machine::Machine,
    flags: u32,
    priority: i32,
) -> Result<CUstream, CUresult> {
    let order = match flags {
        0 => Order::Blocking,
        NON_BLOCKING => Order::Free,
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    };
    let device = current_device(machine)?;
    Ok(encode(
        HandleKind::Stream,
        create(machine, device, order, flags, priority),
    ))
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call("cuStreamDestroy_v2", |machine| {
        // The streams that nobody created cannot be destroyed.
        if (stream as usize) <= 2 {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let stream = resolve(machine, stream)?;
        capture::leave(machine, stream);
        let device = super::device_of(machine, stream);
        let operation = new_operation(machine, "cuStreamDestroy", None, device, None);
        machine.streams.all[stream].destroyed = Some(operation);
        retire_if_over(machine, stream);
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    call_waiting("cuStreamSynchronize", |held| {
        let stream = resolve(held, stream)?;
        capture::check_not_capturing(held, stream, "cuStreamSynchronize")?;
        capture::forbid(held, "cuStreamSynchronize")?;
        if is_wait_ignored(held, "cuStreamSynchronize") {
            return Ok(());
        }
        scheduler::synchronize_stream(held, stream)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    call_waiting("cuStreamQuery", |held| {
        let stream = resolve(held, stream)?;
        capture::check_not_capturing(held, stream, "cuStreamQuery")?;
        capture::forbid(held, "cuStreamQuery")?;
        let goal = scheduler::goal_stream(held, stream);
        scheduler::query(held, &goal)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> CUresult {
    call_waiting("cuCtxSynchronize", |held| {
        let device = current_device(held)?;
        capture::check_device_not_capturing(held, device, "cuCtxSynchronize")?;
        capture::forbid(held, "cuCtxSynchronize")?;
        if is_wait_ignored(held, "cuCtxSynchronize") {
            return Ok(());
        }
        scheduler::synchronize_device(held, device)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: CUstream, priority: Out<'_, i32>) -> CUresult {
    call("cuStreamGetPriority", |machine| {
        let stream = resolve(machine, stream)?;
        put(priority, machine.streams.all[stream].priority)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: CUstream, flags: Out<'_, u32>) -> CUresult {
    call("cuStreamGetFlags", |machine| {
        let stream = resolve(machine, stream)?;
        put(flags, machine.streams.all[stream].flags)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetId(stream: CUstream, id: Out<'_, u64>) -> CUresult {
    call("cuStreamGetId", |machine| {
        let stream = resolve(machine, stream)?;
        put(id, stream as u64)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetDevice(stream: CUstream, device: Out<'_, CUdevice>) -> CUresult {
    call("cuStreamGetDevice", |machine| {
        let stream = resolve(machine, stream)?;
        put(device, super::device_of(machine, stream) as CUdevice)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: CUhostFn,
    argument: *mut std::ffi::c_void,
) -> CUresult {
    call("cuLaunchHostFunc", |machine| {
        let stream = resolve(machine, stream)?;
        let function = function.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        enqueue_host(
            machine,
            stream,
            HostFunction {
                function,
                argument: argument as usize,
            },
        )
    })
}
