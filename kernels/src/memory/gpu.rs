//! GPU memory: allocated from the driver's pool in the order of one stream, and freed after the
//! work of all streams that used it.
//!
//! THE RULE. A block belongs to the stream it was made on, which may use it at once. The first use
//! on another stream waits for everything queued so far on the block's own stream: for the
//! allocation, because earlier work on that memory may still be running, and for the work that
//! fills it. The block is freed on its own stream or, if other streams used it too, on one that
//! waits for all of them (`Queue::freeing_on`). So in safe code no order of drops hands out memory
//! that a kernel still uses, and a new tensor can be used anywhere. After that the caller orders
//! streams with events.
//!
//! A thread that captures allocates nothing on the streams it captures, and what it drops during
//! the capture is freed afterwards.

use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUmemPool_attribute;

use super::pool::{PoolState, Wanted, pool};
use crate::Device;
use crate::cuda::Gpu;
use crate::cuda::calls::CUresult;
use crate::cuda::calls::{DriverFault, Outcome, driver};
use crate::cuda::devices::GPUS_MAX;
use crate::cuda::queue::{Queue, is_capturing};
use crate::error::{Caller, Result};
use crate::panics::{get_mut, lock};
use crate::stream::Stream;

/// Blocks are multiples of this many bytes, as in the driver's pools.
const STEP_BYTES: usize = 512;

/// The streams that use one block.
#[derive(Debug)]
pub(super) struct Users {
    /// The stream it was made on.
    owner: Arc<Queue>,
    /// The other streams.
    visitors: Mutex<Vec<Arc<Queue>>>,
}

/// Blocks dropped by a thread that was capturing.
static DEFERRED: [Mutex<Vec<(Users, u64)>>; GPUS_MAX] =
    [const { Mutex::new(Vec::new()) }; GPUS_MAX];

/// A block's address, its capacity and the streams that use it.
pub(super) fn allocate(index: usize, wanted: Wanted) -> Result<(NonNull<u8>, usize, Users)> {
    let (device, by) = (wanted.info.device, wanted.by);
    let owner = Stream::current_queue(device, by)?;
    if owner.is_captured() {
        let why = "a graph cannot allocate memory";
        let help = "make the tensor before the capture: a step that ran once has all it needs";
        return Err(by.capture(device, why, help));
    }
    free_deferred(index);
    let capacity_bytes = wanted.bytes.next_multiple_of(STEP_BYTES);
    let failed = |fault: DriverFault| fault.of(by, device);
    let gpu = owner.gpu;
    let pool = pool(device).expect("a GPU in use has a pool");
    let mut state = pool.lock();
    let wanted_bytes = state.stats.allocated_bytes.saturating_add(capacity_bytes);
    if state.limit_bytes.is_some_and(|limit| wanted_bytes > limit) {
        refresh(device, &mut state);
        return Err(state.out_of_memory(&wanted, free_bytes(index, &state)));
    }
    let is_full = |fault: &DriverFault| fault.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    let mut taken = take(&owner, capacity_bytes);
    if taken.as_ref().is_err_and(is_full) {
        // Memory freed in the order of a stream that is not there yet counts as taken: wait for it,
        // without the lock, which the awaited work may need.
        drop(state);
        let trimmed = trim(gpu);
        state = pool.lock();
        trimmed.map_err(failed)?;
        taken = take(&owner, capacity_bytes);
    }
    if taken.as_ref().is_err_and(is_full) {
        refresh(device, &mut state);
        return Err(state.out_of_memory(&wanted, free_bytes(index, &state)));
    }
    let address = taken.map_err(failed)?;
    // The driver's pool grows only here, under the lock.
    let reserved_bytes = reserved_bytes(gpu).map_err(failed)?;
    if reserved_bytes > state.stats.reserved_bytes {
        state.stats.system_allocation_count += 1;
    }
    state.set_reserved(reserved_bytes);
    state.insert(wanted, capacity_bytes);
    let pointer = NonNull::new(ptr::without_provenance_mut(address as usize))
        .expect("the driver never returns null");
    let users = Users {
        owner,
        visitors: Mutex::default(),
    };
    Ok((pointer, capacity_bytes, users))
}

fn take(queue: &Queue, bytes: usize) -> Outcome<u64> {
    let (pool, stream) = (queue.gpu.pool, queue.raw());
    queue.gpu.bind()?;
    let mut address = 0;
    // SAFETY: pool and stream are alive and of the same device; the pointer is to a local variable.
    unsafe { driver!(cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream)) }?;
    Ok(address)
}

impl Users {
    fn knows(&self, visitors: &[Arc<Queue>], queue: &Arc<Queue>) -> bool {
        let mut known = visitors.iter().chain([&self.owner]);
        known.any(|known| Arc::ptr_eq(known, queue))
    }

