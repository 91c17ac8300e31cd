//! Models, data, the training step and the loop around it: what `ddp-train` is made of, and what a program of your own
//! can use. Safe Rust only.
//!
//! Where to start reading: `step.rs`, which is a map of everything else.

#![forbid(unsafe_code)]

pub mod error;
pub mod nn;
pub mod params;

pub use error::{Error, Result};
