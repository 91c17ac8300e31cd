//! The history of every byte: its last write, and the reads and atomics since. Bytes with the same
//! history share a segment of an interval map. An access splits segments at its ends, and equal
//! neighbours are merged again, so the map's size follows the irregularity of accesses, not the
//! number of bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use super::clock::Actor;
use crate::handle::OperationId;
use crate::work::Address;

/// How bytes are accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessKind {
    Read,
    Write,
    /// Atomic: does not conflict with another atomic.
    Atomic,
}

/// One access: a moment of an actor, and the kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epoch {
    pub(super) actor: Actor,
    pub(super) time: u64,
    pub(super) operation: OperationId,
}

/// An earlier access that conflicts with a new one and is not in its past.
#[derive(Clone, Debug)]
pub(super) struct Collision {
    pub(super) range: Range<Address>,
    pub(super) with: Epoch,
    pub(super) kind: AccessKind,
}

/// The history of some bytes, as far as a later access can race with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct History {
    write: Option<Epoch>,
    /// Since the write, by actor; without those in the past of a later one, since what races with
    /// them races with that one too.
    reads: Vec<Epoch>,
    /// The same for atomics. They do not replace reads: a second atomic may race with a read and
    /// not with the first atomic.
    atomics: Vec<Epoch>,
}

impl History {
    /// What a new access collides with, the write first.
    fn collision(
        &self,
        kind: AccessKind,
        past: &impl Fn(&Epoch) -> bool,
    ) -> Option<(Epoch, AccessKind)> {
        let unordered = |epochs: &[Epoch], kind: AccessKind| {
            epochs
                .iter()
                .find(|epoch| !past(epoch))
                .map(|epoch| (*epoch, kind))
        };
        unordered(self.write.as_slice(), AccessKind::Write)
            .or_else(|| {
                if kind == AccessKind::Atomic {
                    None
                } else {
                    unordered(&self.atomics, AccessKind::Atomic)
                }
            })
            .or_else(|| {
                if kind == AccessKind::Read {
                    None
                } else {
                    unordered(&self.reads, AccessKind::Read)
                }
            })
    }

    fn record(&mut self, kind: AccessKind, epoch: Epoch, past: &impl Fn(&Epoch) -> bool) {
        match kind {
            AccessKind::Write => {
                *self = Self {
                    write: Some(epoch),
                    ..Self::default()
                }
            }
            AccessKind::Read => replace_past(&mut self.reads, epoch, past),
            AccessKind::Atomic => replace_past(&mut self.atomics, epoch, past),
        }
    }
}

fn replace_past(epochs: &mut Vec<Epoch>, epoch: Epoch, past: &impl Fn(&Epoch) -> bool) {
    epochs.retain(|earlier| !past(earlier));
    // In actor order, so that equal histories compare equal.
    let at = epochs.partition_point(|other| other.actor < epoch.actor);
    epochs.insert(at, epoch);
}

#[derive(Debug)]
struct Segment {
    end: Address,
    history: History,
}

/// The histories of all bytes ever touched, by start address of each segment.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    segments: BTreeMap<Address, Segment>,
}

impl Shadow {
    /// Checks an access of `range` against the past and records it. `past` says which epochs
    /// precede it.
    pub(super) fn access(
        &mut self,
        range: Range<Address>,
        kind: AccessKind,
        epoch: Epoch,
        past: &impl Fn(&Epoch) -> bool,
    ) -> Option<Collision> {
        if range.is_empty() {
            return None;
        }
        self.split(range.start);
        self.split(range.end);
        let mut collision: Option<Collision> = None;
        for (&start, segment) in self.segments.range_mut(range.clone()) {
            match (segment.history.collision(kind, past), &mut collision) {
                (Some((with, kind)), None) => {
                    collision = Some(Collision {
                        range: start..segment.end,
                        with,
                        kind,
                    })
                }
                (Some((with, _)), Some(known))
                    if known.with == with && known.range.end == start =>
                {
                    known.range.end = segment.end;
                }
                _ => {}
            }
            if kind != AccessKind::Write {
                segment.history.record(kind, epoch, past);
            }
        }
        if kind == AccessKind::Write {
            self.replace(range.clone(), epoch, past);
        } else {
            self.fill_gaps(range.clone(), kind, epoch, past);
        }
        self.merge(range);
        collision
    }

