//! The matrix product under addmm and linear on the CPU: the crate `gemm` on one thread a piece, cut by us.
//!
//! Two ways, by the layout of the right operand:
//! * row-major (backward products): one call of `gemm` a thread, on its rows or columns;
//! * transposed (x·Wᵀ, the forward product): `gemm` packs such an operand column by column, and where rows are a power
//!   of two apart they all fall into one set of the cache (half the speed at 1024). So narrow panels of it are
//!   turned round here, in a buffer that stays in the second cache, and `gemm` multiplies those.
//!
//! BITS. On one processor model the result does not depend on the number of threads. `gemm` adds up each output element
//! along k in blocks whose length follows from k and the caches alone once m or n is above 64; below that, and for
//! single rows, columns and tiny outputs, it takes other paths. A product is only cut into pieces that stay on the
//! path of the whole, and panels are the same whoever works on them. On processors with other caches or SIMD widths
//! the blocks differ, and so may the last bits.

mod panel;

use std::ops::Range;

use crate::ops::float::Float;
use crate::threads;

/// f32 and f64: the types that `gemm` is called with.
pub(crate) trait Real: Float {
    /// Writes the transpose of `rows` × `columns` elements, `source_stride` apart from row to row, to `target`, whose
    /// rows are `target_stride` apart.
    fn turn(
        source: &[Self],
        source_stride: usize,
        rows: usize,
        columns: usize,
        target: &mut [Self],
        target_stride: usize,
    );
    /// Lends this thread's buffer for a panel, grown to `len` elements once.
    fn with_panel<R>(len: usize, body: impl FnOnce(&mut [Self]) -> R) -> R;
}

/// A matrix to read: row-major, or seen transposed.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    elements: &'a [T],
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl<'a, T> Matrix<'a, T> {
    /// `elements` in memory order; `transposed` when that is the order of the transpose.
    pub(crate) fn new(elements: &'a [T], rows: usize, columns: usize, transposed: bool) -> Matrix<'a, T> {
        assert_eq!(elements.len(), rows * columns);
        Matrix { elements, rows, columns, transposed }
    }

    /// The same elements seen the other way round.
    pub(crate) fn t(self) -> Matrix<'a, T> {
        Matrix { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// Distances between neighbours: (from row to row, from column to column).
    fn strides(&self) -> (isize, isize) {
        // All elements are in one slice, so the dimensions are below isize::MAX (or there is nothing to reach).
        if self.transposed { (1, self.rows as isize) } else { (self.columns as isize, 1) }
    }

    /// The address of an element, or of where it would be.
    fn address(&self, row: usize, column: usize) -> *const T {
        let (down, right) = self.strides();
        self.elements.as_ptr().wrapping_offset(row as isize * down + column as isize * right)
    }
}

/// A finished part of the output, still in the cache of the thread that made it.
pub(crate) struct Tile<'a, T> {
    start: *mut T,
    stride: usize,
    /// Where it lies in the whole output.
    pub(crate) rows: Range<usize>,
    /// Where it lies in the whole output.
    pub(crate) columns: Range<usize>,
    _exclusive: std::marker::PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// The elements of one row, named as in the whole output.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(self.rows.contains(&row));
        // SAFETY: the tile's rows and columns are inside the output, which the maker of the tile has exclusively
        // there; `&mut self` keeps the rows taken from it apart.
        unsafe {
            let first = self.start.add((row - self.rows.start) * self.stride);
            std::slice::from_raw_parts_mut(first, self.columns.len())
        }
    }
}

/// What happens to each tile once its product is complete.
pub(crate) trait Finish<T>: Sync {
    /// Called once for every element of the output, in tiles.
    fn finish(&self, tile: Tile<'_, T>);
}

/// Nothing happens.
pub(crate) struct AsIs;

impl<T> Finish<T> for AsIs {
    fn finish(&self, _: Tile<'_, T>) {}
}

/// Below this many multiplications waking another thread costs more than it saves.
const PARALLEL_PRODUCT_MIN: usize = 48 * 48 * 256;
/// `gemm`'s general path has m or n above this; pieces stay above it too.
const GENERAL_PATH_ABOVE: usize = 64;
/// `gemm` may treat outputs up to this many elements by dot products.
const DOT_OUTPUT_MAX: usize = 256;
/// Pieces end on multiples of this: whole cache lines of f32, whole micro-tiles.
const PIECE_GRAIN: usize = 16;

/// `out = product_scale * a·b + existing_scale * out`, then `finish`. An `existing_scale` of 0 does not read `out`.
pub(crate) fn product<T: Real>(
    out: &mut [T],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    product_scale: T,
    existing_scale: T,
    finish: &impl Finish<T>,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k && out.len() == m * n);
    if m == 0 || n == 0 {
        return;
    }
    let work = Product { out: out.as_mut_ptr(), stride: n, a, b, product_scale, existing_scale };
    let threads = if m.saturating_mul(n).saturating_mul(k) < PARALLEL_PRODUCT_MIN { 1 } else { threads::count() };
    if b.transposed && m > 1 && n > 1 && k > 2 {
        panel::in_panels(&work, m, n, k, threads, finish);
    } else {
        in_pieces(&work, m, n, k, threads, finish);
    }
}

/// One product under way: `out` is row-major, `stride` from row to row.
struct Product<'a, T> {
    out: *mut T,
    stride: usize,
    a: Matrix<'a, T>,
    b: Matrix<'a, T>,
    product_scale: T,
    existing_scale: T,
}

