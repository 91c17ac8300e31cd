//! Number formats: how an element is stored, and the two precisions of matmuls.

use std::ops::{Add, Mul};

use ddp_ptx::Element;
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
    /// From a `cudaDataType_t`; None for those that are not modelled.
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

/// The accumulator: `f32`, or `f64` for COMPUTE_64F.
pub(super) trait Real:
    Element
    + Copy
    + Default
    + PartialEq
    + Add<Output = Self>
    + Mul<Output = Self>
    + Send
    + Sync
    + 'static
{
    fn from_f64(value: f64) -> Self;

    /// What tensor cores see of it in TF32, which applies to f32 only.
    fn to_tf32(self) -> Self;

    /// Rounded to bf16.
    fn to_bf16(self) -> Self;

    /// Appends `count` consecutive elements.
    ///
    /// # Safety
    /// `from` holds `count` readable elements of type `kind` that nothing writes meanwhile. They
    /// need not be aligned.
    unsafe fn load_run(kind: Type, from: *const u8, count: usize, into: &mut Vec<Self>);

    /// Writes consecutive elements, each rounded once, to nearest even.
    ///
    /// # Safety
    /// `to` has room for as many elements of type `kind` as there are values, and nothing else
    /// touches it meanwhile. It need not be aligned.
    unsafe fn store_run(values: &[Self], kind: Type, to: *mut u8);

    /// One element.
    ///
    /// # Safety
    /// As for a run of one.
    unsafe fn load(kind: Type, from: *const u8) -> Self {
        let mut one = Vec::with_capacity(1);
        // SAFETY: the caller vouches for a run of one.
        unsafe { Self::load_run(kind, from, 1, &mut one) };
        one[0]
    }
}

/// # Safety
/// `from` holds `count` values of `E`, and does as long as the iterator lives. They need not be
/// aligned.
unsafe fn run<E: Copy>(from: *const u8, count: usize) -> impl Iterator<Item = E> {
    // SAFETY: the caller vouches for `count` values; unaligned reads need no more.
    (0..count).map(move |index| unsafe { from.cast::<E>().add(index).read_unaligned() })
}

/// # Safety
/// `to` has room for as many values of `E` as the iterator has. It need not be aligned.
unsafe fn write_run<E>(to: *mut u8, values: impl Iterator<Item = E>) {
    for (index, value) in values.enumerate() {
        // SAFETY: the caller vouches for the room; unaligned writes need no more.
        unsafe { to.cast::<E>().add(index).write_unaligned(value) };
    }
}

macro_rules! real {
    ($real:ty, $from_half:ident, $to_half:ident) => {
        impl Real for $real {
            fn from_f64(value: f64) -> Self {
                value as Self
            }

            fn to_tf32(self) -> Self {
                to_tf32(self as f32) as Self
            }

            fn to_bf16(self) -> Self {
                bf16::$from_half(self).$to_half()
            }

            unsafe fn load_run(kind: Type, from: *const u8, count: usize, into: &mut Vec<Self>) {
                // SAFETY: the caller vouches for `count` elements of `kind` at `from`; unaligned
                // reads need no more.
                unsafe {
                    match kind {
                        Type::F32 => {
                            into.extend(run::<f32>(from, count).map(|value| value as Self))
                        }
                        Type::F64 => {
                            into.extend(run::<f64>(from, count).map(|value| value as Self))
                        }
                        Type::F16 => into.extend(run::<f16>(from, count).map(f16::$to_half)),
                        Type::Bf16 => into.extend(run::<bf16>(from, count).map(bf16::$to_half)),
                    }
                }
            }

            unsafe fn store_run(values: &[Self], kind: Type, to: *mut u8) {
                // SAFETY: the caller vouches for room for as many elements of `kind` as there are
                // values.
                unsafe {
                    match kind {
                        Type::F32 => write_run(to, values.iter().map(|&value| value as f32)),
                        Type::F64 => write_run(to, values.iter().map(|&value| value as f64)),
                        Type::F16 => {
                            write_run(to, values.iter().map(|&value| f16::$from_half(value)))
                        }
                        Type::Bf16 => {
                            write_run(to, values.iter().map(|&value| bf16::$from_half(value)))
                        }
                    }
                }
            }
        }
    };
}

real!(f32, from_f32, to_f32);
real!(f64, from_f64, to_f64);

/// What tensor cores see of an f32 in TF32: 10 bits of mantissa, to nearest, ties away from zero
/// (as `cvt.rna.tf32.f32`).
fn to_tf32(value: f32) -> f32 {
    if value.is_finite() {
        f32::from_bits(value.to_bits().wrapping_add(0x1000) & !0x1fff)
    } else {
        value
    }
}
