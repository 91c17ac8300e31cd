//! Products whose right operand is transposed: its panels are transposed block by block, then
//! multiplied.

use std::cell::RefCell;

use super::parts::{Finish, Product, Real};
use crate::threads;

/// Columns of a panel: whole micro-tiles of `gemm` at every SIMD width.
const PANEL_COLUMNS: usize = 64;
/// The most elements along k at a time: 128 KiB of f32 per panel, in the L2 cache.
const ALONG_MAX: usize = 512;
/// The fewest rows of a piece: with fewer, transposing the panel for each piece costs too much.
const PIECE_ROWS_MIN: usize = 48;

/// Computes the product in pieces: one panel and all rows, or a part of the rows if panels are few.
pub(super) fn in_panels<T: Real>(
    work: &Product<'_, T>,
    m: usize,
    n: usize,
    k: usize,
    threads: usize,
    finish: &impl Finish<T>,
) {
    let panels = n.div_ceil(PANEL_COLUMNS);
    // A piece never has a single row, for which `gemm` would take another path.
    let row_pieces = if threads <= 1 {
        1
    } else {
        threads.div_ceil(panels).min(m / PIECE_ROWS_MIN).max(1)
    };
    let along_pieces = k.div_ceil(ALONG_MAX);
    let body = |piece: usize| {
        let (panel, row_piece) = (piece / row_pieces, piece % row_pieces);
        let columns = panel * PANEL_COLUMNS..((panel + 1) * PANEL_COLUMNS).min(n);
        let rows = threads::cut(m, 1, row_pieces, row_piece);
        T::with_panel(PANEL_COLUMNS * ALONG_MAX, |buffer| {
            for along_piece in 0..along_pieces {
                let along = threads::cut(k, 1, along_pieces, along_piece);
                // A column of the transposed operand is a row of k elements in memory.
                let source = &work.b.elements[columns.start * k + along.start..];
                T::turn(source, k, columns.len(), along.len(), buffer, PANEL_COLUMNS);
                let turned = (buffer.as_ptr(), PANEL_COLUMNS as isize, 1);
                let existing_scale = if along_piece == 0 {
                    work.existing_scale
                } else {
                    T::ONE
                };
                // SAFETY: pieces differ in their columns or in their rows and lie within the
                // output. The buffer holds `along.len()` rows of PANEL_COLUMNS, of which
                // `columns.len()` are filled.
                unsafe { work.multiply(&rows, &columns, &along, turned, existing_scale) };
            }
        });
        // SAFETY: as above; the product of this part is complete.
        finish.finish(unsafe { work.tile(rows, columns) });
    };
    if threads <= 1 {
        (0..panels * row_pieces).for_each(body);
    } else {
        threads::run(panels * row_pieces, body);
    }
}

thread_local! {
    static PANEL_F32: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static PANEL_F64: RefCell<Vec<f64>> = const { RefCell::new(Vec::new()) };
}

/// Transposes element by element: what remains outside of blocks, and types without a vector
/// version.
fn turn_plain<T: Copy>(
    source: &[T],
    source_stride: usize,
    rows: usize,
    columns: usize,
    target: &mut [T],
    stride: usize,
) {
    for row in 0..rows {
        for column in 0..columns {
            target[column * stride + row] = source[row * source_stride + column];
        }
    }
}

impl Real for f64 {
    fn turn(
        source: &[f64],
        source_stride: usize,
        rows: usize,
        columns: usize,
        target: &mut [f64],
        target_stride: usize,
    ) {
        turn_plain(source, source_stride, rows, columns, target, target_stride);
    }

    fn with_panel<R>(len: usize, body: impl FnOnce(&mut [f64]) -> R) -> R {
        PANEL_F64.with_borrow_mut(|panel| {
            panel.resize(len, 0.0);
            body(panel)
        })
    }
}

impl Real for f32 {
    fn turn(
        source: &[f32],
        source_stride: usize,
        rows: usize,
        columns: usize,
        target: &mut [f32],
        target_stride: usize,
    ) {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::level() >= crate::simd::Level::Avx2 {
            // SAFETY: this processor has that level; the function asserts its bounds.
            return unsafe {
                x86::turn(source, source_stride, rows, columns, target, target_stride)
            };
        }
        turn_plain(source, source_stride, rows, columns, target, target_stride);
    }

