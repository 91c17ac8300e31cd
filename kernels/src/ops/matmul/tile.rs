//! Tiles: operands and parts of the output, which both ways to multiply share, and the innermost
//! loops, which compute one tile of the output with its sums in registers.

use std::ops::Range;

use crate::ops::float::Float;

/// The most elements along k of a block. Results depend on it.
pub(super) const ALONG_MAX: usize = 256;
/// The most columns of a block of the right operand: 768 KiB of f32 with `ALONG_MAX`.
pub(crate) const COLUMNS_MAX: usize = 768;
/// Pieces and blocks end at multiples of this: whole cache lines of f32.
pub(super) const PIECE_GRAIN: usize = 16;
/// Matmuls with fewer multiplications run on the calling thread.
pub(super) const PARALLEL_MATMUL_MIN: usize = 48 * 48 * 256;
/// As above, for a matmul of one row, whose speed is that of memory.
pub(super) const PARALLEL_ROW_MIN: usize = 1 << 16;

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

/// Where a product goes: to what a tensor holds, or unrounded.
pub(crate) enum Output<'a, S, T> {
    Stored(&'a mut [S]),
    Wide(&'a mut [T]),
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
    /// # Safety
    /// `start` is the first of these elements, whose rows are `stride` apart, and the caller has
    /// them exclusively.
    pub(super) unsafe fn new(
        start: *mut T,
        stride: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Self {
        Tile {
            start,
            stride,
            rows,
            columns,
            _exclusive: std::marker::PhantomData,
        }
    }

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
pub(crate) struct TiledMatmul<'a, T> {
    pub(super) out: *mut T,
    pub(super) stride: usize,
    pub(super) a: Matrix<'a, T>,
    pub(super) b: Matrix<'a, T>,
    pub(super) matmul_scale: T,
    pub(super) existing_scale: T,
}

// SAFETY: the threads of one matmul write disjoint rows or columns of `out` (argued where they do)
// and only read the rest.
unsafe impl<T: Sync> Sync for TiledMatmul<'_, T> {}

impl<T: Float> TiledMatmul<'_, T> {
    /// # Safety
    /// The part is within the output, and this thread has it exclusively.
    pub(super) unsafe fn tile(&self, rows: Range<usize>, columns: Range<usize>) -> Tile<'_, T> {
        // SAFETY: within the output by the caller's promise.
        unsafe {
            let start = self.out.add(rows.start * self.stride + columns.start);
            Tile::new(start, self.stride, rows, columns)
        }
    }
}

/// Elements of the largest tile.
pub(super) const TILE_MAX: usize = 256;

/// How to compute one tile.
pub(crate) trait TileKernel<T> {
    const ROWS: usize;
    const COLUMNS: usize;
    /// Elements of each step in a panel of rows, of which `ROWS` are used.
    const ROWS_PACKED: usize;

    /// `out = scales.0 * (sum over along of a·b) + scales.1 * out`, for a whole tile. With 0 for
    /// `scales.1`, `out` is not read. Step `s` of row `r` of the left operand is at
    /// `a.0 + r * a.1 + s * a.2`; if it is `PACKED`, the distances are those of a panel.
    ///
    /// # Safety
    /// `a` and `b` hold `along` steps, `out` is writable with rows `stride` apart, and the
    /// processor has the kernel's instructions.
    unsafe fn run<const PACKED: bool>(
        along: usize,
        a: (*const T, usize, usize),
        b: *const T,
        out: *mut T,
        stride: usize,
        scales: (T, T),
    );
}

/// `out = sum + existing_scale * out`, as the kernels round it.
///
/// # Safety
/// `out` is writable, and readable unless `existing_scale` is 0.
#[inline(always)]
pub(super) unsafe fn store<T: Float>(out: *mut T, sum: T, existing_scale: T) {
    // SAFETY: the caller's promise.
    unsafe {
        *out = if existing_scale == T::ZERO {
            sum
        } else {
            existing_scale.fused(*out, sum)
        };
    }
}

/// For processors without a kernel of their own.
pub(crate) struct Plain;

/// Of NEON's 32 registers, 4 × 16 sums of f32 fill 16: a step is 16 multiply-adds for 5 loads.
const PLAIN_COLUMNS: usize = if cfg!(target_arch = "aarch64") { 16 } else { 8 };

impl<T: Float> TileKernel<T> for Plain {
    const ROWS: usize = 4;
    const COLUMNS: usize = PLAIN_COLUMNS;
    const ROWS_PACKED: usize = 4;

