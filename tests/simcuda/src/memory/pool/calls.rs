//! Entry points of memory pools.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::{
    CUmemAccess_flags as Flags, CUmemAllocationType, CUmemLocationType,
    CUmemPool_attribute as Attribute, CUmemoryPool,
};

use super::{Access, PoolId};
use crate::device;
use crate::error::CUresult;
use crate::machine::{self, Machine, Out, put};
use crate::report::{self, FindingKind};

/// Handles are addresses that nothing is at, so that a mix-up with another kind of handle shows.
const FIRST_HANDLE: usize = 0x5d00_0000;

/// What the product is given for a pool.
pub fn handle_of(pool: PoolId) -> CUmemoryPool {
    (FIRST_HANDLE + pool * 0x100) as CUmemoryPool
}

/// The pool that a handle stands for, unless it was destroyed.
pub fn resolve(machine: &mut Machine, handle: CUmemoryPool) -> Result<PoolId, CUresult> {
    let offset = (handle as usize)
        .checked_sub(FIRST_HANDLE)
        .filter(|offset| offset % 0x100 == 0);
    let pool = offset
        .map(|offset| offset / 0x100)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let is_destroyed = machine
        .memory
        .pools
        .get(pool)
        .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
        .is_destroyed;
    if is_destroyed {
        report::finding(
            machine,
            FindingKind::Handle,
            format!("memory pool {pool} is used after cuMemPoolDestroy"),
        );
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(pool)
}

/// `CUmemPoolProps` with its enums as numbers: whatever the caller wrote there is a valid value of
/// these.
#[repr(C)]
pub struct Properties {
    allocation_type: u32,
    handle_types: u32,
    location: Location,
    security_attributes: *mut c_void,
    max_bytes: usize,
    usage: u16,
    reserved: [u8; 54],
}

/// `CUmemLocation` with its enum as a number.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAccessDesc` with its enums as numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDescription {
    location: Location,
    flags: u32,
}

const _: () = assert!(size_of::<Properties>() == size_of::<cudarc::driver::sys::CUmemPoolProps>());
const _: () =
    assert!(size_of::<AccessDescription>() == size_of::<cudarc::driver::sys::CUmemAccessDesc>());

fn located(machine: &Machine, location: Location) -> Result<usize, CUresult> {
    if location.kind != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    device::resolve(machine, location.id)
}

/// See the driver's documentation. Pools of device memory whose memory is not shared with other
/// processes.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolCreate(
    pool: Out<'_, CUmemoryPool>,
    properties: Option<&Properties>,
) -> CUresult {
    machine::call("cuMemPoolCreate", |machine| {
        let properties = properties.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let is_plain = properties.allocation_type
            == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32
            && properties.security_attributes.is_null()
            && properties.usage == 0
            && properties.reserved.iter().all(|byte| *byte == 0);
        if !is_plain {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if properties.handle_types != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let device = located(machine, properties.location)?;
        put(
            pool,
            handle_of(
                machine
                    .memory
                    .pools
                    .create(device, properties.max_bytes as u64),
            ),
        )
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult {
    machine::call("cuMemPoolDestroy", |machine| {
        let pool = resolve(machine, pool)?;
        if machine
            .memory
            .pools
            .get(pool)
            .is_some_and(|pool| pool.is_default)
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        machine.memory.pools.destroy(pool);
        Ok(())
    })
}

/// See the driver's documentation.
///
/// # Safety
/// `value` holds the attribute.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAttribute(
    pool: CUmemoryPool,
    attribute: u32,
    value: *mut c_void,
) -> CUresult {
    machine::call("cuMemPoolSetAttribute", |machine| {
        let pool = resolve(machine, pool)?;
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        if value.is_null() {
            return Err(invalid);
        }
        let pool = machine.memory.pools.get_mut(pool).ok_or(invalid)?;
        // SAFETY: the driver's documentation asks for an int behind the attributes of reuse, and
        // for a 64-bit number behind the others. It does not ask for alignment as a u64 in so many
        // words, so none is assumed.
        let (number, flag) = unsafe {
            let is_flag =
                attribute <= Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES as u32;
            let number = if is_flag {
                0
            } else {
                value.cast::<u64>().read_unaligned()
            };
            (
                number,
                is_flag && value.cast::<c_int>().read_unaligned() != 0,
            )
        };
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] = flag,
            it if it == Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32 => {
                pool.release_threshold = number
            }
            // The marks can be reset, and to nothing else than 0.
            it if it == Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as u32 && number == 0 => {
                pool.reset_reserved_high()
            }
            it if it == Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH as u32 && number == 0 => {
                pool.reset_used_high()
            }
            _ => return Err(invalid),
        }
        Ok(())
    })
}

/// See the driver's documentation.
///
/// # Safety
/// `value` has room for the attribute.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolGetAttribute(
    pool: CUmemoryPool,
    attribute: u32,
    value: *mut c_void,
) -> CUresult {
    machine::call("cuMemPoolGetAttribute", |machine| {
        let pool = resolve(machine, pool)?;
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        if value.is_null() {
            return Err(invalid);
        }
        let pool = machine.memory.pools.get(pool).ok_or(invalid)?;
        let books = pool.books();
        let number = match attribute {
            1..=3 => {
                let flag = c_int::from(pool.reuse[attribute as usize - 1]);
                // SAFETY: the driver's documentation asks for room for an int behind these
                // attributes.
                unsafe { value.cast::<c_int>().write_unaligned(flag) };
                return Ok(());
            }
            it if it == Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32 => {
                pool.release_threshold
            }
            it if it == Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as u32 => books.reserved,
            it if it == Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as u32 => books.reserved_high,
            it if it == Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as u32 => books.used,
            it if it == Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH as u32 => books.used_high,
            _ => return Err(invalid),
        };
        // SAFETY: the driver's documentation asks for room for a 64-bit number behind all other
        // attributes.
        unsafe { value.cast::<u64>().write_unaligned(number) };
        Ok(())
    })
}

