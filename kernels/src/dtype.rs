//! What a tensor's elements are, and which Rust type holds each.
//!
//! F32 is the working type. BF16 and F16 are for storage and casts. F64 is for checking: any device
//! may store it, only the CPU computes with it. U8, I32 and I64 hold labels, bytes and counters.

pub mod round;

use std::fmt;

pub use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit float: the working type.
    F32,
    /// bfloat16: storage and casts.
    BF16,
    /// IEEE half: storage and casts.
    F16,
    /// 64-bit float: for checking, on the CPU only.
    F64,
    /// Unsigned byte.
    U8,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
}

impl DType {
    /// Every dtype, in the order the documentation lists them.
    pub const ALL: [DType; 7] = [
        DType::F32,
        DType::BF16,
        DType::F16,
        DType::F64,
        DType::U8,
        DType::I32,
        DType::I64,
    ];

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

    /// The name used everywhere a dtype is printed.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::F64 => "f64",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::I64 => "i64",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
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
        |v: f64| round::bf16_nearest(round::f32_to_odd(v)),
        |v: bf16| f64::from(round::bf16_wide(v));
    f16 => F16,
        |v: f64| round::f16_nearest(round::f32_to_odd(v)),
        |v: f16| f64::from(round::f16_wide(v));
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
