//! Memory by device: what is allocated, what is kept for reuse, the largest tensors alive, and running out.
//!
//! Freed buffers are kept and handed out again, because giving them back to the system and faulting them in anew
//! costs a training step up to a third of its time. Every byte of host memory handed out was initialised at some time
//! (fresh memory is zero), so reading a buffer before writing it is never undefined.
//!
//! Three kinds: host memory (`host.rs`), pinned host memory, which devices copy from and to by themselves
//! (`pinned.rs`), and GPUs' memory, in stream order from the driver's pools (`gpu.rs`).

mod gpu;
mod host;
mod pinned;

pub(crate) use gpu::free_deferred;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Device;
use crate::cuda::gpu::GPUS_MAX;
use crate::cuda::queue::Queue;
use crate::error::{Error, LiveTensor, OutOfMemory, Result, Site, TensorInfo, human_bytes};
use crate::stream::Event;

/// Every buffer starts on a multiple of this many bytes, which is what cuBLASLt's heuristics assume.
pub(crate) const ALIGNMENT: usize = 256;
/// Buffers up to this size come from the system allocator, larger ones are mapped by themselves.
const SMALL_BYTES_MAX: usize = 1 << 20;
const SMALL_STEP_BYTES: usize = 512;
/// From this size on the machine's free memory is asked before a buffer is mapped: Linux would promise anything.
const CHECKED_BYTES_MIN: usize = 16 << 20;
/// How many tensors an out-of-memory error lists.
const LARGEST_LISTED: usize = 5;

/// What a device's memory is used for. `stats(device)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes that live tensors hold.
    pub allocated_bytes: usize,
    /// Bytes taken from the system: allocated plus kept for reuse.
    pub reserved_bytes: usize,
    /// The highest `allocated_bytes` since the start or `reset_peak`.
    pub allocated_bytes_peak: usize,
    /// The highest `reserved_bytes` since the start or `reset_peak`.
    pub reserved_bytes_peak: usize,
    /// Buffers alive now.
    pub live_count: usize,
    /// Buffers handed out since the start.
    pub allocation_count: u64,
    /// Of those, how many were not a reused one: in steady state this stands still.
    pub system_allocation_count: u64,
}

impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "allocated {} in {} buffers (peak {}), reserved {} (peak {}), {} allocations of which {} new",
            human_bytes(self.allocated_bytes),
            self.live_count,
            human_bytes(self.allocated_bytes_peak),
            human_bytes(self.reserved_bytes),
            human_bytes(self.reserved_bytes_peak),
            self.allocation_count,
            self.system_allocation_count
        )
    }
}

/// What `device`'s memory is used for now. Zeros for a device that was never used.
pub fn stats(device: Device) -> MemoryStats {
    let Some(pool) = pool(device) else { return MemoryStats::default() };
    let mut state = pool.lock();
    gpu::refresh(device, &mut state);
    state.stats
}

/// Bytes that can still be had on `device`: what is free there and what is kept for reuse, within the limit. Others may take them
/// before the caller does. Zero for a GPU on which this process has made nothing yet.
pub fn free_bytes(device: Device) -> usize {
    let Some(pool) = pool(device) else { return 0 };
    let mut state = pool.lock();
    gpu::refresh(device, &mut state);
    state.available_bytes(device)
}

/// What pinned host memory is used for now: host memory that devices copy from and to by themselves.
pub fn pinned_stats() -> MemoryStats {
    PINNED.lock().stats
}

/// Starts the peaks again from what is in use now.
pub fn reset_peak(device: Device) {
    if let Some(pool) = pool(device) {
        let mut state = pool.lock();
        gpu::refresh(device, &mut state);
        let stats = &mut state.stats;
        stats.allocated_bytes_peak = stats.allocated_bytes;
        stats.reserved_bytes_peak = stats.reserved_bytes;
    }
}

/// Gives buffers that are kept for reuse back to the system and says how many bytes that were. Live tensors keep
/// theirs. Not for a training loop: the next step would have to ask the system again.
pub fn empty_cache(device: Device) -> usize {
    let Some(pool) = pool(device) else { return 0 };
    if device.is_accelerator() {
        return gpu::empty_cache(device, pool);
    }
    let pinned_bytes = if device == Device::Cpu { pinned::empty_cache() } else { 0 };
    pinned_bytes + pool.lock().empty_cache()
}

