//! NCCL, through the entry points: ranks that are devices of one process, and ranks that are
//! processes.

mod bench;
mod faults;
mod groups;
mod hangs;
mod order;
mod processes;
mod refusals;
