//! Tools that look at runs, models and machines and train nothing: the report, `watch`, `inspect`,
//! `compare`, `verify`, `doctor`, `bench`, `warm-up`, and curves for TensorBoard.
//!
//! Each command is a function that prints lines with `Say`; its flags belong to the program.
//! `metrics.rs` reads what a run has logged.

#![forbid(unsafe_code)]

pub mod bench;
pub mod compare;
pub mod doctor;
pub mod inspect;
pub mod metrics;
pub mod output;
pub mod report;
pub mod tensorboard;
pub mod verify;
pub mod warm_up;
pub mod watch;

use ddp_data as data;
use ddp_engine::{
    audit, checkpoint, config, confusion, devices, error, exchange, hugging_face, metrics_log,
    process, reducer, setting, shown, step, tasks, trainer, units,
};
use ddp_kernels::files;
use ddp_nn::{self as nn, models, optim, params};