    unsafe fn run<const PACKED: bool>(
        along: usize,
        (a, row_stride, step_stride): (*const T, usize, usize),
        b: *const T,
        out: *mut T,
        stride: usize,
        scales: (T, T),
    ) {
        let (row_stride, step_stride) = if PACKED {
            (1, 4)
        } else {
            (row_stride, step_stride)
        };
        let mut sums = [[T::ZERO; PLAIN_COLUMNS]; 4];
        for step in 0..along {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (column, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: within the panels by the caller's promise.
                    let (a, b) = unsafe {
                        (
                            *a.add(row * row_stride + step * step_stride),
                            *b.add(step * PLAIN_COLUMNS + column),
                        )
                    };
                    *sum = a.fused(b, *sum);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (column, &sum) in sums.iter().enumerate() {
                // SAFETY: within the tile by the caller's promise.
                unsafe { store(out.add(row * stride + column), scales.0 * sum, scales.1) };
            }
        }
    }
}

/// How many steps before its use `b` is fetched.
#[cfg(target_arch = "x86_64")]
const STEPS_AHEAD: usize = 16;

/// A kernel that keeps `$rows` × `$vectors` registers of sums: `NAME: TYPE, FEATURES, ROWS of
/// ROWS_PACKED, VECTORS of LANES, REGISTER, INTRINSICS`.
#[cfg(target_arch = "x86_64")]
macro_rules! kernel {
    (
        $name:ident: $T:ty, $features:literal, $rows:literal of $packed:literal,
        $vectors:literal of $lanes:literal, $register:ident, $zero:ident, $load:ident,
        $store:ident, $all:ident, $fused:ident, $times:ident
    ) => {
        pub(crate) struct $name;

        impl TileKernel<$T> for $name {
            const ROWS: usize = $rows;
            const COLUMNS: usize = $vectors * $lanes;
            const ROWS_PACKED: usize = $packed;

            // With indices, registers hold the sums also where little is optimised.
            #[allow(clippy::needless_range_loop)]
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn run<const PACKED: bool>(
                along: usize,
                (mut a, row_stride, step_stride): (*const $T, usize, usize),
                mut b: *const $T,
                out: *mut $T,
                stride: usize,
                scales: ($T, $T),
            ) {
                use std::arch::x86_64::{
                    _MM_HINT_T0, _mm_prefetch, $all, $fused, $load, $store, $times, $zero,
                };
                // Constants, so that no instruction computes an address.
                let (row_stride, step_stride) = if PACKED {
                    (1, $packed)
                } else {
                    (row_stride, step_stride)
                };
                // The output is written last, and `b` comes from the L2 cache.
                for row in 0..$rows {
                    for vector in 0..$vectors {
                        let at = out.wrapping_add(row * stride + vector * $lanes);
                        _mm_prefetch::<_MM_HINT_T0>(at.cast());
                    }
                }
                let mut sums = [[$zero(); $vectors]; $rows];
                for _ in 0..along {
                    // SAFETY: one step of each panel.
                    unsafe {
                        let mut right = [$zero(); $vectors];
                        for vector in 0..$vectors {
                            let next = b.wrapping_add((STEPS_AHEAD * $vectors + vector) * $lanes);
                            _mm_prefetch::<_MM_HINT_T0>(next.cast());
                            right[vector] = $load(b.add(vector * $lanes));
                        }
                        for row in 0..$rows {
                            let left = $all(*a.add(row * row_stride));
                            for vector in 0..$vectors {
                                sums[row][vector] = $fused(left, right[vector], sums[row][vector]);
                            }
                        }
                        a = a.add(step_stride);
                        b = b.add($vectors * $lanes);
                    }
                }
                let (scale, existing_scale) = ($all(scales.0), $all(scales.1));
                for row in 0..$rows {
                    for vector in 0..$vectors {
                        // SAFETY: within the tile by the caller's promise.
                        unsafe {
                            let out = out.add(row * stride + vector * $lanes);
                            let mut sum = $times(scale, sums[row][vector]);
                            if scales.1 != 0.0 {
                                sum = $fused(existing_scale, $load(out), sum);
                            }
                            $store(out, sum);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(Avx2F32: f32, "avx2,fma", 6 of 8, 2 of 8, __m256, _mm256_setzero_ps, _mm256_loadu_ps,
    _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_mul_ps);
#[cfg(target_arch = "x86_64")]
kernel!(Avx2F64: f64, "avx2,fma", 6 of 6, 2 of 4, __m256d, _mm256_setzero_pd, _mm256_loadu_pd,
    _mm256_storeu_pd, _mm256_set1_pd, _mm256_fmadd_pd, _mm256_mul_pd);
#[cfg(target_arch = "x86_64")]
kernel!(Avx512F32: f32, "avx512f", 8 of 8, 2 of 16, __m512, _mm512_setzero_ps, _mm512_loadu_ps,
    _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_mul_ps);
