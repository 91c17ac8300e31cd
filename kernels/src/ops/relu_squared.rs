//! relu_squared: `out = max(x, 0)²`, and its derivative `2 max(x, 0)`. NaN stays NaN.

use crate::Tensor;
use crate::error::Result;
use crate::launch::Source;
use crate::ops::elementwise::{binary_op, unary_op};
use crate::ops::float::Float;
use crate::ops::loops::{Binary, Unary};

static SOURCE: Source = Source::new("relu_squared.cu", include_str!("relu_squared.cu"));

/// relu² of one element, and its derivative at x times `dy`.
#[derive(Clone, Copy)]
struct ReluSquared;

impl<T: Float> Unary<T> for ReluSquared {
    #[inline(always)]
    fn apply(self, x: T) -> T {
        // Not max(): that would turn NaN into 0.
        if x < T::ZERO { T::ZERO } else { x * x }
    }
}

impl<T: Float> Binary<T> for ReluSquared {
    #[inline(always)]
    fn apply(self, dy: T, x: T) -> T {
        if x <= T::ZERO { T::ZERO } else { dy * (x + x) }
    }
}

/// relu² of `x` in a new tensor.
#[track_caller]
pub fn relu_squared(x: &Tensor) -> Result<Tensor> {
    let out = x.empty_like()?;
    relu_squared_into(&out, x)?;
    Ok(out)
}

/// `out = max(x, 0)²`; `out` may be `x`.
#[track_caller]
pub fn relu_squared_into(out: &Tensor, x: &Tensor) -> Result<()> {
    let kernel = (&SOURCE, "relu_squared");
    unary_op("relu_squared", out, x, ReluSquared, kernel, None)
}

/// `dx = dy · 2 max(x, 0)`; `x` is the input of relu², `dx` may be `dy`.
#[track_caller]
pub fn relu_squared_backward_into(dx: &Tensor, dy: &Tensor, x: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("x", x)];
    let kernel = (&SOURCE, "relu_squared_backward");
    binary_op("relu_squared_backward", operands, ReluSquared, kernel)
}

#[cfg(test)]
mod tests;
