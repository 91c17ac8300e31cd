//! Layers, losses, models, parameters and optimizers.
//!
//! A model is a function: a module with a forward over `Var` (`forward.rs`). It is traced once for
//! each shape, and its backward follows from the trace. `pass.rs` is what both work with.

#![forbid(unsafe_code)]

pub mod activate;
pub mod attention;
pub mod build;
pub mod check;
pub mod containers;
mod cross_entropy;
pub mod decode;
pub mod error;
pub mod forward;
mod head;
pub mod linear;
pub mod lora;
pub mod loss;
pub mod models;
pub mod norm;
pub mod optim;
pub mod params;
pub mod pass;
pub mod scratch;
pub mod vocabulary;

pub use activate::{Activate, Dropout};
pub use attention::{NormOver, Rope, SelfAttention};
pub use build::{Init, Tie};
pub use containers::{Residual, Sequential};
pub use cross_entropy::CrossEntropy;
pub use decode::{Decoder, Sampling};
pub use error::{Error, Result};
pub use forward::{Convolution, CustomOp, Formula, Gate, LossFormula, Module, PerAxis, Scope, Var};
pub use linear::Linear;
pub use lora::Lora;
pub use loss::{Loss, Mse};
pub use norm::Normalize;
pub use pass::{Gradient, Listener, Pass, PassOptions, Saved};
pub use scratch::Scratch;
pub use vocabulary::{Embedding, Head};
