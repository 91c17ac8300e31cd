//! Layers: a forward, a backward, and what is saved between them. No tape: the backward order is the source text.

pub mod layer;
pub mod pass;

pub use layer::{Build, Fold, Init, Layer};
pub use pass::{Pass, Scratch};
