//! Layers, losses, models, parameters and optimizers.
//!
//! A layer has a forward and a backward, and saves between them what the backward needs. There is
//! no tape: backward runs in the order of the source text. `layer.rs` defines layers, `pass.rs`
//! what they work with. A module (`forward.rs`) is a layer by its formula, from which its backward
//! follows.

#![forbid(unsafe_code)]

pub mod activate;
pub mod attention;
pub mod build;
pub mod check;
pub mod containers;
pub mod decode;
pub mod error;
pub mod forward;
pub mod layer;
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

pub use activate::{Activate, Dropout, Geglu, Swiglu};
pub use attention::{NormOver, Rope, SelfAttention};
pub use build::{Build, Init, Tie, UseIndex};
pub use containers::{Recompute, Residual, Sequential};
pub use decode::{Decoder, Sampling};
pub use error::{Error, Result};
pub use forward::{Convolution, CustomOp, Module, PerAxis, Scope, Traced, Var};
pub use layer::Layer;
pub use linear::Linear;
pub use lora::Lora;
pub use loss::{CrossEntropy, Loss, Mse};
pub use norm::Normalize;
pub use pass::{Gradient, Listener, Pass, PassOptions, Saved};
pub use scratch::Scratch;
pub use vocabulary::{Embedding, Head};
