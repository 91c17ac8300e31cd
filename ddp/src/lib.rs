//! The library of `ddp-train`, and the one crate that your own programs need: [`kernels`] has
//! devices and tensors, [`comm`] ranks, [`nn`] layers and models, [`data`] data sets, and [`step`]
//! the training step. Safe Rust only.
//!
//! Start reading at `program.rs` for the program, at `ddp_engine::step` for training.

#![forbid(unsafe_code)]

mod about;
pub mod bench;
pub mod cli;
mod device;
pub mod doctor;
pub mod dry_run;
pub mod error;
pub mod export;
mod first_values;
pub mod flags;
pub mod inspect;
pub mod output;
mod program;
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
use ddp_data::disk as files;
use ddp_engine::shown;
pub use ddp_engine::{
    audit, checkpoint, config, devices, evidence, generate, hugging_face, process, ranks, record,
    reducer, step, tasks, trace, trainer,
};
pub use ddp_kernels as kernels;
pub use ddp_nn as nn;
pub use ddp_nn::{family_settings, models, optim, params};
pub use error::{Error, Result, ShownError};
pub use program::{Program, program};
pub use train::Trainer;
