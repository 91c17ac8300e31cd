//! Messages between ranks of several hosts, over MPI, or over TCP where there is no MPI.
//!
//! `collective.rs` uses them to move tensors in host memory.

mod collective;
mod comm;

pub(crate) use self::collective::Members;
pub(crate) use self::comm::{Comm, MESSAGE_BYTES_MAX, Request};
