//! Models, data, the training step and the loop around it: what `ddp-train` is made of, and what a program of your own
//! can use. Safe Rust only.
//!
//! Where to start reading: `step.rs`, which is a map of everything else.

#![forbid(unsafe_code)]

pub mod audit;
pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod data;
pub mod doctor;
pub mod error;
mod faults;
mod files;
#[doc(hidden)]
pub mod fuzzing;
pub mod inspect;
pub mod metrics;
pub mod models;
pub mod nn;
pub mod optim;
pub mod params;
pub mod process;
pub mod progress;
pub mod reducer;
pub mod report;
mod shown;
pub mod step;
pub mod tensorboard;
pub mod trainer;
pub mod using;

pub use error::{Error, Result, Told};
