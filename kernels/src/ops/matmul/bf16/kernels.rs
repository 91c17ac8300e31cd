//! The innermost loops: one tile of sums, by the instruction or by f32 multiply-adds in its order.

use std::marker::PhantomData;

use super::flush::{flushed, multiply_add};
use super::pack::{PackForm, TILE_ALONG};
use crate::ops::matmul::tile::{TILE_MAX, TileKernel};

/// How to compute one tile of sums.
pub(super) trait PairKernel {
    const ROWS: usize;
    /// Lines of a panel of rows, of which `ROWS` are used.
    const ROWS_PACKED: usize = Self::ROWS;
    const COLUMNS: usize;
    /// Rows that are packed at a time.
    const ROWS_AT_ONCE: usize;
    /// The forms of panels of rows and of columns.
    const LEFT: PackForm;
    const RIGHT: PackForm;
    /// `out = scales.0 * (sum over along of a·b) + scales.1 * out`, for a whole tile. With 0 for
    /// `scales.1`, `out` is not read.
    ///
    /// # Safety
    /// `a` and `b` are panels with `along` elements of each line, `out` is writable with rows
    /// `stride` apart, and the processor has the kernel's instructions.
    unsafe fn run(
        along: usize,
        a: *const f32,
        b: *const f32,
        out: *mut f32,
        stride: usize,
        scales: (f32, f32),
    );
}

/// Either order by the f32 kernel `K`: AMX's, or that of `vdpbf16ps`.
pub(super) struct Emulated<K, const IS_AMX: bool>(PhantomData<K>);

impl<K: TileKernel<f32>, const IS_AMX: bool> PairKernel for Emulated<K, IS_AMX> {
    const ROWS: usize = K::ROWS;
    const ROWS_PACKED: usize = K::ROWS_PACKED;
    const COLUMNS: usize = K::COLUMNS;
    const ROWS_AT_ONCE: usize = 48;
    const LEFT: PackForm = if IS_AMX {
        PackForm::WideTiles
    } else {
        PackForm::WidePairs
    };
    const RIGHT: PackForm = Self::LEFT;

    unsafe fn run(
        along: usize,
        a: *const f32,
        b: *const f32,
        out: *mut f32,
        stride: usize,
        scales: (f32, f32),
    ) {
        if !IS_AMX {
            let along = along.next_multiple_of(2);
            // SAFETY: by the caller's promise; an odd element has a 0 beside it.
            return unsafe { K::run::<true>(along, (a, 0, 0), b, out, stride, scales) };
        }
        const HALF: usize = TILE_ALONG / 2;
        let mut sums = [0f32; TILE_MAX];
        let mut tile = [0f32; TILE_MAX];
        let count = K::ROWS * K::COLUMNS;
        for chunk in 0..along.div_ceil(TILE_ALONG) {
            for (half, existing) in [(0, 0.0), (1, 1.0)] {
                let step = chunk * TILE_ALONG + half * HALF;
                // SAFETY: by the caller's promise; panels have whole chunks.
                unsafe {
                    let (a, b) = (a.add(step * K::ROWS_PACKED), b.add(step * K::COLUMNS));
                    let (tile, scales) = (tile.as_mut_ptr(), (1.0, existing));
                    K::run::<true>(HALF, (a, 0, 0), b, tile, K::COLUMNS, scales);
                }
            }
            for (sum, &of_chunk) in sums[..count].iter_mut().zip(&tile) {
                *sum = flushed(*sum + of_chunk);
            }
        }
        // SAFETY: by the caller's promise.
        unsafe { store_tile(&sums[..count], K::COLUMNS, out, stride, scales) };
    }
}

/// Stores sums in rows of `columns`.
///
/// # Safety
/// `out` is writable with rows `stride` apart, and readable unless `scales.1` is 0.
pub(super) unsafe fn store_tile(
    sums: &[f32],
    columns: usize,
    out: *mut f32,
    stride: usize,
    scales: (f32, f32),
) {
    for (row, sums) in sums.chunks_exact(columns).enumerate() {
        for (column, &sum) in sums.iter().enumerate() {
            // SAFETY: by the caller's promise.
            unsafe {
                store(
                    out.add(row * stride + column),
                    multiply_add(scales.0, sum, -0.0),
                    scales.1,
                )
            };
        }
    }
}

/// `out = sum + existing_scale * out`.
///
/// # Safety
/// `out` is writable, and readable unless `existing_scale` is 0.
#[inline(always)]
pub(super) unsafe fn store(out: *mut f32, sum: f32, existing_scale: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        *out = match existing_scale {
            0.0 => sum,
            1.0 => flushed(flushed(*out) + sum),
            scale => multiply_add(scale, flushed(*out), sum),
        };
    }
}

/// f32 multiply-adds that flush by themselves, for processors without a kernel of their own. Loops
/// that the compiler vectorises add, and look whether any number was tiny: few matmuls have one.
pub(super) struct Flushed;

impl TileKernel<f32> for Flushed {
    const ROWS: usize = 4;
    const COLUMNS: usize = 8;
    const ROWS_PACKED: usize = 4;