/// The most bytes that may be reserved on `device` from now on (on a GPU, whose driver reserves in steps of its own: that live tensors
/// may hold); `None` lifts the limit. Buffers kept for reuse are given back if they are beyond it.
pub fn set_limit_bytes(device: Device, limit_bytes: Option<usize>) {
    if let Some(pool) = pool(device) {
        let mut state = pool.lock();
        state.limit_bytes = limit_bytes;
        gpu::refresh(device, &mut state);
        if limit_bytes.is_some_and(|limit| state.stats.reserved_bytes > limit) {
            drop(state);
            empty_cache(device);
        }
    }
}

/// The `count` largest tensors alive on `device`, the largest first, with where each was made.
pub fn largest_live(device: Device, count: usize) -> Vec<LiveTensor> {
    pool(device).map(|pool| pool.lock().largest_live(count)).unwrap_or_default()
}

/// Every live buffer whose tensor has a name, by id.
pub(crate) fn named_live(device: Device) -> Vec<(u64, LiveTensor)> {
    let Some(pool) = pool(device) else { return Vec::new() };
    let state = pool.lock();
    let named = state.live.iter().filter(|(_, live)| live.tensor.name.is_some());
    let mut named: Vec<_> = named.map(|(id, live)| (*id, live.clone())).collect();
    named.sort_by_key(|(id, _)| *id);
    named
}

/// A buffer on one device, given back to its pool when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    /// Of a GPU's memory only the address is meant: the host never follows it.
    pointer: NonNull<u8>,
    /// 0 for the empty buffer, which no pool ever sees.
    capacity_bytes: usize,
    device: Device,
    id: u64,
    /// Whether the bytes are known to be zero still.
    fresh: bool,
    home: Home,
}

/// Where a block goes back to.
#[derive(Debug)]
enum Home {
    /// Host memory, or what stands in for a device's in tests.
    Host,
    /// Pinned host memory; with the copies that may still use it.
    Pinned(Vec<Event>),
    /// A GPU's pool.
    Gpu(gpu::Place),
}

// SAFETY: a block is the sole owner of its bytes; what is read and written through it from several threads is
// governed by the borrow list in `storage.rs`.
unsafe impl Send for Block {}
// SAFETY: as above; a shared block only gives out its address.
unsafe impl Sync for Block {}

impl Block {
    /// A buffer of at least `bytes` on `device`, for a tensor described by `info`; `pinned` for host memory that is.
    pub(crate) fn new(
        device: Device,
        bytes: usize,
        pinned: bool,
        info: TensorInfo,
        op: &'static str,
        at: Site,
    ) -> Result<Block> {
        device.check_usable(op, at)?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        if bytes == 0 {
            let pointer = NonNull::without_provenance(std::num::NonZero::new(ALIGNMENT).unwrap());
            return Ok(Block { pointer, capacity_bytes: 0, device, id, fresh: true, home: Home::Host });
        }
        let Some(pool) = pool(device) else {
            return Err(Error::DeviceAbsent { op, device, why: "it has no memory pool".into(), at });
        };
        let wanted = Wanted { device, bytes, id, info, op, at };
        match device {
            Device::Cpu if pinned => pinned::allocate(wanted),
            Device::Cuda(index) if device.is_accelerator() => gpu::allocate(index, pool, wanted),
            _ => pool.allocate(wanted),
        }
    }

    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Puts the tensor's name into the list of live tensors.
    pub(crate) fn set_name(&self, name: &Arc<str>) {
        let pool = if let Home::Pinned(_) = self.home { Some(&PINNED) } else { pool(self.device) };
        if let Some(pool) = pool
            && let Some(live) = pool.lock().live.get_mut(&self.id)
        {
            live.tensor.name = Some(name.clone());
        }
    }

    /// The bytes are not handed out again before `event` has passed.
    pub(crate) fn hold_until(&mut self, event: Event) {
        if let Home::Pinned(pending) = &mut self.home {
            pending.push(event);
        }
    }

    /// The bytes are never handed out again: nobody can say when a device is done with them. They go on counting as allocated.
    pub(crate) fn keep_for_ever(&mut self) {
        // No pool sees an empty buffer.
        self.capacity_bytes = 0;
    }

    /// Work that is known to come after everything that uses the block now will use it on `queue`.
    pub(crate) fn adopt(&self, queue: &Arc<Queue>) {
        if let Home::Gpu(place) = &self.home {
            place.adopt(queue);
        }
    }

