//! Using a saved model: `ddp-train eval`, `ddp-train predict` and `ddp-train generate`.
//!
//! `choose.rs` finds the checkpoint, `load.rs` loads model and rows, `forward.rs` runs the model;
//! `eval.rs` counts the outputs, `predict.rs` writes them, and `generate.rs` continues texts.
//!
//! Batch k belongs to rank k mod N. A batch then has the same rows for any number of ranks, and the
//! bits of a matmul depend on its rows. Sums are added in the order of batches, and rank 0 writes
//! rows in order with at most one batch of each rank in memory. The output is the same to the bit
//! on any number of ranks.

pub(crate) mod chat;
pub(crate) mod choose;
pub(crate) mod eval;
mod forward;
pub(crate) mod generate;
pub(crate) mod load;
mod outputs;
pub(crate) mod predict;

pub use generate::prompts;