    unsafe fn run<const PACKED: bool>(
        along: usize,
        (a, ..): (*const f32, usize, usize),
        b: *const f32,
        out: *mut f32,
        stride: usize,
        scales: (f32, f32),
    ) {
        // The least size of a number that is not 0, less one: of sums and of each operand.
        let size = |x: f32| x.abs().to_bits().wrapping_sub(1);
        let (mut sums, mut least) = ([[0f32; 8]; 4], [[u32::MAX; 8]; 4]);
        let (mut least_a, mut least_b) = ([u32::MAX; 4], [u32::MAX; 8]);
        // SAFETY: within the panels by the caller's promise.
        let step = |step: usize| unsafe {
            (
                *a.add(step * 4).cast::<[f32; 4]>(),
                *b.add(step * 8).cast::<[f32; 8]>(),
            )
        };
        for (a, b) in (0..along).map(step) {
            for (row, &a) in a.iter().enumerate() {
                for (column, &b) in b.iter().enumerate() {
                    let sum = a.mul_add(b, sums[row][column]);
                    sums[row][column] = sum;
                    least[row][column] = least[row][column].min(size(sum));
                }
                least_a[row] = least_a[row].min(size(a));
            }
            least_b
                .iter_mut()
                .zip(b)
                .for_each(|(least, b)| *least = size(b).min(*least));
        }
        let least = least.as_flattened().iter().chain(&least_a).chain(&least_b);
        // Otherwise each sum is added again, and flushed.
        let none_is_tiny = least.min() >= Some(&f32::MIN_POSITIVE.to_bits());
        for (row, column) in (0..4).flat_map(|row| (0..8).map(move |column| (row, column))) {
            let sum = if none_is_tiny {
                sums[row][column]
            } else {
                let add = |sum, (a, b): ([f32; 4], [f32; 8])| {
                    multiply_add(flushed(a[row]), flushed(b[column]), sum)
                };
                (0..along).map(step).fold(0.0, add)
            };
            // SAFETY: within the tile by the caller's promise.
            unsafe {
                store(
                    out.add(row * stride + column),
                    multiply_add(scales.0, sum, -0.0),
                    scales.1,
                );
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use dpbf16::Dpbf16;

#[cfg(target_arch = "x86_64")]
mod dpbf16 {
    use std::arch::x86_64::{
        __m512bh, __m512i, _MM_HINT_T0, _mm_prefetch, _mm512_dpbf16_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
        _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::{PackForm, PairKernel};

    /// `vdpbf16ps`.
    pub(in super::super) struct Dpbf16;

    const ROWS: usize = 8;
    const VECTORS: usize = 2;
    const LANES: usize = 16;
    /// How many steps before its use `b` is fetched.
    const STEPS_AHEAD: usize = 16;

    impl PairKernel for Dpbf16 {
        const ROWS: usize = ROWS;
        const COLUMNS: usize = VECTORS * LANES;
        const ROWS_AT_ONCE: usize = 64;
        const LEFT: PackForm = PackForm::Pairs;
        const RIGHT: PackForm = PackForm::Pairs;

        // With indices, registers hold the sums also where little is optimised.
        #[allow(clippy::needless_range_loop)]
        #[target_feature(enable = "avx512f,avx512bf16")]
        unsafe fn run(
            along: usize,
            mut a: *const f32,
            mut b: *const f32,
            out: *mut f32,
            stride: usize,
            scales: (f32, f32),
        ) {
            // SAFETY: both are 64 bytes of which every bit pattern is a value.
            let pairs = |x: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(x) };
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            for _ in 0..along.div_ceil(2) {
                // SAFETY: one step of each panel.
                unsafe {
                    let mut right = [pairs(_mm512_set1_epi32(0)); VECTORS];
                    for vector in 0..VECTORS {
                        let next = b.wrapping_add((STEPS_AHEAD * VECTORS + vector) * LANES);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                        right[vector] = pairs(_mm512_loadu_si512(b.add(vector * LANES).cast()));
                    }
                    for row in 0..ROWS {
                        let left = pairs(_mm512_set1_epi32(*a.add(row).cast()));
                        for vector in 0..VECTORS {
                            sums[row][vector] =
                                _mm512_dpbf16_ps(sums[row][vector], left, right[vector]);
                        }
                    }
                    a = a.add(ROWS);
                    b = b.add(VECTORS * LANES);
                }
            }
            let (scale, existing_scale) = (_mm512_set1_ps(scales.0), _mm512_set1_ps(scales.1));
            for row in 0..ROWS {
                for vector in 0..VECTORS {
                    // SAFETY: within the tile by the caller's promise.
                    unsafe {
                        let out = out.add(row * stride + vector * LANES);
                        let mut sum = _mm512_mul_ps(scale, sums[row][vector]);
                        if scales.1 != 0.0 {
                            sum = _mm512_fmadd_ps(existing_scale, _mm512_loadu_ps(out), sum);
                        }
                        _mm512_storeu_ps(out, sum);
                    }
                }
            }
        }
    }
}