    /// Work on `queue` is going to use the block: from now on it is freed after that, and if this is the first such work, it starts
    /// after what the block's own stream was given so far. Nothing to do but on a GPU, and there nothing on the stream that the block was made on.
    pub(crate) fn visit(&self, queue: &Arc<Queue>, op: &'static str, at: Site) -> Result<()> {
        match &self.home {
            Home::Gpu(place) => place.visit(queue, op, at),
            _ => Ok(()),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.capacity_bytes == 0 {
            return;
        }
        let Some(pool) = pool(self.device) else { return };
        match &mut self.home {
            Home::Host => {
                let mut state = pool.lock();
                state.remove(self.id, self.capacity_bytes);
                state.free.entry(self.capacity_bytes).or_default().push(Chunk(self.pointer));
            }
            Home::Pinned(pending) => {
                pinned::give_back(self.id, self.pointer, self.capacity_bytes, std::mem::take(pending))
            }
            Home::Gpu(place) => {
                pool.lock().remove(self.id, self.capacity_bytes);
                place.free(self.pointer.addr().get() as u64);
            }
        }
    }
}

/// What a pool is asked for.
struct Wanted {
    device: Device,
    bytes: usize,
    id: u64,
    info: TensorInfo,
    op: &'static str,
    at: Site,
}

/// An address in a pool's list of free buffers.
#[derive(Debug)]
struct Chunk(NonNull<u8>);
// SAFETY: the list owns the bytes behind the address; nothing else refers to them.
unsafe impl Send for Chunk {}

#[derive(Debug, Default)]
struct PoolState {
    /// Buffers kept for reuse, by capacity.
    free: BTreeMap<usize, Vec<Chunk>>,
    live: HashMap<u64, LiveTensor>,
    stats: MemoryStats,
    limit_bytes: Option<usize>,
}

#[derive(Debug)]
struct Pool(std::sync::LazyLock<Mutex<PoolState>>);

/// The CPU's pool, then one for each GPU (or what stands in for it).
static POOLS: [Pool; 1 + GPUS_MAX] = [const { Pool::new() }; 1 + GPUS_MAX];
static PINNED: Pool = Pool::new();

fn pool(device: Device) -> Option<&'static Pool> {
    match device {
        Device::Cpu => POOLS.first(),
        Device::Cuda(index) => POOLS[1..].get(index),
    }
}

impl Pool {
    const fn new() -> Pool {
        Pool(std::sync::LazyLock::new(Mutex::default))
    }

    /// The state stays consistent at every point where a panic could leave the lock, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Host memory.
    fn allocate(&self, wanted: Wanted) -> Result<Block> {
        let capacity_bytes = host::rounded(wanted.bytes);
        let mut state = self.lock();
        let (pointer, capacity_bytes, fresh) = match state.reuse(capacity_bytes) {
            Some((pointer, capacity)) => (pointer, capacity, false),
            None => match state.take_from_system(wanted.device, capacity_bytes) {
                Some(pointer) => (pointer, capacity_bytes, true),
                None => return Err(state.out_of_memory(wanted)),
            },
        };
        let (device, id) = (wanted.device, wanted.id);
        state.insert(wanted, capacity_bytes);
        Ok(Block { pointer, capacity_bytes, device, id, fresh, home: Home::Host })
    }
}

impl PoolState {
    /// Counts a buffer that was handed out.
    fn insert(&mut self, wanted: Wanted, capacity_bytes: usize) {
        let stats = &mut self.stats;
        stats.allocated_bytes += capacity_bytes;
        stats.allocated_bytes_peak = stats.allocated_bytes_peak.max(stats.allocated_bytes);
        stats.live_count += 1;
        stats.allocation_count += 1;
        self.live.insert(wanted.id, LiveTensor { tensor: wanted.info, bytes: capacity_bytes, made_at: wanted.at });
    }

    /// Counts a buffer that came back.
    fn remove(&mut self, id: u64, capacity_bytes: usize) {
        self.live.remove(&id);
        self.stats.allocated_bytes -= capacity_bytes;
        self.stats.live_count -= 1;
    }

    /// Counts memory taken from the system.
    fn grow(&mut self, bytes: usize) {
        self.stats.reserved_bytes += bytes;
        self.stats.reserved_bytes_peak = self.stats.reserved_bytes_peak.max(self.stats.reserved_bytes);
        self.stats.system_allocation_count += 1;
    }

