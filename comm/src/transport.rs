//! How tensors and news of failures move between ranks. The implementations of
//! [`Collective`](crate::collective) are `shared/` within a host, `hosts` across hosts (with
//! `messages` over the sockets of `tcp/`), and `nccl/` between GPUs. Ranks that `mpirun` starts
//! meet through `mpi/`, which moves no tensors. `failure` is how a rank that fails ends the others,
//! and `patience` how long a rank waits for one that shows no progress.

pub(crate) mod failure;
pub(crate) mod frames;
pub(crate) mod hosts;
pub(crate) mod messages;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
pub(crate) mod nccl;
pub(crate) mod patience;
pub(crate) mod placement;
pub(crate) mod rdma;
pub(crate) mod shared;
pub(crate) mod tcp;
