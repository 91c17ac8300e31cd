//! Which devices see each other's memory. Asked once a pair, at its first copy; what cannot is said aloud, once. An answer that
//! says nothing about the pair (no memory just now, a device that is lost) fails that copy, and the next one asks again.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use super::fault::{Outcome, describe, driver};
use super::gpu::Gpu;
use crate::transfer::warn;

/// How bytes get from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// The devices see each other.
    Direct,
    /// Through host memory.
    Staged,
}

/// The link between two devices, in both directions. A direct one is opened here: the pools' memory becomes visible to both.
pub(crate) fn link(a: &Gpu, b: &Gpu) -> Outcome<Link> {
    static LINKS: Mutex<Vec<([usize; 2], Link)>> = Mutex::new(Vec::new());
    let pair = [a.index.min(b.index), a.index.max(b.index)];
    let mut links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, link)) = links.iter().find(|(known, _)| *known == pair) {
        return Ok(*link);
    }
    let refused = refusal(a, b)?;
    let link = if refused.is_some() { Link::Staged } else { Link::Direct };
    if let Some(why) = refused {
        warn(&format!(
            "{} and {} do not see each other's memory ({why}): copies between them go through host memory, at a fraction of the \
             speed. On NVLink or one PCIe switch they would; `nvidia-smi topo -m` shows how they are connected, and IOMMU or \
             container settings can forbid it",
            a.device(),
            b.device()
        ));
    }
    links.push((pair, link));
    Ok(link)
}

/// Opens both directions, or says why the two cannot see each other. What passes is an error.
fn refusal(a: &Gpu, b: &Gpu) -> Outcome<Option<String>> {
    for (viewer, owner) in [(a, b), (b, a)] {
        if !sees(viewer, owner)? {
            return Ok(Some(format!("the driver says that {} cannot access {}", viewer.device(), owner.device())));
        }
    }
    for (viewer, owner) in [(a, b), (b, a)] {
        match open(viewer, owner) {
            Err(fault) if is_for_good(fault.code) => {
                let (name, meaning) = describe(fault.code);
                return Ok(Some(format!("{} said {name}: {meaning}", fault.function)));
            }
            other => other?,
        }
    }
    Ok(None)
}

/// Whether a refusal to open a pool is about the pair of devices, and so will be the same next time.
fn is_for_good(code: CUresult) -> bool {
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

fn sees(viewer: &Gpu, owner: &Gpu) -> Outcome<bool> {
    let mut can = 0;
    // SAFETY: the pointer is to a variable of ours.
    unsafe { driver!(cuDeviceCanAccessPeer(&mut can, viewer.handle, owner.handle)) }?;
    Ok(can != 0)
}

/// Makes the memory of `owner`'s pool, present and future, visible to `viewer`.
fn open(viewer: &Gpu, owner: &Gpu) -> Outcome<()> {
    let location =
        sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: viewer.handle };
    let flags = sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let description = sys::CUmemAccessDesc { location, flags };
    // SAFETY: one whole description, and a pool that is never destroyed.
    unsafe { driver!(cuMemPoolSetAccess(owner.pool, &description, 1)) }
}
