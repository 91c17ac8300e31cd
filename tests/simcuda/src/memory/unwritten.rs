//! Device memory that nothing has written since it was allocated. On hardware it holds whatever was
//! there before; using it is a finding, wherever the value goes.
//!
//! A copy may read it, because tensors are copied with their padding; the copied bytes then count
//! as unwritten, too. A finding is reported once nothing is queued: if the write was only late, it
//! races with the read, and the race is the cause to report.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::work::Address;

/// The unwritten bytes of all live allocations, and who read some.
#[derive(Debug, Default)]
pub struct Unwritten {
    /// The end of each range by its start.
    ranges: BTreeMap<Address, Address>,
    /// Findings that wait.
    pub(super) told: Vec<String>,
}

impl Unwritten {
    /// Bytes that nothing has written.
    pub fn add(&mut self, range: Range<Address>) {
        self.ranges.insert(range.start, range.end);
    }

    /// Bytes that were written, or freed.
    pub fn remove(&mut self, range: &Range<Address>) {
        while let Some((&start, &end)) = self.ranges.range(..range.end).next_back()
            && end > range.start
        {
            self.ranges.remove(&start);
            if end > range.end {
                self.ranges.insert(range.end, end);
            }
            if start < range.start {
                self.ranges.insert(start, range.start);
            }
        }
    }

    /// The unwritten parts of a range, in order.
    pub fn within(&self, range: &Range<Address>) -> impl Iterator<Item = Range<Address>> {
        let Range { start, end } = *range;
        let before = self.ranges.range(..start).next_back();
        let parts = before.into_iter().chain(self.ranges.range(start..end));
        parts
            .map(move |(from, to)| start.max(*from)..end.min(*to))
            .filter(|part| !part.is_empty())
    }
}
