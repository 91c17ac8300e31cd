//! MPI, as far as this crate needs it: start and end, communicators, and messages.
//!
//! `library.rs` is the only file that names the crate `mpi`, `roll_call.rs` finds out which ranks
//! are missing when ranks meet, `collective.rs` moves tensors in host memory.

mod collective;
mod library;
mod roll_call;

pub(crate) use self::collective::Mpi;
pub(crate) use self::library::{Comm, Job, MESSAGE_BYTES_MAX, Request, abort};
