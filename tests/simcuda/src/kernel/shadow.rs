//! The shadow of memory while kernels run: marks (which bytes a launch touched, and how) and cells
//! (who touched them last). The runtime in the kernel's library writes both; they are created, read
//! and cleared here.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use crate::work::{Address, Touched};

/// Bytes of memory that one group of mark words covers: read, written, atomic, and known to have
/// been written before.
const GROUP_BYTES: u64 = 64;
const GROUP_WORDS: usize = 4;
/// Bytes of memory that one entry of `pages` covers.
const PAGE_BYTES: u64 = 4096;
/// Larger mappings may have huge pages, which cost as much memory as they are large.
const HUGE_BYTES: usize = 4 << 20;
/// How many shadows of allocations are kept for launches to come.
const KEPT: usize = 128;
/// Blocks are numbered in 22 bits, over all launches.
const SERIAL_MAX: u64 = (1 << 22) - 1;

/// The words for this many bytes, as `cells_of` in `shim/runtime.h`: the last write and the last
/// read of each byte, and where they were made, for each 4 bytes.
pub(super) fn cells_of(bytes: u64) -> u64 {
    2 * bytes + 2 * (bytes / 4 + 1)
}

/// Zeroed memory that costs only what is touched.
#[derive(Debug)]
pub(super) struct Zeros<T> {
    pointer: *mut T,
    bytes: usize,
}

// SAFETY: owned memory without any tie to a thread.
unsafe impl<T> Send for Zeros<T> {}

impl<T> Zeros<T> {
    fn new(count: u64) -> Option<Self> {
        let bytes = (count as usize).max(1) * size_of::<T>();
        // SAFETY: a fresh mapping anywhere; nothing is at its place.
        let pointer = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if pointer == libc::MAP_FAILED {
            return None;
        }
        if bytes >= HUGE_BYTES {
            // SAFETY: advice about a mapping of ours. Fewer page faults; refusal does no harm.
            unsafe { libc::madvise(pointer, bytes, libc::MADV_HUGEPAGE) };
        }
        Some(Self {
            pointer: pointer.cast(),
            bytes,
        })
    }

    /// Makes all of it zero again.
    fn clear(&mut self) {
        // SAFETY: the whole of a private anonymous mapping of ours, which reads as zeros
        // afterwards.
        unsafe { libc::madvise(self.pointer.cast(), self.bytes, libc::MADV_DONTNEED) };
    }
}

impl<T> Drop for Zeros<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, whole, and nobody has it any more.
        unsafe { libc::munmap(self.pointer.cast(), self.bytes) };
    }
}

/// The shadow of one allocation.
#[derive(Debug)]
pub(super) struct Shadow {
    range: Range<Address>,
    marks: Zeros<u64>,
    pages: Zeros<u8>,
    cells: Option<Zeros<u64>>,
    /// The launch that used it last.
    used: u64,
}

impl Shadow {
    fn new(range: Range<Address>) -> Option<Self> {
        let bytes = range.end - range.start;
        Some(Self {
            marks: Zeros::new(bytes.div_ceil(GROUP_BYTES) * GROUP_WORDS as u64)?,
            pages: Zeros::new(bytes.div_ceil(PAGE_BYTES))?,
            cells: None,
            range,
            used: 0,
        })
    }

    /// Moves the launch's marks into `touched`, and clears them.
    fn take(&mut self, touched: &mut Touched) {
        let bytes = self.range.end - self.range.start;
        // SAFETY: the mappings are as long as `new` made them for this many bytes, and no kernel
        // runs now.
        let (pages, marks) = unsafe {
            (
                std::slice::from_raw_parts_mut(
                    self.pages.pointer,
                    bytes.div_ceil(PAGE_BYTES) as usize,
                ),
                std::slice::from_raw_parts_mut(
                    self.marks.pointer,
                    bytes.div_ceil(GROUP_BYTES) as usize * GROUP_WORDS,
                ),
            )
        };
        let mut runs = [Run::default(); 3];
        let groups_per_page = (PAGE_BYTES / GROUP_BYTES) as usize;
        for (page, is_touched) in pages
            .iter_mut()
            .enumerate()
            .filter(|(_, is_touched)| **is_touched != 0)
        {
            *is_touched = 0;
            let first = page * groups_per_page;
            let groups = marks.len() / GROUP_WORDS;
            for group in first..(first + groups_per_page).min(groups) {
                let words = &mut marks[group * GROUP_WORDS..(group + 1) * GROUP_WORDS];
                let at = self.range.start + group as u64 * GROUP_BYTES;
                let into = [
                    &mut touched.reads,
                    &mut touched.writes,
                    &mut touched.atomics,
                ];
                for ((word, run), ranges) in words.iter_mut().zip(&mut runs).zip(into) {
                    run.add(at, std::mem::take(word), ranges);
                }
            }
        }
        let into = [
            &mut touched.reads,
            &mut touched.writes,
            &mut touched.atomics,
        ];
        runs.iter_mut()
            .zip(into)
            .for_each(|(run, ranges)| run.finish(ranges));
    }
}

