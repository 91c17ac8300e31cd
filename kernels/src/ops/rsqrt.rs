//! rsqrt: `out = 1 / √(x + ε)`, as normalizing layers need it, and its derivative. ε is first
//! rounded to the dtype of the math: f32, or f64 for f64.

use crate::Tensor;
use crate::error::Result;
use crate::launch::Source;
use crate::ops::elementwise::{binary_op, unary_op};
use crate::ops::float::Float;
use crate::ops::loops::{Binary, Unary};

static SOURCE: Source = Source::new("rsqrt.cu", include_str!("rsqrt.cu"));

/// rsqrt with this ε.
#[derive(Clone, Copy)]
struct Rsqrt(f64);

impl<T: Float> Unary<T> for Rsqrt {
    #[inline(always)]
    fn apply(self, x: T) -> T {
        T::ONE / (x + T::from_f64(self.0)).root()
    }
}

/// The derivative times `dy`, from rsqrt's output.
#[derive(Clone, Copy)]
struct RsqrtBackward;

impl<T: Float> Binary<T> for RsqrtBackward {
    #[inline(always)]
    fn apply(self, dy: T, y: T) -> T {
        T::from_f64(-0.5) * dy * (y * y * y)
    }
}

/// `out = 1 / √(x + epsilon)`; `out` may be `x`. ∞ at −epsilon, NaN below.
#[track_caller]
pub fn rsqrt_into(out: &Tensor, x: &Tensor, epsilon: f64) -> Result<()> {
    let (op, kernel) = (Rsqrt(epsilon), (&SOURCE, "rsqrt"));
    unary_op("rsqrt", out, x, op, kernel, Some(epsilon as f32))
}

/// `dx = -dy · y³ / 2`; `y` is rsqrt's output, `dx` may be `dy`.
#[track_caller]
pub fn rsqrt_backward_into(dx: &Tensor, dy: &Tensor, y: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("y", y)];
    let kernel = (&SOURCE, "rsqrt_backward");
    binary_op("rsqrt_backward", operands, RsqrtBackward, kernel)
}

#[cfg(test)]
mod tests;
