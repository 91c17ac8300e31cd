//! Random numbers: the same from the same seed.

use std::ops::Range;

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number of this range.
    pub(crate) fn of(&mut self, range: Range<u64>) -> u64 {
        range.start + (self.next() >> 16) % (range.end - range.start).max(1)
    }

    /// True in one of `count` cases.
    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.of(0..count) == 0
    }
}
