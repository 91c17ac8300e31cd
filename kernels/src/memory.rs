//! Memory by device: what is allocated, what is kept for reuse, the largest tensors alive, and running out.
//!
//! Freed buffers are kept and handed out again, because giving them back to the system and faulting them in anew
//! costs a training step up to a third of its time. Large ones are mapped on huge pages. Every byte handed out was
//! initialised at some time (fresh memory is zero), so reading a buffer before writing it is never undefined.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::Device;
use crate::error::{Error, LiveTensor, OutOfMemory, Result, Site, TensorInfo, human_bytes};

/// Every buffer starts on a multiple of this many bytes, which is what cuBLASLt's heuristics assume.
pub(crate) const ALIGNMENT: usize = 256;
/// Buffers up to this size come from the system allocator, larger ones are mapped by themselves.
const SMALL_BYTES_MAX: usize = 1 << 20;
const SMALL_STEP_BYTES: usize = 512;
const HUGE_PAGE_BYTES: usize = 2 << 20;
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
    pool(device).map(|pool| pool.lock().stats).unwrap_or_default()
}

/// Starts the peaks again from what is in use now.
pub fn reset_peak(device: Device) {
    if let Some(pool) = pool(device) {
        let stats = &mut pool.lock().stats;
        stats.allocated_bytes_peak = stats.allocated_bytes;
        stats.reserved_bytes_peak = stats.reserved_bytes;
    }
}

/// Gives buffers that are kept for reuse back to the system and says how many bytes that were. Live tensors keep
/// theirs. Not for a training loop: the next step would have to ask the system again.
pub fn empty_cache(device: Device) -> usize {
    pool(device).map(|pool| pool.lock().empty_cache()).unwrap_or(0)
}

