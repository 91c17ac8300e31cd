//! Operations with a backward by hand.

use std::any::Any;
use std::fmt;

use ddp_kernels::Tensor;

use crate::error::Result;

/// An operation of one's own, with a forward and a backward by hand.
pub trait CustomOp: Any + fmt::Debug + Send + Sync {
    /// The shape of the value for inputs of these shapes.
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>>;

    /// Writes the value to `out`.
    fn forward(&self, inputs: &[&Tensor], out: &Tensor) -> Result<()>;

    /// Writes the gradients of all inputs, from these, the value and the value's gradient.
    fn backward(&self, inputs: &[&Tensor], out: [&Tensor; 2], gradients: &[&Tensor]) -> Result<()>;
}