    fn with_panel<R>(len: usize, body: impl FnOnce(&mut [f32]) -> R) -> R {
        PANEL_F32.with_borrow_mut(|panel| {
            panel.resize(len, 0.0);
            body(panel)
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_shuffle_ps, _mm256_storeu_ps,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    use super::turn_plain;

    const SIDE: usize = 8;

    /// Transposes squares of 8 × 8, eight source rows at a time, so that cache lines are read once.
    #[target_feature(enable = "avx2")]
    pub(super) fn turn(
        source: &[f32],
        source_stride: usize,
        rows: usize,
        columns: usize,
        target: &mut [f32],
        target_stride: usize,
    ) {
        if rows == 0 || columns == 0 {
            return;
        }
        assert!(source.len() >= (rows - 1) * source_stride + columns);
        assert!(target.len() >= (columns - 1) * target_stride + rows && target_stride >= rows);
        let (full_rows, full_columns) = (rows / SIDE * SIDE, columns / SIDE * SIDE);
        for row in (0..full_rows).step_by(SIDE) {
            for column in (0..full_columns).step_by(SIDE) {
                // SAFETY: the square's last element is within both slices by the assertions above.
                unsafe {
                    let from = source.as_ptr().add(row * source_stride + column);
                    let to = target.as_mut_ptr().add(column * target_stride + row);
                    square(from, source_stride, to, target_stride);
                }
            }
        }
        let rest = |row: usize, column: usize| &source[row * source_stride + column..];
        if full_columns < columns && full_rows > 0 {
            let target = &mut target[full_columns * target_stride..];
            turn_plain(
                rest(0, full_columns),
                source_stride,
                full_rows,
                columns - full_columns,
                target,
                target_stride,
            );
        }
        if full_rows < rows {
            let target = &mut target[full_rows..];
            turn_plain(
                rest(full_rows, 0),
                source_stride,
                rows - full_rows,
                columns,
                target,
                target_stride,
            );
        }
    }

    /// # Safety
    /// Eight rows of eight elements can be read at `from` and written at `to`, at these distances.
    #[target_feature(enable = "avx2")]
    #[inline]
    unsafe fn square(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        // SAFETY: readable by the caller's promise.
        let row: [__m256; SIDE] =
            std::array::from_fn(|i| unsafe { _mm256_loadu_ps(from.add(i * from_stride)) });
        // Interleaves pairs of rows, then fours, then joins the halves.
        let (a0, a1) = (
            _mm256_unpacklo_ps(row[0], row[1]),
            _mm256_unpackhi_ps(row[0], row[1]),
        );
        let (a2, a3) = (
            _mm256_unpacklo_ps(row[2], row[3]),
            _mm256_unpackhi_ps(row[2], row[3]),
        );
        let (a4, a5) = (
            _mm256_unpacklo_ps(row[4], row[5]),
            _mm256_unpackhi_ps(row[4], row[5]),
        );
        let (a6, a7) = (
            _mm256_unpacklo_ps(row[6], row[7]),
            _mm256_unpackhi_ps(row[6], row[7]),
        );
        let (b0, b1) = (
            _mm256_shuffle_ps::<0x44>(a0, a2),
            _mm256_shuffle_ps::<0xee>(a0, a2),
        );
        let (b2, b3) = (
            _mm256_shuffle_ps::<0x44>(a1, a3),
            _mm256_shuffle_ps::<0xee>(a1, a3),
        );
        let (b4, b5) = (
            _mm256_shuffle_ps::<0x44>(a4, a6),
            _mm256_shuffle_ps::<0xee>(a4, a6),
        );
        let (b6, b7) = (
            _mm256_shuffle_ps::<0x44>(a5, a7),
            _mm256_shuffle_ps::<0xee>(a5, a7),
        );
        let turned = [
            _mm256_permute2f128_ps::<0x20>(b0, b4),
            _mm256_permute2f128_ps::<0x20>(b1, b5),
            _mm256_permute2f128_ps::<0x20>(b2, b6),
            _mm256_permute2f128_ps::<0x20>(b3, b7),
            _mm256_permute2f128_ps::<0x31>(b0, b4),
            _mm256_permute2f128_ps::<0x31>(b1, b5),
            _mm256_permute2f128_ps::<0x31>(b2, b6),
            _mm256_permute2f128_ps::<0x31>(b3, b7),
        ];
        for (index, lanes) in turned.into_iter().enumerate() {
            // SAFETY: writable by the caller's promise.
            unsafe { _mm256_storeu_ps(to.add(index * to_stride), lanes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn turning_round_in_squares_equals_element_by_element(rows in 0usize..40, columns in 0usize..40, gap in 0usize..9) {
            let (source_stride, target_stride) = (columns + gap, rows + gap);
            let source: Vec<f32> = (0..rows * source_stride + columns).map(|i| i as f32).collect();
            let mut plain = vec![-1.0; columns * target_stride + rows];
            let mut squares = plain.clone();
            turn_plain(&source, source_stride, rows, columns, &mut plain, target_stride);
            f32::turn(&source, source_stride, rows, columns, &mut squares, target_stride);
            prop_assert_eq!(plain, squares);
        }
    }
}
