//! The entry points of devices, and their attributes.

use std::ffi::{c_char, c_int};

use cudarc::driver::sys::{
    CUdevice_P2PAttribute as PeerAttribute, CUdevice_attribute as Attribute, CUuuid,
};

use crate::error::CUresult;
use crate::machine::{self, Machine, Out, put};

/// The device with this ordinal.
pub fn resolve(machine: &Machine, ordinal: c_int) -> Result<usize, CUresult> {
    usize::try_from(ordinal)
        .ok()
        .filter(|ordinal| *ordinal < machine.devices.len())
        .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> CUresult {
    machine::call("cuInit", |machine| {
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if machine.devices.is_empty() {
            return Err(CUresult::CUDA_ERROR_NO_DEVICE);
        }
        machine.initialised = true;
        machine::end::register();
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<'_, c_int>) -> CUresult {
    machine::call("cuDriverGetVersion", |_| put(version, 13000))
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<'_, c_int>, ordinal: c_int) -> CUresult {
    machine::call("cuDeviceGet", |machine| {
        put(device, resolve(machine, ordinal)? as c_int)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> CUresult {
    machine::call("cuDeviceGetCount", |machine| {
        put(count, machine.devices.len() as c_int)
    })
}

/// Writes `text` and a zero into the `length` bytes at `to`, and truncates like the driver.
///
/// # Safety
/// `to` is null or has `length` bytes.
unsafe fn write_text(to: *mut c_char, length: c_int, text: &str) -> Result<(), CUresult> {
    let length = usize::try_from(length).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
    if to.is_null() || length == 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let kept = text.len().min(length - 1);
    // SAFETY: `kept` bytes and the zero fit into `length`, which the caller vouches for; `text` has
    // `kept` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), to, kept);
        to.add(kept).write(0);
    }
    Ok(())
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(
    name: *mut c_char,
    length: c_int,
    device: c_int,
) -> CUresult {
    machine::call("cuDeviceGetName", |machine| {
        let text = machine.devices[resolve(machine, device)?].name();
        // SAFETY: the caller has `length` bytes at `name`, as the driver's documentation asks.
        unsafe { write_text(name, length, &text) }
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(
    bus_id: *mut c_char,
    length: c_int,
    device: c_int,
) -> CUresult {
    machine::call("cuDeviceGetPCIBusId", |machine| {
        let text = format!("0000:{:02X}:00.0", resolve(machine, device)? + 1);
        // SAFETY: the caller has `length` bytes at `bus_id`, as the driver's documentation asks.
        unsafe { write_text(bus_id, length, &text) }
    })
}

fn uuid(ordinal: usize) -> CUuuid {
    let mut bytes = *b"simulated GPU\0\0\0";
    bytes[15] = ordinal as u8;
    CUuuid {
        bytes: bytes.map(|byte| byte as c_char),
    }
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(to: Out<'_, CUuuid>, device: c_int) -> CUresult {
    machine::call("cuDeviceGetUuid_v2", |machine| {
        put(to, uuid(resolve(machine, device)?))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(to: Out<'_, CUuuid>, device: c_int) -> CUresult {
    machine::call("cuDeviceGetUuid", |machine| {
        put(to, uuid(resolve(machine, device)?))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<'_, usize>, device: c_int) -> CUresult {
    machine::call("cuDeviceTotalMem_v2", |machine| {
        put(
            bytes,
            machine.devices[resolve(machine, device)?].memory_bytes as usize,
        )
    })
}

/// Attributes by number: an H100's values where a program may rely on them, none where nothing is
/// simulated.
const ATTRIBUTES: &[(Attribute, c_int)] = &[
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, c_int::MAX),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
        48 << 10,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY,
        64 << 10,
    ),
    (Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK,
        64 << 10,
    ),
    (Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1_000_000),
    (Attribute::CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 8),
    (Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1_000_000),
    (Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 4 << 20),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
        2048,
    ),
    (Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2),
    (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED,
        1,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        228 << 10,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
        64 << 10,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        227 << 10,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        1,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED,
        1,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
        32,
    ),
    (
        Attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
        1 << 10,
    ),
    (Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512),
];

/// See the driver's documentation. Attributes of features that are not simulated are 0 (not
/// supported).
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(
    value: Out<'_, c_int>,
    attribute: c_int,
    device: c_int,
) -> CUresult {
    machine::call("cuDeviceGetAttribute", |machine| {
        let ordinal = resolve(machine, device)?;
        if !(1..Attribute::CU_DEVICE_ATTRIBUTE_MAX as c_int).contains(&attribute) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let is = |wanted: Attribute| attribute == wanted as c_int;
        let (major, minor) = machine.devices[ordinal].capability;
        let own = if is(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
            ordinal as c_int + 1
        } else if is(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) {
            major as c_int
        } else if is(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) {
            minor as c_int
        } else {
            let found = ATTRIBUTES.iter().find(|(known, _)| is(*known));
            found.map_or(0, |(_, value)| *value)
        };
        put(value, own)
    })
}

/// Whether `device` can be given access to the memory of `peer`.
pub fn can_access(machine: &Machine, device: usize, peer: usize) -> bool {
    device != peer && !machine.config.no_peer
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(
    can: Out<'_, c_int>,
    device: c_int,
    peer: c_int,
) -> CUresult {
    machine::call("cuDeviceCanAccessPeer", |machine| {
        let (device, peer) = (resolve(machine, device)?, resolve(machine, peer)?);
        machine.memory.asked_for_peers = true;
        put(can, c_int::from(can_access(machine, device, peer)))
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetP2PAttribute(
    value: Out<'_, c_int>,
    attribute: u32,
    from: c_int,
    to: c_int,
) -> CUresult {
    machine::call("cuDeviceGetP2PAttribute", |machine| {
        let (from, to) = (resolve(machine, from)?, resolve(machine, to)?);
        if from == to {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let supported = [
            PeerAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED as u32,
            PeerAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED as u32,
        ];
        put(
            value,
            c_int::from(supported.contains(&attribute) && can_access(machine, from, to)),
        )
    })
}