/// See the driver's documentation.
///
/// # Safety
/// `descriptions` has `count` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolSetAccess(
    pool: CUmemoryPool,
    descriptions: *const AccessDescription,
    count: usize,
) -> CUresult {
    machine::call("cuMemPoolSetAccess", |machine| {
        let pool = resolve(machine, pool)?;
        if descriptions.is_null() || count > 1024 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the caller has `count` entries there, of a type for which all bits
        // are valid.
        let descriptions = unsafe { std::slice::from_raw_parts(descriptions, count) };
        let home = machine
            .memory
            .pools
            .get(pool)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
            .device;
        let mut changes = Vec::with_capacity(count);
        for description in descriptions {
            let device = located(machine, description.location)?;
            let access = access_from(description.flags)?;
            if device == home && access != Some(Access::ReadWrite) {
                // "An error is returned if the access of the pool's own device would be revoked."
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
            if device != home && access.is_some() && !device::can_access(machine, device, home) {
                return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
            }
            changes.push((device, access));
        }
        let pool = machine
            .memory
            .pools
            .get_mut(pool)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        changes
            .into_iter()
            .filter(|(device, _)| *device != home)
            .for_each(|(device, access)| pool.set_access(device, access));
        Ok(())
    })
}

fn access_from(flags: u32) -> Result<Option<Access>, CUresult> {
    match flags {
        it if it == Flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32 => Ok(None),
        it if it == Flags::CU_MEM_ACCESS_FLAGS_PROT_READ as u32 => Ok(Some(Access::Read)),
        it if it == Flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32 => Ok(Some(Access::ReadWrite)),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolGetAccess(
    flags: Out<'_, u32>,
    pool: CUmemoryPool,
    location: Option<&Location>,
) -> CUresult {
    machine::call("cuMemPoolGetAccess", |machine| {
        let pool = resolve(machine, pool)?;
        let device = located(
            machine,
            *location.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
        )?;
        let access = machine
            .memory
            .pools
            .get(pool)
            .and_then(|pool| pool.access_of(device));
        put(
            flags,
            match access {
                None => Flags::CU_MEM_ACCESS_FLAGS_PROT_NONE as u32,
                Some(Access::Read) => Flags::CU_MEM_ACCESS_FLAGS_PROT_READ as u32,
                Some(Access::ReadWrite) => Flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32,
            },
        )
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize) -> CUresult {
    machine::call("cuMemPoolTrimTo", |machine| {
        let pool = resolve(machine, pool)?;
        machine
            .memory
            .pools
            .get_mut(pool)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
            .trim(keep_bytes as u64);
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetDefaultMemPool(
    pool: Out<'_, CUmemoryPool>,
    device: c_int,
) -> CUresult {
    // Default pools have the numbers of their devices.
    machine::call("cuDeviceGetDefaultMemPool", |machine| {
        put(pool, handle_of(device::resolve(machine, device)?))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetMemPool(pool: Out<'_, CUmemoryPool>, device: c_int) -> CUresult {
    machine::call("cuDeviceGetMemPool", |machine| {
        let device = device::resolve(machine, device)?;
        put(pool, handle_of(machine.memory.pools.current(device)))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceSetMemPool(device: c_int, pool: CUmemoryPool) -> CUresult {
    machine::call("cuDeviceSetMemPool", |machine| {
        let device = device::resolve(machine, device)?;
        let pool = resolve(machine, pool)?;
        if machine
            .memory
            .pools
            .get(pool)
            .is_none_or(|pool| pool.device != device)
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        machine.memory.pools.set_current(device, pool);
        Ok(())
    })
}
