//! Copies as calls of the driver on a stream, and which devices can access each other's memory.
//! `transfer.rs` decides what may be copied.
//!
//! Each pair of devices is asked once, at its first copy, and a refusal is a warning. A passing
//! error (no memory, a lost device) fails that copy, and the next copy asks again.

use std::sync::Mutex;

use cudarc::driver::sys;

use super::calls::{CUresult, Outcome, describe, driver};
use super::gpu::Gpu;
use super::nodes::{self, NodeKind};
use super::queue::Queue;
use crate::message::warn;
use crate::panics::lock;

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
/// memory (`are_linked`), the driver goes through host memory.
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

/// Whether two devices can access each other's memory. If they can, this opens both pools.
pub(crate) fn are_linked(a: &Gpu, b: &Gpu) -> Outcome<bool> {
    static LINKS: Mutex<Vec<([usize; 2], bool)>> = Mutex::new(Vec::new());
    let pair = [a.index.min(b.index), a.index.max(b.index)];
    let mut links = lock(&LINKS);
    if let Some((_, linked)) = links.iter().find(|(known, _)| *known == pair) {
        return Ok(*linked);
    }
    let refused = refusal(a, b)?;
    if let Some(why) = &refused {
        warn(&format!(
            "{} and {} cannot access each other's memory ({why}), so copies between them go \
             through host memory, which is slow; help: see how they are connected with `nvidia-smi \
             topo -m`, and check the IOMMU and container settings",
            a.device(),
            b.device()
        ));
    }
    links.push((pair, refused.is_none()));
    Ok(refused.is_none())
}

/// Opens both directions, or says why the devices cannot access each other. A passing error is Err.
fn refusal(a: &Gpu, b: &Gpu) -> Outcome<Option<String>> {
    for (viewer, owner) in [(a, b), (b, a)] {
        let mut can = 0;
        // SAFETY: the pointer is to a local variable.
        unsafe { driver!(cuDeviceCanAccessPeer(&mut can, viewer.handle, owner.handle)) }?;
        if can == 0 {
            let (viewer, owner) = (viewer.device(), owner.device());
            return Ok(Some(format!(
                "the driver says that {viewer} cannot access {owner}"
            )));
        }
    }
    for (viewer, owner) in [(a, b), (b, a)] {
        match open(viewer, owner) {
            Err(fault) if is_permanent(fault.code) => {
                let (name, meaning) = describe(fault.code);
                return Ok(Some(format!(
                    "{} failed: {name}: {meaning}",
                    fault.function
                )));
            }
            other => other?,
        }
    }
    Ok(None)
}

/// Whether a refusal to open a pool is about the pair of devices, and so will not change.
fn is_permanent(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_NOT_SUPPORTED
            | CUresult::CUDA_ERROR_NOT_PERMITTED
            | CUresult::CUDA_ERROR_INVALID_DEVICE
            | CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
            | CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
            | CUresult::CUDA_ERROR_TOO_MANY_PEERS
    )
}

/// Makes all memory of `owner`'s pool, present and future, accessible to `viewer`.
fn open(viewer: &Gpu, owner: &Gpu) -> Outcome<()> {
    let location = sys::CUmemLocation {
        type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
        id: viewer.handle,
    };
    let flags = sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let description = sys::CUmemAccessDesc { location, flags };
    // SAFETY: one complete description, and a pool that is never destroyed.
    unsafe { driver!(cuMemPoolSetAccess(owner.pool, &description, 1)) }
}
