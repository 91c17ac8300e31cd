//! Who takes part in a job whose ranks the program itself has started.
//!
//! A job is a sequence of generations. Everything that ranks share belongs to one generation: its
//! memory, groups, communicators and graphs. When a rank is lost or a new one comes, the remaining
//! ranks meet and the next generation begins, in the same way as the first. A job that is not
//! elastic has one generation, of all its ranks.
//!
//! The launcher decides. Ranks report what they do (`wire::ToLauncher`) and are told what was
//! decided (`wire::ToRank`). A decision is a pure function of what has happened (`decide.rs`): it
//! has no clock, file, socket or thread, so that a simulation can run it through years of faults
//! (`tests/membership`). The launcher's loop (`launch/spawn.rs`, `launch/spawn/job.rs`) turns what
//! happens into events and carries out what is decided.
//!
//! What a rank does because of what it was told (`client.rs`), and for how long agents and ranks
//! work without a word from the launcher (`lease.rs`), is plain data, too, for the same reason.
//!
//! Where the ranks of a new generation continue, and who gives its state to whom, is another pure
//! function (`agreement.rs`).
//!
//! A rank keeps its number in the job; `World` numbers the ranks of each generation anew.

pub mod agreement;
pub mod client;
pub mod decide;
pub mod lease;
pub(crate) mod packets;
pub mod state;
pub mod wire;

pub use wire::{Change, LostRank};
