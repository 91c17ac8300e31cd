//! What is known of an allocation: which bytes a launch touched, and who touched them last.

use std::collections::HashMap;
use std::ops::Range;

use crate::order::Cell;

/// The bytes that a launch touched, each list sorted within an allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Read.
    pub reads: Vec<Range<u64>>,
    /// Written. Bytes both read and written are in both lists.
    pub writes: Vec<Range<u64>>,
    /// Changed by atomics, which do not race with each other.
    pub atomics: Vec<Range<u64>>,
}

/// Of 64 bytes, a bit each: read, written, changed by an atomic, known to have been written before
/// the launch, read through the read-only path.
type Marks = [u64; 5];
pub(super) const READ: usize = 0;
pub(super) const WRITTEN: usize = 1;
pub(super) const ATOMIC: usize = 2;
pub(super) const KNOWN: usize = 3;
pub(super) const READ_ONLY: usize = 4;

/// Marks of one page of memory, 4096 bytes.
pub(super) const PAGE_MARKS: usize = 64;

/// A launch that starts later begins to count anew.
const MOMENT_MAX: u32 = 1 << 31;

/// What is kept of an allocation.
#[derive(Debug)]
pub(super) struct Shadow {
    pub(super) range: Range<u64>,
    pub(super) marks: Vec<Marks>,
    /// Which pages have marks.
    pub(super) pages: Vec<u8>,
    /// By the bytes of a cell: 1, 2, 4, 8 and 16.
    pub(super) cells: [Vec<Cell>; 5],
    /// The launch that used it last.
    pub(super) used: u64,
}

impl Shadow {
    pub(super) fn new(range: Range<u64>) -> Shadow {
        let groups = ((range.end - 1) / 64 - range.start / 64 + 1) as usize;
        Shadow {
            marks: vec![[0; 5]; groups],
            pages: vec![0; groups.div_ceil(PAGE_MARKS)],
            cells: Default::default(),
            range,
            used: 0,
        }
    }

    /// Moves marks to the lists, and clears them.
    pub(super) fn take(&mut self, footprint: &mut Footprint) {
        let mut runs = [Run::default(); 3];
        let first = self.range.start / 64 * 64;
        for (page, is_marked) in self.pages.iter_mut().enumerate() {
            if *is_marked == 0 {
                continue;
            }
            *is_marked = 0;
            let groups = page * PAGE_MARKS..((page + 1) * PAGE_MARKS).min(self.marks.len());
            for group in groups {
                let marks = std::mem::take(&mut self.marks[group]);
                let into = [
                    &mut footprint.reads,
                    &mut footprint.writes,
                    &mut footprint.atomics,
                ];
                for ((word, run), ranges) in marks.into_iter().zip(&mut runs).zip(into) {
                    run.add(first + group as u64 * 64, word, ranges);
                }
            }
        }
        let into = [
            &mut footprint.reads,
            &mut footprint.writes,
            &mut footprint.atomics,
        ];
        for (run, ranges) in runs.iter_mut().zip(into) {
            run.finish(ranges);
        }
    }
}

/// A range that may still grow.
#[derive(Clone, Copy, Default)]
pub(super) struct Run {
    start: u64,
    end: u64,
}

impl Run {
    /// Adds the bytes from `at` on whose bits are set.
    pub(super) fn add(&mut self, at: u64, mut word: u64, ranges: &mut Vec<Range<u64>>) {
        while word != 0 {
            let first = word.trailing_zeros();
            let length = (word >> first).trailing_ones();
            let start = at + u64::from(first);
            if start != self.end {
                self.finish(ranges);
                self.start = start;
            }
            self.end = start + u64::from(length);
            word &= u64::MAX.checked_shl(first + length).unwrap_or(0);
        }
    }

    pub(super) fn finish(&mut self, ranges: &mut Vec<Range<u64>>) {
        if self.start < self.end {
            ranges.push(self.start..self.end);
        }
        *self = Self::default();
    }
}

/// What launches keep of global memory for those after them. One launch uses it at a time.
#[derive(Debug)]
pub struct Shadows {
    pub(super) allocations: HashMap<(u64, u64), Shadow>,
    pub(super) launch: u64,
    /// The next launch begins at this moment.
    pub(super) moment: u32,
}

impl Default for Shadows {
    fn default() -> Self {
        // New cells hold 0, which means no access.
        Self {
            allocations: HashMap::new(),
            launch: 0,
            moment: 1,
        }
    }
}

impl Shadows {
    pub(super) fn begin(&mut self) -> u32 {
        self.launch += 1;
        if self.moment > MOMENT_MAX {
            for shadow in self.allocations.values_mut() {
                shadow.cells = Default::default();
            }
            self.moment = 1;
        }
        self.moment
    }
}
