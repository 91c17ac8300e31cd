//! The library of `ddp-train`, and the one crate that a program of yours needs. Safe Rust only.
//!
//! A perceptron that learns which points are near the origin, on as many ranks as a launcher
//! starts:
//!
//! ```
//! use ddp::comm::{Options, World};
//! use ddp::data::{InMemory, Loader};
//! use ddp::kernels::{DType, Device, Random, Seed, Tensor};
//! use ddp::nn::{Activate, CrossEntropy, Linear, Sequential};
//! use ddp::optim::AdamW;
//! use ddp::step::Step;
//!
//! fn train(world: &World) -> ddp::Result<()> {
//!     let device = world.device()?; // this rank's GPU, or the CPU
//!     let points = Tensor::rand(&[600, 2], DType::F32, Device::Cpu, &mut Random::new(1))?;
//!     let is_near = |point: &[f32]| i64::from(point[0].hypot(point[1]) < 0.8);
//!     let labels: Vec<i64> = points.to_vec()?.chunks(2).map(is_near).collect();
//!     let data = InMemory::classes(points, labels, 2)?;
//!     let layers = Sequential::new().then(Linear::new(32)).then(Activate::relu());
//!     let layers = layers.then(Linear::new(2));
//!     let model = layers.build(&[2], device, Seed(1))?;
//!     let mut loader = Loader::builder(data).batch_size(60).shuffle(Seed(1)).build(world)?;
//!     let step = Step::builder(model, CrossEntropy::default(), AdamW::default());
//!     let mut step = step.build(world)?;
//!     for index in 0..300 {
//!         step.run(loader.load(index)?, 0.01)?;
//!     }
//!     println!("accuracy {}", step.report()?.accuracy());
//!     Ok(())
//! }
//! fn main() -> std::process::ExitCode { World::run(&Options::default(), train) }
//! ```
//!
//! # A map
//!
//! | module | what it has |
//! |---|---|
//! | [`kernels`] | devices, tensors, transfers, operations |
//! | [`comm`] | [`World`](comm::World): the ranks, their groups, how they fail and end |
//! | [`data`], [`tables`] | tensors as data, files, your own [`Dataset`](data::Dataset); loaders |
//! | [`nn`] | layers, losses; [`models`], [`params`], [`optim`] |
//! | [`step`] | [`Step`](step::Step): forward, loss, backward, reduction, update |
//! | [`train`], [`trainer`], [`config`] | around the step: checkpoints, logs, evaluation, resume |
//! | [`checkpoint`], [`hugging_face`], [`generate`] | models in files, and texts that they make |
//! | [`metrics_log`], [`report`] | what a run has logged, and its page |
//! | [`tools`] | what looks at runs and machines |
//!
//! # Features
//!
//! Without default features this is the library alone. `tools` adds [`Trainer`] and [`tools`],
//! `program` adds [`program()`], `mpi` ranks under `mpirun`, `tokenizers` texts by a
//! `tokenizer.json`: these four are the default, which makes `ddp-train`. `tables` reads CSV files,
//! `parquet` also `.parquet` files.
//!
//! Start reading at `program.rs` for the program, at `ddp_engine::step` for training.

#![forbid(unsafe_code)]

#[cfg(feature = "program")]
mod about;
#[cfg(feature = "program")]
mod cli;
#[cfg(feature = "program")]
mod dry_run;
#[cfg(feature = "program")]
pub mod error;
#[cfg(feature = "program")]
mod export;
#[cfg(feature = "program")]
mod flags;
#[cfg(feature = "program")]
mod initial_weights;
#[cfg(feature = "program")]
mod program;
#[cfg(feature = "tools")]
pub mod progress;
#[cfg(feature = "program")]
mod show_tokens;
#[cfg(feature = "program")]
mod start;
#[cfg(feature = "program")]
mod tokenize;
#[cfg(feature = "tools")]
pub mod train;
#[cfg(feature = "program")]
pub mod using;

pub use ddp_comm as comm;
pub use ddp_data as data;
#[cfg(not(feature = "program"))]
pub use ddp_engine::error;
pub use ddp_engine::{
    audit, checkpoint, config, confusion, devices, generate, hugging_face, metrics_log, process,
    ranks, reducer, step, tasks, trace, trainer,
};
#[cfg(feature = "tools")]
use ddp_engine::{shown, units};
pub use ddp_kernels as kernels;
pub use ddp_nn as nn;
pub use ddp_nn::{family_settings, models, optim, params};
#[cfg(feature = "tables")]
pub use ddp_tables as tables;
pub use error::{Error, Result};
#[cfg(feature = "program")]
use {
    ddp_engine::{exchange, initial, lora},
    ddp_kernels::files,
};
#[cfg(feature = "tools")]
pub use {ddp_tools as tools, ddp_tools::report, train::Trainer};
#[cfg(feature = "program")]
pub use {error::ShownError, program::Program, program::program};
