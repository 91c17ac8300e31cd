//! The matrix product under addmm and linear on the CPU: single-threaded calls of the crate `gemm`
//! on pieces that we cut.
//!
//! The right operand's layout decides how:
//! * row-major (backward): one call of `gemm` per thread, on its rows or columns;
//! * transposed (x·Wᵀ, forward): `gemm` would pack such an operand column by column. If its rows
//!   are a power of two apart, they fall into one set of the cache (half the speed at 1024). So
//!   narrow panels are transposed here, in a buffer that stays in the L2 cache, and multiplied by
//!   `gemm`.
//!
//! Bits: on one processor model the result does not depend on the number of threads. If m or n is
//! above 64, `gemm` adds each output element along k in blocks whose length follows from k and the
//! caches alone. Below that, and for single rows, columns and tiny outputs, it takes other paths. A
//! product is only cut into pieces that stay on the path of the whole. On processors with other
//! caches or SIMD widths blocks differ, and so may the last bits.

mod panel;
mod parts;

use crate::threads;
use parts::Product;
pub(crate) use parts::{AsIs, Finish, Matrix, Real, Tile};

/// Products with fewer multiplications run on the caller alone.
const PARALLEL_PRODUCT_MIN: usize = 48 * 48 * 256;
/// `gemm` takes its general path if m or n is above this; pieces must be, too.
const GENERAL_PATH_ABOVE: usize = 64;
/// For outputs up to this many elements, `gemm` may use dot products.
const DOT_OUTPUT_MAX: usize = 256;
/// Pieces end at multiples of this: whole cache lines of f32 and whole micro-tiles.
const PIECE_GRAIN: usize = 16;

/// `out = product_scale * a·b + existing_scale * out`, then `finish`. With an `existing_scale` of
/// 0, `out` is not read.
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
    let work = Product {
        out: out.as_mut_ptr(),
        stride: n,
        a,
        b,
        product_scale,
        existing_scale,
    };
    let threads = if m.saturating_mul(n).saturating_mul(k) < PARALLEL_PRODUCT_MIN {
        1
    } else {
        threads::count()
    };
    if b.transposed && m > 1 && n > 1 && k > 2 {
        panel::in_panels(&work, m, n, k, threads, finish);
    } else {
        in_pieces(&work, m, n, k, threads, finish);
    }
}

/// One call of `gemm` per thread, on its share of the rows or columns.
fn in_pieces<T: Real>(
    work: &Product<'_, T>,
    m: usize,
    n: usize,
    k: usize,
    threads: usize,
    finish: &impl Finish<T>,
) {
    let (by_rows, pieces) = cutting(m, n, k, threads, work.a.transposed);
    threads::run(pieces, |index| {
        let (rows, columns) = if by_rows {
            (threads::cut(m, PIECE_GRAIN, pieces, index), 0..n)
        } else {
            (0..m, threads::cut(n, PIECE_GRAIN, pieces, index))
        };
        let (b_down, b_right) = work.b.strides();
        let b = (work.b.address(0, columns.start), b_down, b_right);
        // SAFETY: the pieces' rows, or columns, do not overlap and lie within the output; `along`
        // is all of k.
        unsafe {
            work.multiply(&rows, &columns, &(0..k), b, work.existing_scale);
            finish.finish(work.tile(rows, columns));
        }
    });
}

/// Whether to cut by rows, and into how many pieces. Cut by columns, a piece packs its own part of
/// `b` and shares `a` unpacked. A transposed `a` has to be packed, so it is cut by rows.
fn cutting(m: usize, n: usize, k: usize, threads: usize, a_transposed: bool) -> (bool, usize) {
    if threads <= 1 || m < 2 || n < 2 || k <= 2 {
        return (true, 1);
    }
    let pieces = |cut: usize, other: usize| {
        let piece_min = PIECE_GRAIN + GENERAL_PATH_ABOVE.max(DOT_OUTPUT_MAX / other);
        threads.min(cut / piece_min).max(1)
    };
    let (by_rows, by_columns) = (pieces(m, n), pieces(n, m));
    if by_rows > by_columns || (by_rows == by_columns && a_transposed) {
        (true, by_rows)
    } else {
        (false, by_columns)
    }
}

#[cfg(test)]
mod tests;
