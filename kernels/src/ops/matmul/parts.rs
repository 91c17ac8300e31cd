//! What both ways to multiply share: operands, tiles of the output, and a matmul in progress.

use std::ops::Range;

use crate::ops::float::Float;

/// The most elements along k of a block. Results depend on it.
pub(super) const ALONG_MAX: usize = 256;

/// A matrix to read, row-major or transposed.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub(super) elements: &'a [T],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) transposed: bool,
}

impl<'a, T> Matrix<'a, T> {
    /// `elements` in memory order, which is that of the transpose if `transposed`.
    pub(crate) fn new(
        elements: &'a [T],
        rows: usize,
        columns: usize,
        transposed: bool,
    ) -> Matrix<'a, T> {
        assert_eq!(elements.len(), rows * columns);
        Matrix {
            elements,
            rows,
            columns,
            transposed,
        }
    }

    /// The transpose, with the same elements.
    pub(crate) fn t(self) -> Matrix<'a, T> {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            transposed: !self.transposed,
            ..self
        }
    }
}

/// A finished part of the output, in the cache of the thread that made it.
pub(crate) struct Tile<'a, T> {
    start: *mut T,
    stride: usize,
    /// Its rows of the whole output.
    pub(crate) rows: Range<usize>,
    /// Its columns of the whole output.
    pub(crate) columns: Range<usize>,
    _exclusive: std::marker::PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// The elements of one row, counted in the whole output.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(self.rows.contains(&row));
        // SAFETY: the tile is inside the output, and its maker has these rows and columns
        // exclusively. `&mut self` keeps two rows from being taken at once.
        unsafe {
            let first = self.start.add((row - self.rows.start) * self.stride);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }
}

/// What happens to a tile when its sums are complete.
pub(crate) trait Finish<T>: Sync {
    /// Called once for every element of the output, in tiles.
    fn finish(&self, tile: Tile<'_, T>);
}

/// Does nothing.
pub(crate) struct AsIs;

impl<T> Finish<T> for AsIs {
    fn finish(&self, _: Tile<'_, T>) {}
}

/// A matmul in progress. `out` is row-major, with rows `stride` apart.
pub(crate) struct Matmul<'a, T> {
    pub(super) out: *mut T,
    pub(super) stride: usize,
    pub(super) a: Matrix<'a, T>,
    pub(super) b: Matrix<'a, T>,
    pub(super) matmul_scale: T,
    pub(super) existing_scale: T,
}

// SAFETY: the threads of one matmul write disjoint rows or columns of `out` (argued where they do)
// and only read the rest.
unsafe impl<T: Sync> Sync for Matmul<'_, T> {}

impl<T: Float> Matmul<'_, T> {
    /// # Safety
    /// The part is within the output, and this thread has it exclusively.
    pub(super) unsafe fn tile(&self, rows: Range<usize>, columns: Range<usize>) -> Tile<'_, T> {
        // SAFETY: within the output by the caller's promise.
        let start = unsafe { self.out.add(rows.start * self.stride + columns.start) };
        Tile {
            start,
            stride: self.stride,
            rows,
            columns,
            _exclusive: std::marker::PhantomData,
        }
    }
}
