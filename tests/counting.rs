//! An allocator that counts allocations, for tests which show that code takes no heap memory. A
//! test file includes this file and makes it the allocator of its process:
//!
//! ```text
//! #[path = "../../tests/counting.rs"]
//! mod counting;
//! #[global_allocator]
//! static COUNTING: counting::Counting = counting::Counting;
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The number of allocations of this process, on all threads.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::SeqCst)
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises to this function are those that System requires.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises to this function are those that System requires.
        unsafe { System.dealloc(pointer, layout) }
    }
}
