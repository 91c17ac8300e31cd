//! cast: the same numbers in another dtype. Floats round to the nearest, ties to even; floats to
//! integers drop the fraction and saturate, NaN becomes 0; integers to narrower integers saturate.
//!
//! Every pair of dtypes rounds once. The two 16-bit floats go through f32, which holds them all. A
//! wider number on its way to them is first rounded "to odd", which preserves what the second
//! rounding needs to know: whether anything was dropped. The conversions are integer arithmetic and
//! selects, which vectorise.

use crate::cuda::copies;
use crate::dtype::{
    DType, Element, bf16, bf16_nearest, bf16_wide, f16, f16_nearest, f16_wide, f32_to_odd,
    with_element,
};
use crate::error::Result;
use crate::launch::{CuFile, GpuLaunch, Grid, args};
use crate::ops::call::{Buffer, EVERY_DTYPE, OpCall};
use crate::ops::elementwise::{Unary, UnaryOf, write};
use crate::streaming::STREAMING_BYTES_MIN;
use crate::{Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("cast.cu", include_str!("cast.cu"));
/// The kernels by source dtype, in the order of `DType::ALL`. The target dtype is appended.
const KERNELS: [&str; 7] = [
    "cast_f32_to",
    "cast_bf16_to",
    "cast_f16_to",
    "cast_f64_to",
    "cast_u8_to",
    "cast_i32_to",
    "cast_i64_to",
];

/// `x` in `dtype`, in a new tensor on the same device. A transposed view stays one.
#[track_caller]
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.is_transposed() {
        return cast(&x.t()?, dtype)?.t();
    }
    let out = Tensor::empty(x.shape(), dtype, x.device())?;
    cast_into(&out, x)?;
    Ok(out)
}

/// `out = x` in the dtype of `out`; both of one shape and row-major.
///
/// Backward: `cast_into` with `dout` in the other dtype.
#[track_caller]
pub fn cast_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let mut call = OpCall::new("cast");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    call.same_shape(x, out)?;
    call.all_row_major()?;
    call.run(x, &EVERY_DTYPE, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        let (from, to) = (x.dtype, out.dtype);
        if let Some(gpu) = placed.gpu() {
            if from == to {
                return copy_on(&gpu, &out, &x);
            }
            let wider = if from.bytes() > to.bytes() { from } else { to };
            let (name, grid) = (KERNELS[from as usize], Grid::packs(x.count, wider));
            return gpu.launch(&SOURCE, (name, to), grid, args![out, x, x.count]);
        }
        if from == to {
            threads::copy(out.elements_mut::<u8>(), x.elements::<u8>());
        } else {
            with_element!(from, From => with_element!(to, To => run::<From, To>(&mut out, &x)));
        }
        Ok(())
    })
}

/// Copies all of `x` to `out`, of the same size. Does nothing if `x` is in place.
pub(super) fn copy_on(gpu: &GpuLaunch, out: &Buffer<'_>, x: &Buffer<'_>) -> Result<()> {
    if x.is_in_place() || x.count == 0 {
        return Ok(());
    }
    let (target, source) = (out.address(), x.address());
    // SAFETY: both operands are entered, are memory of this device and of this size, and do not
    // overlap: `place` refuses that, except for operands that are in place.
    let copied = unsafe { copies::within(&gpu.queue, target, source, x.bytes()) };
    copied.map_err(|fault| fault.of(gpu.by, gpu.queue.gpu.device()))
}

fn run<From: Convert<To>, To: Element>(out: &mut Buffer<'_>, x: &Buffer<'_>) {
    let x = x.elements::<From>();
    let out = out.elements_mut::<To>();
    let large = size_of_val(out) >= STREAMING_BYTES_MIN;
    write(out, large, UnaryOf { x, f: Converted });
}

/// A number in another type.
#[derive(Clone, Copy)]
struct Converted;

impl<From: Convert<To>, To: Element> Unary<From, To> for Converted {
    #[inline(always)]
    fn apply(self, x: From) -> To {
        x.convert()
    }
}

/// Converts a number by the rules at the head of this file.
pub(crate) trait Convert<To>: Element {
    fn convert(self) -> To;
}

macro_rules! by_as {
    ($($From:ty => $($To:ty),*;)*) => {$($(
        impl Convert<$To> for $From {
            #[inline(always)]
            fn convert(self) -> $To {
                // Rust's `as` rounds, drops fractions and saturates as this file promises.
                self as $To
            }
        }
    )*)*};
}
by_as! {
    f32 => f32, f64, u8, i32, i64;
    f64 => f32, f64, u8, i32, i64;
    u8 => f32, f64, u8, i32, i64;
    i32 => f32, f64, i32, i64;
    i64 => f32, f64, i64;
}

macro_rules! by_clamping {
    ($($From:ty => $($To:ty),*;)*) => {$($(
        impl Convert<$To> for $From {
            #[inline(always)]
            fn convert(self) -> $To {
                self.clamp(<$To>::MIN as $From, <$To>::MAX as $From) as $To
            }
        }
    )*)*};
}
by_clamping! {
    i32 => u8;
    i64 => u8, i32;
}

macro_rules! to_sixteen_bits {
    ($($From:ty: $as_f32:expr;)*) => {$(
        impl Convert<bf16> for $From {
            #[inline(always)]
            fn convert(self) -> bf16 {
                bf16_nearest(($as_f32)(self))
            }
        }
        impl Convert<f16> for $From {
            #[inline(always)]
            fn convert(self) -> f16 {
                f16_nearest(($as_f32)(self))
            }
        }
    )*};
}
to_sixteen_bits! {
    f32: |x: f32| x;
    f64: f32_to_odd;
    u8: f32::from;
    i32: |x: i32| f32_to_odd(f64::from(x));
    i64: |x: i64| f32_to_odd(f64_sticky(x));
}

macro_rules! from_sixteen_bits {
    ($($From:ty: $widen:ident => $($To:ty),*;)*) => {$($(
        impl Convert<$To> for $From {
            #[inline(always)]
            fn convert(self) -> $To {
                Convert::<$To>::convert($widen(self))
            }
        }
    )*)*};
}
from_sixteen_bits! {
    bf16: bf16_wide => f32, bf16, f16, f64, u8, i32, i64;
    f16: f16_wide => f32, bf16, f16, f64, u8, i32, i64;
}

/// `x`, or beyond 2³² a number that rounds to 16 bits as `x` does: of the low 16 bits only whether
/// any is set.
#[inline(always)]
fn f64_sticky(x: i64) -> f64 {
    let size = x.unsigned_abs();
    // At least 17 bits remain, of which bf16 and f16 look at 12; at most 48, which f64 holds.
    let kept = (size >> 16) | u64::from(size & 0xffff != 0);
    let size = if size < 1 << 32 {
        size as f64
    } else {
        kept as f64 * 65536.0
    };
    if x < 0 { -size } else { size }
}

#[cfg(test)]
mod tests;
