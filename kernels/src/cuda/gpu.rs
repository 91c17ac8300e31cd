//! One CUDA device as this process uses it: its context, its default stream, its memory pool, and events kept for reuse.
//! Made at first use and kept to the end of the process.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUmemoryPool, CUresult};

use super::calls;
use super::fault::{Fault, Outcome, describe, driver};
use super::queue::Queue;
use crate::Device;
use crate::device::discover;
use crate::error::{Error, Result, Site};

/// As many devices as one process can use: more than any machine has.
pub(crate) const GPUS_MAX: usize = 64;

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
    reaper: OnceLock<Arc<Queue>>,
    capture_queues: Mutex<Vec<Arc<Queue>>>,
    /// Captures under way, on any thread.
    captures: AtomicUsize,
    /// Events without timing that nobody holds any more.
    spare_events: Mutex<Vec<Handle<CUevent>>>,
}

static GPUS: [OnceLock<Gpu>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];

/// A handle of the driver's. They name things that any thread may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle<T>(pub(crate) T);
macro_rules! from_any_thread {
    ($($handle:ty),*) => {$(
        // SAFETY: the driver's functions take these handles from any thread; what a handle names is guarded by the driver's own locks, or
        // (executable graphs) by whoever holds the handle.
        unsafe impl Send for Handle<$handle> {}
        // SAFETY: as above; a shared handle is only ever copied out.
        unsafe impl Sync for Handle<$handle> {}
    )*};
}
// The last are cuBLASLt's.
from_any_thread!(CUevent, sys::CUfunction, sys::CUgraphExec, sys::CUmodule, *mut std::ffi::c_void);

// SAFETY: the raw handles inside are the driver's, which any thread may use, and everything else is Send and Sync by itself.
unsafe impl Send for Gpu {}
// SAFETY: as above; fields that change are behind locks.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// The device of this index, made ready at the first call. Refuses one that is not there, saying why.
    pub(crate) fn get(index: usize, op: &'static str, at: Site) -> Result<&'static Gpu> {
        let device = Device::Cuda(index);
        device.check_usable(op, at)?;
        if let Some(gpu) = GPUS[index].get() {
            return Ok(gpu);
        }
        static MAKING: Mutex<()> = Mutex::new(());
        let _alone = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = GPUS[index].get() {
            return Ok(gpu);
        }
        // A refusal is not remembered: somebody else's memory may be free again next time.
        let gpu = Gpu::make(index).map_err(|fault| {
            let (name, meaning) = describe(fault.code);
            let why = format!("the driver has it, but {} said {name} ({meaning})", fault.function);
            Error::DeviceAbsent { op, device, why, at }
        })?;
        Ok(GPUS[index].get_or_init(|| gpu))
    }

    /// The device of this index, if it was ever used.
    pub(crate) fn if_made(index: usize) -> Option<&'static Gpu> {
        GPUS.get(index)?.get()
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
            reaper: OnceLock::new(),
            capture_queues: Mutex::default(),
            captures: AtomicUsize::new(0),
            spare_events: Mutex::default(),
        })
    }

    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.index)
    }

    /// Makes this device's context the calling thread's. The driver is asked each time: other libraries in the process choose
    /// devices too.
    pub(crate) fn bind(&self) -> Outcome<()> {
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is to a variable of ours; the primary context is retained for the whole process.
        unsafe {
            driver!(cuCtxGetCurrent(&mut current))?;
            if current == self.context { Ok(()) } else { driver!(cuCtxSetCurrent(self.context)) }
        }
    }

    /// A stream that nobody uses, for a capture: with the priority of the one that it stands for.
    pub(super) fn take_capture_queue(&'static self, urgent: bool) -> Outcome<Arc<Queue>> {
        let mut spare = self.capture_queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(position) = spare.iter().position(|queue| queue.urgent == urgent) {
            return Ok(spare.swap_remove(position));
        }
        drop(spare);
        Queue::new(self, u64::MAX, urgent)
    }

    pub(super) fn give_capture_queue_back(&self, queue: Arc<Queue>) {
        self.capture_queues.lock().unwrap_or_else(PoisonError::into_inner).push(queue);
    }

    /// Counts a capture that begins or ends.
    pub(super) fn count_capture(&self, begins: bool) {
        if begins {
            self.captures.fetch_add(1, Ordering::Relaxed);
        } else {
            self.captures.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether any thread captures on this device: then nobody may wait for the device as a whole.
    pub(crate) fn has_captures(&self) -> bool {
        self.captures.load(Ordering::Relaxed) > 0
    }

    /// The stream that frees what several streams used, once all of them are past it. None of them waits for the others.
    pub(crate) fn reaper(&'static self) -> Outcome<Arc<Queue>> {
        if let Some(queue) = self.reaper.get() {
            return Ok(queue.clone());
        }
        let queue = Queue::new(self, u64::MAX, false)?;
        Ok(self.reaper.get_or_init(|| queue).clone())
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

    /// Blocks until everything given to this device is done. Refused while any thread captures on it: it would break the capture.
    pub(crate) fn synchronize(&self) -> Outcome<()> {
        if self.has_captures() {
            return Err(Fault { function: "cuCtxSynchronize", code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED });
        }
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
    let mut never = 0i32;
    // SAFETY: the properties are whole and the pointers are to variables of ours, of the types the attributes have.
    unsafe {
        driver!(cuMemPoolCreate(&mut pool, &properties))?;
        let threshold = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        driver!(cuMemPoolSetAttribute(pool, threshold, ptr::from_mut(&mut keep_all).cast()))?;
        // No allocation is to make a stream wait for another one's free.
        let internal = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
        driver!(cuMemPoolSetAttribute(pool, internal, ptr::from_mut(&mut never).cast()))?;
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
