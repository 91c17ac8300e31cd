//! The copies that the door in `transfer.rs` lets through, as calls of the driver on a stream.

use std::sync::Arc;

use super::fault::{Outcome, driver};
use super::gpu::Gpu;
use super::queue::{Mark, Queue};

/// Host to device. Pinned memory is read later. Of pageable memory the driver mostly takes its copy before this returns, but does not promise it.
///
/// # Safety
/// `source` holds `bytes` readable bytes, which stay and do not change until the stream has passed. `target` is that many bytes of memory
/// that the stream's device may write.
pub(crate) unsafe fn upload(queue: &Queue, target: u64, source: *const u8, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, queue.raw())) }
}

/// Device to host. Pinned memory is written later; pageable memory mostly before this returns, but that is not promised.
///
/// # Safety
/// As `upload`, the other way round.
pub(crate) unsafe fn download(queue: &Queue, target: *mut u8, source: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, queue.raw())) }
}

/// Within one device's memory.
///
/// # Safety
/// Both are `bytes` bytes of memory of the stream's device that do not overlap.
pub(crate) unsafe fn within(queue: &Queue, target: u64, source: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyDtoDAsync_v2(target, source, bytes, queue.raw())) }
}

/// Zeros.
///
/// # Safety
/// `target` is `bytes` bytes of memory of the stream's device.
pub(crate) unsafe fn zero(queue: &Queue, target: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemsetD8Async(target, 0, bytes, queue.raw())) }
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
    unsafe { driver!(cuMemcpyPeerAsync(target, target_context, source, source_context, bytes, queue.raw())) }
}

/// Bytes that go through host memory at a time.
pub(crate) const STAGE_BYTES: usize = 16 << 20;

/// The streams of a copy between devices in pieces: one of the source's device for the way down, one of the target's for the way up. `queue` is
/// one of them or both; what is missing the device has for this.
pub(crate) fn sides(queue: &Arc<Queue>, target_gpu: &'static Gpu, source_gpu: &'static Gpu) -> Outcome<Sides> {
    let side = |gpu: &'static Gpu| if queue.gpu.index == gpu.index { Ok(queue.clone()) } else { gpu.side_queue() };
    Ok(Sides { down: side(source_gpu)?, up: side(target_gpu)? })
}

/// What `sides` gives.
pub(crate) struct Sides {
    pub(crate) down: Arc<Queue>,
    pub(crate) up: Arc<Queue>,
}

/// From one device to another through two stages of pinned host memory, in pieces, so that the way up runs beside the way down. All of it is
/// ordered as one piece of work of `queue`; the host waits for nothing. Gives the point at which the stages are free again. After an error
/// some of it may be under way on either side, ordered before nothing of `queue`.
///
/// # Safety
/// `target` and `source` are `bytes` bytes of memory of the devices of `sides`, and stay until these have passed. Each stage is `STAGE_BYTES` (or
/// `bytes`, if that is less) of pinned memory that nobody touches before the mark that is returned, or before both sides have passed.
pub(crate) unsafe fn staged(
    queue: &Arc<Queue>,
    Sides { down, up }: &Sides,
    target: u64,
    source: u64,
    bytes: usize,
    stages: [*mut u8; 2],
) -> Outcome<Mark> {
    let start = queue.record(false)?;
    for other in [down, up].into_iter().filter(|other| !Arc::ptr_eq(other, queue)) {
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
        unsafe { download(down, stage, source + first as u64, length) }?;
        up.wait(&down.record(false)?)?;
        // SAFETY: as above; the stage has been filled when the stream comes here.
        unsafe { upload(up, target + first as u64, stage, length) }?;
        freed[piece % 2] = Some(up.record(false)?);
    }
    let done = up.record(false)?;
    if !Arc::ptr_eq(up, queue) {
        queue.wait(&done)?;
    }
    Ok(done)
}
