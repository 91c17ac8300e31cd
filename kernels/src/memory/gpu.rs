//! A GPU's memory: taken from the driver's pool in the order of a stream, given back in the order of all streams that used it.
//!
//! THE RULE. A block belongs to the stream it was made on: there it may be used at once. The first use on another stream waits for
//! all that its own stream was given so far: for the allocation, because what the block was before may still be at work, and for
//! what filled it. It is freed on its own stream; if others used it too, on one that waits for all of them (`Gpu::reaper`).
//! So no order of drops in safe code hands out memory that a kernel still works on, and a tensor just made can be used
//! anywhere. Which stream writes and which reads when from then on is the caller's to say, with events.
//!
//! A thread that captures allocates nothing on the streams it captures, and what it drops meanwhile is freed afterwards.

use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUmemPool_attribute, CUresult};

use super::{Block, Home, Pool, PoolState, Wanted};
use crate::Device;
use crate::cuda::fault::{Fault, Outcome, driver};
use crate::cuda::gpu::GPUS_MAX;
use crate::cuda::queue::Queue;
use crate::cuda::{Gpu, capture};
use crate::error::{Error, Result, Site};
use crate::stream::Stream;

/// Blocks are multiples of this many bytes, as the driver's pools have them.
const STEP_BYTES: usize = 512;

/// The streams around one block.
#[derive(Debug)]
pub(super) struct Place {
    /// The stream it was made on.
    queue: Arc<Queue>,
    /// The other streams that used it.
    visitors: Mutex<Vec<Arc<Queue>>>,
}

/// Blocks dropped by a thread that was capturing.
static DEFERRED: [Mutex<Vec<(Place, u64)>>; GPUS_MAX] = [const { Mutex::new(Vec::new()) }; GPUS_MAX];

pub(super) fn allocate(index: usize, pool: &'static Pool, wanted: Wanted) -> Result<Block> {
    let (device, op, at) = (wanted.device, wanted.op, wanted.at);
    let queue = Stream::current_at(device, op, at)?.queue().expect("a GPU's stream").clone();
    if queue.is_captured() {
        let why = "a graph cannot allocate. Make the tensor before the capture: a step that ran once has all it needs"
            .to_string();
        return Err(Error::Capture { op, device, why, at });
    }
    free_deferred(index);
    let capacity_bytes = wanted.bytes.next_multiple_of(STEP_BYTES);
    let failed = |fault: Fault| fault.of(op, device, at);
    let mut state = pool.lock();
    let gpu = queue.gpu;
    let wanted_bytes = state.stats.allocated_bytes.saturating_add(capacity_bytes);
    if state.limit_bytes.is_some_and(|limit_bytes| wanted_bytes > limit_bytes) {
        refresh(device, &mut state);
        return Err(state.out_of_memory(wanted));
    }
    let address = match take(&queue, capacity_bytes) {
        // What was freed in the order of streams that are not there yet counts as taken.
        Err(fault) if fault.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            // Without the lock: what the device waits for may need it.
            drop(state);
            let trimmed = trim(gpu);
            state = pool.lock();
            trimmed.map_err(failed)?;
            refresh(device, &mut state);
            match take(&queue, capacity_bytes) {
                Err(fault) if fault.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    refresh(device, &mut state);
                    return Err(state.out_of_memory(wanted));
                }
                other => other.map_err(failed)?,
            }
        }
        other => other.map_err(failed)?,
    };
    let now_bytes = attribute(gpu, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT).map_err(failed)?;
    // Only here does it grow, under the lock.
    if now_bytes > state.stats.reserved_bytes {
        state.stats.system_allocation_count += 1;
    }
    note_reserved(&mut state, now_bytes);
    let id = wanted.id;
    state.insert(wanted, capacity_bytes);
    let pointer = NonNull::new(ptr::without_provenance_mut(address as usize)).expect("the driver gives no null");
    let place = Place { queue, visitors: Mutex::default() };
    Ok(Block { pointer, capacity_bytes, device, id, fresh: false, home: Home::Gpu(place) })
}

fn take(queue: &Queue, bytes: usize) -> Outcome<u64> {
    queue.gpu.bind()?;
    let mut address = 0;
    // SAFETY: pool and stream are of the same device, alive, and the pointer is to a variable of ours.
    unsafe { driver!(cuMemAllocFromPoolAsync(&mut address, bytes, queue.gpu.pool, queue.raw())) }?;
    Ok(address)
}

impl Place {
    pub(super) fn visit(&self, queue: &Arc<Queue>, op: &'static str, at: Site) -> Result<()> {
        if Arc::ptr_eq(queue, &self.queue) {
            return Ok(());
        }
        let mut visitors = self.visitors.lock().unwrap_or_else(PoisonError::into_inner);
        if visitors.iter().any(|visitor| Arc::ptr_eq(visitor, queue)) {
            return Ok(());
        }
        if queue.is_captured() {
            let why =
                "a tensor made on another stream is used on this one for the first time, and a graph cannot wait for \
                       what is not in it. Run the step once on this stream before the capture"
                    .to_string();
            return Err(Error::Capture { op, device: queue.gpu.device(), why, at });
        }
        let ordered = if capture::is_capturing() && self.queue.is_captured() {
            // A stream outside the capture cannot wait for a place in it.
            Err(Fault { function: "cuStreamWaitEvent", code: CUresult::CUDA_ERROR_CAPTURED_EVENT })
        } else {
            self.queue.record(false).and_then(|now| queue.wait(&now))
        };
        ordered.map_err(|fault| fault.of(op, queue.gpu.device(), at))?;
        visitors.push(queue.clone());
        Ok(())
    }

