//! `ddp-train` as users start it, alone and under the real `mpirun`: its output, its files, its
//! exit codes, and that one failure ends all ranks soon and is reported once.
//!
//! Without the feature `mpi` the program starts the ranks, and tests that need `mpirun` are left
//! out. With it, they fail where `mpirun` is missing.

#[path = "../support/mod.rs"]
mod support;

mod alone;
mod audit;
mod bad_data;
mod benches;
#[cfg(feature = "tokenizers")]
mod chats;
mod chosen;
mod command_line;
mod compare;
mod continuing;
mod data;
mod disk;
mod earlier;
mod early;
mod early_stops;
mod events;
mod face;
mod faults;
mod frozen;
mod generate;
mod golden;
mod gpt;
mod handshake;
mod hosts;
mod hugging_face;
mod inspect;
mod lora;
mod losing;
mod losing_and_stopping;
mod losing_hosts;
mod losing_often;
mod losing_slices;
mod made;
mod options;
mod prices;
mod reading;
mod recompute;
mod report;
mod resuming;
mod same;
mod sample;
mod started;
mod stopping;
mod tables;
mod tcp;
#[cfg(feature = "tokenizers")]
mod tokenize;
mod trace;
mod truth;
mod using;
mod verify;
mod vit;
mod waits;
