//! Models, data, the training step and the loop around it: what `ddp-train` is made of, and what a program of your own
//! can use. Safe Rust only.
//!
//! Where to start reading: `step.rs`, which is a map of everything else.

#![forbid(unsafe_code)]

pub mod bench;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod dry_run;
pub mod error;
pub mod inspect;
pub mod progress;
pub mod report;
pub mod tensorboard;
pub mod train;
pub mod using;

pub use ddp_data as data;
use ddp_data::disk as files;
use ddp_engine::shown;
pub use ddp_engine::{
    audit, checkpoint, devices, evidence, process, ranks, record, reducer, step, tasks, trainer,
};
pub use ddp_nn as nn;
pub use ddp_nn::{models, optim, params};
pub use error::{Error, Result, Told};
