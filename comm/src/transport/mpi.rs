//! MPI, as far as this crate needs it: start and end, communicators, and messages.
//!
//! `library.rs` is the only file that names the crate `mpi`, `roll_call.rs` finds out which ranks
//! are missing when ranks meet.

mod library;
mod roll_call;

pub(crate) use self::library::{Comm, Job, Request, abort};
