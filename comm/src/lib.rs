//! Ranks, and collectives between them. Knows tensors, but no models.
//!
//! A program starts with a [`World`]: this process among the ranks of its job. It makes [`Group`]s,
//! which move and reduce tensors. Five folders, each of which uses only those before it, over a
//! base of plain files (errors, processes, the launcher's variables, where ranks meet):
//!
//! - `membership/`: who takes part in a job
//! - `collective/`: groups of ranks, and what a transport has to offer them
//! - `transport/`: shared memory within a host, TCP between hosts, NCCL between GPUs; and how news
//!   of a failure travels
//! - `launch/`: starts ranks on this host and on others, and gives each its GPU and cores
//! - `world/`: puts them together: how ranks meet, stop, fail and end

mod background;
mod collective;
pub mod error;
mod identity;
mod launch;
mod launcher;
pub mod membership;
mod process;
mod rendezvous;
mod say;
#[cfg(test)]
mod tests;
mod transport;
mod waited;
mod world;

pub use background::Background;
pub use collective::group::Group;
pub use collective::handshake::{Field, Severity};
pub use collective::tree::{Addend, SumTree};
pub use collective::{Reduce, StopVote};
pub use error::{Error, Remedy, RemoteError, Result};
pub use identity::{HOST_RANKS_MAX, RANKS_MAX};
pub use launch::gpus::{GpuTable, Shortage};
pub use launch::limits::check_stack;
pub use launch::stop::{Signal, StopSignals, hold_stops};
pub use launch::{gpus, spawn};
pub use launcher::{is_rank_0, job_age, job_number, likely_rank};
pub use membership::{Change, LostRank};
pub use say::{print_line, print_now, print_progress};
pub use transport::nccl::environment::{NcclChoice, settings_of_free_order};
pub use transport::rdma::Rdma;
pub use world::{HasExitCode, Options, World};
