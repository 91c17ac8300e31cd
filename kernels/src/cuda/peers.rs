//! Which devices can access each other's memory. Each pair is asked once, at its first copy, and a
//! refusal is a warning. A passing error (no memory, a lost device) fails that copy, and the next
//! copy asks again.

use std::sync::Mutex;

use cudarc::driver::sys;

use super::calls::CUresult;
use super::fault::{Outcome, describe, driver};
use super::gpu::Gpu;
use crate::sync::lock;
use crate::warning::warn;

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
