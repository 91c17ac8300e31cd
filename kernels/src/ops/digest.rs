//! Digests of the quanta of a chunk table: a hash of the bits, the sum, and the sum of squares.
//!
//! The hash of a quantum is Σ bits(xᵢ) · keyᵢ modulo 2⁶⁴, where keyᵢ is odd and depends on i: a
//! single change always shows, in whatever order the terms are added. Sums have a warp's order. So
//! the CPU and GPUs get the same bits, except for NaN, and so do ranks that each hold some quanta.

use crate::error::Result;
use crate::launch::{CuFile, args};
use crate::ops::call::{FLOATS, OpCall, with_float};
use crate::ops::chunks::{Chunk, ChunkTable, QUANTUM};
use crate::ops::float::{Float, lane_sum_of};
use crate::simd::multiversion;
use crate::{DType, Tensor};

pub(super) static SOURCE: CuFile = CuFile::new("digest.cu", include_str!("digest.cu"));

/// The numbers of a digest: hash, bits of the sum (f64), bits of the sum of squares (f64).
pub const DIGEST: usize = 3;

/// The keys of a quantum's elements.
static KEYS: [u64; QUANTUM] = keys();

const fn keys() -> [u64; QUANTUM] {
    let mut keys = [0; QUANTUM];
    let mut index = 0;
    while index < QUANTUM {
        keys[index] = digest_mix(index as u64) | 1;
        index += 1;
    }
    keys
}

/// Mixes a number so that each bit of it changes about half of the result's (SplitMix64).
pub const fn digest_mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Bits that tell every number from every other, those of an f32 in the lower half and three more.
#[inline(always)]
fn bits<T: Float>(x: T) -> u64 {
    x.widened().to_bits().rotate_right(29)
}

multiversion! {
    /// The digest of a quantum. It is in the first cache after the first of the three passes.
    fn digest[T: Float](x: &[T]) -> [i64; DIGEST] {
        let term = |(x, key): (&T, &u64)| bits(*x).wrapping_mul(*key);
        let hash = x.iter().zip(&KEYS).map(term).fold(0, u64::wrapping_add);
        let sums = [lane_sum_of(x, T::widened), lane_sum_of(x, |x| x.widened() * x.widened())];
        [hash.cast_signed(), sums[0].to_bits().cast_signed(), sums[1].to_bits().cast_signed()]
    }
}

/// The digest of every quantum of `chunks` of `x` (N), into `out`, i64 ([`DIGEST`] · quanta).
///
/// Backward: none.
#[track_caller]
pub fn digest_quanta(out: &Tensor, x: &Tensor, chunks: &ChunkTable) -> Result<()> {
    let mut call = OpCall::new("digest_quanta");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    chunks.check_fits(&call, x)?;
    let quanta = chunks.quanta();
    let expected = "three numbers for each quantum of the chunk table";
    call.has_shape(out, &[DIGEST * quanta], expected)?;
    call.has_dtype(out, &[DType::I64])?;
    call.run(x, &FLOATS, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.gpu() {
            let args = args![out, x, quanta];
            return chunks.launch(&gpu, &SOURCE, "digest_quanta_f32", (32, 1), args);
        }
        let (out, _) = out.elements_mut::<i64>().as_chunks_mut::<DIGEST>();
        with_float!(placed.dtype, T => {
            let x = x.elements::<T>();
            chunks.each_quantum(out, |piece: Chunk| digest(&x[piece.range()]));
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests;