    /// Counts `queue` among those that use the block, without ordering anything.
    pub(super) fn adopt(&self, queue: &Arc<Queue>) {
        let mut visitors = self.visitors.lock().unwrap_or_else(PoisonError::into_inner);
        if !Arc::ptr_eq(queue, &self.queue) && !visitors.iter().any(|visitor| Arc::ptr_eq(visitor, queue)) {
            visitors.push(queue.clone());
        }
    }

    /// Frees the memory at `address` after all work that used it.
    pub(super) fn free(&mut self, address: u64) {
        let visitors = std::mem::take(self.visitors.get_mut().unwrap_or_else(PoisonError::into_inner));
        let place = Place { queue: self.queue.clone(), visitors: Mutex::new(visitors) };
        place.free_or_defer(address);
    }

    fn free_or_defer(mut self, address: u64) {
        let visitors = self.visitors.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Its streams' work of this thread goes into a graph just now, and frees do not belong there.
        if capture::is_capturing() {
            let deferred = &DEFERRED[self.queue.gpu.index];
            deferred.lock().unwrap_or_else(PoisonError::into_inner).push((self, address));
            return;
        }
        let freed = match &visitors[..] {
            [] => free_on(&self.queue, address),
            visitors => self.queue.gpu.reaper().and_then(|reaper| {
                let users = std::iter::once(&self.queue).chain(visitors);
                users.map(|user| user.record(false)).try_for_each(|used| reaper.wait(&used?))?;
                free_on(&reaper, address)
            }),
        };
        // A device that is lost says so at the next call that somebody waits for; memory of such a device is lost with it.
        if let Err(fault) = freed {
            tracing::debug!(
                "{} on {} said {:?} as a tensor was dropped",
                fault.function,
                self.queue.gpu.device(),
                fault.code
            );
        }
    }
}

fn free_on(queue: &Queue, address: u64) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: the address came from this device's pool and no handle on it is left. All work that used it was given to
    // this stream or to ones it now waits for.
    unsafe { driver!(cuMemFreeAsync(address, queue.raw())) }
}

/// Frees what was dropped during a capture that is over.
pub(crate) fn free_deferred(index: usize) {
    let waiting = std::mem::take(&mut *DEFERRED[index].lock().unwrap_or_else(PoisonError::into_inner));
    for (place, address) in waiting {
        place.free_or_defer(address);
    }
}

fn attribute(gpu: &Gpu, which: CUmemPool_attribute) -> Outcome<usize> {
    let mut value = 0u64;
    // SAFETY: the pool is alive, and these attributes are 64-bit numbers.
    unsafe { driver!(cuMemPoolGetAttribute(gpu.pool, which, ptr::from_mut(&mut value).cast())) }?;
    Ok(value as usize)
}

/// Gives back to the device what the pool keeps and nobody uses, once all work on it is done. While somebody captures nobody can wait for
/// that: then only what is free already.
fn trim(gpu: &Gpu) -> Outcome<()> {
    if !gpu.has_captures() {
        gpu.synchronize()?;
    }
    // SAFETY: the pool is alive; memory in use stays.
    unsafe { driver!(cuMemPoolTrimTo(gpu.pool, 0)) }
}

fn note_reserved(state: &mut PoolState, reserved_bytes: usize) {
    state.stats.reserved_bytes = reserved_bytes;
    state.stats.reserved_bytes_peak = state.stats.reserved_bytes_peak.max(reserved_bytes);
}

/// Asks the driver what the pool holds now. Nothing to ask of other devices, or of one that was never used.
pub(super) fn refresh(device: Device, state: &mut PoolState) {
    if let Device::Cuda(index) = device
        && let Some(gpu) = Gpu::if_made(index)
        && let Ok(bytes) = attribute(gpu, CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    {
        note_reserved(state, bytes);
    }
}

/// Bytes that may still be taken: the device's free memory and what the pool keeps, within the limit.
pub(super) fn free_bytes(index: usize, state: &PoolState) -> usize {
    let kept_bytes = state.stats.reserved_bytes.saturating_sub(state.stats.allocated_bytes);
    let device_bytes = Gpu::if_made(index).and_then(|gpu| gpu.memory_bytes().ok()).map_or(0, |(free, _)| free);
    let within_limit = state.limit_bytes.map_or(usize::MAX, |limit| limit.saturating_sub(state.stats.allocated_bytes));
    within_limit.min(device_bytes + kept_bytes)
}

pub(super) fn empty_cache(device: Device, pool: &Pool) -> usize {
    let Device::Cuda(index) = device else { return 0 };
    let Some(gpu) = Gpu::if_made(index) else { return 0 };
    free_deferred(index);
    let reserved_bytes = || {
        let mut state = pool.lock();
        refresh(device, &mut state);
        state.stats.reserved_bytes
    };
    let before_bytes = reserved_bytes();
    // Without the lock: what the device waits for may need it. A device that is lost keeps what it has.
    let _ = trim(gpu);
    before_bytes.saturating_sub(reserved_bytes())
}
