//! A buffer on one device, which goes back to its pool when it is dropped.

use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::pool::{PINNED, Pool, Wanted, pool};
use super::{gpu, host, pinned};
use crate::Device;
use crate::cuda::queue::Queue;
use crate::error::{Caller, Result, TensorInfo};
use crate::stream::Event;

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
        device.check_usable(by)?;
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

    fn pool(&self) -> Option<&'static Pool> {
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
            _ => Ok(()),
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
