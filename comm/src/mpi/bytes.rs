//! A tensor's elements as bytes.

use ddp_kernels::dtype::{bf16, f16};
use ddp_kernels::{DType, Element, Tensor};

use crate::error::Result;

/// Runs `$body` with `$T` bound to the Rust type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {{
        macro_rules! with {
            ($rust:ty) => {{
                type $T = $rust;
                $body
            }};
        }
        match $dtype {
            DType::F32 => with!(f32),
            DType::BF16 => with!(bf16),
            DType::F16 => with!(f16),
            DType::F64 => with!(f64),
            DType::U8 => with!(u8),
            DType::I32 => with!(i32),
            DType::I64 => with!(i64),
        }
    }};
}

/// Lends a tensor's bytes, read only. The tensor is in host memory: another is refused.
pub(crate) fn lend<R>(tensor: &Tensor, body: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
    with_element!(tensor.dtype(), T => tensor.with_slice::<T, _>(|elements| body(bytes_of(elements)))?)
}

/// Lends a tensor's bytes. The tensor is in host memory: another is refused.
pub(crate) fn lend_mut<R>(tensor: &Tensor, body: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
    with_element!(tensor.dtype(), T => tensor.with_slice_mut::<T, _>(|elements| body(bytes_of_mut(elements)))?)
}

fn bytes_of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: the same memory for the same time; an `Element` is a plain number without padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn bytes_of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    // SAFETY: the same memory for the same time, lent by this reference alone; an `Element` is a plain number without
    // padding, and any bytes are one.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(elements)) }
}
