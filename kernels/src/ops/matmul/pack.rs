//! Panels: copies of an operand in the order in which a kernel reads it.

#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Level};

use std::ops::Range;

use super::tile::Matrix;
use crate::ops::float::Float;
use crate::streaming;

/// How elements are transposed while they are packed.
pub(crate) trait Transpose: Float {
    /// Transposes a matrix of this `size`. Each of `from` and `to` are elements and the distance of
    /// their rows.
    fn turn(from: (&[Self], usize), size: [usize; 2], to: (&mut [Self], usize)) {
        turn_plain(from, size, to);
    }
}

impl Transpose for f32 {
    #[cfg(target_arch = "x86_64")]
    fn turn(from: (&[f32], usize), size: [usize; 2], to: (&mut [f32], usize)) {
        if simd::level() >= Level::Avx2 {
            // SAFETY: this processor has that level; the function asserts its bounds.
            unsafe { x86::turn(from, size, to) };
        } else {
            turn_plain(from, size, to);
        }
    }
}

impl Transpose for f64 {}

/// Panels begin at cache lines, and one further apart than their length: distances of a power of
/// two would put them all into one set of the cache.
const CACHE_LINE: usize = 64;
const GAP: usize = 16;
/// How many columns before its use a column is fetched.
const COLUMNS_AHEAD: usize = 8;

/// A buffer for some panels, which grows to the largest block.
#[derive(Default)]
pub(super) struct Panels<T> {
    buffer: Vec<T>,
}

impl<T: Transpose> Panels<T> {
    fn distance(along: usize, width: usize) -> usize {
        along * width + GAP
    }

    /// Copies rows of a matrix, called lines, between the columns `along`. Each panel has `taken`
    /// lines. A step along k is `width` elements, of which the first `taken` are theirs; what
    /// follows, and lines that do not exist, have any value.
    #[inline(always)]
    pub(super) fn pack(
        &mut self,
        from: Matrix<'_, T>,
        lines: &Range<usize>,
        along: &Range<usize>,
        taken: usize,
        width: usize,
    ) {
        let distance = Self::distance(along.len(), width);
        let len = lines.len().div_ceil(taken) * distance;
        if self.buffer.len() < len + CACHE_LINE {
            self.buffer.resize(len + CACHE_LINE, T::ZERO);
        }
        let start = self.start();
        let panels = &mut self.buffer[start..start + len];
        let firsts = lines.clone().step_by(taken);
        if from.transposed {
            for (step, column) in along.clone().enumerate() {
                let ahead = (column + COLUMNS_AHEAD) * from.rows + lines.start;
                let ahead = from.elements.as_ptr().wrapping_add(ahead);
                streaming::ask(ahead.cast(), lines.len() * size_of::<T>());
                let column = &from.elements[column * from.rows..(column + 1) * from.rows];
                for (panel, first) in panels.chunks_mut(distance).zip(firsts.clone()) {
                    let to = &mut panel[step * width..(step + 1) * width];
                    if let Some(lines) = column.get(first..first + width) {
                        to.copy_from_slice(lines);
                    } else {
                        let rest = &column[first..];
                        to[..rest.len()].copy_from_slice(rest);
                    }
                }
            }
        } else if !along.is_empty() {
            for (panel, first) in panels.chunks_mut(distance).zip(firsts) {
                let source = &from.elements[first * from.columns + along.start..];
                let rows = width.min(from.rows - first);
                T::turn((source, from.columns), [rows, along.len()], (panel, width));
            }
        }
    }

    /// Where the panels begin.
    fn start(&self) -> usize {
        self.buffer.as_ptr().align_offset(CACHE_LINE)
    }

    /// The address of a panel that `pack` filled.
    pub(super) fn panel(&self, index: usize, along: usize, width: usize) -> *const T {
        self.buffer[self.start() + index * Self::distance(along, width)..].as_ptr()
    }
}

