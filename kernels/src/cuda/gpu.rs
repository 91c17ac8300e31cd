//! One CUDA device as this process uses it: its context, its default stream, its memory pool, and events kept for reuse.
//! Made at first use and kept to the end of the process.

use std::cell::Cell;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUmemoryPool};

use super::calls;
use super::fault::{Outcome, describe, driver};
use super::queue::Queue;
use crate::Device;
use crate::device::discover;
use crate::error::{Error, Result, Site};

/// As many devices as one process can use: more than any machine has.
pub(crate) const GPUS_MAX: usize = 32;

/// One CUDA device of this process.
pub(crate) struct Gpu {
    pub(crate) index: usize,
    pub(crate) handle: CUdevice,
    pub(crate) context: CUcontext,
    /// Major and minor, `(9, 0)` for sm_90.
    pub(crate) capability: (u32, u32),
    /// Processors that run blocks.
    pub(crate) multiprocessors: u32,
    /// Where its tensors live. It keeps what is freed, so that in steady state nothing is asked of the driver.
    pub(crate) pool: CUmemoryPool,
    default_queue: OnceLock<Arc<Queue>>,
    /// For what this device does on behalf of a copy whose stream is another device's.
    side_queue: OnceLock<Arc<Queue>>,
    /// Events without timing that nobody holds any more.
    spare_events: Mutex<Vec<Handle<CUevent>>>,
}

static GPUS: [OnceLock<Result<Gpu, String>>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];

/// A handle of the driver's. They name things that any thread may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle<T>(pub(crate) T);
// SAFETY: the driver's functions take their handles from any thread; what a handle names is guarded by the driver's own locks.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; a shared handle is only ever copied out.
unsafe impl<T> Sync for Handle<T> {}

// SAFETY: the raw handles inside are the driver's, which any thread may use, and everything else is Send and Sync by itself.
unsafe impl Send for Gpu {}
// SAFETY: as above; fields that change are behind locks.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The device of this index, made ready at the first call. Refuses one that is not there, saying why.
    pub(crate) fn get(index: usize, op: &'static str, at: Site) -> Result<&'static Gpu> {
        let device = Device::Cuda(index);
        device.check_usable(op, at)?;
        let made = GPUS[index].get_or_init(|| {
            Gpu::make(index).map_err(|fault| {
                let (name, meaning) = describe(fault.code);
                format!("the driver has it, but {} said {name} ({meaning})", fault.function)
            })
        });
        made.as_ref().map_err(|why| Error::DeviceAbsent { op, device, why: why.clone(), at })
    }

    /// The device of this index, if it was ever used.
    pub(crate) fn if_made(index: usize) -> Option<&'static Gpu> {
        GPUS.get(index)?.get()?.as_ref().ok()
    }

    /// Any device of this process: one that is in use, or else the first.
    pub(crate) fn any(op: &'static str, at: Site) -> Result<&'static Gpu> {
        match (0..GPUS_MAX).find_map(Gpu::if_made) {
            Some(gpu) => Ok(gpu),
            None => Gpu::get(0, op, at),
        }
    }

    fn make(index: usize) -> Outcome<Gpu> {
        let mut handle = 0;
        let mut context = ptr::null_mut();
        // SAFETY: the driver is initialised (`check_usable` asked discovery) and has every function of `calls`; the
        // pointers are to variables of ours. The primary context is never released: it ends with the process.
        unsafe {
            driver!(cuDeviceGet(&mut handle, index as i32))?;
            driver!(cuDevicePrimaryCtxRetain(&mut context, handle))?;
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: as above.
            unsafe { driver!(cuDeviceGetAttribute(&mut value, which, handle)) }.map(|()| value.max(0) as u32)
        };
        use sys::CUdevice_attribute_enum as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1);
        let pool = make_pool(handle)?;
        Ok(Gpu {
            index,
            handle,
            context,
            capability,
            multiprocessors,
            pool,
            default_queue: OnceLock::new(),
            side_queue: OnceLock::new(),
            spare_events: Mutex::default(),
        })
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.index)
    }

    /// Makes this device's context the calling thread's. Costs nothing when it is already.
    pub(crate) fn bind(&self) -> Outcome<()> {
        thread_local! {
            /// The index of the device bound last, plus one.
            static BOUND: Cell<usize> = const { Cell::new(0) };
        }
        if BOUND.get() == self.index + 1 {
            return Ok(());
        }
        // SAFETY: the primary context is retained for the whole process.
        unsafe { driver!(cuCtxSetCurrent(self.context)) }?;
        BOUND.set(self.index + 1);
        Ok(())
    }

    /// The stream of operations for which no other was chosen. Not CUDA's own default stream, which waits for all others.
    pub(crate) fn default_queue(&'static self) -> Outcome<Arc<Queue>> {
        if let Some(queue) = self.default_queue.get() {
            return Ok(queue.clone());
        }
        let queue = Queue::new(self, 0, false)?;
        // Two threads at once: one of the two streams is dropped again.
        Ok(self.default_queue.get_or_init(|| queue).clone())
    }

    /// The stream for what this device does on behalf of a copy whose stream is another device's.
    pub(crate) fn side_queue(&'static self) -> Outcome<Arc<Queue>> {
        if let Some(queue) = self.side_queue.get() {
            return Ok(queue.clone());
        }
        let queue = Queue::new(self, u64::MAX, false)?;
        Ok(self.side_queue.get_or_init(|| queue).clone())
    }

    /// An event without timing: one that was given back, or a new one.
    pub(crate) fn take_event(&self) -> Outcome<CUevent> {
        let spare = self.spare_events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(event) = spare {
            return Ok(event.0);
        }
        self.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: the context is current, and the pointer is to a variable of ours.
        unsafe { driver!(cuEventCreate(&mut event, sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32)) }?;
        Ok(event)
    }

    /// Keeps an event for reuse: what waits for it already waits for what it marked when the wait was called.
    pub(crate) fn give_event_back(&self, event: CUevent) {
        self.spare_events.lock().unwrap_or_else(PoisonError::into_inner).push(Handle(event));
    }

    /// Blocks until everything given to this device is done.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        self.bind()?;
        // SAFETY: the context is current.
        unsafe { driver!(cuCtxSynchronize()) }
    }

    /// Free memory of the device and all of it, in bytes, as the driver says.
    pub(crate) fn memory_bytes(&self) -> Outcome<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current, and the pointers are to variables of ours.
        unsafe { driver!(cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }
}

/// A pool of our own on the device, which keeps what is given back to it.
fn make_pool(handle: CUdevice) -> Outcome<CUmemoryPool> {
    // SAFETY: all zeroes is a valid value: plain numbers, a null pointer, and enums for which 0 is defined.
    let mut properties: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
    properties.allocType = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = handle;
    let mut pool = ptr::null_mut();
    let mut keep_all = u64::MAX;
    // SAFETY: the properties are whole and the pointers are to variables of ours, of the types the attributes have.
    unsafe {
        driver!(cuMemPoolCreate(&mut pool, &properties))?;
        let threshold = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        driver!(cuMemPoolSetAttribute(pool, threshold, ptr::from_mut(&mut keep_all).cast()))?;
    }
    Ok(pool)
}

/// How many CUDA devices tensors can be made on.
pub(crate) fn usable_count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| if why_unusable().is_none() { discover().gpus.len().min(GPUS_MAX) } else { 0 })
}

/// Why the GPUs that discovery sees cannot be used, if they cannot.
pub(crate) fn why_unusable() -> Option<String> {
    if discover().gpus.is_empty() { None } else { calls::check().err() }
}
