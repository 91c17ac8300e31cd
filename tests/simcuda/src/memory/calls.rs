//! Entry points that allocate and free: in stream order, directly, and pinned.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdeviceptr, CUmemoryPool, CUmemorytype, CUpointer_attribute as Attribute, CUstream,
};

use super::allocation::{Allocation, End, Made};
use super::pool::{self, PoolId};
use super::{Owner, Turn, pinned};
use crate::error::CUresult;
use crate::graph::capture;
use crate::handle::StreamId;
use crate::machine::{self, LockedMachine, Machine, Out, host_actor, put};
use crate::race::Clock;
use crate::report::{self, FindingKind};
use crate::scheduler;
use crate::stream;

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> CUresult {
    machine::call("cuMemGetInfo_v2", |machine| {
        let device = machine::current_device(machine)?;
        put(free, machine.memory.free_bytes(device) as usize)?;
        put(total, machine.devices[device].memory_bytes as usize)
    })
}

/// Takes `bytes` from a pool, in the order of a stream.
fn allocate_ordered(
    machine: &mut Machine,
    name: &'static str,
    pool: PoolId,
    stream: StreamId,
    bytes: usize,
) -> Result<CUdeviceptr, CUresult> {
    if bytes == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if stream::is_capturing(machine, stream) {
        let message = format!(
            "{name} of {bytes} bytes (the graph would own the memory, which is not simulated)"
        );
        return Err(capture::unsupported(machine, stream, &message));
    }
    let bytes = bytes as u64;
    let device = machine
        .memory
        .pools
        .get(pool)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
        .device;
    let free = machine.memory.free_bytes(device);
    machine.memory.pools.take(pool, bytes, free)?;
    let owner = Owner::Device {
        device,
        pool: Some(pool),
    };
    let made = machine
        .memory
        .allocate(owner, bytes, Made::now(name, Some(stream)));
    let allocation = made.inspect_err(|_| machine.memory.pools.give_back(pool, bytes))?;
    let describe = format!("{name} of {bytes} bytes");
    let turn = Turn::Allocate(Arc::clone(&allocation));
    if let Err(code) = stream::enqueue_turn(machine, stream, &describe, turn) {
        machine.memory.pools.give_back(pool, bytes);
        machine.memory.release(&allocation);
        return Err(code);
    }
    Ok(allocation.range.start)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocFromPoolAsync(
    pointer: Out<'_, CUdeviceptr>,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    machine::call("cuMemAllocFromPoolAsync", |machine| {
        let pool = pool::calls::resolve(machine, pool)?;
        let stream = stream::resolve(machine, stream)?;
        put(
            pointer,
            allocate_ordered(machine, "cuMemAllocFromPoolAsync", pool, stream, bytes)?,
        )
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(
    pointer: Out<'_, CUdeviceptr>,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    machine::call("cuMemAllocAsync", |machine| {
        let stream = stream::resolve(machine, stream)?;
        let pool = machine
            .memory
            .pools
            .current(stream::device_of(machine, stream));
        put(
            pointer,
            allocate_ordered(machine, "cuMemAllocAsync", pool, stream, bytes)?,
        )
    })
}

