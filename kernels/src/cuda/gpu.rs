//! One CUDA device of this process: its context, its memory pool, and events kept for reuse.
//! Made at first use and kept until the process ends.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUmemoryPool};

use super::calls::CUresult;
use super::calls::{DriverFault, Outcome, describe, driver};
use super::devices::GPUS_MAX;
use crate::Device;
use crate::error::{Caller, Result};
use crate::panics::lock;

/// One CUDA device of this process.
pub(crate) struct Gpu {
    pub(crate) index: usize,
    pub(crate) handle: CUdevice,
    pub(crate) context: CUcontext,
    /// Major and minor: `(9, 0)` for sm_90.
    pub(crate) capability: (u32, u32),
    /// The number of streaming multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Bytes per second that the device's memory can move at most.
    pub(crate) bandwidth: f64,
    /// The pool of all tensors. It keeps freed memory, so a steady state asks the driver for none.
    pub(crate) pool: CUmemoryPool,
    /// Captures under way, on any thread.
    pub(super) captures: AtomicUsize,
    /// Events without timing, kept for reuse.
    spare_events: Mutex<Vec<Handle<CUevent>>>,
}

static GPUS: [OnceLock<Gpu>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];

/// A handle of the driver's, which any thread may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle<T>(pub(crate) T);
macro_rules! from_any_thread {
    ($($handle:ty),*) => {$(
        // SAFETY: the driver takes these handles from any thread and locks what they name; whoever
        // holds an executable graph locks it itself.
        unsafe impl Send for Handle<$handle> {}
        // SAFETY: as above; a shared handle is only copied out.
        unsafe impl Sync for Handle<$handle> {}
    )*};
}
// The last are cuBLASLt's.
from_any_thread!(
    CUevent,
    sys::CUfunction,
    sys::CUgraphExec,
    sys::CUmodule,
    *mut std::ffi::c_void
);

// SAFETY: the raw handles are the driver's, which any thread may use; the rest is Send and Sync.
unsafe impl Send for Gpu {}
// SAFETY: as above; fields that change are behind locks.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The device of this index, made at the first call; an error says why it cannot be used.
    pub(crate) fn get(index: usize, by: Caller) -> Result<&'static Gpu> {
        let device = Device::Cuda(index);
        device.check_usable(by)?;
        if let Some(gpu) = Gpu::if_made(index) {
            return Ok(gpu);
        }
        static MAKING: Mutex<()> = Mutex::new(());
        let _alone = lock(&MAKING);
        if let Some(gpu) = Gpu::if_made(index) {
            return Ok(gpu);
        }
        // A failure is not remembered: the device may have free memory next time.
        let gpu = Gpu::make(index).map_err(|fault| {
            let (name, meaning) = describe(fault.code);
            let why = format!("{} failed: {name} ({meaning})", fault.function);
            by.absent(device, why)
        })?;
        Ok(GPUS[index].get_or_init(|| gpu))
    }

    /// The device of this index, if it was ever used.
    pub(crate) fn if_made(index: usize) -> Option<&'static Gpu> {
        GPUS.get(index)?.get()
    }

    /// The first device that this process uses, if it uses any.
    pub(crate) fn any_made() -> Option<&'static Gpu> {
        (0..GPUS_MAX).find_map(Gpu::if_made)
    }

    fn make(index: usize) -> Outcome<Gpu> {
        let mut handle = 0;
        let mut context = ptr::null_mut();
        // SAFETY: `check_usable` found the driver initialised and every function of `calls` there;
        // the pointers are to local variables. The primary context is never released.
        unsafe {
            driver!(cuDeviceGet(&mut handle, index as i32))?;
            driver!(cuDevicePrimaryCtxRetain(&mut context, handle))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: as above.
            unsafe { driver!(cuDeviceGetAttribute(&mut value, which, handle)) }
                .map(|()| value.max(0) as u32)
        };
        use sys::CUdevice_attribute_enum as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1);
        let clock_khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bus_bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        // Two transfers a clock.
        let bandwidth = 2.0 * f64::from(clock_khz) * 1e3 * f64::from(bus_bits) / 8.0;
        Ok(Gpu {
            index,
            handle,
            context,
            capability,
            multiprocessors,
            bandwidth,
            pool: make_pool(handle)?,
            captures: AtomicUsize::new(0),
            spare_events: Mutex::default(),
        })
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.index)
    }

    /// Makes this device's context the calling thread's. The driver is asked each time, because
    /// other libraries in the process choose devices too.
    pub(crate) fn bind(&self) -> Outcome<()> {
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a local variable; the context is retained for the process.
        unsafe {
            driver!(cuCtxGetCurrent(&mut current))?;
            if current == self.context {
                Ok(())
            } else {
                driver!(cuCtxSetCurrent(self.context))
            }
        }
    }

    /// Whether any thread captures on this device: then no thread may wait for the whole device.
    pub(crate) fn has_captures(&self) -> bool {
        self.captures.load(Ordering::Relaxed) > 0
    }

    /// An event without timing: a reused one, or a new one.
    pub(super) fn take_event(&self) -> Outcome<CUevent> {
        if let Some(event) = lock(&self.spare_events).pop() {
            return Ok(event.0);
        }
        self.bind()?;
        let mut event = ptr::null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the context is current, and the pointer is to a local variable.
        unsafe { driver!(cuEventCreate(&mut event, flags)) }?;
        Ok(event)
    }

    /// Keeps an event for reuse. A wait already given is for what the event marked at that time.
    pub(super) fn give_event_back(&self, event: CUevent) {
        lock(&self.spare_events).push(Handle(event));
    }

    /// Blocks until all work given to this device is done. Refused during any thread's capture,
    /// which it would break.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        if self.has_captures() {
            return Err(DriverFault {
                function: "cuCtxSynchronize",
                code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            });
        }
        self.bind()?;
        // SAFETY: the context is current.
        unsafe { driver!(cuCtxSynchronize()) }
    }

    /// Bytes of the device's memory that no process uses.
    pub(crate) fn free_bytes(&self) -> Outcome<usize> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current, and the pointers are to local variables.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(free)
    }
}

/// A memory pool that keeps what is given back to it.
fn make_pool(handle: CUdevice) -> Outcome<CUmemoryPool> {
    use sys::CUmemPool_attribute_enum as Attribute;
    // SAFETY: all zeros is a valid value: plain numbers, a null pointer, enums with a variant 0.
    let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = handle;
    let mut pool = ptr::null_mut();
    let mut keep_all = u64::MAX;
    // An allocation must not make a stream wait for another stream's free.
    let mut never = 0i32;
    let (keep_all, never) = (ptr::from_mut(&mut keep_all), ptr::from_mut(&mut never));
    let threshold = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    let internal = Attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    // SAFETY: the properties are complete, and the pointers are to local variables of the
    // attributes' types.
    unsafe {
        driver!(cuMemPoolCreate(&mut pool, &properties))?;
        driver!(cuMemPoolSetAttribute(pool, threshold, keep_all.cast()))?;
        driver!(cuMemPoolSetAttribute(pool, internal, never.cast()))?;
    }
    Ok(pool)
}
