//! Addresses of device memory: one reservation for all devices, one range each.

use std::ops::Range;

use crate::work::{Address, Views};

/// What allocations are aligned to, as cuMemAlloc promises.
pub const ALIGNMENT_BYTES: u64 = 256;

/// At least this many unowned bytes lie between two allocations.
pub const RED_ZONE_BYTES: u64 = 512;

/// The fill byte of new and freed memory.
pub const POISON: u8 = 0xff;

const PAGE_BYTES: u64 = 4096;

/// The preferred start of device memory, so that two runs print the same addresses.
const FIRST_ADDRESS: Address = 0x2000_0000_0000;

/// Address space per byte of memory: how long a freed address is not reused.
const ADDRESSES_PER_BYTE: u64 = 64;

/// Freed memory above this is given back to the system instead of being filled.
const DISCARD_BYTES: u64 = 1 << 20;

/// The addresses of one device.
#[derive(Debug)]
pub struct Arena {
    /// All of them.
    pub range: Range<Address>,
    /// Unused from here on.
    next: Address,
}

/// Reserves the addresses of all devices, and maps them in all views.
pub fn reserve(devices: usize, memory_bytes: u64) -> (Vec<Arena>, Range<Address>, Views) {
    let mut each = (memory_bytes * ADDRESSES_PER_BYTE).next_multiple_of(1 << 30);
    loop {
        let total = each * devices.max(1) as u64;
        if let Some(views) = map_views(total) {
            let arena = |device: usize| {
                let first = views.low + device as u64 * each;
                Arena {
                    range: first..first + each,
                    next: first + RED_ZONE_BYTES,
                }
            };
            let arenas = (0..devices).map(arena).collect();
            return (arenas, views.low..views.low + total, views);
        }
        // A limit on addresses (ulimit -v): with fewer, they are only reused sooner.
        each /= 2;
        assert!(
            each > 2 * memory_bytes,
            "simcuda: cannot reserve addresses for {devices} devices of {memory_bytes} bytes"
        );
    }
}

/// Sparse memory of this many bytes, once for each view.
fn map_views(bytes: u64) -> Option<Views> {
    let each_bytes = bytes.next_power_of_two();
    let mut views = Views { low: 0, each_bytes };
    // SAFETY: a new mapping touches nothing that exists: without MAP_FIXED the address is a wish.
    // The views replace parts of that mapping, which nothing uses yet. The descriptor is ours.
    unsafe {
        let anywhere = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let wish = FIRST_ADDRESS as *mut libc::c_void;
        let low = libc::mmap(
            wish,
            views.bytes() as usize,
            libc::PROT_NONE,
            anywhere,
            -1,
            0,
        );
        if low == libc::MAP_FAILED {
            return None;
        }
        views.low = low as Address;
        let file = libc::memfd_create(c"simcuda-memory".as_ptr(), libc::MFD_CLOEXEC);
        let mut is_mapped = file >= 0 && libc::ftruncate(file, bytes as i64) == 0;
        for view in 0..Views::COUNT {
            let allowed = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let at = views.at(view, views.low) as *mut libc::c_void;
            is_mapped = is_mapped
                && libc::mmap(at, bytes as usize, allowed, flags, file, 0) != libc::MAP_FAILED;
        }
        libc::close(file);
        if !is_mapped {
            libc::munmap(low, views.bytes() as usize);
            return None;
        }
    }
    Some(views)
}

/// Fills new memory with poison.
pub fn poison(start: Address, bytes: u64) {
    // SAFETY: the range is in our reservation, and of no live allocation: nobody else uses it.
    unsafe { std::ptr::write_bytes(start as *mut u8, POISON, bytes as usize) };
}

impl Arena {
    /// Room at addresses that were never used.
    pub fn fresh(&mut self, bytes: u64) -> Option<Address> {
        let start = self.next;
        let next = bytes
            .checked_add(RED_ZONE_BYTES)?
            .checked_next_multiple_of(ALIGNMENT_BYTES)?
            .checked_add(start)?;
        if next > self.range.end {
            return None;
        }
        self.next = next;
        Some(start)
    }

    /// Room between `live` allocations, which come by address.
    pub fn between(
        &self,
        live: impl Iterator<Item = Range<Address>>,
        bytes: u64,
    ) -> Option<Address> {
        let mut start = self.range.start + RED_ZONE_BYTES;
        for allocation in live {
            if start.checked_add(bytes)?.checked_add(RED_ZONE_BYTES)? <= allocation.start {
                return Some(start);
            }
            start = (allocation.end + RED_ZONE_BYTES).next_multiple_of(ALIGNMENT_BYTES);
        }
        (start.checked_add(bytes)?.checked_add(RED_ZONE_BYTES)? <= self.range.end).then_some(start)
    }
}

/// The bytes of a freed allocation: poisoned, or given back to the system when they are many.
pub fn discard(range: &Range<Address>) {
    let bytes = range.end - range.start;
    let pages = range.start.next_multiple_of(PAGE_BYTES)..range.end / PAGE_BYTES * PAGE_BYTES;
    if bytes >= DISCARD_BYTES {
        // SAFETY: whole pages of an allocation that is over. They read as zeros afterwards; the
        // checks keep everybody away.
        unsafe {
            libc::madvise(
                pages.start as *mut libc::c_void,
                (pages.end - pages.start) as usize,
                libc::MADV_REMOVE,
            )
        };
    } else {
        // SAFETY: an allocation that is over, mapped since it was made.
        unsafe { std::ptr::write_bytes(range.start as *mut u8, POISON, bytes as usize) };
    }
}
