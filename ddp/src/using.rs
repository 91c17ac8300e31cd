//! Using a model that was saved: `ddp-train eval` and `ddp-train predict`.
//!
//! `choose.rs` finds the checkpoint, `load.rs` makes model and rows ready, `dealt.rs` says which rank has which rows, `forward.rs` takes
//! batches through the model; `eval.rs` counts what comes out, `predict.rs` writes it down.
//!
//! Ranks take batches in turn: batch k of all rows is rank k mod N's. So a batch has the same rows whatever the number of ranks, which is what the bits of
//! a product depend on; rank 0 can write rows in their order with no more than a batch a rank in memory; and sums are added up in the order of batches.
//! What comes out is the same to the bit on any number of ranks.

pub(crate) mod choose;
mod dealt;
mod eval;
mod forward;
mod load;
mod outputs;
mod predict;

pub use eval::eval;
pub use predict::predict;
