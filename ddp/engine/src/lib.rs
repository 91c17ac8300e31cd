//! The training step and what surrounds it: reducer, trainer, checkpoints, metrics log, audit.
//!
//! Start reading at `step.rs`, then `trainer/training.rs`, the loop around it.

#![forbid(unsafe_code)]

pub mod audit;
pub mod checkpoint;
pub mod config;
pub mod confusion;
pub mod devices;
pub mod digest;
mod elastic;
pub mod error;
pub mod exchange;
mod faults;
pub mod generate;
pub mod hugging_face;
pub mod initial;
pub mod lora;
pub mod metrics_log;
mod model;
pub mod process;
pub mod ranks;
pub mod reducer;
pub mod setting;
pub mod shown;
pub mod step;
pub mod tasks;
pub mod trace;
pub mod trainer;
pub mod units;

pub use error::{Error, Result};
#[doc(hidden)]
pub use faults::at_command;