    /// Forgets the history of `range`.
    pub(super) fn forget(&mut self, range: Range<Address>) {
        self.split(range.start);
        self.split(range.end);
        self.remove(range);
    }

    #[cfg(test)]
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Makes `at` a segment boundary.
    fn split(&mut self, at: Address) {
        let Some((&start, segment)) = self.segments.range_mut(..at).next_back() else {
            return;
        };
        debug_assert!(start < at);
        if segment.end > at {
            let right = Segment {
                end: segment.end,
                history: segment.history.clone(),
            };
            segment.end = at;
            self.segments.insert(at, right);
        }
    }

    /// Removes the segments that start in `range`.
    fn remove(&mut self, range: Range<Address>) {
        let starts: Vec<Address> = self
            .segments
            .range(range)
            .map(|(&start, _)| start)
            .collect();
        for start in starts {
            self.segments.remove(&start);
        }
    }

    fn replace(&mut self, range: Range<Address>, epoch: Epoch, past: &impl Fn(&Epoch) -> bool) {
        let mut history = History::default();
        history.record(AccessKind::Write, epoch, past);
        match self.segments.get_mut(&range.start) {
            // Exactly this segment exists: the usual case of repeated work.
            Some(segment) if segment.end == range.end => segment.history = history,
            _ => {
                self.remove(range.clone());
                self.segments.insert(
                    range.start,
                    Segment {
                        end: range.end,
                        history,
                    },
                );
            }
        }
    }

    /// Bytes of `range` without a segment were never touched.
    fn fill_gaps(
        &mut self,
        range: Range<Address>,
        kind: AccessKind,
        epoch: Epoch,
        past: &impl Fn(&Epoch) -> bool,
    ) {
        let mut gaps = Vec::new();
        let mut reached = range.start;
        for (&start, segment) in self.segments.range(range.clone()) {
            if reached < start {
                gaps.push(reached..start);
            }
            reached = segment.end;
        }
        if reached < range.end {
            gaps.push(reached..range.end);
        }
        for gap in gaps {
            let mut history = History::default();
            history.record(kind, epoch, past);
            self.segments.insert(
                gap.start,
                Segment {
                    end: gap.end,
                    history,
                },
            );
        }
    }

    /// Merges neighbours with the same history in `range` and at its ends.
    fn merge(&mut self, range: Range<Address>) {
        let from = self
            .segments
            .range(..range.start)
            .next_back()
            .map_or(range.start, |(&start, _)| start);
        let mut joined = Vec::new();
        let mut last: Option<(Address, &Segment)> = None;
        // The new ends of the surviving segments that changed.
        let mut ends: Vec<(Address, Address)> = Vec::new();
        for (&start, segment) in self.segments.range(from..=range.end) {
            match last {
                Some((survivor, before))
                    if before.history == segment.history
                        && ends
                            .last()
                            .filter(|end| end.0 == survivor)
                            .map_or(before.end, |end| end.1)
                            == start =>
                {
                    joined.push(start);
                    match ends.last_mut() {
                        Some(end) if end.0 == survivor => end.1 = segment.end,
                        _ => ends.push((survivor, segment.end)),
                    }
                }
                _ => last = Some((start, segment)),
            }
        }
        for start in joined {
            self.segments.remove(&start);
        }
        for (start, end) in ends {
            if let Some(segment) = self.segments.get_mut(&start) {
                segment.end = end;
            }
        }
    }
}
