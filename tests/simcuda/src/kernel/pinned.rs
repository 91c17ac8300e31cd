//! Pinned memory that a kernel touches at its product address. Those pages may be closed to the
//! host because a copy is in flight, but the kernel is not the host. They are opened while it runs
//! and restored afterwards.

use std::ops::Range;

use crate::memory::pinned::mapping::{protections, set_protection};
use crate::work::Address;

/// The pages that hold a range.
pub(super) fn pages_of(range: &Range<Address>) -> Range<Address> {
    range.start & !4095..(range.end + 4095) & !4095
}

/// Pages opened for a launch, with their former protection.
pub(super) struct Opened {
    before: Vec<(Range<Address>, i32)>,
}

impl Opened {
    /// Opens the pages of `range`, which one mapping of pinned memory holds.
    pub(super) fn new(range: &Range<Address>) -> Self {
        let pages = pages_of(range);
        let before = protections(&pages);
        protect(&pages, libc::PROT_READ | libc::PROT_WRITE);
        Self { before }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.before
            .iter()
            .for_each(|(pages, protection)| protect(pages, *protection));
    }
}

/// A launch holds the machine's lock, so no other thread changes these pages.
fn protect(pages: &Range<Address>, protection: i32) {
    set_protection(pages.start, pages.end - pages.start, protection);
}
