//! Using a saved model: `ddp-train eval` and `ddp-train predict`.
//!
//! `choose.rs` finds the checkpoint, `load.rs` loads model and rows, `round_robin.rs` divides rows
//! among ranks, `forward.rs` runs the model; `eval.rs` counts the outputs, `predict.rs` writes
//! them.
//!
//! Batch k belongs to rank k mod N. A batch then has the same rows for any number of ranks, and the
//! bits of a product depend on its rows. Sums are added in the order of batches, and rank 0 writes
//! rows in order with at most one batch of each rank in memory. The output is the same to the bit
//! on any number of ranks.

pub(crate) mod choose;
mod eval;
mod forward;
pub(crate) mod load;
mod outputs;
mod predict;
mod round_robin;

pub use eval::eval;
pub use predict::predict;
