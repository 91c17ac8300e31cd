//! Number formats: how an element is stored, and the two precisions that products are computed in.

use std::ops::{Add, Mul};

use half::{bf16, f16};

/// An element type that the simulated library multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    F32,
    F64,
    F16,
    Bf16,
}

impl Type {
    /// From a `cudaDataType_t`; none for those that are not modelled.
    pub(super) fn from_raw(raw: u32) -> Option<Self> {
        match raw {
            0 => Some(Self::F32),
            1 => Some(Self::F64),
            2 => Some(Self::F16),
            14 => Some(Self::Bf16),
            _ => None,
        }
    }

    pub(super) fn raw(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F64 => 1,
            Self::F16 => 2,
            Self::Bf16 => 14,
        }
    }

    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// What sums are accumulated in: `f32`, or `f64` for COMPUTE_64F.
pub(super) trait Real:
    Copy + Default + PartialEq + Add<Output = Self> + Mul<Output = Self> + Send + Sync + 'static
{
    const ONE: Self;

    fn from_f64(value: f64) -> Self;

    /// What the tensor cores see of it in TF32, which is a format of f32 only.
    fn to_tf32(self) -> Self;

    /// # Safety
    /// `from` holds an element of type `kind`, readable and not written meanwhile. It need not be aligned.
    unsafe fn load(kind: Type, from: *const u8) -> Self;

    /// Rounds once, to nearest even.
    ///
    /// # Safety
    /// `to` has room for an element of type `kind` that nobody else touches meanwhile. It need not be aligned.
    unsafe fn store(self, kind: Type, to: *mut u8);
}

macro_rules! real {
    ($real:ty, $from_half:ident, $to_half:ident) => {
        impl Real for $real {
            const ONE: Self = 1.0;

            fn from_f64(value: f64) -> Self {
                value as Self
            }

            fn to_tf32(self) -> Self {
                to_tf32(self as f32) as Self
            }

            unsafe fn load(kind: Type, from: *const u8) -> Self {
                // SAFETY: the caller vouches for an element of `kind` at `from`; unaligned reads need no more.
                unsafe {
                    match kind {
                        Type::F32 => from.cast::<f32>().read_unaligned() as Self,
                        Type::F64 => from.cast::<f64>().read_unaligned() as Self,
                        Type::F16 => from.cast::<f16>().read_unaligned().$to_half(),
                        Type::Bf16 => from.cast::<bf16>().read_unaligned().$to_half(),
                    }
                }
            }

            unsafe fn store(self, kind: Type, to: *mut u8) {
                // SAFETY: the caller vouches for room for an element of `kind` at `to`; unaligned writes need no more.
                unsafe {
                    match kind {
                        Type::F32 => to.cast::<f32>().write_unaligned(self as f32),
                        Type::F64 => to.cast::<f64>().write_unaligned(self as f64),
                        Type::F16 => to.cast::<f16>().write_unaligned(f16::$from_half(self)),
                        Type::Bf16 => to.cast::<bf16>().write_unaligned(bf16::$from_half(self)),
                    }
                }
            }
        }
    };
}

real!(f32, from_f32, to_f32);
real!(f64, from_f64, to_f64);

/// What the tensor cores see of an f32 in TF32: 10 bits of mantissa, to nearest, ties away from zero (as `cvt.rna.tf32.f32`).
fn to_tf32(value: f32) -> f32 {
    if value.is_finite() { f32::from_bits(value.to_bits().wrapping_add(0x1000) & !0x1fff) } else { value }
}
