//! Pinned host memory: pages that stay where they are, so that a device copies from and to them by itself while the host goes
//! on. A buffer that comes back while a copy may still use it waits, with that copy's event, until it is handed out again.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUresult;

use super::{Block, Home, PINNED, Wanted, host};
use crate::cuda::fault::{Fault, Outcome, driver};
use crate::cuda::gpu::GPUS_MAX;
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

impl Kept {
    /// Whether no copy uses it any more.
    fn is_idle(&mut self) -> bool {
        self.pending.retain(|event| !event.is_done());
        self.pending.is_empty()
    }
}

fn kept() -> MutexGuard<'static, Vec<Kept>> {
    // Only pushes and removals happen under this lock: a panic cannot leave the list half changed.
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The smallest kept buffer that fits, is at most twice as large, and that no copy uses any more. The lock is not held while the driver is
/// asked: each candidate is taken out of the list first.
fn reuse(capacity_bytes: usize) -> Option<Kept> {
    let fits = |kept: &Kept| (capacity_bytes..=2 * capacity_bytes).contains(&kept.capacity_bytes);
    let next = || {
        let mut kept = kept();
        let candidates = kept.iter().enumerate().filter(|(_, kept)| fits(kept));
        let (_, at) = candidates.map(|(at, kept)| (kept.capacity_bytes, at)).min()?;
        Some(kept.swap_remove(at))
    };
    let mut busy = Vec::new();
    let mut found = next();
    while let Some(mut candidate) = found.take() {
        if candidate.is_idle() {
            found = Some(candidate);
            break;
        }
        busy.push(candidate);
        found = next();
    }
    kept().append(&mut busy);
    found
}

fn take(capacity_bytes: usize, wanted: &Wanted) -> Result<NonNull<u8>> {
    let (op, at) = (wanted.op, wanted.at);
    let gpu = Gpu::any(op, at)?;
    if capture::is_capturing() {
        let why = "pinned memory cannot be made meanwhile. Make it before the capture".to_string();
        return Err(Error::Capture { op, device: gpu.device(), why, at });
    }
    let is_full = |fault: &Fault| fault.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    let mapped = match map(gpu, capacity_bytes) {
        // What is kept for reuse may be what is missing.
        Err(fault) if is_full(&fault) && empty_cache() > 0 => map(gpu, capacity_bytes),
        other => other,
    };
    match mapped {
        Ok(pointer) => {
            PINNED.lock().grow(capacity_bytes);
            Ok(pointer)
        }
        Err(fault) if is_full(&fault) => {
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
    kept().push(Kept { pointer, capacity_bytes, pending });
}

/// Gives kept buffers back to the driver and says how many bytes that were. Those that a copy still uses stay, and all of them while this
/// thread captures: the driver could not be asked.
pub(super) fn empty_cache() -> usize {
    if capture::is_capturing() {
        return 0;
    }
    // Where there is a buffer there is a device in use.
    let Some(gpu) = (0..GPUS_MAX).find_map(Gpu::if_made) else { return 0 };
    let buffers = std::mem::take(&mut *kept());
    let (mut released_bytes, mut left) = (0, Vec::new());
    for mut buffer in buffers {
        let is_idle = buffer.is_idle() && gpu.bind().is_ok();
        // SAFETY: the buffer came from `map`, and a context is current; no tensor refers to it, and no copy.
        if is_idle && unsafe { driver!(cuMemFreeHost(buffer.pointer.as_ptr().cast())) }.is_ok() {
            released_bytes += buffer.capacity_bytes;
        } else {
            left.push(buffer);
        }
    }
    kept().append(&mut left);
    PINNED.lock().stats.reserved_bytes -= released_bytes;
    released_bytes
}
