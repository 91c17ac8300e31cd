//! Layers: a forward, a backward, and what is saved between them. No tape: the backward order is the source text.
//!
//! `layer.rs` says what a layer is, `pass.rs` what it works with; the rest are layers, and the losses at their end.

pub mod activate;
pub mod build;
pub mod check;
pub mod dropout;
pub mod layer;
pub mod linear;
pub mod loss;
pub mod pass;
pub mod residual;
pub mod sequential;

pub use activate::Activate;
pub use build::{Build, Init, Place, Tie};
pub use dropout::Dropout;
pub use layer::{Fold, Folded, Layer};
pub use linear::Linear;
pub use loss::{CrossEntropy, Loss, Losses, Mse};
pub use pass::{Gradient, Listener, Pass, PassOptions, Saved, Scratch};
pub use residual::Residual;
pub use sequential::Sequential;
