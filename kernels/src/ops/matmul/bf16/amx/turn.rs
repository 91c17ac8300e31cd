//! Elements in the order of tiles.

use std::arch::x86_64::{
    __m256i, __m512i, _mm512_castsi256_si512, _mm512_inserti64x4, _mm512_loadu_si512,
    _mm512_permutexvar_epi16, _mm512_shuffle_i32x4, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use super::tiles::{ALONG, LINES, TileBytes};
use crate::dtype::bf16;
use crate::ops::matmul::bf16::product::{ALONG_MAX, SPLIT_ALONG_MAX, parts};

/// What operands hold.
pub(crate) trait AmxElement: Copy + Default + Sync {
    /// How many bf16 each of their elements becomes.
    const PARTS: usize;
    /// The most elements along k of a block.
    const ALONG_MAX: usize;
    /// As `turn_tile`, for a tile of each part; these lie two apart.
    ///
    /// # Safety
    /// As for `turn_tile`.
    unsafe fn turn_tiles(
        to: &mut [TileBytes],
        from: *const Self,
        stride: usize,
        is_transposed: bool,
        is_left: bool,
    );
}

impl AmxElement for bf16 {
    const PARTS: usize = 1;
    const ALONG_MAX: usize = ALONG_MAX;

    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn turn_tiles(
        to: &mut [TileBytes],
        from: *const bf16,
        stride: usize,
        is_transposed: bool,
        is_left: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe { turn_tile(&mut to[0].0, from, stride, is_transposed, is_left) };
    }
}

/// Each is the sum of two bf16.
impl AmxElement for f32 {
    const PARTS: usize = 2;
    const ALONG_MAX: usize = SPLIT_ALONG_MAX;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn turn_tiles(
        to: &mut [TileBytes],
        from: *const f32,
        stride: usize,
        is_transposed: bool,
        is_left: bool,
    ) {
        let width = if is_transposed { LINES } else { ALONG };
        let mut rooms = [[bf16::ZERO; LINES * ALONG]; 2];
        for row in 0..LINES * ALONG / width {
            // SAFETY: a row, by the caller's promise.
            let from = unsafe { std::slice::from_raw_parts(from.add(row * stride), width) };
            let [high, low] = rooms
                .each_mut()
                .map(|part| &mut part[row * width..][..width]);
            for ((high, low), &x) in high.iter_mut().zip(low).zip(from) {
                [*high, *low] = parts(x);
            }
        }
        for (to, part) in to.chunks_mut(2).zip(&rooms) {
            // SAFETY: `part` has whole rows.
            unsafe { turn_tile(&mut to[0].0, part.as_ptr(), width, is_transposed, is_left) };
        }
    }
}

/// Fills a tile from 16 lines with 32 elements each, or 32 elements with 16 lines each if
/// `is_transposed`.
///
/// # Safety
/// `from` has as many rows, `stride` apart.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn turn_tile(
    to: &mut [u32; LINES * LINES],
    from: *const bf16,
    stride: usize,
    is_transposed: bool,
    is_left: bool,
) {
    // SAFETY: 512 bits of any value.
    let mut rows = unsafe { std::mem::zeroed::<[__m512i; LINES]>() };
    // SAFETY: by the caller's promise.
    unsafe {
        if is_transposed {
            const HALVES: [u16; 32] = {
                let mut order = [0; 32];
                let mut index = 0;
                while index < 32 {
                    order[index] = (index / 2 + index % 2 * 16) as u16;
                    index += 1;
                }
                order
            };
            let order = _mm512_loadu_si512(HALVES.as_ptr().cast());
            for (pair, row) in rows.iter_mut().enumerate() {
                let first = from.add(2 * pair * stride).cast::<__m256i>();
                let second = from.add((2 * pair + 1) * stride).cast::<__m256i>();
                let both = _mm512_castsi256_si512(first.read_unaligned());
                let both = _mm512_inserti64x4::<1>(both, second.read_unaligned());
                *row = _mm512_permutexvar_epi16(order, both);
            }
        } else {
            for (line, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_si512(from.add(line * stride).cast());
            }
        }
    }
    // Rows of pairs for the right operand, of lines for the left one.
    if is_transposed == is_left {
        rows = transposed(rows);
    }
    for (to, row) in to.chunks_exact_mut(LINES).zip(rows) {
        // SAFETY: a chunk has 64 bytes.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), row) };
    }
}

/// The transpose of 16 × 16 numbers.
#[target_feature(enable = "avx512f")]
fn transposed(mut rows: [__m512i; LINES]) -> [__m512i; LINES] {
    // Pairs of rows, then of pairs: within each 128 bits a square of 4 × 4 is transposed.
    for rows in rows.chunks_exact_mut(4) {
        let low = [
            _mm512_unpacklo_epi32(rows[0], rows[1]),
            _mm512_unpacklo_epi32(rows[2], rows[3]),
        ];
        let high = [
            _mm512_unpackhi_epi32(rows[0], rows[1]),
            _mm512_unpackhi_epi32(rows[2], rows[3]),
        ];
        rows[0] = _mm512_unpacklo_epi64(low[0], low[1]);
        rows[1] = _mm512_unpackhi_epi64(low[0], low[1]);
        rows[2] = _mm512_unpacklo_epi64(high[0], high[1]);
        rows[3] = _mm512_unpackhi_epi64(high[0], high[1]);
    }
    // Squares are transposed among each other.
    let mut out = rows;
    for column in 0..4 {
        let [a, b, c, d] = [0, 4, 8, 12].map(|row| rows[row + column]);
        let (ab, ab_high) = (
            _mm512_shuffle_i32x4::<0x88>(a, b),
            _mm512_shuffle_i32x4::<0xdd>(a, b),
        );
        let (cd, cd_high) = (
            _mm512_shuffle_i32x4::<0x88>(c, d),
            _mm512_shuffle_i32x4::<0xdd>(c, d),
        );
        out[column] = _mm512_shuffle_i32x4::<0x88>(ab, cd);
        out[column + 8] = _mm512_shuffle_i32x4::<0xdd>(ab, cd);
        out[column + 4] = _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high);
        out[column + 12] = _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high);
    }
    out
}
