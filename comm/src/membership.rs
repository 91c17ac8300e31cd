//! Who takes part in a job that the program itself has started.
//!
//! A job is a sequence of generations. All that ranks share belongs to one generation: its memory,
//! groups, communicators and graphs. When a rank is lost or a new one comes, the ranks that are
//! left meet, and the next generation begins: the same way for the first one, after a loss and for
//! a new rank.
//!
//! The launcher decides. Ranks say what they do (`wire::ToLauncher`), and are told what was decided
//! (`wire::ToRank`). What is decided is a pure function of what has happened (`decide.rs`): it has no
//! clock, file, socket or thread, so that a simulation runs it through years of faults
//! (`tests/membership`). The launcher's loop (`spawn/job.rs`) turns what happens into events, and
//! carries out what is decided.
//!
//! A rank of a job keeps its number; `World` numbers the ranks of a generation anew.

pub mod client;
pub mod decide;
pub(crate) mod packets;
pub mod state;
pub mod wire;

pub use wire::{Change, LostRank};
