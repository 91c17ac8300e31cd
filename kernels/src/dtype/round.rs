//! Rounding to 16 bits and back in integer arithmetic: the same bits on every processor, in loops
//! that vectorise.

use half::{bf16, f16};

/// The nearest bf16, ties to even; NaN stays NaN and becomes quiet.
#[inline(always)]
pub fn bf16_nearest(x: f32) -> bf16 {
    let bits = x.to_bits();
    // The upper half, plus one if the lower half is above its middle, or is its middle and the
    // upper half is odd.
    let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { nan } else { nearest } as u16)
}

/// The same number as f32.
#[inline(always)]
pub fn bf16_wide(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The nearest f16, ties to even; NaN stays NaN and becomes quiet.
#[inline(always)]
pub(crate) fn f16_nearest(x: f32) -> f16 {
    /// 2⁻¹⁴, the smallest f16 that is not subnormal, and 2¹⁶, where infinity lies, as bits of f32.
    const NORMAL_MIN: u32 = 0x3880_0000;
    const BEYOND: u32 = 0x4780_0000;
    let sign = (x.to_bits() >> 16) & 0x8000;
    let bits = x.to_bits() & 0x7fff_ffff;
    // Rounds the lower 13 bits as `bf16_nearest` does its 16, and moves the exponent bias from 127
    // to 15.
    let normal = bits
        .wrapping_add(0xfff + ((bits >> 13) & 1))
        .wrapping_sub((127 - 15) << 23)
        >> 13;
    // A subnormal f16 counts units of 2⁻²⁴, the last bit of a number in [1/2, 1): adding 1/2 rounds
    // to those.
    let subnormal = (f32::from_bits(bits) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let nan = 0x7e00 | (bits >> 13 & 0x3ff);
    let finite = if bits < NORMAL_MIN { subnormal } else { normal };
    let beyond = if x.is_nan() { nan } else { 0x7c00 };
    f16::from_bits((sign | if bits < BEYOND { finite } else { beyond }) as u16)
}

/// The same number as f32.
#[inline(always)]
pub(crate) fn f16_wide(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let sign = (bits & 0x8000) << 16;
    let shifted = (bits & 0x7fff) << 13;
    let normal = shifted.wrapping_add((127 - 15) << 23);
    // Subnormals count units of 2⁻²⁴: exact in f32.
    let subnormal = (((bits & 0x3ff) as i32) as f32 * (1.0 / (1 << 24) as f32)).to_bits();
    let special = shifted | 0x7f80_0000;
    let finite = if bits & 0x7c00 == 0 {
        subnormal
    } else {
        normal
    };
    f32::from_bits(
        sign | if bits & 0x7c00 == 0x7c00 {
            special
        } else {
            finite
        },
    )
}

/// `x` if f32 can hold it, else its f32 neighbour whose last bit is odd. Rounding this to a type at
/// least two bits narrower gives the same as rounding `x`: an odd last bit means that bits were
/// lost, and only even ones can be ties.
#[inline(always)]
pub(crate) fn f32_to_odd(x: f64) -> f32 {
    let near = x as f32;
    let (back, bits) = (f64::from(near), near.to_bits());
    let other = if back.abs() > x.abs() {
        bits.wrapping_sub(1)
    } else {
        bits.wrapping_add(1)
    };
    f32::from_bits(if back != x && bits & 1 == 0 {
        other
    } else {
        bits
    })
}
