//! Ranks that each have a GPU, over NCCL: sums and moves of tensors on a stream, eagerly or
//! captured in a graph.
//!
//! A call enters the tensors' memory as an operation does (`ddp_kernels::foreign`), gives its work
//! to the stream and returns. So that no thread has to wait for a driver to learn what went wrong,
//! the device marks where calls begin and end (`ddp_kernels::progress`), and a thread of each
//! rank watches the marks.
//!
//! * `library.rs`: NCCL's functions, and what its errors mean.
//! * `join.rs`: how ranks make a group: one version, one id, a deadline.
//! * `communicator.rs`: NCCL's handle; `turns.rs`: what the groups of one device share.
//! * `group.rs`: calls on a group; `common.rs`: what these share with its watch.
//! * `warm.rs`: every operation once, before anything depends on it.
//! * `watch.rs`, `hang.rs`: how a hang or a difference ends the job, and with which text.
//! * `names.rs`, `compare.rs`: names of calls, and whether ranks make the same; pure.
//! * `environment.rs`: NCCL's settings; `log.rs`: how it says that it connects ranks.
//!
//! The communicator is a blocking one: a non-blocking one would start a thread a call, and its
//! stream could not be used until it was polled. A communicator of a process is never destroyed:
//! NCCL would wait for the other ranks and for graphs that hold its calls. The end of the process
//! frees it, or an abort where the job continues without a lost rank. Ranks that are threads
//! destroy theirs in the background, because their process lives on.
//!
//! Sums only, and never NCCL's average, which multiplies by 1/N first. Every rank gets the same
//! bits. They follow NCCL's order, which depends on the machine and the length.

mod common;
mod communicator;
mod compare;
pub(crate) mod environment;
mod group;
mod hang;
mod join;
mod library;
mod log;
mod names;
mod turns;
mod warm;
mod watch;

pub(crate) use self::join::{Join, join};
pub(crate) use self::watch::Watches;
