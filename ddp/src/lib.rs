//! The library of `ddp-train`, and the one crate that your own programs need: [`kernels`] has
//! devices and tensors, [`comm`] ranks, [`nn`] layers and models, [`data`] data sets, and [`step`]
//! the training step. Safe Rust only.
//!
//! Start reading at `bin/ddp-train.rs` for the program, at `ddp_engine::step` for training.

#![forbid(unsafe_code)]

pub mod bench;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod dry_run;
pub mod error;
pub mod export;
pub mod inspect;
pub mod output;
pub mod progress;
pub mod report;
pub mod start;
pub mod tensorboard;
pub mod tokenize;
pub mod train;
mod units;
pub mod using;
pub mod watch;

pub use ddp_comm as comm;
pub use ddp_data as data;
use ddp_engine::shown;
pub use ddp_engine::{
    audit, checkpoint, devices, evidence, generate, hugging_face, process, ranks, record, reducer,
    step, tasks, trace, trainer,
};
pub use ddp_kernels as kernels;
use ddp_kernels::files;
pub use ddp_nn as nn;
pub use ddp_nn::{models, optim, params};
pub use error::{Error, Result, ShownError};
