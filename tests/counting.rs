//! An allocator that counts allocations and remembers the largest, for tests of heap use. A test
//! file includes this file and makes it the allocator of its process:
//!
//! ```text
//! #[path = "../../tests/counting.rs"]
//! mod counting;
//! #[global_allocator]
//! static COUNTING: counting::Counting = counting::Counting;
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

pub(crate) struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static LARGEST_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The number of allocations of this process, on all threads.
#[allow(dead_code, reason = "not every test counts")]
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.load(Ordering::SeqCst)
}

/// The largest allocation of this process since the last call, in bytes.
#[allow(dead_code, reason = "not every test looks at sizes")]
pub(crate) fn take_largest_bytes() -> usize {
    LARGEST_BYTES.swap(0, Ordering::SeqCst)
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        LARGEST_BYTES.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises to this function are those that System requires.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises to this function are those that System requires.
        unsafe { System.dealloc(pointer, layout) }
    }
}
