//! What both ways to multiply share: operands, tiles of the output, and a product in progress.

use std::ops::Range;

use crate::ops::float::Float;

/// f32 and f64: the types that `gemm` is called with.
pub(crate) trait Real: Float {
    /// Transposes `rows` × `columns` elements, whose rows are `source_stride` apart, to `target`,
    /// whose rows are `target_stride` apart.
    fn turn(
        source: &[Self],
        source_stride: usize,
        rows: usize,
        columns: usize,
        target: &mut [Self],
        target_stride: usize,
    );
    /// Passes this thread's buffer for a panel, of at least `len` elements, to `body`.
    fn with_panel<R>(len: usize, body: impl FnOnce(&mut [Self]) -> R) -> R;
}

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

    /// Distances (from row to row, from column to column).
    pub(super) fn strides(&self) -> (isize, isize) {
        // All elements are in one slice, so non-empty dimensions are below isize::MAX.
        if self.transposed {
            (1, self.rows as isize)
        } else {
            (self.columns as isize, 1)
        }
    }

    /// The address of an element, which need not exist.
    pub(super) fn address(&self, row: usize, column: usize) -> *const T {
        let (down, right) = self.strides();
        self.elements
            .as_ptr()
            .wrapping_offset(row as isize * down + column as isize * right)
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

/// What happens to a tile when its product is complete.
pub(crate) trait Finish<T>: Sync {
    /// Called once for every element of the output, in tiles.
    fn finish(&self, tile: Tile<'_, T>);
}

/// Does nothing.
pub(crate) struct AsIs;

impl<T> Finish<T> for AsIs {
    fn finish(&self, _: Tile<'_, T>) {}
}

/// A product in progress. `out` is row-major, with rows `stride` apart.
pub(super) struct Product<'a, T> {
    pub(super) out: *mut T,
    pub(super) stride: usize,
    pub(super) a: Matrix<'a, T>,
    pub(super) b: Matrix<'a, T>,
    pub(super) product_scale: T,
    pub(super) existing_scale: T,
}

// SAFETY: the threads of one product write disjoint rows or columns of `out` (argued where they do)
// and only read the rest.
unsafe impl<T: Sync> Sync for Product<'_, T> {}

impl<T: Real> Product<'_, T> {
    /// `out[rows, columns] = product_scale * a[rows, along]·b + existing_scale * out[rows,
    /// columns]` on this thread, with `b` starting at `(b_start, b_down, b_right)`.
    ///
    /// # Safety
    /// The rows and columns lie within the output and nobody else touches them; `along` lies within
    /// a's columns and the strided matrix at `b_start` has `along.len()` rows and `columns.len()`
    /// columns.
    pub(super) unsafe fn multiply(
        &self,
        rows: &Range<usize>,
        columns: &Range<usize>,
        along: &Range<usize>,
        (b_start, b_down, b_right): (*const T, isize, isize),
        existing_scale: T,
    ) {
        let (a_down, a_right) = self.a.strides();
        // SAFETY: by the caller's promise the target is inside the output and exclusive, and the
        // operands are inside their slices. Nothing is reached through an empty range.
        unsafe {
            gemm::gemm(
                rows.len(),
                columns.len(),
                along.len(),
                self.out.add(rows.start * self.stride + columns.start),
                1,
                self.stride as isize,
                existing_scale.to_f64() != 0.0,
                self.a.address(rows.start, along.start),
                a_right,
                a_down,
                b_start,
                b_right,
                b_down,
                existing_scale,
                self.product_scale,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }

    /// # Safety
    /// As for `multiply`: the part is within the output, and this thread has it exclusively.
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
