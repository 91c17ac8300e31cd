//! Copies as calls of the driver on a stream. `transfer.rs` decides what may be copied.

use super::fault::{Outcome, driver};
use super::gpu::Gpu;
use super::nodes::{self, NodeKind};
use super::queue::Queue;

/// Host to device. Pinned memory is read later; pageable memory mostly before this returns, which
/// the driver does not promise.
///
/// # Safety
/// `source` holds `bytes` readable bytes that stay unchanged until the stream has passed. `target`
/// is that many bytes of memory that the stream's device may write.
pub(crate) unsafe fn upload(
    queue: &Queue,
    target: u64,
    source: *const u8,
    bytes: usize,
) -> Outcome<()> {
    let source = source.cast();
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyHtoDAsync_v2(target, source, bytes, queue.raw())) }
}

/// Device to host. Pinned memory is written later; pageable memory mostly before this returns.
///
/// # Safety
/// As `upload`, with source and target exchanged.
pub(crate) unsafe fn download(
    queue: &Queue,
    target: *mut u8,
    source: u64,
    bytes: usize,
) -> Outcome<()> {
    let target = target.cast();
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyDtoHAsync_v2(target, source, bytes, queue.raw())) }
}

/// Within one device's memory.
///
/// # Safety
/// Both are `bytes` bytes of memory of the stream's device that do not overlap.
pub(crate) unsafe fn within(queue: &Queue, target: u64, source: u64, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    let copy = || unsafe { driver!(cuMemcpyDtoDAsync_v2(target, source, bytes, queue.raw())) };
    nodes::launch(queue, copy)??;
    nodes::note(|notes| {
        notes.begin();
        notes.operand(source, bytes, [true, false]);
        notes.operand(target, bytes, [false, true]);
        notes.node(NodeKind::Copy, "copy".into(), "copy", &[source, target]);
    });
    Ok(())
}

/// Fills with `byte`.
///
/// # Safety
/// `target` is `bytes` bytes of memory of the stream's device.
pub(crate) unsafe fn fill(queue: &Queue, target: u64, byte: u8, bytes: usize) -> Outcome<()> {
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    let fill = || unsafe { driver!(cuMemsetD8Async(target, byte, bytes, queue.raw())) };
    nodes::launch(queue, fill)??;
    nodes::note(|notes| {
        notes.begin();
        notes.operand(target, bytes, [false, true]);
        notes.node(NodeKind::Fill, "zeros".into(), "fill", &[target]);
    });
    Ok(())
}

/// From one device to another, on a stream of either. Where the devices cannot access each other's
/// memory (`peers.rs`), the driver goes through host memory.
///
/// # Safety
/// Both are `bytes` bytes of their devices' memory.
pub(crate) unsafe fn between(
    queue: &Queue,
    (target, target_gpu): (u64, &Gpu),
    (source, source_gpu): (u64, &Gpu),
    bytes: usize,
) -> Outcome<()> {
    let (to, from) = (target_gpu.context, source_gpu.context);
    let stream = queue.raw();
    queue.gpu.bind()?;
    // SAFETY: by the caller's promise.
    unsafe { driver!(cuMemcpyPeerAsync(target, to, source, from, bytes, stream)) }
}
