//! Memory by device: how much is in use, the largest live tensors, and limits.
//!
//! Freed buffers are kept for reuse: giving them back to the system and faulting them in again
//! costs a training step up to a third of its time. All host memory handed out is initialised
//! (fresh memory is zero), so reading a buffer before writing it is never undefined behaviour.
//!
//! There are three kinds: host memory (`host.rs`), pinned host memory, which devices can copy
//! asynchronously (`pinned.rs`), and GPU memory from the driver's pools (`gpu.rs`).

mod block;
mod gpu;
mod host;
mod pinned;
mod pool;

pub(crate) use block::Block;
pub(crate) use gpu::free_deferred;
pub use pool::MemoryStats;

use crate::Device;
use crate::error::LiveTensor;
use pool::{PINNED, PoolState, pool};

/// Runs `look` with the pool of `device`; None for a device that cannot exist.
fn with_pool<R>(device: Device, look: impl FnOnce(&mut PoolState) -> R) -> Option<R> {
    let mut state = pool(device)?.lock();
    gpu::refresh(device, &mut state);
    Some(look(&mut state))
}

/// What the memory of `device` is used for now. Zeros for a device that was never used.
pub fn stats(device: Device) -> MemoryStats {
    with_pool(device, |state| state.stats).unwrap_or_default()
}

/// Bytes that an allocation on `device` could get now: free memory and buffers kept for reuse,
/// within the limit. Zero for a GPU that this process has not used.
pub fn free_bytes(device: Device) -> usize {
    let available = |state: &mut PoolState| match device {
        Device::Cpu => host::free_bytes(state),
        Device::Cuda(index) => gpu::free_bytes(index, state),
    };
    with_pool(device, available).unwrap_or(0)
}

/// What pinned host memory is used for now.
pub fn pinned_stats() -> MemoryStats {
    PINNED.lock().stats
}

/// Gives buffers kept for reuse back to the system and returns their bytes. Live tensors keep
/// theirs. Not for a training loop: the next step would have to ask the system again.
pub fn empty_cache(device: Device) -> usize {
    match device {
        Device::Cpu => pinned::empty_cache() + host::empty_cache(),
        Device::Cuda(index) => gpu::empty_cache(index),
    }
}

/// Limits the bytes reserved on `device` (on a GPU, whose driver reserves in large steps, the bytes
/// of live tensors); None removes the limit. Gives back kept buffers that exceed it.
pub fn set_limit_bytes(device: Device, limit_bytes: Option<usize>) {
    let exceeds = with_pool(device, |state| {
        state.limit_bytes = limit_bytes;
        limit_bytes.is_some_and(|limit| state.stats.reserved_bytes > limit)
    });
    if exceeds == Some(true) {
        empty_cache(device);
    }
}

/// The `count` largest live tensors on `device`, the largest first.
pub fn largest_live(device: Device, count: usize) -> Vec<LiveTensor> {
    with_pool(device, |state| state.largest_live(count)).unwrap_or_default()
}
