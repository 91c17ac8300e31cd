//! The bookkeeping of one kind of memory: live tensors, statistics, limit, buffers kept for reuse.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{LazyLock, Mutex, MutexGuard};

use crate::Device;
use crate::cuda::devices::GPUS_MAX;
use crate::error::{Caller, Error, LiveTensor, OutOfMemory, TensorInfo, human_bytes};
use crate::panics::lock;

/// How many tensors an out-of-memory error lists.
const LARGEST_LISTED: usize = 5;

/// What a device's memory is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Bytes that live tensors hold.
    pub allocated_bytes: usize,
    /// Bytes taken from the system: allocated plus kept for reuse.
    pub reserved_bytes: usize,
    /// The highest `allocated_bytes` since the start or `reset_peak`.
    pub(crate) allocated_bytes_peak: usize,
    /// The highest `reserved_bytes` since the start or `reset_peak`.
    pub reserved_bytes_peak: usize,
    /// Buffers alive now.
    pub live_count: usize,
    /// Buffers handed out since the start.
    pub allocation_count: u64,
    /// How many of those were new memory: constant in a steady state.
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

/// A request for memory on `info.device`.
pub(super) struct Wanted {
    pub(super) bytes: usize,
    pub(super) id: u64,
    pub(super) info: TensorInfo,
    pub(super) by: Caller,
}

/// An address in a list of buffers kept for reuse.
#[derive(Debug)]
pub(super) struct HostChunk(pub(super) NonNull<u8>);
// SAFETY: the list owns the bytes at the address; nothing else refers to them.
unsafe impl Send for HostChunk {}

#[derive(Debug, Default)]
pub(super) struct PoolState {
    /// Host buffers kept for reuse, by capacity.
    pub(super) free: BTreeMap<usize, Vec<HostChunk>>,
    /// Live buffers by id.
    pub(super) live: HashMap<u64, LiveTensor>,
    pub(super) stats: MemoryStats,
    pub(super) limit_bytes: Option<usize>,
}

#[derive(Debug)]
pub(super) struct BlockPool(LazyLock<Mutex<PoolState>>);

/// The CPU's pool, then one for each GPU.
static POOLS: [BlockPool; 1 + GPUS_MAX] = [const { BlockPool::new() }; 1 + GPUS_MAX];
/// Pinned host memory.
pub(super) static PINNED: BlockPool = BlockPool::new();

/// The pool of a device; None for an index that no device can have.
pub(super) fn pool(device: Device) -> Option<&'static BlockPool> {
    match device {
        Device::Cpu => POOLS.first(),
        Device::Cuda(index) => POOLS[1..].get(index),
    }
}

impl BlockPool {
    const fn new() -> BlockPool {
        BlockPool(LazyLock::new(Mutex::default))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.0)
    }
}

impl PoolState {
    /// Counts a buffer that is handed out.
    pub(super) fn insert(&mut self, wanted: Wanted, capacity_bytes: usize) {
        let stats = &mut self.stats;
        stats.allocated_bytes += capacity_bytes;
        stats.allocated_bytes_peak = stats.allocated_bytes_peak.max(stats.allocated_bytes);
        stats.live_count += 1;
        stats.allocation_count += 1;
        let live = LiveTensor {
            tensor: wanted.info,
            bytes: capacity_bytes,
            made_at: wanted.by.at,
        };
        self.live.insert(wanted.id, live);
    }

    /// Counts a buffer that was returned.
    pub(super) fn remove(&mut self, id: u64, capacity_bytes: usize) {
        self.live.remove(&id);
        self.stats.allocated_bytes -= capacity_bytes;
        self.stats.live_count -= 1;
    }

    /// Counts memory taken from the system.
    pub(super) fn grow(&mut self, bytes: usize) {
        self.set_reserved(self.stats.reserved_bytes + bytes);
        self.stats.system_allocation_count += 1;
    }

    /// Notes how many bytes are taken from the system now.
    pub(super) fn set_reserved(&mut self, bytes: usize) {
        let stats = &mut self.stats;
        stats.reserved_bytes = bytes;
        stats.reserved_bytes_peak = stats.reserved_bytes_peak.max(bytes);
    }

    pub(super) fn largest_live(&self, count: usize) -> Vec<LiveTensor> {
        let mut by_size: Vec<&LiveTensor> = self.live.values().collect();
        by_size.sort_by_key(|live| (std::cmp::Reverse(live.bytes), live.made_at));
        by_size.into_iter().take(count).cloned().collect()
    }

    /// The error for a request that does not fit; `free_bytes` is what could still be had.
    pub(super) fn out_of_memory(&self, wanted: &Wanted, free_bytes: usize) -> Error {
        let stats = &self.stats;
        // What a GPU's pool keeps for reuse counts as free already.
        let used_bytes = match wanted.info.device {
            Device::Cpu => stats.reserved_bytes,
            Device::Cuda(_) => stats.allocated_bytes,
        };
        let all_bytes = used_bytes.saturating_add(free_bytes);
        Error::OutOfMemory(Box::new(OutOfMemory {
            device: wanted.info.device,
            wanted: wanted.info.clone(),
            asked_bytes: wanted.bytes,
            free_bytes,
            limit_bytes: self.limit_bytes.unwrap_or(all_bytes),
            allocated_bytes: stats.allocated_bytes,
            reserved_bytes: stats.reserved_bytes,
            largest: self.largest_live(LARGEST_LISTED),
            at: wanted.by.at,
        }))
    }
}