/// The most bytes that may be reserved on `device` from now on; `None` lifts the limit. Buffers kept for reuse are given
/// back if they are beyond it.
pub fn set_limit_bytes(device: Device, limit_bytes: Option<usize>) {
    if let Some(pool) = pool(device) {
        let mut state = pool.lock();
        state.limit_bytes = limit_bytes;
        if limit_bytes.is_some_and(|limit| state.stats.reserved_bytes > limit) {
            state.empty_cache();
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
    pointer: NonNull<u8>,
    /// 0 for the empty buffer, which no pool ever sees.
    capacity_bytes: usize,
    device: Device,
    id: u64,
    /// Whether the bytes are known to be zero still.
    fresh: bool,
}

// SAFETY: a block is the sole owner of its bytes; what is read and written through it from several threads is
// governed by the borrow list in `storage.rs`.
unsafe impl Send for Block {}
// SAFETY: as above; a shared block only gives out its address.
unsafe impl Sync for Block {}

impl Block {
    /// A buffer of at least `bytes` on `device`, for a tensor described by `info`.
    pub(crate) fn new(device: Device, bytes: usize, info: TensorInfo, op: &'static str, at: Site) -> Result<Block> {
        device.check_usable(op, at)?;
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        if bytes == 0 {
            let pointer = NonNull::without_provenance(std::num::NonZero::new(ALIGNMENT).unwrap());
            return Ok(Block { pointer, capacity_bytes: 0, device, id, fresh: true });
        }
        let Some(pool) = pool(device) else {
            return Err(Error::DeviceAbsent { op, device, why: "it has no memory pool".into(), at });
        };
        pool.allocate(device, bytes, id, info, at)
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
        if let Some(pool) = pool(self.device)
            && let Some(live) = pool.lock().live.get_mut(&self.id)
        {
            live.tensor.name = Some(name.clone());
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.capacity_bytes > 0
            && let Some(pool) = pool(self.device)
        {
            let mut state = pool.lock();
            state.live.remove(&self.id);
            state.stats.allocated_bytes -= self.capacity_bytes;
            state.stats.live_count -= 1;
            state.free.entry(self.capacity_bytes).or_default().push(Chunk(self.pointer));
        }
    }
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

/// How many stand-in devices have a pool; real devices will bring pools of their own.
pub(crate) const STAND_IN_COUNT_MAX: usize = 8;
static POOLS: [Pool; 1 + STAND_IN_COUNT_MAX] = [const { Pool::new() }; 1 + STAND_IN_COUNT_MAX];

fn pool(device: Device) -> Option<&'static Pool> {
    match device {
        Device::Cpu => POOLS.first(),
        Device::Cuda(index) => POOLS[1..].get(index).filter(|_| device.runs_host_code()),
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

    fn allocate(&self, device: Device, bytes: usize, id: u64, info: TensorInfo, at: Site) -> Result<Block> {
        let capacity_bytes = rounded(bytes);
        let mut state = self.lock();
        let (pointer, capacity_bytes, fresh) = match state.reuse(capacity_bytes) {
            Some((pointer, capacity)) => (pointer, capacity, false),
            None => match state.take_from_system(device, capacity_bytes) {
                Some(pointer) => (pointer, capacity_bytes, true),
                None => return Err(Error::OutOfMemory(Box::new(state.out_of_memory(device, bytes, info, at)))),
            },
        };
        let stats = &mut state.stats;
        stats.allocated_bytes += capacity_bytes;
        stats.allocated_bytes_peak = stats.allocated_bytes_peak.max(stats.allocated_bytes);
        stats.live_count += 1;
        stats.allocation_count += 1;
        state.live.insert(id, LiveTensor { tensor: info, bytes: capacity_bytes, made_at: at });
        Ok(Block { pointer, capacity_bytes, device, id, fresh })
    }
}

impl PoolState {
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
        let pointer = system_allocate(capacity_bytes).or_else(|| {
            self.empty_cache();
            system_allocate(capacity_bytes)
        })?;
        self.stats.reserved_bytes += capacity_bytes;
        self.stats.reserved_bytes_peak = self.stats.reserved_bytes_peak.max(self.stats.reserved_bytes);
        self.stats.system_allocation_count += 1;
        Some(pointer)
    }

    /// Bytes that may still be taken from the system. The machine is asked only when `wanted_bytes` is large.
    fn free_bytes(&self, device: Device, wanted_bytes: usize) -> usize {
        let within_limit = self.limit_bytes.map_or(usize::MAX, |limit| limit.saturating_sub(self.stats.reserved_bytes));
        if device == Device::Cpu && wanted_bytes >= CHECKED_BYTES_MIN {
            // What is reserved but was never written is promised already, though the machine still counts it as free.
            let promised = self.stats.reserved_bytes.saturating_sub(resident_bytes().unwrap_or(usize::MAX));
            within_limit.min(machine_available_bytes().unwrap_or(usize::MAX).saturating_sub(promised))
        } else {
            within_limit
        }
    }

    fn empty_cache(&mut self) -> usize {
        let mut released_bytes = 0;
        for (capacity_bytes, chunks) in std::mem::take(&mut self.free) {
            for chunk in chunks {
                // SAFETY: the chunk came from `system_allocate` with this capacity, and it was in the free list:
                // no block refers to it any more.
                unsafe { system_release(chunk.0, capacity_bytes) };
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

    fn out_of_memory(&self, device: Device, asked_bytes: usize, wanted: TensorInfo, at: Site) -> OutOfMemory {
        // Small failures under no limit come from the system itself: then it is the machine's state that informs.
        let free_bytes = self.free_bytes(device, CHECKED_BYTES_MIN);
        OutOfMemory {
            device,
            wanted,
            asked_bytes,
            free_bytes,
            limit_bytes: self.limit_bytes.unwrap_or_else(|| self.stats.reserved_bytes.saturating_add(free_bytes)),
            allocated_bytes: self.stats.allocated_bytes,
            reserved_bytes: self.stats.reserved_bytes,
            largest: self.largest_live(LARGEST_LISTED),
            at,
        }
    }
}

fn rounded(bytes: usize) -> usize {
    if bytes <= SMALL_BYTES_MAX {
        bytes.next_multiple_of(SMALL_STEP_BYTES)
    } else {
        // A shape's bytes are at most isize::MAX: rounding up cannot overflow usize.
        bytes.next_multiple_of(HUGE_PAGE_BYTES)
    }
}

/// Zeroed memory for one buffer, or `None` when the system has none.
fn system_allocate(capacity_bytes: usize) -> Option<NonNull<u8>> {
    if capacity_bytes <= SMALL_BYTES_MAX {
        let layout = Layout::from_size_align(capacity_bytes, ALIGNMENT).ok()?;
        // SAFETY: the size is not zero: the smallest capacity is SMALL_STEP_BYTES.
        return NonNull::new(unsafe { alloc_zeroed(layout) });
    }
    map_huge(capacity_bytes)
}

/// A private mapping that starts on a huge-page boundary.
fn map_huge(capacity_bytes: usize) -> Option<NonNull<u8>> {
    let mapped_bytes = capacity_bytes.checked_add(HUGE_PAGE_BYTES)?;
    // SAFETY: a new private anonymous mapping at an address of the kernel's choosing touches nothing of ours.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            mapped_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let skip_bytes = start.addr().next_multiple_of(HUGE_PAGE_BYTES) - start.addr();
    let rest_bytes = HUGE_PAGE_BYTES - skip_bytes;
    // SAFETY: head and tail lie inside the mapping just made and outside the part that is kept; both are whole
    // pages because mmap's address, the huge page and the capacity are multiples of the page size.
    unsafe {
        let kept = start.byte_add(skip_bytes);
        if skip_bytes > 0 {
            libc::munmap(start, skip_bytes);
        }
        if rest_bytes > 0 {
            libc::munmap(kept.byte_add(capacity_bytes), rest_bytes);
        }
        // Advice only: where huge pages are off, small ones serve.
        libc::madvise(kept, capacity_bytes, libc::MADV_HUGEPAGE);
        NonNull::new(kept.cast())
    }
}

/// # Safety
/// `pointer` came from `system_allocate(capacity_bytes)` and nothing uses it any more.
unsafe fn system_release(pointer: NonNull<u8>, capacity_bytes: usize) {
    if capacity_bytes <= SMALL_BYTES_MAX {
        // SAFETY: allocated with exactly this layout, by the caller's promise.
        unsafe { dealloc(pointer.as_ptr(), Layout::from_size_align_unchecked(capacity_bytes, ALIGNMENT)) };
    } else {
        // SAFETY: the kept part of a mapping of our own, whole pages, unused by the caller's promise.
        unsafe { libc::munmap(pointer.as_ptr().cast(), capacity_bytes) };
    }
}

/// The memory of this process that is really there.
fn resident_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<usize>().ok()?.checked_mul(1024)
}

/// What the machine, or the container around this process, can still give. `None` where it does not say.
fn machine_available_bytes() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let number = |path: &str| read(path).and_then(|text| text.trim().parse::<usize>().ok());
    let machine = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()?.checked_mul(1024)
    });
    // Files that were read count as used in a container, though they give way.
    let gives_way = read("/sys/fs/cgroup/memory.stat").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("inactive_file "))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    });
    let container = number("/sys/fs/cgroup/memory.max").and_then(|most| {
        let used_bytes = number("/sys/fs/cgroup/memory.current")?.saturating_sub(gives_way.unwrap_or(0));
        Some(most.saturating_sub(used_bytes))
    });
    match (machine, container) {
        (Some(machine), Some(container)) => Some(machine.min(container)),
        (one, other) => one.or(other),
    }
}
