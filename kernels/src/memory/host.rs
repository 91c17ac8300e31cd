//! Host memory from the system: small buffers from its allocator, large ones mapped by themselves on huge pages; and how much
//! the machine has left.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::{ALIGNMENT, SMALL_BYTES_MAX, SMALL_STEP_BYTES};

const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The capacity that serves a request.
pub(super) fn rounded(bytes: usize) -> usize {
    if bytes <= SMALL_BYTES_MAX {
        bytes.next_multiple_of(SMALL_STEP_BYTES)
    } else {
        // A shape's bytes are at most isize::MAX: rounding up cannot overflow usize.
        bytes.next_multiple_of(HUGE_PAGE_BYTES)
    }
}

/// Zeroed memory for one buffer, or `None` when the system has none.
pub(super) fn allocate(capacity_bytes: usize) -> Option<NonNull<u8>> {
    if capacity_bytes <= SMALL_BYTES_MAX {
        let layout = Layout::from_size_align(capacity_bytes, ALIGNMENT).ok()?;
        // SAFETY: the size is not zero: the smallest capacity is SMALL_STEP_BYTES.
        return NonNull::new(unsafe { alloc_zeroed(layout) });
    }
    map_huge(capacity_bytes)
}

/// A private mapping that starts on a huge-page boundary.
fn map_huge(capacity_bytes: usize) -> Option<NonNull<u8>> {
    let mapped_bytes = capacity_bytes.checked_add(HUGE_PAGE_BYTES)?;
    // SAFETY: a new private anonymous mapping at an address of the kernel's choosing touches nothing of ours.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            mapped_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return None;
    }
    let skip_bytes = start.addr().next_multiple_of(HUGE_PAGE_BYTES) - start.addr();
    let rest_bytes = HUGE_PAGE_BYTES - skip_bytes;
    // SAFETY: head and tail lie inside the mapping just made and outside the part that is kept; both are whole
    // pages because mmap's address, the huge page and the capacity are multiples of the page size.
    unsafe {
        let kept = start.byte_add(skip_bytes);
        if skip_bytes > 0 {
            libc::munmap(start, skip_bytes);
        }
        if rest_bytes > 0 {
            libc::munmap(kept.byte_add(capacity_bytes), rest_bytes);
        }
        // Advice only: where huge pages are off, small ones serve.
        libc::madvise(kept, capacity_bytes, libc::MADV_HUGEPAGE);
        NonNull::new(kept.cast())
    }
}

/// # Safety
/// `pointer` came from `allocate(capacity_bytes)` and nothing uses it any more.
pub(super) unsafe fn release(pointer: NonNull<u8>, capacity_bytes: usize) {
    if capacity_bytes <= SMALL_BYTES_MAX {
        // SAFETY: allocated with exactly this layout, by the caller's promise.
        unsafe { dealloc(pointer.as_ptr(), Layout::from_size_align_unchecked(capacity_bytes, ALIGNMENT)) };
    } else {
        // SAFETY: the kept part of a mapping of our own, whole pages, unused by the caller's promise.
        unsafe { libc::munmap(pointer.as_ptr().cast(), capacity_bytes) };
    }
}

/// The memory of this process that is really there.
pub(super) fn resident_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<usize>().ok()?.checked_mul(1024)
}

/// What the machine, or the container around this process, can still give. `None` where it does not say.
pub(super) fn machine_available_bytes() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let number = |path: &str| read(path).and_then(|text| text.trim().parse::<usize>().ok());
    let machine = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()?.checked_mul(1024)
    });
    // Files that were read count as used in a container, though they give way.
    let gives_way = read("/sys/fs/cgroup/memory.stat").and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("inactive_file "))?;
        line.split_whitespace().nth(1)?.parse::<usize>().ok()
    });
    let container = number("/sys/fs/cgroup/memory.max").and_then(|most| {
        let used_bytes = number("/sys/fs/cgroup/memory.current")?.saturating_sub(gives_way.unwrap_or(0));
        Some(most.saturating_sub(used_bytes))
    });
    match (machine, container) {
        (Some(machine), Some(container)) => Some(machine.min(container)),
        (one, other) => one.or(other),
    }
}
