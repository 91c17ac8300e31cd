//! Pinned host memory: pages that stay where they are, so that a device copies from and to them by itself while the host goes
//! on. A buffer that comes back while a copy may still use it waits, with that copy's event, until it is handed out again.

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUresult;

use super::{Block, Home, PINNED, Wanted, host};
use crate::cuda::fault::{Outcome, driver};
use crate::cuda::{Gpu, capture};
use crate::error::{Error, Result};
use crate::stream::Event;

/// A buffer kept for reuse.
#[derive(Debug)]
struct Kept {
    pointer: NonNull<u8>,
    capacity_bytes: usize,
    /// Copies that may still use it.
    pending: Vec<Event>,
}

// SAFETY: the list owns the bytes behind the address; only copies of the device refer to them, and `pending` knows those.
unsafe impl Send for Kept {}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all devices.
const PORTABLE: u32 = 1;

pub(super) fn allocate(wanted: Wanted) -> Result<Block> {
    let capacity_bytes = host::rounded(wanted.bytes);
    let (id, device) = (wanted.id, wanted.device);
    let (pointer, capacity_bytes, fresh) = match reuse(capacity_bytes) {
        Some(kept) => (kept.pointer, kept.capacity_bytes, false),
        None => (take(capacity_bytes, &wanted)?, capacity_bytes, true),
    };
    PINNED.lock().insert(wanted, capacity_bytes);
    Ok(Block { pointer, capacity_bytes, device, id, fresh, home: Home::Pinned(Vec::new()) })
}

/// The smallest kept buffer that fits, is at most twice as large, and that no copy uses any more.
fn reuse(capacity_bytes: usize) -> Option<Kept> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |kept: &Kept| (capacity_bytes..=2 * capacity_bytes).contains(&kept.capacity_bytes);
    let free = |kept: &mut Kept| {
        kept.pending.retain(|event| !event.is_done());
        kept.pending.is_empty()
    };
    let candidates = kept.iter_mut().enumerate().filter(|(_, kept)| fits(kept));
    let best = candidates.filter_map(|(at, kept)| free(kept).then_some((kept.capacity_bytes, at))).min()?;
    Some(kept.swap_remove(best.1))
}

fn take(capacity_bytes: usize, wanted: &Wanted) -> Result<NonNull<u8>> {
    let (op, at) = (wanted.op, wanted.at);
    let gpu = Gpu::any(op, at)?;
    if capture::is_capturing() {
        let why = "pinned memory cannot be made meanwhile. Make it before the capture".to_string();
        return Err(Error::Capture { op, device: gpu.device(), why, at });
    }
    match map(gpu, capacity_bytes) {
        Ok(pointer) => {
            PINNED.lock().grow(capacity_bytes);
            Ok(pointer)
        }
        Err(fault) if fault.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            let wanted = Wanted { info: wanted.info.clone(), ..*wanted };
            Err(PINNED.lock().out_of_memory(wanted))
        }
        Err(fault) => Err(fault.of(op, gpu.device(), at)),
    }
}

/// Zeroed pinned memory.
fn map(gpu: &Gpu, bytes: usize) -> Outcome<NonNull<u8>> {
    gpu.bind()?;
    let mut pointer = std::ptr::null_mut();
    // SAFETY: a context is current, and the pointer is to a variable of ours.
    unsafe { driver!(cuMemHostAlloc(&mut pointer, bytes, PORTABLE)) }?;
    // SAFETY: the driver has just given us this many bytes, which nobody else knows of.
    unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
    Ok(NonNull::new(pointer.cast()).expect("the driver gives no null"))
}

pub(super) fn give_back(id: u64, pointer: NonNull<u8>, capacity_bytes: usize, pending: Vec<Event>) {
    PINNED.lock().remove(id, capacity_bytes);
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(Kept { pointer, capacity_bytes, pending });
}

/// Gives kept buffers back to the driver and says how many bytes that were. Those that a copy still uses stay.
pub(super) fn empty_cache() -> usize {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let (mut released_bytes, mut left) = (0, Vec::new());
    for buffer in std::mem::take(&mut *kept) {
        let idle = buffer.pending.iter().all(Event::is_done);
        // SAFETY: the buffer came from `map`; no tensor refers to it, and no copy.
        if idle && unsafe { driver!(cuMemFreeHost(buffer.pointer.as_ptr().cast())) }.is_ok() {
            released_bytes += buffer.capacity_bytes;
        } else {
            left.push(buffer);
        }
    }
    *kept = left;
    PINNED.lock().stats.reserved_bytes -= released_bytes;
    released_bytes
}
