//! Memory by device: how much is in use, the largest live tensors, and limits.
//!
//! Freed buffers are kept for reuse: returning them to the system and faulting them in again costs
//! a training step up to a third of its time. All host memory handed out is initialised (fresh
//! memory is zero), so reading a buffer before writing it is never undefined behaviour.
//!
//! There are three kinds: host memory (`host.rs`), pinned host memory, which devices can copy
//! asynchronously (`pinned.rs`), and GPU memory from the driver's pools (`gpu.rs`).

mod gpu;
mod host;
mod pinned;
mod pool;

pub(crate) use gpu::free_deferred;
pub use host::machine_available_bytes;
pub use pool::MemoryStats;

use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use pool::{BlockPool, PINNED, PoolState, Wanted, pool};

use crate::Device;
use crate::cuda::queue::Queue;
use crate::error::{Caller, LiveTensor, Result, TensorInfo};
use crate::stream::Event;

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

/// An address for this many bytes that do not exist: not that of others that do not.
fn planned(bytes: usize) -> NonNull<u8> {
    static NEXT: AtomicUsize = AtomicUsize::new(host::ALIGNMENT);
    let room = bytes.next_multiple_of(host::ALIGNMENT);
    let address = NEXT.fetch_add(room, Ordering::Relaxed);
    NonNull::without_provenance(NonZero::new(address).expect("it begins above 0"))
}

/// A buffer on one device, which goes back to its pool when it is dropped.
#[derive(Debug)]
pub(crate) struct Block {
    /// Of GPU memory this is only an address: the host never follows it.
    pub(crate) pointer: NonNull<u8>,
    /// 0 for a buffer that no pool knows.
    capacity_bytes: usize,
    pub(crate) device: Device,
    pub(crate) id: u64,
    /// Whether the bytes are known to be zero still.
    pub(crate) is_fresh: bool,
    home: Home,
}

/// Where a block goes back to.
#[derive(Debug)]
enum Home {
    Host,
    /// Pinned host memory, with the copies that may still use it.
    Pinned(Vec<Event>),
    Gpu(gpu::Users),
}

// SAFETY: a block is the only owner of its bytes; the borrow list in `storage.rs` governs reading
// and writing through it from several threads.
unsafe impl Send for Block {}
// SAFETY: as above; a shared block only gives out its address.
unsafe impl Sync for Block {}

impl Block {
    /// A buffer of at least `bytes` on `info.device`, in pinned host memory if `pinned`.
    pub(crate) fn new(bytes: usize, pinned: bool, info: TensorInfo, by: Caller) -> Result<Block> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let device = info.device;
        if !device.is_planned() {
            device.check_usable(by)?;
        }
        let mut block = Block {
            pointer: NonNull::without_provenance(NonZero::new(host::ALIGNMENT).unwrap()),
            capacity_bytes: 0,
            device,
            id,
            is_fresh: true,
            home: if pinned {
                Home::Pinned(Vec::new())
            } else {
                Home::Host
            },
        };
        if bytes == 0 {
            return Ok(block);
        }
        let wanted = Wanted {
            bytes,
            id,
            info,
            by,
        };
        (block.pointer, block.capacity_bytes, block.is_fresh) = match device {
            Device::Cpu if pinned => pinned::allocate(wanted)?,
            Device::Cpu => host::allocate(wanted)?,
            device if device.is_planned() => (planned(bytes), 0, false),
            Device::Cuda(index) => {
                let (pointer, capacity_bytes, users) = gpu::allocate(index, wanted)?;
                block.home = Home::Gpu(users);
                (pointer, capacity_bytes, false)
            }
        };
        Ok(block)
    }

    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.home, Home::Pinned(_))
    }

    fn pool(&self) -> Option<&'static BlockPool> {
        if self.is_pinned() {
            Some(&PINNED)
        } else {
            pool(self.device)
        }
    }

    /// Puts the tensor's name into the list of live tensors.
    pub(crate) fn set_name(&self, name: &Arc<str>) {
        if let Some(pool) = self.pool()
            && let Some(live) = pool.lock().live.get_mut(&self.id)
        {
            live.tensor.name = Some(name.clone());
        }
    }

    /// The bytes are not reused before `event` has passed.
    pub(crate) fn hold_until(&mut self, event: Event) {
        if let Home::Pinned(pending) = &mut self.home {
            pending.push(event);
        }
    }

    /// The bytes are never reused, because a device may still be using them. They stay allocated.
    pub(crate) fn keep_forever(&mut self) {
        self.capacity_bytes = 0;
    }

    /// The block is freed after the work of `queue`, which is already ordered after its other uses.
    pub(crate) fn adopt(&self, queue: &Arc<Queue>) {
        if let Home::Gpu(users) = &self.home {
            users.adopt(queue);
        }
    }

    /// Work on `queue` is going to use the block: from now on the block is freed after that, and
    /// the queue's first use starts after what the block's own stream was given so far. It does
    /// nothing for host memory or on the stream that the block was made on.
    pub(crate) fn visit(&self, queue: &Arc<Queue>, by: Caller) -> Result<()> {
        match &self.home {
            Home::Gpu(users) => users.visit(queue, by),
            Home::Host | Home::Pinned(_) => Ok(()),
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let (pointer, capacity_bytes) = (self.pointer, self.capacity_bytes);
        if capacity_bytes == 0 {
            return;
        }
        if let Some(pool) = self.pool() {
            pool.lock().remove(self.id, capacity_bytes);
        }
        match &mut self.home {
            Home::Host => host::give_back(pointer, capacity_bytes),
            Home::Pinned(pending) => {
                pinned::give_back(pointer, capacity_bytes, std::mem::take(pending));
            }
            Home::Gpu(users) => users.free(pointer.addr().get() as u64),
        }
    }
}