/// A range that may still grow.
#[derive(Clone, Copy, Default)]
struct Run {
    start: Address,
    end: Address,
}

impl Run {
    /// Adds the bytes from `at` on whose bits are set.
    fn add(&mut self, at: Address, mut word: u64, ranges: &mut Vec<Range<Address>>) {
        while word != 0 {
            let first = word.trailing_zeros();
            let length = (word >> first).trailing_ones();
            let start = at + u64::from(first);
            if start != self.end {
                self.finish(ranges);
                self.start = start;
            }
            self.end = start + u64::from(length);
            word &= if first + length == 64 {
                0
            } else {
                u64::MAX << (first + length)
            };
        }
    }

    fn finish(&mut self, ranges: &mut Vec<Range<Address>>) {
        if self.start < self.end {
            ranges.push(self.start..self.end);
        }
        *self = Self::default();
    }
}

/// All shadows, and the numbers of blocks.
#[derive(Debug)]
pub(super) struct Shadows {
    /// By range, and apart for reads through the cache that is not coherent.
    allocations: HashMap<(Address, Address, bool), Shadow>,
    shared: Option<Zeros<u64>>,
    launch: u64,
    next_serial: u64,
}

impl Default for Shadows {
    fn default() -> Self {
        // 0 is in fresh cells: no block has it.
        Self {
            allocations: HashMap::new(),
            shared: None,
            launch: 0,
            next_serial: 1,
        }
    }
}

/// Where the runtime finds the parts of a shadow.
pub(super) struct Pointers {
    pub(super) marks: *mut u64,
    pub(super) pages: *mut u8,
    pub(super) cells: *mut u64,
}

impl Shadows {
    /// Starts a launch of this many blocks: the number of its first block; None if there are too
    /// many.
    pub(super) fn begin(&mut self, blocks: u64) -> Option<u32> {
        self.launch += 1;
        if blocks > SERIAL_MAX - 1 {
            return None;
        }
        if self.next_serial + blocks > SERIAL_MAX {
            self.allocations
                .values_mut()
                .filter_map(|shadow| shadow.cells.as_mut())
                .for_each(Zeros::clear);
            self.shared.iter_mut().for_each(Zeros::clear);
            self.next_serial = 1;
        }
        let first = self.next_serial;
        self.next_serial += blocks;
        Some(first as u32)
    }

    /// Cells for shared memory. Libraries share them: block numbers distinguish their uses.
    pub(super) fn shared_cells(&mut self, cells: u64) -> *mut u64 {
        let needed = cells as usize * size_of::<u64>();
        if self
            .shared
            .as_ref()
            .is_none_or(|shared| shared.bytes < needed)
        {
            self.shared = Zeros::new(cells);
        }
        self.shared
            .as_ref()
            .map_or(std::ptr::null_mut(), |shared| shared.pointer)
    }

