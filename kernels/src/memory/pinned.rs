//! Pinned host memory, which devices copy asynchronously. A buffer that is freed while a copy may
//! still use it is reused only after that copy's event.

use std::ptr::NonNull;
use std::sync::Mutex;

use super::host;
use super::pool::{PINNED, Wanted};
use crate::cuda::Gpu;
use crate::cuda::calls::CUresult;
use crate::cuda::calls::{DriverFault, Outcome, driver};
use crate::cuda::queue::is_capturing;
use crate::error::Result;
use crate::panics::lock;
use crate::stream::Event;

/// A buffer kept for reuse.
#[derive(Debug)]
struct SpareBuffer {
    pointer: NonNull<u8>,
    capacity_bytes: usize,
    /// Copies that may still use it.
    pending: Vec<Event>,
}

// SAFETY: the list owns the bytes at the address; only copies in `pending` refer to them.
unsafe impl Send for SpareBuffer {}

static KEPT: Mutex<Vec<SpareBuffer>> = Mutex::new(Vec::new());

impl SpareBuffer {
    /// Whether no copy uses it any more.
    fn is_idle(&mut self) -> bool {
        self.pending.retain(|event| !event.is_done());
        self.pending.is_empty()
    }
}

/// A buffer's address, its capacity, and whether it is still zero.
pub(super) fn allocate(wanted: Wanted) -> Result<(NonNull<u8>, usize, bool)> {
    let capacity_bytes = host::rounded(wanted.bytes);
    let buffer = match reuse(capacity_bytes) {
        Some(kept) => (kept.pointer, kept.capacity_bytes, false),
        None => (take(capacity_bytes, &wanted)?, capacity_bytes, true),
    };
    PINNED.lock().insert(wanted, buffer.1);
    Ok(buffer)
}

/// The smallest idle buffer that fits and is at most twice as large. The lock is not held while the
/// driver is asked: each candidate is taken out of the list first.
fn reuse(capacity_bytes: usize) -> Option<SpareBuffer> {
    let fits = capacity_bytes..=2 * capacity_bytes;
    let next = || {
        let mut kept = lock(&KEPT);
        let sizes = kept
            .iter()
            .enumerate()
            .map(|(at, it)| (it.capacity_bytes, at));
        let (_, at) = sizes.filter(|(bytes, _)| fits.contains(bytes)).min()?;
        Some(kept.swap_remove(at))
    };
    let mut busy = Vec::new();
    let mut found = None;
    while let Some(mut candidate) = next() {
        if candidate.is_idle() {
            found = Some(candidate);
            break;
        }
        busy.push(candidate);
    }
    lock(&KEPT).append(&mut busy);
    found
}

fn take(capacity_bytes: usize, wanted: &Wanted) -> Result<NonNull<u8>> {
    let by = wanted.by;
    let gpu = match Gpu::any_made() {
        Some(gpu) => gpu,
        None => Gpu::get(0, by)?,
    };
    if is_capturing() {
        let why = "pinned memory cannot be allocated during a capture";
        let help = "make the tensor before the capture";
        return Err(by.capture(gpu.device(), why, help));
    }
    let is_full = |fault: &DriverFault| fault.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    let mapped = match map(gpu, capacity_bytes) {
        Err(fault) if is_full(&fault) && empty_cache() > 0 => map(gpu, capacity_bytes),
        other => other,
    };
    let mut state = PINNED.lock();
    match mapped {
        Ok(pointer) => {
            state.grow(capacity_bytes);
            Ok(pointer)
        }
        Err(fault) if is_full(&fault) => Err(state.out_of_memory(wanted, host::free_bytes(&state))),
        Err(fault) => Err(fault.of(by, gpu.device())),
    }
}

/// Zeroed pinned memory.
fn map(gpu: &Gpu, bytes: usize) -> Outcome<NonNull<u8>> {
    /// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all devices.
    const PORTABLE: u32 = 1;
    gpu.bind()?;
    let mut pointer = std::ptr::null_mut();
    // SAFETY: a context is current, and the pointer is to a local variable.
    unsafe { driver!(cuMemHostAlloc(&mut pointer, bytes, PORTABLE)) }?;
    // SAFETY: the driver has just allocated this many bytes, which nothing else refers to.
    unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
    Ok(NonNull::new(pointer.cast()).expect("the driver never returns null"))
}

/// Keeps a buffer for reuse once the copies in `pending` are done.
pub(super) fn give_back(pointer: NonNull<u8>, capacity_bytes: usize, pending: Vec<Event>) {
    lock(&KEPT).push(SpareBuffer {
        pointer,
        capacity_bytes,
        pending,
    });
}

/// Gives idle kept buffers back to the driver and returns their bytes. During a capture of this
/// thread it gives back none, because the driver cannot be asked.
pub(super) fn empty_cache() -> usize {
    // If there is a buffer, a device is in use.
    let Some(gpu) = Gpu::any_made().filter(|_| !is_capturing()) else {
        return 0;
    };
    let buffers = std::mem::take(&mut *lock(&KEPT));
    let (mut released_bytes, mut left) = (0, Vec::new());
    for mut buffer in buffers {
        let is_idle = buffer.is_idle() && gpu.bind().is_ok();
        // SAFETY: the buffer came from `map`, a context is current, and no tensor or copy uses it.
        if is_idle && unsafe { driver!(cuMemFreeHost(buffer.pointer.as_ptr().cast())) }.is_ok() {
            released_bytes += buffer.capacity_bytes;
        } else {
            left.push(buffer);
        }
    }
    lock(&KEPT).append(&mut left);
    PINNED.lock().stats.reserved_bytes -= released_bytes;
    released_bytes
}
