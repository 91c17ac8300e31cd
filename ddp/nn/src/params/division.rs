//! What a rank has of the trained part where ranks share it (ZeRO): masters and gradients of its
//! own ranges alone, one after the other, and memory for the gradients of some windows of the
//! arena, which backward uses again and again.

use std::ops::Range;

use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;

/// What a rank has of the trained part.
#[derive(Clone, Debug, Default)]
pub struct Division {
    /// The elements that it owns, in ascending order: it has masters of these alone, if layers read
    /// rounded copies.
    pub own: Vec<Range<usize>>,
    /// All elements, in ascending order, where gradients have memory that is used again. None if
    /// there is memory for all.
    pub windows: Option<Vec<Window>>,
}

/// Elements whose gradients are next to each other in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Whole parameters, with the padding after them.
    pub range: Range<usize>,
    /// The number of the memory. Windows with the same number are not in use at the same time.
    pub slot: usize,
}

/// Ranges of an arena, one after the other in memory.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) memory: Tensor,
    /// In ascending order, each with where it begins in memory.
    ranges: Vec<(Range<usize>, usize)>,
}

impl Held {
    /// Zeros for these ranges, in ascending order.
    pub(super) fn zeros(
        ranges: Vec<Range<usize>>,
        dtype: DType,
        device: Device,
        name: &str,
    ) -> Result<Held> {
        let mut end = 0;
        let placed = ranges.into_iter().map(|range| {
            let start = end;
            end += range.len();
            (range, start)
        });
        let ranges = placed.collect();
        let memory = Tensor::zeros(&[end], dtype, device)?.named(name);
        Ok(Held { memory, ranges })
    }

    /// The elements of `range`, all of which it holds.
    pub(super) fn part(&self, range: Range<usize>) -> Result<Tensor> {
        let after = self
            .ranges
            .partition_point(|(it, _)| it.start <= range.start);
        let found = after.checked_sub(1).map(|at| &self.ranges[at]);
        let found = found.filter(|(it, _)| range.end <= it.end);
        let (held, at) = found.unwrap_or_else(|| panic!("this rank has no elements {range:?}"));
        let start = at + range.start - held.start;
        Ok(self.memory.slice(start..start + range.len())?)
    }

    /// The parts of `range` that it holds.
    pub(super) fn within(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let cut =
            move |(it, _): &(Range<usize>, usize)| it.start.max(range.start)..it.end.min(range.end);
        let parts = self.ranges.iter().map(cut);
        parts.filter(|part| !part.is_empty())
    }
}

/// Memory of gradients that is used again. Letters: E elements of a window.
#[derive(Debug)]
pub(super) struct WindowPool {
    /// Each with (E), in ascending order.
    pub(super) all: Vec<(Window, Tensor)>,
    /// The memory of each slot.
    slots: Vec<Tensor>,
}

impl WindowPool {
    pub(super) fn zeros(windows: Vec<Window>, dtype: DType, device: Device) -> Result<WindowPool> {
        let mut lengths = Vec::new();
        for window in &windows {
            lengths.resize(lengths.len().max(window.slot + 1), 0);
            lengths[window.slot] = window.range.len().max(lengths[window.slot]);
        }
        let slot = |length: usize| Tensor::zeros(&[length], dtype, device);
        let slots = lengths
            .into_iter()
            .map(slot)
            .collect::<Result<Vec<_>, _>>()?;
        let with_memory = |window: Window| -> Result<_> {
            let memory = slots[window.slot].slice(0..window.range.len())?;
            Ok((window, memory))
        };
        let all = windows
            .into_iter()
            .map(with_memory)
            .collect::<Result<_>>()?;
        Ok(WindowPool { all, slots })
    }

    /// The memory of `range`, which is in one window.
    pub(super) fn part(&self, range: Range<usize>) -> Result<Tensor> {
        let after = self
            .all
            .partition_point(|(it, _)| it.range.start <= range.start);
        let (window, memory) = &self.all[after - 1];
        let start = range.start - window.range.start;
        Ok(memory.slice(start..start + range.len())?)
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.iter().map(Tensor::bytes).sum()
    }
}
