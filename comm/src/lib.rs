//! Ranks, and collectives between them. Knows tensors, but no models.
//!
//! A program starts with a [`World`]: this process among the ranks of its job. It makes [`Group`]s,
//! which move and reduce tensors. Modules, from the bottom up: who the ranks are (`identity`,
//! `process`, `launcher`, `cores`), implementations of collectives (`single`, `shared/` within a
//! host, `mpi/` or `tcp/` below `messages` and `hosts` between hosts, `nccl/` between GPUs) behind
//! `group`, how jobs fail and stop (`failure`, `stop`, `watch`), and `world/`, which puts them
//! together.

mod allocation;
mod background;
mod collective;
mod cores;
pub mod error;
mod failure;
mod frames;
pub mod gpus;
mod group;
mod handshake;
mod hosts;
mod identity;
mod launcher;
mod limits;
pub mod membership;
mod messages;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod patience;
mod placement;
mod process;
mod rendezvous;
mod say;
mod shared;
mod single;
pub mod spawn;
mod stop;
mod sums;
mod tcp;
#[cfg(test)]
mod tests;
mod threads;
mod tree;
mod waited;
mod watch;
mod world;

pub use background::Background;
pub use collective::Reduce;
pub use error::{Error, Remedy, RemoteError, Result};
pub use gpus::{GpuTable, Shortage};
pub use group::Group;
pub use handshake::{Field, Severity};
pub use identity::RANKS_MAX;
pub use launcher::{is_rank_0, job_age, job_number, likely_rank};
pub use limits::check_stack;
pub use membership::{Change, LostRank};
pub use nccl::environment::{NcclChoice, settings_of_free_order};
pub use say::{print_line, print_now, print_progress};
pub use stop::{Signal, StopSignals, hold_stops};
pub use tree::{Part, SumTree};
pub use world::{HasExitCode, Options, World};
