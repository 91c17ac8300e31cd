//! A matmul of one row with rows of weights, as in generating text: bound by reading the weights,
//! so nothing is packed. Squares of 8 × 8 weights are transposed in registers; each element is then
//! added along k in the order of the other kernels, and has their bits.

use std::arch::x86_64::{
    __m256, _MM_HINT_T1, _mm_prefetch, _mm256_broadcast_ss, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_setzero_ps, _mm256_storeu_ps,
};
use std::ops::Range;

use super::pack::x86::{SIDE, turned};
use super::tile::{ALONG_MAX, Finish, TiledMatmul, store};
use crate::threads;

/// Squares beside each other whose sums are in registers.
const SQUARES: usize = 2;
/// Columns of the output that are computed at a time.
const COLUMNS: usize = SQUARES * SIDE;

/// Computes some columns of the output, which has one row. The right operand is transposed.
///
/// # Safety
/// As for `Real::piece`; the processor has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn piece(
    work: &TiledMatmul<'_, f32>,
    columns: Range<usize>,
    finish: &impl Finish<f32>,
) {
    assert!(work.a.rows == 1 && work.b.transposed && columns.end <= work.b.columns);
    let k = work.b.rows;
    let (x, blocks) = (work.a.elements, k.div_ceil(ALONG_MAX).max(1));
    for start in columns.clone().step_by(COLUMNS) {
        let width = COLUMNS.min(columns.end - start);
        let (weights, next) = work.b.elements[start * k..].split_at(width * k);
        for block in 0..blocks {
            let along = threads::cut(k, 1, blocks, block);
            let existing_scale = match block {
                0 => work.existing_scale,
                _ => 1.0,
            };
            let sums = if width == COLUMNS && k > 0 {
                let next = next.as_ptr().wrapping_add(COLUMNS * along.start);
                block_sums(&x[along.clone()], &weights[along.start..], k, next)
            } else {
                plain_sums(&x[along.clone()], &weights[along.start..], k)
            };
            for (index, sum) in sums.into_iter().enumerate().take(width) {
                // SAFETY: the column is within the output, and this thread's alone.
                unsafe {
                    let out = work.out.add(start + index);
                    store(out, work.matmul_scale * sum, existing_scale);
                }
            }
        }
    }
    // SAFETY: as above; the sums of these columns are complete.
    finish.finish(unsafe { work.tile(0..1, columns) });
}

/// The sums over `x` times each of COLUMNS rows of weights, which are `stride` apart.
#[target_feature(enable = "avx2,fma")]
fn block_sums(x: &[f32], weights: &[f32], stride: usize, next: *const f32) -> [f32; COLUMNS] {
    assert!(weights.len() >= (COLUMNS - 1) * stride + x.len());
    let mut sums: [__m256; SQUARES] = [_mm256_setzero_ps(); SQUARES];
    let (steps, rest) = x.as_chunks::<SIDE>();
    // A cache line of each row at a time, since rows may be apart by what the cache holds together.
    for (line, steps) in steps.chunks(2).enumerate() {
        for row in 0..COLUMNS {
            let at = next.wrapping_add((line * COLUMNS + row) * 2 * SIDE);
            _mm_prefetch::<_MM_HINT_T1>(at.cast());
        }
        for (square, sum) in sums.iter_mut().enumerate() {
            for (half, steps) in steps.iter().enumerate() {
                let mut rows = [_mm256_setzero_ps(); SIDE];
                for (row, lanes) in rows.iter_mut().enumerate() {
                    let at = (square * SIDE + row) * stride + (2 * line + half) * SIDE;
                    // SAFETY: eight elements from there on are in `weights` by the assertion.
                    *lanes = unsafe { _mm256_loadu_ps(weights.as_ptr().add(at)) };
                }
                let lanes = turned(rows);
                for step in 0..SIDE {
                    *sum = _mm256_fmadd_ps(_mm256_broadcast_ss(&steps[step]), lanes[step], *sum);
                }
            }
        }
    }
    let mut out = [0.0; COLUMNS];
    for (out, sum) in out.chunks_exact_mut(SIDE).zip(sums) {
        // SAFETY: a chunk has eight elements.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sum) };
    }
    let done = x.len() - rest.len();
    for (out, row) in out.iter_mut().zip(weights.chunks(stride)) {
        for (step, weight) in rest.iter().zip(&row[done..]) {
            *out = step.mul_add(*weight, *out);
        }
    }
    out
}

/// As above, for fewer rows.
#[target_feature(enable = "avx2,fma")]
fn plain_sums(x: &[f32], weights: &[f32], stride: usize) -> [f32; COLUMNS] {
    let mut out = [0.0; COLUMNS];
    for (out, row) in out.iter_mut().zip(weights.chunks(stride.max(1))) {
        for (step, weight) in x.iter().zip(row) {
            *out = step.mul_add(*weight, *out);
        }
    }
    out
}
