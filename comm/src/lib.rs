//! Ranks, and collectives between them. Knows tensors; knows nothing of models.
//!
//! `world.rs` says who this process is among the ranks of a job, `group.rs` is what a trainer calls, `collective.rs` the
//! one trait behind it, and beside it are the implementations: alone (`single.rs`), within a host (`shared/`), between
//! hosts (`mpi.rs`).

pub mod collective;
mod ending;
pub mod error;
mod failure;
pub mod gpus;
pub mod group;
pub mod handshake;
#[cfg(feature = "mpi")]
mod hosts;
mod launcher;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod run;
mod share;
pub mod shared;
mod signals;
mod single;
mod stop;
mod sums;
pub mod threads;
mod waited;
mod watch;
pub mod world;

pub use collective::{Collective, Operation, Reduce};
pub use ending::Ending;
pub use error::{Error, Result};
pub use gpus::GpuTable;
pub use group::Group;
pub use handshake::Field;
pub use launcher::likely_rank;
pub use run::Failure;
pub use stop::{Signal, Stops};
pub use world::{Options, Transport, World};
