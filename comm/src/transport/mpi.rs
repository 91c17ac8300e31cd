//! The parts of MPI that this crate needs: start and end, and an exchange of values between ranks.
//!
//! Only `library.rs` names the crate `mpi`.

mod exchange;
mod library;

pub(crate) use self::library::{MpiJob, abort, advance};
