//! One memory under two addresses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::super::space::POISON;
use crate::error::CUresult;
use crate::work::Address;

const PAGE_BYTES: u64 = 4096;

/// The product's mappings by their first address, for a handler that cannot ask the machine.
/// Whoever holds this lock touches no product's memory, so that a handler never waits for its own
/// thread.
static LIVE: Mutex<BTreeMap<Address, Live>> = Mutex::new(BTreeMap::new());

/// A mapping of the product.
struct Live {
    end: Address,
    /// What each page allows.
    pages: Vec<i32>,
}

fn live() -> MutexGuard<'static, BTreeMap<Address, Live>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What each of these pages of one live mapping allows: ranges with equal protection.
#[cfg(test)]
pub(crate) fn protections(pages: &Range<Address>) -> Vec<(Range<Address>, i32)> {
    let live = live();
    let Some((first, mapping)) = live.range(..=pages.start).next_back() else {
        return Vec::new();
    };
    let mut found: Vec<(Range<Address>, i32)> = Vec::new();
    for start in (pages.start..pages.end.min(mapping.end)).step_by(PAGE_BYTES as usize) {
        let allowed = mapping.pages[((start - first) / PAGE_BYTES) as usize];
        match found.last_mut() {
            Some((range, same)) if *same == allowed => range.end = start + PAGE_BYTES,
            _ => found.push((start..start + PAGE_BYTES, allowed)),
        }
    }
    found
}

/// Opens the page of an address if it is in any live mapping.
pub(in crate::memory) fn open_page(address: Address) -> bool {
    let is_live = live()
        .range(..=address)
        .next_back()
        .is_some_and(|(_, mapping)| address < mapping.end);
    is_live
        && set_protection(
            address / PAGE_BYTES * PAGE_BYTES,
            PAGE_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
        )
}

/// Sets what may be done with pages of ours. Allocates nothing: a handler calls it.
pub(crate) fn set_protection(start: Address, bytes: u64, allowed: i32) -> bool {
    if let Some((first, mapping)) = live().range_mut(..=start).next_back() {
        let page = |address: Address| ((address - first) / PAGE_BYTES) as usize;
        let pages = page(start)..page(start + bytes).min(mapping.pages.len());
        mapping
            .pages
            .get_mut(pages)
            .into_iter()
            .for_each(|pages| pages.fill(allowed));
    }
    // SAFETY: the pages are the product's of a live mapping. Closing them makes the product's
    // touches fault, which is what is wanted: the simulator itself uses the other mapping.
    unsafe { libc::mprotect(start as *mut libc::c_void, bytes as usize, allowed) == 0 }
}

/// What the product may do with pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Everything.
    Open,
    /// Read.
    ReadOnly,
    /// Nothing.
    Closed,
}

/// The two addresses.
#[derive(Debug)]
pub struct Mapping {
    /// What the product was given.
    pub product: Address,
    /// What copies use; never closed.
    pub simulator: Address,
    /// In whole pages, without the guard page behind.
    bytes: u64,
}

impl Mapping {
    /// Memory of `bytes`, full of poison. Behind the product's mapping is a page that nobody may
    /// touch.
    pub fn new(bytes: u64) -> Result<Self, CUresult> {
        let out_of_memory = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let pages = bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .filter(|pages| *pages < 1 << 46)
            .ok_or(out_of_memory)?;
        // SAFETY: the name is a constant string that ends in zero.
        let file = unsafe { libc::memfd_create(c"simcuda-pinned".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(out_of_memory);
        }
        // SAFETY: the file is ours, and just made.
        let sized = unsafe { libc::ftruncate(file, pages as libc::off_t) } == 0;
        let mapped = if sized { Self::map(file, pages) } else { None };
        // SAFETY: the file is ours; mappings outlive it.
        unsafe { libc::close(file) };
        let mapping = mapped.ok_or(out_of_memory)?;
        // SAFETY: the mapping is new, `pages` long, and nobody knows of it yet.
        unsafe { std::ptr::write_bytes(mapping.simulator as *mut u8, POISON, pages as usize) };
        Ok(mapping)
    }

    fn map(file: i32, pages: u64) -> Option<Self> {
        let open = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: three new mappings. The first reserves addresses of the system's choice, the
        // second replaces the first part of just these, the third is again of the system's choice.
        let (reserved, product, simulator) = unsafe {
            let anywhere = std::ptr::null_mut();
            let reserved = libc::mmap(
                anywhere,
                (pages + PAGE_BYTES) as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if reserved == libc::MAP_FAILED {
                return None;
            }
            let product = libc::mmap(
                reserved,
                pages as usize,
                open,
                libc::MAP_SHARED | libc::MAP_FIXED,
                file,
                0,
            );
            (
                reserved,
                product,
                libc::mmap(anywhere, pages as usize, open, libc::MAP_SHARED, file, 0),
            )
        };
        if product == libc::MAP_FAILED || simulator == libc::MAP_FAILED {
            // SAFETY: it was made above, and nobody else knows of it.
            unsafe { libc::munmap(reserved, (pages + PAGE_BYTES) as usize) };
            return None;
        }
        let mapping = Live {
            end: product as Address + pages,
            pages: vec![open; (pages / PAGE_BYTES) as usize],
        };
        live().insert(product as Address, mapping);
        Some(Self {
            product: product as Address,
            simulator: simulator as Address,
            bytes: pages,
        })
    }

    /// Whether `address` is in the product's pages.
    pub fn covers(&self, address: Address) -> bool {
        (self.product..self.product + self.bytes).contains(&address)
    }

    /// Sets what the product may do with the pages that hold `range`.
    pub fn protect(&self, range: &Range<Address>, protection: Protection) {
        let start = range.start.max(self.product) / PAGE_BYTES * PAGE_BYTES;
        let end = range
            .end
            .next_multiple_of(PAGE_BYTES)
            .min(self.product + self.bytes);
        let allowed = match protection {
            Protection::Open => libc::PROT_READ | libc::PROT_WRITE,
            Protection::ReadOnly => libc::PROT_READ,
            Protection::Closed => libc::PROT_NONE,
        };
        let is_set = set_protection(start, end - start, allowed);
        assert!(
            is_set,
            "mprotect of pinned memory: {}",
            std::io::Error::last_os_error()
        );
    }

    /// The memory was freed. Its addresses stay closed, so that a late touch faults and is not
    /// another allocation's; while copies still use it the memory itself is kept.
    pub fn close(&self, is_in_use: bool) {
        live().remove(&self.product);
        // SAFETY: both ranges are this mapping's, whose allocation is over: the product's addresses
        // are replaced by nothing at all, and the simulator's are used by nobody when no copy is in
        // flight.
        unsafe {
            libc::mmap(
                self.product as *mut libc::c_void,
                self.bytes as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            );
            if !is_in_use {
                libc::munmap(self.simulator as *mut libc::c_void, self.bytes as usize);
            }
        }
    }
}
