//! The matmul for AMX with `tdpbf16ps` done by f32 arithmetic: its panels, tiles and strides.

use super::*;

/// The matmul for AMX with `tdpbf16ps` done by f32 arithmetic: its panels, tiles and strides.
pub(super) struct TilesInF32;

/// `tdpbf16ps`, as it was seen on an Intel Xeon. By intrinsics, since tests are hardly optimised.
#[target_feature(enable = "avx512f")]
fn multiply_tiles(sums: &mut [[f32; 16]; 16], a: &[[u32; 16]; 16], b: &[[u32; 16]; 16]) {
    use std::arch::x86_64::*;
    let vector = |bits: i32| _mm512_set1_epi32(bits);
    let flushed = |x: __m512| {
        let bits = _mm512_castps_si512(x);
        let tiny = _mm512_testn_epi32_mask(bits, vector(0x7f80_0000));
        _mm512_castsi512_ps(_mm512_mask_and_epi32(bits, tiny, bits, vector(i32::MIN)))
    };
    // Each number of a pair as f32: the lower one in half 0.
    let wide = |pairs: __m512i, half: usize| {
        flushed(_mm512_castsi512_ps(match half {
            0 => _mm512_slli_epi32::<16>(pairs),
            _ => _mm512_and_si512(pairs, vector(0xffff_0000_u32 as i32)),
        }))
    };
    for (a, sums) in a.iter().zip(sums) {
        let mut chains = [_mm512_setzero_ps(); 2];
        for (&a, b) in a.iter().zip(b) {
            // SAFETY: it reads the 16 numbers of `b`.
            let b = unsafe { _mm512_loadu_si512(b.as_ptr().cast()) };
            for (half, chain) in chains.iter_mut().enumerate() {
                let (a, b) = (wide(vector(a as i32), half), wide(b, half));
                *chain = flushed(_mm512_fmadd_ps(a, b, *chain));
            }
        }
        let of_both = flushed(_mm512_add_ps(chains[0], chains[1]));
        // SAFETY: it reads and writes the 16 numbers of `sums`.
        unsafe {
            let sum = _mm512_add_ps(_mm512_loadu_ps(sums.as_ptr()), of_both);
            _mm512_storeu_ps(sums.as_mut_ptr(), flushed(sum));
        }
    }
}

impl amx::TileUnit for TilesInF32 {
    unsafe fn with_tiles(body: impl FnOnce()) {
        // `flushed` alone would keep what was rounded up as a subnormal number.
        flush::flushing(body);
    }

    unsafe fn multiply<const PARTS: usize>(
        is_first: bool,
        steps: usize,
        a: *const amx::TileBytes,
        b: *const amx::TileBytes,
        out: *mut f32,
        stride: usize,
    ) {
        let all = || (0..32).flat_map(|row| (0..32).map(move |column| (row, column)));
        let mut tiles = [[[0.0; 16]; 16]; 4];
        for (row, column) in all().filter(|_| !is_first) {
            // SAFETY: 32 rows are readable.
            let sum = unsafe { *out.add(row * stride + column) };
            tiles[row / 16 * 2 + column / 16][row % 16][column % 16] = sum;
        }
        for step in 0..steps {
            // Of which parts of both, in turn.
            let products: &[[usize; 2]] = match PARTS {
                1 => &[[0, 0]],
                _ => &[[0, 1], [0, 0], [1, 0]],
            };
            for [of_a, of_b] in products
                .iter()
                .map(|of| of.map(|part| 2 * (PARTS * step + part)))
            {
                // SAFETY: two tiles of each part of each panel a step, as the instructions load
                // them; the processor has AVX-512.
                unsafe {
                    let [above, below, left, right] =
                        [a.add(of_a), a.add(of_a + 1), b.add(of_b), b.add(of_b + 1)]
                            .map(|tile| *tile.cast::<[[u32; 16]; 16]>());
                    multiply_tiles(&mut tiles[0], &above, &left);
                    multiply_tiles(&mut tiles[1], &above, &right);
                    multiply_tiles(&mut tiles[2], &below, &left);
                    multiply_tiles(&mut tiles[3], &below, &right);
                }
            }
        }
        for (row, column) in all() {
            let sum = tiles[row / 16 * 2 + column / 16][row % 16][column % 16];
            // SAFETY: 32 rows are writable.
            unsafe { *out.add(row * stride + column) = sum };
        }
    }
}