// SAFETY: shared by the threads of one product, which write disjoint rows or columns of `out` (argued where they do)
// and otherwise read.
unsafe impl<T: Sync> Sync for Product<'_, T> {}

impl<T: Real> Product<'_, T> {
    /// `out[rows, columns] = product_scale * a[rows, along]·b + existing_scale * out[rows, columns]` on this thread, with
    /// `b` starting at `(b_start, b_down, b_right)`.
    ///
    /// # Safety
    /// The rows and columns lie within the output and nobody else touches them; `along` lies within a's columns and the
    /// strided matrix at `b_start` has `along.len()` rows and `columns.len()` columns.
    unsafe fn multiply(
        &self,
        rows: &Range<usize>,
        columns: &Range<usize>,
        along: &Range<usize>,
        (b_start, b_down, b_right): (*const T, isize, isize),
        existing_scale: T,
    ) {
        let (a_down, a_right) = self.a.strides();
        // SAFETY: the target is inside the output and exclusive, the operands are inside their slices, all by the
        // caller's promise; where a range is empty nothing is reached.
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
    /// As for `multiply`: the part is within the output and this thread has it exclusively.
    unsafe fn tile(&self, rows: Range<usize>, columns: Range<usize>) -> Tile<'_, T> {
        // SAFETY: within the output by the caller's promise.
        let start = unsafe { self.out.add(rows.start * self.stride + columns.start) };
        Tile { start, stride: self.stride, rows, columns, _exclusive: std::marker::PhantomData }
    }
}

/// One call of `gemm` a thread, on its share of the rows or columns.
fn in_pieces<T: Real>(work: &Product<'_, T>, m: usize, n: usize, k: usize, threads: usize, finish: &impl Finish<T>) {
    let (by_rows, pieces) = cutting(m, n, k, threads, work.a.transposed);
    threads::run(pieces, |index| {
        let (rows, columns) = if by_rows {
            (threads::cut(m, PIECE_GRAIN, pieces, index), 0..n)
        } else {
            (0..m, threads::cut(n, PIECE_GRAIN, pieces, index))
        };
        let (b_down, b_right) = work.b.strides();
        let b = (work.b.address(0, columns.start), b_down, b_right);
        // SAFETY: the pieces' rows, or columns, do not overlap and lie within the output; `along` is all of k.
        unsafe {
            work.multiply(&rows, &columns, &(0..k), b, work.existing_scale);
            finish.finish(work.tile(rows, columns));
        }
    });
}

/// Whether to cut by rows, and into how many pieces. By columns a piece packs its own part of `b` and shares `a` unpacked;
/// a transposed `a` has to be packed, so there it is cut by rows.
fn cutting(m: usize, n: usize, k: usize, threads: usize, a_transposed: bool) -> (bool, usize) {
    if threads <= 1 || m < 2 || n < 2 || k <= 2 {
        return (true, 1);
    }
    let pieces = |cut: usize, other: usize| {
        let piece_min = PIECE_GRAIN + GENERAL_PATH_ABOVE.max(DOT_OUTPUT_MAX / other);
        threads.min(cut / piece_min).max(1)
    };
    let (by_rows, by_columns) = (pieces(m, n), pieces(n, m));
    if by_rows > by_columns || (by_rows == by_columns && a_transposed) { (true, by_rows) } else { (false, by_columns) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::random_f32;

    /// The products a training step makes, and awkward ones around every threshold above.
    const SHAPES: [(usize, usize, usize); 16] = [
        (128, 1024, 784),
        (128, 10, 1024),
        (10, 1024, 128),
        (128, 1024, 10),
        (300, 1000, 128),
        (1, 1000, 700),
        (1000, 1, 700),
        (2, 600, 513),
        (600, 2, 513),
        (65, 65, 1025),
        (64, 64, 1000),
        (161, 3, 3000),
        (3, 161, 3000),
        (200, 200, 2),
        (97, 193, 511),
        (5, 7, 3),
    ];

    fn run(m: usize, n: usize, k: usize, a_t: bool, b_t: bool, threads: usize) -> Vec<u32> {
        let (a, b) = (random_f32(m * k, 1), random_f32(k * n, 2));
        let mut out = random_f32(m * n, 3);
        let (a, b) = (Matrix::new(&a, m, k, a_t), Matrix::new(&b, k, n, b_t));
        let work = Product { out: out.as_mut_ptr(), stride: n, a, b, product_scale: 0.5, existing_scale: 2.0 };
        if b_t && m > 1 && n > 1 && k > 2 {
            panel::in_panels(&work, m, n, k, threads, &AsIs);
        } else {
            in_pieces(&work, m, n, k, threads, &AsIs);
        }
        out.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn the_bits_do_not_depend_on_the_number_of_pieces() {
        for (m, n, k) in SHAPES {
            for (a_t, b_t) in [(false, false), (false, true), (true, false), (true, true)] {
                let alone = run(m, n, k, a_t, b_t, 1);
                for threads in 2..=8 {
                    assert!(run(m, n, k, a_t, b_t, threads) == alone, "{m}x{n}x{k} {a_t} {b_t} on {threads}");
                }
            }
        }
    }
}
