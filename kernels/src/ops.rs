//! The math: one operation, one file (its `.cu` joins it with CUDA). Operations write into tensors given to them;
//! the short forms without `_into` make the output on the operands' device.
//!
//! What all do before their math stands in `call.rs`; the elementwise loops in `loops.rs`.

mod call;
mod cast;
mod loops;
mod relu;
#[cfg(test)]
pub(crate) mod testing;

pub use cast::cast;
pub use relu::{relu, relu_backward_into, relu_into};
