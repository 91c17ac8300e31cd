//! relu: `out = max(x, 0)`, and its derivative `x > 0` (0 at 0, as in PyTorch). NaN stays NaN.

use crate::Tensor;
use crate::error::Result;
use crate::launch::Source;
use crate::ops::elementwise::{binary_op, unary_op};
use crate::ops::float::Float;
use crate::ops::loops::{Binary, Unary};

static SOURCE: Source = Source::new("relu.cu", include_str!("relu.cu"));

/// relu of one element, and its derivative times `dy`, from relu's input or output.
#[derive(Clone, Copy)]
pub(crate) struct Relu;

impl<T: Float> Unary<T> for Relu {
    #[inline(always)]
    fn apply(self, x: T) -> T {
        // Not max(): that would turn NaN into 0.
        if x < T::ZERO { T::ZERO } else { x }
    }
}

impl<T: Float> Binary<T> for Relu {
    #[inline(always)]
    fn apply(self, dy: T, y: T) -> T {
        if y > T::ZERO { dy } else { T::ZERO }
    }
}

/// relu of `x` in a new tensor.
#[track_caller]
pub fn relu(x: &Tensor) -> Result<Tensor> {
    let out = x.empty_like()?;
    relu_into(&out, x)?;
    Ok(out)
}

/// `out = relu(x)`; `out` may be `x`.
#[track_caller]
pub fn relu_into(out: &Tensor, x: &Tensor) -> Result<()> {
    unary_op("relu", out, x, Relu, (&SOURCE, "relu"), None)
}

/// `dx = dy` where `y > 0`, else 0; `y` is relu's input or output, `dx` may be `dy`.
#[track_caller]
pub fn relu_backward_into(dx: &Tensor, dy: &Tensor, y: &Tensor) -> Result<()> {
    let operands = [("dx", dx), ("dy", dy), ("y", y)];
    let kernel = (&SOURCE, "relu_backward");
    binary_op("relu_backward", operands, Relu, kernel)
}

#[cfg(test)]
mod tests;
