//! Layers, losses, models, parameters and optimizers.
//!
//! A layer has a forward and a backward, and saves between them what the backward needs. There is
//! no tape: the order of the backward pass is that of the source text. `layer.rs` defines layers,
//! `pass.rs` what they work with.

#![forbid(unsafe_code)]

pub mod activate;
pub mod attention;
pub mod build;
pub mod check;
pub mod decode;
pub mod dropout;
pub mod embedding;
pub mod error;
pub mod head;
pub mod layer;
pub mod linear;
pub mod loss;
pub mod models;
pub mod norm;
pub mod observe;
pub mod optim;
pub mod params;
pub mod pass;
pub mod recompute;
pub mod residual;
pub mod scratch;
pub(crate) mod sequential;
mod setting;

pub use activate::{Activate, Gate};
pub use attention::SelfAttention;
pub use build::{Build, Init, Tie, UseIndex};
pub use decode::{Decoder, Sampling};
pub use dropout::Dropout;
pub use embedding::Embedding;
pub use error::{Error, Result};
pub use head::Head;
pub use layer::Layer;
pub use linear::Linear;
pub use loss::{CrossEntropy, Loss, Mse};
pub use norm::Normalize;
pub use pass::{Gradient, Listener, Pass, PassOptions, Saved};
pub use recompute::Recompute;
pub use residual::Residual;
pub use scratch::Scratch;
pub use sequential::Sequential;
