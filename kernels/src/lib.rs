//! Tensors on devices, transfers between devices, and operations on tensors.
//!
//! This crate knows nothing of ranks or training. To read the source, start with `tensor.rs`, then
//! `transfer.rs`, then any file of `ops/`.
//!
//! ```
//! use ddp_kernels::{DType, Device, Tensor, ops};
//!
//! let x = Tensor::from_slice(&[1.0f32, -2.0], &[2], Device::Cpu)?.named("x");
//! assert_eq!(x.to_string(), "\"x\" f32[2] on cpu");
//! assert_eq!(ops::activate(&x, ops::Activation::Relu)?.to_vec::<f32>()?, [1.0, 0.0]);
//! assert_eq!(x.to((Device::Cpu, DType::BF16))?.dtype(), DType::BF16);
//! # Ok::<(), ddp_kernels::Error>(())
//! ```

pub mod ahead;
pub mod budget;
mod cuda;
pub mod device;
pub mod dtype;
pub mod error;
pub mod files;
pub mod foreign;
pub mod graph;
pub mod heartbeat;
mod launch;
#[doc(hidden)]
pub mod library;
pub mod mapped;
mod math;
pub mod matmuls;
pub mod memory;
mod message;
pub mod npy;
pub mod ops;
pub mod panics;
pub mod progress;
pub mod random;
pub mod setting;
pub mod shape;
pub mod simd;
mod storage;
pub mod stream;
mod streaming;
pub mod sums;
mod tensor;
pub mod threads;
pub mod trace;
pub mod transfer;

pub use device::{Device, Member};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use math::normalize_levels;
pub use ops::Destination;
pub use random::{Random, Seed};
pub use shape::Shape;
pub use tensor::Tensor;
