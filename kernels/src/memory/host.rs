//! Host memory: small buffers from the system allocator, large ones mapped on huge pages; and how
//! much memory the machine has left.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use super::pool::{HostChunk, PoolState, Wanted, pool};
use crate::Device;
use crate::error::Result;

/// Every buffer starts at a multiple of this many bytes, as cuBLASLt's heuristics assume.
pub(super) const ALIGNMENT: usize = 256;
/// Buffers up to this size come from the system allocator; larger ones are mapped.
const SMALL_BYTES_MAX: usize = 1 << 20;
const SMALL_STEP_BYTES: usize = 512;
/// From this size on the machine's free memory is checked first, because Linux overcommits.
const CHECKED_BYTES_MIN: usize = 16 << 20;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A buffer's address, its capacity, and whether it is still zero.
pub(super) fn allocate(wanted: Wanted) -> Result<(NonNull<u8>, usize, bool)> {
    let capacity_bytes = rounded(wanted.bytes);
    let mut state = pool(Device::Cpu).expect("the CPU has a pool").lock();
    let buffer = match reuse(&mut state, capacity_bytes) {
        Some((pointer, capacity_bytes)) => (pointer, capacity_bytes, false),
        None => match take_from_system(&mut state, capacity_bytes) {
            Some(pointer) => (pointer, capacity_bytes, true),
            None => return Err(state.out_of_memory(&wanted, free_bytes(&state))),
        },
    };
    state.insert(wanted, buffer.1);
    Ok(buffer)
}

/// Keeps a buffer for reuse.
pub(super) fn give_back(pointer: NonNull<u8>, capacity_bytes: usize) {
    let mut state = pool(Device::Cpu).expect("the CPU has a pool").lock();
    let chunks = state.free.entry(capacity_bytes).or_default();
    chunks.push(HostChunk(pointer));
}

/// The smallest kept buffer that fits and wastes at most a quarter (half, if it is small).
fn reuse(state: &mut PoolState, capacity_bytes: usize) -> Option<(NonNull<u8>, usize)> {
    let most = if capacity_bytes <= SMALL_BYTES_MAX {
        (2 * capacity_bytes).min(SMALL_BYTES_MAX)
    } else {
        capacity_bytes + capacity_bytes / 4
    };
    let mut fitting = state.free.range_mut(capacity_bytes..=most);
    let (&found, chunks) = fitting.find(|(_, chunks)| !chunks.is_empty())?;
    chunks.pop().map(|chunk| (chunk.0, found))
}

fn take_from_system(state: &mut PoolState, capacity_bytes: usize) -> Option<NonNull<u8>> {
    let lacks = |state: &PoolState| free_bytes_for(state, capacity_bytes) < capacity_bytes;
    if lacks(state) {
        let kept_bytes = state.stats.reserved_bytes - state.stats.allocated_bytes;
        let most_bytes = free_bytes_for(state, capacity_bytes).saturating_add(kept_bytes);
        // Kept buffers are given back only where that helps.
        if most_bytes < capacity_bytes {
            return None;
        }
        release_kept(state);
        if lacks(state) {
            return None;
        }
    }
    let pointer = map(capacity_bytes).or_else(|| {
        release_kept(state);
        map(capacity_bytes)
    })?;
    state.grow(capacity_bytes);
    Some(pointer)
}

/// Bytes that can still be taken from the system.
pub(super) fn free_bytes(state: &PoolState) -> usize {
    free_bytes_for(state, CHECKED_BYTES_MIN)
}

/// As `free_bytes`; asks the machine only if `wanted_bytes` is large.
fn free_bytes_for(state: &PoolState, wanted_bytes: usize) -> usize {
    let reserved_bytes = state.stats.reserved_bytes;
    let limit_bytes = state.limit_bytes.unwrap_or(usize::MAX);
    let within_limit = limit_bytes.saturating_sub(reserved_bytes);
    if wanted_bytes < CHECKED_BYTES_MIN {
        return within_limit;
    }
    // The machine still counts memory as free that was reserved and never written.
    let promised_bytes = reserved_bytes.saturating_sub(resident_bytes().unwrap_or(usize::MAX));
    let machine_bytes = machine_available_bytes().unwrap_or(usize::MAX);
    within_limit.min(machine_bytes.saturating_sub(promised_bytes))
}

