//! A product of one row with rows of weights, as in generating text: bound by reading the weights,
//! so nothing is packed. As in f32, squares of 8 × 8 pairs are transposed in registers.

use std::arch::x86_64::{
    __m256, __m256i, _mm256_add_ps, _mm256_and_si256, _mm256_broadcast_ss, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_epi32, _mm256_setzero_ps,
    _mm256_slli_epi32, _mm256_storeu_ps,
};
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use super::flush::{flushed, flushing};
use super::kernels::store;
use super::pack::TILE_ALONG;
use super::product::{ALONG_GRAIN, ALONG_MAX, Bf16Order, Product, Target};
use crate::dtype::{bf16, bf16_wide};
use crate::ops::matmul::pack::x86::{SIDE, turned};
use crate::ops::matmul::tile::{Finish, Tile};
use crate::ops::round;
use crate::threads;

/// Columns of the output that are computed at a time, and that `Finish` gets.
const COLUMNS: usize = 2 * SIDE;
const FINISHED: usize = 512;

/// Whether `piece` computes this product.
pub(super) fn fits(work: &Product<'_>) -> bool {
    let is_row = work.a.rows == 1 && work.b.transposed && work.b.rows.is_multiple_of(2);
    is_row && matches!(work.out, Target::Bf16(_))
}

/// Computes some columns of the output, which has one row.
///
/// # Safety
/// As for `bf16::piece`; the product `fits`, and the processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn piece(work: &Product<'_>, columns: Range<usize>, finish: &impl Finish<f32>) {
    let Target::Bf16(out) = work.out else { return };
    let (k, x) = (work.b.rows, work.a.elements);
    // Each pair's second element, then its first.
    let swapped: Vec<f32> = x
        .chunks_exact(2)
        .flat_map(|x| [bf16_wide(x[1]), bf16_wide(x[0])])
        .collect();
    let blocks = k.div_ceil(ALONG_MAX).max(1);
    for first in columns.clone().step_by(FINISHED) {
        let columns = first..columns.end.min(first + FINISHED);
        let mut sums = [0f32; FINISHED];
        let sums = &mut sums[..columns.len()];
        // SAFETY: these columns are within the output, and this thread's.
        let out = unsafe { std::slice::from_raw_parts_mut(out.add(first), columns.len()) };
        if work.scales.1 != 0.0 {
            round::widen(sums, out);
        }
        for block in 0..blocks {
            let along = threads::cut(k, ALONG_GRAIN, blocks, block);
            let existing_scale = if block == 0 { work.scales.1 } else { 1.0 };
            flushing(|| {
                for start in (0..columns.len()).step_by(COLUMNS) {
                    let width = COLUMNS.min(columns.len() - start);
                    let weights = &work.b.elements[(first + start) * k..][..width * k];
                    let x = &swapped[along.clone()];
                    let of_block = match work.order {
                        Bf16Order::Amx => block_sums::<true>(x, weights, k, along.start),
                        Bf16Order::Dpbf16 => block_sums::<false>(x, weights, k, along.start),
                    };
                    for (index, sum) in of_block.into_iter().enumerate().take(width) {
                        let sum = flushed(work.scales.0 * sum);
                        // SAFETY: it is one of the sums.
                        unsafe { store(&raw mut sums[start + index], sum, existing_scale) };
                    }
                }
            });
        }
        // SAFETY: these are the sums of a row, complete.
        let tile = unsafe { Tile::new(sums.as_mut_ptr(), columns.len(), 0..1, columns) };
        finish.finish(tile);
        round::round(out, sums);
    }
}

/// The sums over `x`, swapped pairs from element `first` on, times each of at most COLUMNS rows of
/// weights, which are `stride` apart.
#[target_feature(enable = "avx2,fma")]
fn block_sums<const IS_AMX: bool>(
    x: &[f32],
    weights: &[bf16],
    stride: usize,
    first: usize,
) -> [f32; COLUMNS] {
    let mut out = [0.0; COLUMNS];
    let rows = weights.len() / stride.max(1);
    let whole = if rows == COLUMNS {
        x.len() / TILE_ALONG * TILE_ALONG
    } else {
        0
    };
    let mut sums = [_mm256_setzero_ps(); 2];
    let high: __m256i = _mm256_set1_epi32(0xffff_0000u32.cast_signed());
    for (chunk, x) in x[..whole].chunks_exact(TILE_ALONG).enumerate() {
        for (square, sum) in sums.iter_mut().enumerate() {
            let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
            for (half, x) in x.chunks_exact(2 * SIDE).enumerate() {
                let mut lines: [__m256; SIDE] = [_mm256_setzero_ps(); SIDE];
                for (row, lanes) in lines.iter_mut().enumerate() {
                    let at = (square * SIDE + row) * stride + first + chunk * TILE_ALONG;
                    // SAFETY: eight pairs from there on are in `weights`, in one row.
                    unsafe {
                        let at = weights.as_ptr().add(at + half * 2 * SIDE).cast::<f32>();
                        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(COLUMNS * stride / 2).cast());
                        *lanes = _mm256_loadu_ps(at);
                    }
                }
                for (step, pairs) in turned(lines).into_iter().enumerate() {
                    let pairs = _mm256_castps_si256(pairs);
                    let second = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
                    let first = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
                    let (x_second, x_first) = (
                        _mm256_broadcast_ss(&x[2 * step]),
                        _mm256_broadcast_ss(&x[2 * step + 1]),
                    );
                    if IS_AMX {
                        odd = _mm256_fmadd_ps(x_second, second, odd);
                        even = _mm256_fmadd_ps(x_first, first, even);
                    } else {
                        *sum = _mm256_fmadd_ps(x_second, second, *sum);
                        *sum = _mm256_fmadd_ps(x_first, first, *sum);
                    }
                }
            }
            if IS_AMX {
                *sum = _mm256_add_ps(*sum, _mm256_add_ps(even, odd));
            }
        }
    }
    for (out, sum) in out.chunks_exact_mut(SIDE).zip(sums) {
        // SAFETY: a chunk has eight elements.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
    }
    for (out, row) in out.iter_mut().zip(weights.chunks_exact(stride.max(1))) {
        let row = &row[first..first + x.len()];
        for (x, row) in x[whole..]
            .chunks(TILE_ALONG)
            .zip(row[whole..].chunks(TILE_ALONG))
        {
            let mut halves = [0f32; 2];
            for (x, row) in x.chunks_exact(2).zip(row.chunks_exact(2)) {
                let row = [row[1], row[0]].map(|weight| flushed(bf16_wide(weight)));
                for half in 0..2 {
                    let sum = if IS_AMX { &mut halves[half] } else { &mut *out };
                    *sum = flushed(flushed(x[half]).mul_add(row[half], *sum));
                }
            }
            if IS_AMX {
                *out = flushed(*out + flushed(halves[1] + halves[0]));
            }
        }
    }
    out
}