    /// The smallest kept buffer that fits without wasting more than a quarter (twice, for small ones).
    fn reuse(&mut self, capacity_bytes: usize) -> Option<(NonNull<u8>, usize)> {
        let most = if capacity_bytes <= SMALL_BYTES_MAX {
            (2 * capacity_bytes).min(SMALL_BYTES_MAX)
        } else {
            capacity_bytes + capacity_bytes / 4
        };
        let (&found, chunks) = self.free.range_mut(capacity_bytes..=most).find(|(_, chunks)| !chunks.is_empty())?;
        chunks.pop().map(|chunk| (chunk.0, found))
    }

    fn take_from_system(&mut self, device: Device, capacity_bytes: usize) -> Option<NonNull<u8>> {
        let free_bytes = self.free_bytes(device, capacity_bytes);
        if free_bytes < capacity_bytes {
            let kept_bytes = self.stats.reserved_bytes - self.stats.allocated_bytes;
            // What could not be served even then leaves the kept buffers where they are.
            if free_bytes.saturating_add(kept_bytes) < capacity_bytes {
                return None;
            }
            self.empty_cache();
            if self.free_bytes(device, capacity_bytes) < capacity_bytes {
                return None;
            }
        }
        let pointer = host::allocate(capacity_bytes).or_else(|| {
            self.empty_cache();
            host::allocate(capacity_bytes)
        })?;
        self.grow(capacity_bytes);
        Some(pointer)
    }

    /// Bytes that may still be taken from the system. The machine is asked only when `wanted_bytes` is large.
    fn free_bytes(&self, device: Device, wanted_bytes: usize) -> usize {
        let within_limit = self.limit_bytes.map_or(usize::MAX, |limit| limit.saturating_sub(self.stats.reserved_bytes));
        if device == Device::Cpu && wanted_bytes >= CHECKED_BYTES_MIN {
            // What is reserved but was never written is promised already, though the machine still counts it as free.
            let promised = self.stats.reserved_bytes.saturating_sub(host::resident_bytes().unwrap_or(usize::MAX));
            within_limit.min(host::machine_available_bytes().unwrap_or(usize::MAX).saturating_sub(promised))
        } else {
            within_limit
        }
    }

    /// Bytes that a large request could be given, from whomever.
    fn available_bytes(&self, device: Device) -> usize {
        match device {
            Device::Cuda(index) if device.is_accelerator() => gpu::free_bytes(index, self),
            // Small failures under no limit come from the system itself: then it is the machine's state that informs.
            device => self.free_bytes(device, CHECKED_BYTES_MIN),
        }
    }

    fn empty_cache(&mut self) -> usize {
        let mut released_bytes = 0;
        for (capacity_bytes, chunks) in std::mem::take(&mut self.free) {
            for chunk in chunks {
                // SAFETY: the chunk came from `host::allocate` with this capacity, and it was in the free list:
                // no block refers to it any more.
                unsafe { host::release(chunk.0, capacity_bytes) };
                released_bytes += capacity_bytes;
            }
        }
        self.stats.reserved_bytes -= released_bytes;
        released_bytes
    }

    fn largest_live(&self, count: usize) -> Vec<LiveTensor> {
        let mut by_size: Vec<&LiveTensor> = self.live.values().collect();
        by_size.sort_by_key(|live| (std::cmp::Reverse(live.bytes), live.made_at));
        by_size.into_iter().take(count).cloned().collect()
    }

    fn out_of_memory(&self, wanted: Wanted) -> Error {
        let free_bytes = self.available_bytes(wanted.device);
        Error::OutOfMemory(Box::new(OutOfMemory {
            device: wanted.device,
            wanted: wanted.info,
            asked_bytes: wanted.bytes,
            free_bytes,
            limit_bytes: self.limit_bytes.unwrap_or_else(|| {
                // What a GPU's pool keeps counts as free already.
                let used_bytes =
                    if wanted.device.is_accelerator() { self.stats.allocated_bytes } else { self.stats.reserved_bytes };
                used_bytes.saturating_add(free_bytes)
            }),
            allocated_bytes: self.stats.allocated_bytes,
            reserved_bytes: self.stats.reserved_bytes,
            largest: self.largest_live(LARGEST_LISTED),
            at: wanted.at,
        }))
    }
}
