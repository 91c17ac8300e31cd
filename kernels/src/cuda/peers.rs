//! Which devices see each other's memory. Asked once a pair, at its first copy; what cannot is said aloud, once.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;

use super::fault::{Outcome, driver};
use super::gpu::Gpu;

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
    let link = if sees(a, b)? && sees(b, a)? && open(a, b).and_then(|()| open(b, a)).is_ok() {
        Link::Direct
    } else {
        tracing::warn!(
            "{} and {} do not see each other's memory: copies between them go through host memory, at a fraction of the \
             speed. On NVLink or one PCIe switch they would; `nvidia-smi topo -m` shows how they are connected, and IOMMU or \
             container settings can forbid it",
            a.device(),
            b.device()
        );
        Link::Staged
    };
    links.push((pair, link));
    Ok(link)
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
