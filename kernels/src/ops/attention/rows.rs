//! The rows of one head on the CPU, and panels of them in the order in which tiles read them.

use std::ops::Range;

use super::sizes::{ColumnLayout, Sizes};
use crate::ops::matmul::{Real, TileKernel};

/// A buffer that grows to the largest use, aligned to cache lines.
#[derive(Default)]
pub(super) struct Room<T> {
    buffer: Vec<T>,
}

const CACHE_LINE: usize = 64;

impl<T: Real> Room<T> {
    /// This many elements, of arbitrary values.
    pub(super) fn take(&mut self, len: usize) -> &mut [T] {
        if self.buffer.len() < len + CACHE_LINE {
            self.buffer.resize(len + CACHE_LINE, T::ZERO);
        }
        let start = self.buffer.as_ptr().align_offset(CACHE_LINE);
        &mut self.buffer[start..start + len]
    }
}

/// The rows of one head of q, k, v, out or their gradients: `rows` of `width` elements each.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a, T> {
    pub(super) elements: &'a [T],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
}

impl<'a, T: Real> HeadRows<'a, T> {
    /// These rows of head number `head` in a sequence.
    pub(super) fn new(
        (elements, columns): (&'a [T], ColumnLayout),
        sizes: Sizes,
        (sequence, head): (usize, usize),
        rows: Range<usize>,
    ) -> HeadRows<'a, T> {
        let (width, stride, rows_of) = (sizes.head_size, columns.stride, rows.len());
        let first_row = sequence * sizes.time + rows.start;
        let start = first_row * stride + columns.first + head * width;
        let len = (rows_of - 1) * stride + width;
        HeadRows {
            elements: &elements[start..start + len],
            stride,
            rows: rows_of,
            width,
        }
    }

    /// From row `first` on.
    pub(super) fn from(self, first: usize) -> HeadRows<'a, T> {
        HeadRows {
            elements: &self.elements[first * self.stride..],
            rows: self.rows - first,
            ..self
        }
    }

    /// Panels of a tile's columns of rows each: `[column][row]`.
    pub(super) fn turn<'b, K: TileKernel<T>>(&self, room: &'b mut Room<T>) -> Lines<'b, T> {
        let distance = self.width * K::COLUMNS;
        let panels = room.take(self.rows.div_ceil(K::COLUMNS) * distance);
        for (index, panel) in panels.chunks_mut(distance).enumerate() {
            let first = index * K::COLUMNS;
            let rows = K::COLUMNS.min(self.rows - first);
            let source = &self.elements[first * self.stride..];
            let size = [rows, self.width];
            T::turn((source, self.stride), size, (panel, K::COLUMNS));
        }
        Lines {
            panels,
            along: self.width,
        }
    }

    /// Panels of a tile's columns each: `[row][column]`.
    pub(super) fn copy<'b, K: TileKernel<T>>(&self, room: &'b mut Room<T>) -> Lines<'b, T> {
        let distance = self.rows * K::COLUMNS;
        let panels = room.take(self.width.div_ceil(K::COLUMNS) * distance);
        for (index, panel) in panels.chunks_mut(distance).enumerate() {
            let first = index * K::COLUMNS;
            let (width, source) = (K::COLUMNS.min(self.width - first), &self.elements[first..]);
            // A copy of a constant length is a few loads and stores.
            match width {
                32 => copy_lines::<_, 32>(panel, source, self.stride),
                16 if K::COLUMNS == 16 => copy_lines::<_, 16>(panel, source, self.stride),
                _ => {
                    let rows = source.chunks(self.stride);
                    for (line, row) in panel.chunks_mut(K::COLUMNS).zip(rows) {
                        line[..width].copy_from_slice(&row[..width]);
                    }
                }
            }
        }
        Lines {
            panels,
            along: self.rows,
        }
    }
}

/// The first WIDTH elements of each row.
fn copy_lines<T: Copy, const WIDTH: usize>(to: &mut [T], source: &[T], stride: usize) {
    let lines = to.as_chunks_mut::<WIDTH>().0.iter_mut();
    for (line, row) in lines.zip(source.chunks(stride)) {
        if let Some(row) = row.first_chunk() {
            *line = *row;
        }
    }
}

/// Panels of one head, each of `along` steps.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a, T> {
    panels: &'a [T],
    pub(super) along: usize,
}

impl<T> Lines<'_, T> {
    /// The address of a step of a panel whose steps have `width` elements.
    pub(super) fn at(&self, panel: usize, step: usize, width: usize) -> *const T {
        self.panels[(panel * self.along + step) * width..].as_ptr()
    }
}
