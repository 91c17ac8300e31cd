//! The parts of MPI that this crate needs: start and end, communicators, and messages.
//!
//! Only `library.rs` names the crate `mpi`. `roll_call.rs` finds out which ranks are missing when
//! ranks meet.

mod library;
mod roll_call;

pub(crate) use self::library::{MpiComm, MpiJob, MpiRequest, abort};