/// Finds the allocation that a call frees, and marks it as freed by it. Anything else is a finding
/// and an error.
fn end(machine: &mut Machine, pointer: u64, made: Made) -> Result<Arc<Allocation>, CUresult> {
    let name = made.by;
    let Some(allocation) = machine.memory.at(pointer).cloned() else {
        let message = match machine.memory.holding(pointer) {
            Some(inside) => format!(
                "{name}({pointer:#x}) does not name the beginning, but byte {} of {inside}",
                pointer - inside.range.start
            ),
            None => format!("{name}({pointer:#x}): nothing was ever allocated there"),
        };
        report::finding(machine, FindingKind::OutOfBounds, message);
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    if let Err(earlier) = allocation.begin_end(End(made)) {
        let message = format!("{name}({pointer:#x}) frees {allocation} again, which was {earlier}");
        report::finding(machine, FindingKind::DoubleFree, message);
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(allocation)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) -> CUresult {
    machine::call("cuMemFreeAsync", |machine| {
        let stream = stream::resolve(machine, stream)?;
        if stream::is_capturing(machine, stream) {
            let message = format!(
                "cuMemFreeAsync of {pointer:#x} (the graph would free the memory at each launch)"
            );
            return Err(capture::unsupported(machine, stream, &message));
        }
        // Memory without a pool cannot be freed in stream order; `end` reports freed memory.
        if machine
            .memory
            .at(pointer)
            .is_some_and(|found| found.owner.pool().is_none() && found.end().is_none())
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let allocation = end(machine, pointer, Made::now("cuMemFreeAsync", Some(stream)))?;
        let pool = allocation
            .owner
            .pool()
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let describe = format!("cuMemFreeAsync of {} bytes", allocation.bytes());
        let bytes = allocation.bytes();
        stream::enqueue_turn(machine, stream, &describe, Turn::Free(allocation, pool))?;
        machine.memory.pools.give_back_in_order(pool, bytes);
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(pointer: Out<'_, CUdeviceptr>, bytes: usize) -> CUresult {
    machine::call("cuMemAlloc_v2", |machine| {
        let device = machine::current_device(machine)?;
        capture::forbid(machine, "cuMemAlloc")?;
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let owner = Owner::Device { device, pool: None };
        let allocation =
            machine
                .memory
                .allocate(owner, bytes as u64, Made::now("cuMemAlloc", None))?;
        let operation = stream::note(machine, &format!("cuMemAlloc of {bytes} bytes"), device);
        let host = host_actor(machine);
        machine
            .race
            .allocate(allocation.range.clone(), host, operation);
        put(pointer, allocation.range.start)
    })
}

/// See the driver's documentation. It waits for the device as the driver does, but without a
/// promise: the host learns nothing. Pool memory is freed without waiting: its users must have been
/// waited for.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    machine::call_waiting("cuMemFree_v2", |machine: &mut LockedMachine| {
        let current = machine::current_device(machine)?;
        capture::forbid(machine, "cuMemFree")?;
        if pointer == 0 {
            return Ok(());
        }
        if machine
            .memory
            .at(pointer)
            .is_some_and(|found| found.owner.device().is_none() && found.end().is_none())
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let allocation = end(machine, pointer, Made::now("cuMemFree", None))?;
        let device = allocation.owner.device().unwrap_or(current);
        let waited_for = match allocation.owner.pool() {
            Some(pool) => {
                machine.memory.pools.give_back(pool, allocation.bytes());
                Vec::new()
            }
            None => {
                let goal = scheduler::goal_device(machine, device);
                scheduler::wait_without_promise(machine, &goal)?
            }
        };
        free_now(machine, &allocation, device, "cuMemFree", &waited_for);
        Ok(())
    })
}

/// The host frees after it has `waited_for` this: whoever used the memory must be ordered before.
fn free_now(
    machine: &mut Machine,
    allocation: &Arc<Allocation>,
    device: usize,
    name: &str,
    waited_for: &[Clock],
) {
    let operation = stream::note(
        machine,
        &format!("{name} of {} bytes", allocation.bytes()),
        device,
    );
    let host = host_actor(machine);
    let known = machine.race.snapshot(host);
    // A separate actor: what precedes the free does not thereby precede the host's next actions.
    let freer = machine.race.actor();
    waited_for
        .iter()
        .chain([&known])
        .for_each(|clock| machine.race.join(freer, clock));
    if let Some(race) = machine
        .race
        .free(allocation.range.clone(), freer, operation)
    {
        report::race(machine, &race);
    }
    machine.race.retire(freer);
    machine.memory.release(allocation);
}

fn allocate_pinned(
    machine: &mut Machine,
    name: &'static str,
    bytes: usize,
) -> Result<*mut c_void, CUresult> {
    machine::current_device(machine)?;
    capture::forbid(machine, name)?;
    if bytes == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    pinned::install_handler();
    let allocation = machine
        .memory
        .allocate_pinned(bytes as u64, Made::now(name, None))?;
    Ok(allocation.range.start as *mut c_void)
}

/// See the driver's documentation. All pinned memory is portable and mapped, as with unified
/// addressing.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(
    pointer: Out<'_, *mut c_void>,
    bytes: usize,
    flags: u32,
) -> CUresult {
    machine::call("cuMemHostAlloc", |machine| {
        // Portable, device map, write-combined.
        if flags & !7 != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        put(pointer, allocate_pinned(machine, "cuMemHostAlloc", bytes)?)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(pointer: Out<'_, *mut c_void>, bytes: usize) -> CUresult {
    machine::call("cuMemAllocHost_v2", |machine| {
        put(pointer, allocate_pinned(machine, "cuMemAllocHost", bytes)?)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    machine::call("cuMemFreeHost", |machine| {
        let device = machine::current_device(machine)?;
        capture::forbid(machine, "cuMemFreeHost")?;
        let pointer = pointer as u64;
        if machine
            .memory
            .at(pointer)
            .is_some_and(|found| found.owner.device().is_some() && found.end().is_none())
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if let Some(found) = machine
            .memory
            .at(pointer)
            .filter(|found| found.end().is_none())
            && let Some(user) = machine.memory.in_flight.describe_user(found)
        {
            let message = format!("cuMemFreeHost frees {found}\n  while it is in flight: {user}");
            report::finding(machine, FindingKind::HostAccess, message);
        }
        let allocation = end(machine, pointer, Made::now("cuMemFreeHost", None))?;
        free_now(machine, &allocation, device, "cuMemFreeHost", &[]);
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(
    pointer: Out<'_, CUdeviceptr>,
    host: *mut c_void,
    flags: u32,
) -> CUresult {
    machine::call("cuMemHostGetDevicePointer_v2", |machine| {
        machine::current_device(machine)?;
        let is_pinned = machine
            .memory
            .holding(host as u64)
            .is_some_and(|found| found.owner.device().is_none());
        if flags != 0 || !is_pinned {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        put(pointer, host as u64)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetAddressRange_v2(
    start: Out<'_, CUdeviceptr>,
    bytes: Out<'_, usize>,
    pointer: CUdeviceptr,
) -> CUresult {
    machine::call("cuMemGetAddressRange_v2", |machine| {
        let found = machine
            .memory
            .holding(pointer)
            .cloned()
            .ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
        if start.is_some() {
            put(start, found.range.start)?;
        }
        if bytes.is_some() {
            put(bytes, found.bytes() as usize)?;
        }
        Ok(())
    })
}

/// See the driver's documentation. Only the attributes that say what a pointer is of.
///
/// # Safety
/// `data` has room for the attribute.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: u32,
    pointer: CUdeviceptr,
) -> CUresult {
    machine::call("cuPointerGetAttribute", |machine| {
        let found = machine
            .memory
            .holding(pointer)
            .cloned()
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if data.is_null() {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let device = found.owner.device();
        let number = |value: u32| (u64::from(value), 4);
        let (value, bytes): (u64, usize) = match attribute {
            it if it == Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32 => {
                number(match device {
                    Some(_) => CUmemorytype::CU_MEMORYTYPE_DEVICE as u32,
                    None => CUmemorytype::CU_MEMORYTYPE_HOST as u32,
                })
            }
            it if it == Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER as u32 => (pointer, 8),
            it if it == Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER as u32 && device.is_none() => {
                (pointer, 8)
            }
            it if it == Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED as u32 => (0, 1),
            it if it == Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as u32 => {
                // Pinned memory belongs to the device whose context made it; any is as good under
                // unified addressing.
                (c_int::try_from(device.unwrap_or(0)).unwrap_or(0) as u64, 4)
            }
            it if it == Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as u32 => {
                (found.range.start, 8)
            }
            it if it == Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE as u32 => (found.bytes(), 8),
            it if it == Attribute::CU_POINTER_ATTRIBUTE_MAPPED as u32 => (1, 1),
            it if it == Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32 => (
                found
                    .owner
                    .pool()
                    .map_or(0, |pool| pool::calls::handle_of(pool) as u64),
                8,
            ),
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        // SAFETY: the caller has room for the attribute, whose size this is; the machine is
        // little-endian, so the first bytes count.
        unsafe {
            std::ptr::copy_nonoverlapping(value.to_le_bytes().as_ptr(), data.cast::<u8>(), bytes)
        };
        Ok(())
    })
}
