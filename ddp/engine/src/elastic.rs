//! What a rank has trained while others are lost and come. docs/elastic.md names the files in the
//! order in which a loss goes through them; a rank's part begins in `trainer.rs`.
//!
//! After the loss of a rank, or when one comes, the ranks meet in a new world. All that they share
//! is made anew. Each says where it stands, and all make the same plan of that
//! (`ddp_comm::membership::agreement`). What a rank has is a `run`, and under ZeRO-1 its `slices`.
//! Which errors are such a loss is in `loss`.

pub(crate) mod loss;
pub(crate) mod run;
pub(crate) mod slices;
pub(crate) mod totals;
