//! The copies that the door in `transfer.rs` lets through, as calls of the driver on a stream.

use std::sync::Arc;

use super::fault::{Outcome, driver};
use super::gpu::Gpu;
use super::queue::{Mark, Queue};

/// Host to device. Of pageable memory the driver has taken its copy when this returns; pinned memory is read later.
///
/// # Safety
/// `source` holds `bytes` readable bytes; pinned ones stay and do not change until the stream has passed. `target` is that many bytes of memory
/// that the stream's device may write.
pub(crate) unsafe fn upload(queue: &Queue, target: u64, source: *const u8, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, queue.stream)) }
}

/// Device to host. Pageable memory is written when this returns, pinned memory later.
///
/// # Safety
/// As `upload`, the other way round.
pub(crate) unsafe fn download(queue: &Queue, target: *mut u8, source: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, queue.stream)) }
}

/// Within one device's memory.
///
/// # Safety
/// Both are `bytes` bytes of memory of the stream's device that do not overlap.
pub(crate) unsafe fn within(queue: &Queue, target: u64, source: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyDtoDAsync_v2(target, source, bytes, queue.stream)) }
}

/// Zeros.
///
/// # Safety
/// `target` is `bytes` bytes of memory of the stream's device.
pub(crate) unsafe fn zero(queue: &Queue, target: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemsetD8Async(target, 0, bytes, queue.stream)) }
}

/// From one device to another that sees it, on a stream of either.
///
/// # Safety
/// Both are `bytes` bytes of their devices' memory.
pub(crate) unsafe fn peer(
    queue: &Queue,
    (target, target_gpu): (u64, &Gpu),
    (source, source_gpu): (u64, &Gpu),
    bytes: usize,
) -> Outcome<()> {
    queue.gpu.bind()?;
    let (target_context, source_context) = (target_gpu.context, source_gpu.context);
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyPeerAsync(target, target_context, source, source_context, bytes, queue.stream)) }
}

/// Bytes that go through host memory at a time.
pub(crate) const STAGE_BYTES: usize = 16 << 20;

/// From one device to another through two stages of pinned host memory, in pieces, so that the way up runs beside the way down. All of it is
/// ordered as one piece of work of `queue`; the host waits for nothing. Gives the point at which the stages are free again.
///
/// # Safety
/// As `peer`; each stage is `STAGE_BYTES` (or `bytes`, if that is less) of pinned memory that nobody touches before the mark that is returned.
pub(crate) unsafe fn staged(
    queue: &Arc<Queue>,
    (target, target_gpu): (u64, &'static Gpu),
    (source, source_gpu): (u64, &'static Gpu),
    bytes: usize,
    stages: [*mut u8; 2],
) -> Outcome<Mark> {
    let side = |gpu: &'static Gpu| if queue.gpu.index == gpu.index { Ok(queue.clone()) } else { gpu.side_queue() };
    let (down, up) = (side(source_gpu)?, side(target_gpu)?);
    let start = queue.record(false)?;
    for other in [&down, &up].into_iter().filter(|other| !Arc::ptr_eq(other, queue)) {
        other.wait(&start)?;
    }
    let mut freed: [Option<Mark>; 2] = [None, None];
    for (piece, first) in (0..bytes).step_by(STAGE_BYTES).enumerate() {
        let length = STAGE_BYTES.min(bytes - first);
        let stage = stages[piece % 2];
        if let Some(free) = &freed[piece % 2] {
            down.wait(free)?;
        }
        // SAFETY: by the caller's promise; the piece lies inside both, and the stage is not in use: `freed` says so.
        unsafe { download(&down, stage, source + first as u64, length) }?;
        up.wait(&down.record(false)?)?;
        // SAFETY: as above; the stage has been filled when the stream comes here.
        unsafe { upload(&up, target + first as u64, stage, length) }?;
        freed[piece % 2] = Some(up.record(false)?);
    }
    let done = up.record(false)?;
    if !Arc::ptr_eq(&up, queue) {
        queue.wait(&done)?;
    }
    Ok(done)
}