/// Transposes element by element: what remains outside of blocks, and types without a vector
/// version.
fn turn_plain<T: Copy>(
    (source, source_stride): (&[T], usize),
    [rows, columns]: [usize; 2],
    (target, stride): (&mut [T], usize),
) {
    for row in 0..rows {
        for column in 0..columns {
            target[column * stride + row] = source[row * source_stride + column];
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::{
        __m256, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_shuffle_ps, _mm256_storeu_ps,
        _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    use super::turn_plain;
    use crate::streaming;

    pub(in super::super) const SIDE: usize = 8;

    /// Transposes squares of 8 × 8, eight source rows at a time, so that cache lines are read once.
    #[target_feature(enable = "avx2")]
    pub(super) fn turn(
        (source, source_stride): (&[f32], usize),
        [rows, columns]: [usize; 2],
        (target, target_stride): (&mut [f32], usize),
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
                    for ahead in SIDE..2 * SIDE {
                        streaming::ask(from.wrapping_add(ahead * source_stride).cast(), 1);
                    }
                    square(from, source_stride, to, target_stride);
                }
            }
        }
        let rest = |row: usize, column: usize| &source[row * source_stride + column..];
        if full_columns < columns && full_rows > 0 {
            let target = &mut target[full_columns * target_stride..];
            let (from, size) = (rest(0, full_columns), [full_rows, columns - full_columns]);
            turn_plain((from, source_stride), size, (target, target_stride));
        }
        if full_rows < rows {
            let target = &mut target[full_rows..];
            let (from, size) = (rest(full_rows, 0), [rows - full_rows, columns]);
            turn_plain((from, source_stride), size, (target, target_stride));
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
        for (index, lanes) in turned(row).into_iter().enumerate() {
            // SAFETY: writable by the caller's promise.
            unsafe { _mm256_storeu_ps(to.add(index * to_stride), lanes) };
        }
    }

    /// The columns of a square whose rows these are.
    #[target_feature(enable = "avx2")]
    #[inline]
    pub(in super::super) fn turned(row: [__m256; SIDE]) -> [__m256; SIDE] {
        // Interleaves pairs of rows, then fours, then joins the halves.
        let a0 = _mm256_unpacklo_ps(row[0], row[1]);
        let a1 = _mm256_unpackhi_ps(row[0], row[1]);
        let a2 = _mm256_unpacklo_ps(row[2], row[3]);
        let a3 = _mm256_unpackhi_ps(row[2], row[3]);
        let a4 = _mm256_unpacklo_ps(row[4], row[5]);
        let a5 = _mm256_unpackhi_ps(row[4], row[5]);
        let a6 = _mm256_unpacklo_ps(row[6], row[7]);
        let a7 = _mm256_unpackhi_ps(row[6], row[7]);
        let b0 = _mm256_shuffle_ps::<0x44>(a0, a2);
        let b1 = _mm256_shuffle_ps::<0xee>(a0, a2);
        let b2 = _mm256_shuffle_ps::<0x44>(a1, a3);
        let b3 = _mm256_shuffle_ps::<0xee>(a1, a3);
        let b4 = _mm256_shuffle_ps::<0x44>(a4, a6);
        let b5 = _mm256_shuffle_ps::<0xee>(a4, a6);
        let b6 = _mm256_shuffle_ps::<0x44>(a5, a7);
        let b7 = _mm256_shuffle_ps::<0xee>(a5, a7);
        [
            _mm256_permute2f128_ps::<0x20>(b0, b4),
            _mm256_permute2f128_ps::<0x20>(b1, b5),
            _mm256_permute2f128_ps::<0x20>(b2, b6),
            _mm256_permute2f128_ps::<0x20>(b3, b7),
            _mm256_permute2f128_ps::<0x31>(b0, b4),
            _mm256_permute2f128_ps::<0x31>(b1, b5),
            _mm256_permute2f128_ps::<0x31>(b2, b6),
            _mm256_permute2f128_ps::<0x31>(b3, b7),
        ]
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
            let (from, size) = ((&source[..], source_stride), [rows, columns]);
            turn_plain(from, size, (&mut plain, target_stride));
            f32::turn(from, size, (&mut squares, target_stride));
            prop_assert_eq!(plain, squares);
        }
    }
}