    pub(super) fn visit(&self, queue: &Arc<Queue>, by: Caller) -> Result<()> {
        if Arc::ptr_eq(queue, &self.owner) {
            return Ok(());
        }
        let mut visitors = lock(&self.visitors);
        if self.knows(&visitors, queue) {
            return Ok(());
        }
        if queue.is_captured() {
            let why = "this stream uses a tensor of another stream for the first time, and a graph \
                       cannot wait for work outside it";
            let help = "run the step once on this stream before the capture";
            return Err(by.capture(queue.gpu.device(), why, help));
        }
        let ordered = if self.owner.is_captured() {
            // A stream outside the capture cannot wait for an event inside it.
            Err(DriverFault {
                function: "cuStreamWaitEvent",
                code: CUresult::CUDA_ERROR_CAPTURED_EVENT,
            })
        } else {
            self.owner.record(false).and_then(|now| queue.wait(&now))
        };
        ordered.map_err(|fault| fault.of(by, queue.gpu.device()))?;
        visitors.push(queue.clone());
        Ok(())
    }

    /// Counts `queue` among the users, without ordering anything.
    pub(super) fn adopt(&self, queue: &Arc<Queue>) {
        let mut visitors = lock(&self.visitors);
        if !self.knows(&visitors, queue) {
            visitors.push(queue.clone());
        }
    }

    /// Frees the memory at `address` after all work that used it.
    pub(super) fn free(&mut self, address: u64) {
        let visitors = std::mem::take(get_mut(&mut self.visitors));
        let users = Users {
            owner: self.owner.clone(),
            visitors: Mutex::new(visitors),
        };
        users.free_or_defer(address);
    }

    fn free_or_defer(mut self, address: u64) {
        // This thread's work on the streams goes into a graph, where frees do not belong.
        if is_capturing() {
            let deferred = &DEFERRED[self.owner.gpu.index];
            lock(deferred).push((self, address));
            return;
        }
        let visitors = std::mem::take(get_mut(&mut self.visitors));
        let freed = if visitors.is_empty() {
            free_on(&self.owner, address)
        } else {
            self.free_after(&visitors, address)
        };
        // A lost device reports its error at the next call that waits; its memory is lost too.
        if let Err(DriverFault { function, code }) = freed {
            let device = self.owner.gpu.device();
            tracing::debug!("{function} on {device} failed with {code:?} as a tensor was dropped");
        }
    }

    fn free_after(&self, visitors: &[Arc<Queue>], address: u64) -> Outcome<()> {
        let freeing = Queue::freeing_on(self.owner.gpu)?;
        for user in visitors.iter().chain([&self.owner]) {
            freeing.wait(&user.record(false)?)?;
        }
        free_on(&freeing, address)
    }
}

fn free_on(queue: &Queue, address: u64) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: the address came from this device's pool and no handle on it is left. All work that
    // used it was given to this stream or to streams that it now waits for.
    unsafe { driver!(cuMemFreeAsync(address, queue.raw())) }
}

/// Frees what was dropped during a capture that is over.
pub(crate) fn free_deferred(index: usize) {
    let waiting = std::mem::take(&mut *lock(&DEFERRED[index]));
    for (users, address) in waiting {
        users.free_or_defer(address);
    }
}

/// Bytes that the device's pool has taken from the driver.
fn reserved_bytes(gpu: &Gpu) -> Outcome<usize> {
    let which = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    let mut value = 0u64;
    let pointer = ptr::from_mut(&mut value).cast();
    // SAFETY: the pool is alive, and this attribute is a 64-bit number.
    unsafe { driver!(cuMemPoolGetAttribute(gpu.pool, which, pointer)) }?;
    Ok(value as usize)
}

/// Gives back to the device what the pool keeps unused, once all work on the device is done. During
/// a capture it cannot wait for that, and gives back only what is free already.
fn trim(gpu: &Gpu) -> Outcome<()> {
    if !gpu.has_captures() {
        gpu.synchronize()?;
    }
    // SAFETY: the pool is alive; memory in use stays.
    unsafe { driver!(cuMemPoolTrimTo(gpu.pool, 0)) }
}

/// Notes what the driver's pool holds now. Nothing for the CPU or a device that was never used.
pub(super) fn refresh(device: Device, state: &mut PoolState) {
    if let Device::Cuda(index) = device
        && let Some(gpu) = Gpu::if_made(index)
        && let Ok(bytes) = reserved_bytes(gpu)
    {
        state.set_reserved(bytes);
    }
}

/// Bytes that may still be allocated: the device's free memory and what its pool keeps.
pub(super) fn free_bytes(index: usize, state: &PoolState) -> usize {
    let stats = &state.stats;
    let kept_bytes = stats.reserved_bytes.saturating_sub(stats.allocated_bytes);
    let device_bytes = Gpu::if_made(index).and_then(|gpu| gpu.free_bytes().ok());
    let limit_bytes = state.limit_bytes.unwrap_or(usize::MAX);
    let within_limit = limit_bytes.saturating_sub(stats.allocated_bytes);
    within_limit.min(device_bytes.unwrap_or(0) + kept_bytes)
}

/// Gives kept memory back to the device and returns its bytes.
pub(super) fn empty_cache(index: usize) -> usize {
    let Some(gpu) = Gpu::if_made(index) else {
        return 0;
    };
    free_deferred(index);
    let Ok(before_bytes) = reserved_bytes(gpu) else {
        return 0;
    };
    // Without the lock, which the awaited work may need. A lost device keeps what it has.
    let _ = trim(gpu);
    before_bytes.saturating_sub(reserved_bytes(gpu).unwrap_or(before_bytes))
}
