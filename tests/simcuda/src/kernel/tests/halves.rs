//! Conversions to and from 16-bit floats: the model of PTX, the CUDA headers' substitutes and the
//! crate `half` agree on every class of f32.
//!
//! Rounding to bf16 depends on the whole upper half of an f32, and on how the lower half compares
//! with 0 and with 0x8000. Rounding to f16 cuts within the upper half, for subnormals far above the
//! lower half, of which then only matters whether it is 0.

use half::{bf16, f16};

use super::{Ground, library, shot};

const LOWER: [u16; 8] = [0, 1, 0x0fff, 0x1000, 0x7fff, 0x8000, 0x8001, 0xffff];

/// In hardware every NaN becomes this one.
const NAN: u16 = 0x7fff;

#[test]
fn every_class_of_f32_is_rounded_as_ptx_documents() {
    let code = library(
        r#"#include <cuda_bf16.h>
           #include <cuda_fp16.h>
           extern "C" __global__ void narrow(const unsigned short* lower, unsigned short* out) {
             unsigned int upper = blockIdx.x * blockDim.x + threadIdx.x;
             for (int i = 0; i < 8; i++) {
               float x = __uint_as_float(upper << 16 | lower[i]);
               unsigned short* to = out + (upper * 8 + i) * 3;
               asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to[0]) : "f"(x));
               to[1] = __bfloat16_as_ushort(__float2bfloat16_rn(x));
               to[2] = __half_as_ushort(__float2half_rn(x));
             }
           }
           extern "C" __global__ void widen(float* out) {
             unsigned short bits = (unsigned short)(blockIdx.x * blockDim.x + threadIdx.x);
             out[2 * bits] = __bfloat162float(__ushort_as_bfloat16(bits));
             out[2 * bits + 1] = __half2float(__ushort_as_half(bits));
           }"#,
    );
    let mut ground = Ground::default();
    let (lower, narrow) = (ground.upload(&LOWER), ground.allocate((8 << 16) * 6));
    shot(&code, "narrow", 256, 256, &[lower, narrow]).expect(&ground);
    let narrow = ground.download::<u16>(narrow, (8 << 16) * 3);
    let all = (0..=u16::MAX).flat_map(|upper| LOWER.map(|lower| (upper, lower)));
    for ((upper, lower), got) in all.zip(narrow.chunks_exact(3)) {
        let x = f32::from_bits(u32::from(upper) << 16 | u32::from(lower));
        let expected = if x.is_nan() {
            [NAN; 3]
        } else {
            let b = bf16::from_f32(x).to_bits();
            [b, b, f16::from_f32(x).to_bits()]
        };
        assert_eq!(got, expected, "{x:e} ({:#x})", x.to_bits());
    }
    let wide = ground.allocate(8 << 16);
    shot(&code, "widen", 256, 256, &[wide]).expect(&ground);
    let wide = ground.download::<f32>(wide, 2 << 16);
    for (bits, got) in (0..=u16::MAX).zip(wide.chunks_exact(2)) {
        let expected = [
            bf16::from_bits(bits).to_f32(),
            f16::from_bits(bits).to_f32(),
        ];
        let same = |(got, expected): (&f32, &f32)| {
            got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
        };
        assert!(got.iter().zip(&expected).all(same), "{bits:#x}: {got:?}");
    }
}
