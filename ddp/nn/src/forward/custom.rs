//! Operations with a backward by hand.

use std::any::Any;
use std::fmt;

use ddp_kernels::Tensor;

use crate::error::Result;

/// An operation of one's own, with a forward and a backward by hand.
pub trait CustomOp: Any + fmt::Debug + Send + Sync {
    /// The shape of the value for inputs of these shapes. Of those that have rows, the first axis
    /// is the rows.
    fn shape(&self, inputs: &[Vec<usize>]) -> Result<Vec<usize>>;

    /// Whether the first axis of the value is the rows of its inputs, each computed from its own
    /// row. What is made of all rows, as a mean for a buffer, depends on how ranks divide a batch.
    fn has_rows(&self) -> bool {
        true
    }

    /// Writes the value to `out`.
    fn forward(&self, inputs: &[&Tensor], out: &Tensor) -> Result<()>;

    /// Writes the gradients of all inputs, from these, the value and the value's gradient.
    fn backward(&self, inputs: &[&Tensor], out: [&Tensor; 2], gradients: &[&Tensor]) -> Result<()>;
}
