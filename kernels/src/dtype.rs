//! What a tensor's elements are, and which Rust type holds each.
//!
//! F32 is the working type. BF16 and F16 are for storage and casts. F64 is for checking: any device
//! may store it, only the CPU computes with it. U8, I32 and I64 hold labels, bytes and counters.

use std::fmt;

pub use half::{bf16, f16};

use crate::named;

named! {
    /// The type of a tensor's elements.
    #[derive(Hash)]
    pub enum DType {
        /// 32-bit float: the working type.
        F32 = "f32",
        /// bfloat16: activations, and weights that matmuls read.
        BF16 = "bf16",
        /// IEEE half: storage and casts.
        F16 = "f16",
        /// 64-bit float: for checking, on the CPU only.
        F64 = "f64",
        /// Unsigned byte.
        U8 = "u8",
        /// 32-bit integer.
        I32 = "i32",
        /// 64-bit integer.
        I64 = "i64",
    }
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::BF16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Whether the type has a fractional part.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16 | DType::F16 | DType::F64)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor can hold: plain data for which every bit pattern is a value.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + fmt::Debug + 'static {
    /// The dtype of this type.
    const DTYPE: DType;
    /// The nearest value of this type (ties to even; integers saturate and truncate).
    fn from_f64(value: f64) -> Self;
    /// The value as f64 (I64 beyond 2⁵³ rounds).
    fn to_f64(self) -> f64;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident, $from:expr, $to:expr;)*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
            #[inline]
            fn from_f64(value: f64) -> Self {
                ($from)(value)
            }
            #[inline]
            fn to_f64(self) -> f64 {
                ($to)(self)
            }
        }
    )*};
}

element! {
    f32 => F32, |v: f64| v as f32, |v: f32| f64::from(v);
    // Not half's from_f64, which truncates bits before it rounds.
    bf16 => BF16,
        |v: f64| bf16_nearest(f32_to_odd(v)),
        |v: bf16| f64::from(bf16_wide(v));
    f16 => F16,
        |v: f64| f16_nearest(f32_to_odd(v)),
        |v: f16| f64::from(f16_wide(v));
    f64 => F64, |v: f64| v, |v: f64| v;
    u8 => U8, |v: f64| v as u8, |v: u8| f64::from(v);
    i32 => I32, |v: f64| v as i32, |v: i32| f64::from(v);
    i64 => I64, |v: f64| v as i64, |v: i64| v as f64;
}

/// Runs `$body` with `$T` bound to the Rust type of the dtype `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::dtype::with_element!(@ $dtype, $T, $body, F32 f32, BF16 $crate::dtype::bf16,
            F16 $crate::dtype::f16, F64 f64, U8 u8, I32 i32, I64 i64)
    };
    (@ $dtype:expr, $T:ident, $body:expr, $($name:ident $rust:ty),*) => {
        match $dtype {
            $($crate::DType::$name => {
                type $T = $rust;
                $body
            })*
        }
    };
}
pub(crate) use with_element;

// Rounding to 16 bits and back is integer arithmetic: the same bits on every processor, in loops
// that vectorise.

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