    /// The shadow of an allocation that this launch touches, perhaps through the cache; None if
    /// there is no memory for it.
    pub(super) fn of(
        &mut self,
        range: &Range<Address>,
        with_cells: bool,
        is_cached: bool,
    ) -> Option<Pointers> {
        // Who touched a byte is kept in one place.
        let cells = if is_cached && with_cells {
            self.of(range, true, false)?.cells
        } else {
            std::ptr::null_mut()
        };
        let key = (range.start, range.end, is_cached);
        let with_cells = with_cells && !is_cached;
        let launch = self.launch;
        let shadow = match self.allocations.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(Shadow::new(range.clone())?),
        };
        shadow.used = launch;
        if with_cells && shadow.cells.is_none() {
            shadow.cells = Some(Zeros::new(cells_of(range.end - range.start))?);
        }
        let own = shadow.cells.as_ref().filter(|_| with_cells);
        let cells = own.map_or(cells, |cells| cells.pointer);
        Some(Pointers {
            marks: shadow.marks.pointer,
            pages: shadow.pages.pointer,
            cells,
        })
    }

    /// Ends a launch: what it touched goes to `touched`. Returns bytes that it read through the
    /// cache and wrote.
    pub(super) fn end(&mut self, touched: &mut Touched) -> Option<Range<Address>> {
        let launch = self.launch;
        let mut used: Vec<(bool, &mut Shadow)> = self
            .allocations
            .iter_mut()
            .filter(|(_, shadow)| shadow.used == launch)
            .map(|(key, shadow)| (key.2, shadow))
            .collect();
        // A hash map's order is not reproducible.
        used.sort_by_key(|(is_cached, shadow)| (*is_cached, shadow.range.start));
        let mut stale = None;
        for (is_cached, shadow) in used {
            let before = touched.reads.len();
            shadow.take(touched);
            if is_cached && stale.is_none() {
                stale = common(&touched.reads[before..], &touched.writes)
                    .or_else(|| common(&touched.reads[before..], &touched.atomics));
            }
        }
        while self.allocations.len() > KEPT {
            let Some(oldest) = self
                .allocations
                .iter()
                .min_by_key(|(_, shadow)| shadow.used)
                .map(|(key, _)| *key)
            else {
                break;
            };
            self.allocations.remove(&oldest);
        }
        stale
    }
}

/// Bytes that are in ranges of both; `sorted` by address, without overlaps.
fn common(sorted: &[Range<Address>], others: &[Range<Address>]) -> Option<Range<Address>> {
    others.iter().find_map(|other| {
        let at = sorted.partition_point(|range| range.end <= other.start);
        let found = sorted.get(at).filter(|found| found.start < other.end)?;
        Some(found.start.max(other.start)..found.end.min(other.end))
    })
}

// These tests mean lists with one range, not the numbers in it.
#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    fn ranges_of(bits: &[(Address, u64)]) -> Vec<Range<Address>> {
        let (mut run, mut ranges) = (Run::default(), Vec::new());
        bits.iter()
            .for_each(|(at, word)| run.add(*at, *word, &mut ranges));
        run.finish(&mut ranges);
        ranges
    }

    #[test]
    fn bits_become_ranges_and_grow_over_words() {
        assert_eq!(ranges_of(&[(1024, u64::MAX), (1088, 0xff)]), [1024..1096]);
        assert_eq!(
            ranges_of(&[(1024, 0x8000_0000_0000_0001), (1088, 1)]),
            [1024..1025, 1087..1089]
        );
        assert_eq!(ranges_of(&[(1024, 0xf0f0)]), [1028..1032, 1036..1040]);
        assert_eq!(ranges_of(&[(1024, 0)]), []);
        // Words with gaps between them are not merged.
        assert_eq!(
            ranges_of(&[(1024, u64::MAX), (1152, u64::MAX)]),
            [1024..1088, 1152..1216]
        );
    }

    #[test]
    fn common_bytes_are_found_in_either_order() {
        let reads = [0..4, 8..16, 32..40];
        assert_eq!(common(&reads, &[4..8, 16..32, 40..50]), None);
        assert_eq!(common(&reads, &[100..200, 12..20]), Some(12..16));
        assert_eq!(common(&reads, &[30..100]), Some(32..40));
        assert_eq!(common(&[], &[0..1]), None);
    }

    #[test]
    fn numbers_of_blocks_begin_again_before_they_run_out() {
        let mut shadows = Shadows::default();
        assert_eq!(shadows.begin(100), Some(1));
        assert_eq!(shadows.begin(SERIAL_MAX - 200), Some(101));
        assert_eq!(shadows.begin(1000), Some(1));
        assert_eq!(shadows.begin(SERIAL_MAX), None);
    }
}