/// Gives kept buffers back to the system and returns their bytes.
pub(super) fn empty_cache() -> usize {
    release_kept(&mut pool(Device::Cpu).expect("the CPU has a pool").lock())
}

fn release_kept(state: &mut PoolState) -> usize {
    let mut released_bytes = 0;
    for (capacity_bytes, chunks) in std::mem::take(&mut state.free) {
        for chunk in chunks {
            // SAFETY: the chunk came from `map` with this capacity, and as it was in the list of
            // kept buffers no block refers to it.
            unsafe { unmap(chunk.0, capacity_bytes) };
            released_bytes += capacity_bytes;
        }
    }
    state.stats.reserved_bytes -= released_bytes;
    released_bytes
}

/// The capacity that serves a request.
pub(super) fn rounded(bytes: usize) -> usize {
    if bytes <= SMALL_BYTES_MAX {
        bytes.next_multiple_of(SMALL_STEP_BYTES)
    } else {
        // A shape's bytes are at most isize::MAX, so rounding up cannot overflow.
        bytes.next_multiple_of(HUGE_PAGE_BYTES)
    }
}

/// Zeroed memory for one buffer; None if the system has none.
fn map(capacity_bytes: usize) -> Option<NonNull<u8>> {
    if capacity_bytes <= SMALL_BYTES_MAX {
        let layout = Layout::from_size_align(capacity_bytes, ALIGNMENT).ok()?;
        // SAFETY: the size is not zero: the smallest capacity is SMALL_STEP_BYTES.
        return NonNull::new(unsafe { alloc_zeroed(layout) });
    }
    let mapped_bytes = capacity_bytes.checked_add(HUGE_PAGE_BYTES)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private anonymous mapping at an address that the kernel chooses.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped_bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    let skip_bytes = start.addr().next_multiple_of(HUGE_PAGE_BYTES) - start.addr();
    let rest_bytes = HUGE_PAGE_BYTES - skip_bytes;
    // SAFETY: head and tail lie inside the new mapping and outside the part that is kept; both are
    // whole pages, because mmap's address, the huge page and the capacity are multiples of a page.
    unsafe {
        let kept = start.byte_add(skip_bytes);
        if skip_bytes > 0 {
            libc::munmap(start, skip_bytes);
        }
        if rest_bytes > 0 {
            libc::munmap(kept.byte_add(capacity_bytes), rest_bytes);
        }
        // Only advice: without huge pages, small ones serve.
        libc::madvise(kept, capacity_bytes, libc::MADV_HUGEPAGE);
        NonNull::new(kept.cast())
    }
}

/// # Safety
/// `pointer` came from `map(capacity_bytes)` and nothing uses it any more.
unsafe fn unmap(pointer: NonNull<u8>, capacity_bytes: usize) {
    if capacity_bytes <= SMALL_BYTES_MAX {
        // SAFETY: allocated with exactly this layout, by the caller's promise.
        unsafe {
            let layout = Layout::from_size_align_unchecked(capacity_bytes, ALIGNMENT);
            dealloc(pointer.as_ptr(), layout);
        }
    } else {
        // SAFETY: the kept part of a mapping, whole pages, unused by the caller's promise.
        unsafe { libc::munmap(pointer.as_ptr().cast(), capacity_bytes) };
    }
}

/// The memory of this process that is in physical memory.
fn resident_bytes() -> Option<usize> {
    Some(1024 * number_after("/proc/self/status", "VmRSS:")?)
}

/// What the machine, or this process's container, can still give. None where it does not say.
pub fn machine_available_bytes() -> Option<usize> {
    let machine = number_after("/proc/meminfo", "MemAvailable:").map(|kib| 1024 * kib);
    // A container counts its page cache as used, though the kernel would give it up.
    let cache_bytes = number_after("/sys/fs/cgroup/memory.stat", "inactive_file ").unwrap_or(0);
    let number = |path| std::fs::read_to_string(path).ok()?.trim().parse().ok();
    let container = number("/sys/fs/cgroup/memory.max").and_then(|most: usize| {
        let used_bytes: usize = number("/sys/fs/cgroup/memory.current")?;
        Some(most.saturating_sub(used_bytes.saturating_sub(cache_bytes)))
    });
    machine.into_iter().chain(container).min()
}

/// The number after `key` at the beginning of a line of a file.
fn number_after(path: &str, key: &str) -> Option<usize> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}
