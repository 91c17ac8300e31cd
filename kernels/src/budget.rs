//! A bound on the heap that work of strangers may use: a template of a model folder can ask for
//! terabytes within a few steps.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

thread_local! {
    /// The bytes that this thread may still allocate, and what tells that it wanted more.
    static LEFT: Cell<isize> = const { Cell::new(isize::MAX) };
    static TELLS: Cell<*const AtomicBool> = const { Cell::new(ptr::null()) };
}

/// The system's allocator, which keeps threads within their budget ([`within`]). A program
/// declares it with `#[global_allocator]`, as `ddp-train` does; without it no budget holds.
pub struct Budgeted;

/// Runs `work` on this thread, which may hold `bytes` more on the heap than now. If it asks for
/// more, `exceeds` becomes true and the thread sleeps until the process ends.
pub fn within<T>(bytes: usize, exceeds: &AtomicBool, work: impl FnOnce() -> T) -> T {
    /// The budget before, which returns also if `work` panics.
    struct Before(isize, *const AtomicBool);
    impl Drop for Before {
        fn drop(&mut self) {
            LEFT.set(self.0);
            TELLS.set(self.1);
        }
    }
    let bytes = isize::try_from(bytes).unwrap_or(isize::MAX);
    let _before = Before(LEFT.replace(bytes), TELLS.replace(exceeds));
    work()
}

/// Counts bytes of this thread; negative ones are given back.
fn count(bytes: isize) {
    let tells = TELLS.get();
    // What reports a panic may hold locks of the process.
    if tells.is_null() || thread::panicking() {
        return;
    }
    LEFT.set(LEFT.get().saturating_sub(bytes));
    if LEFT.get() < 0 && bytes > 0 {
        // SAFETY: `within` sets it only while it borrows the flag.
        unsafe { &*tells }.store(true, Ordering::Release);
        loop {
            // Sleep: until the process ends; it does not allocate, as `park` may.
            thread::sleep(Duration::from_secs(3600));
        }
    }
}

// SAFETY: all memory is the system's; counting does not allocate.
unsafe impl GlobalAlloc for Budgeted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.cast_signed() - layout.size().cast_signed());
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}
