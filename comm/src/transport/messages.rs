//! Messages between ranks of several hosts, over MPI or over TCP where there is no MPI.
//!
//! `collective.rs` moves tensors in host memory with them.

mod collective;
mod comm;

pub(crate) use self::collective::Members;
pub(crate) use self::comm::{Comm, MESSAGE_BYTES_MAX, Request};
