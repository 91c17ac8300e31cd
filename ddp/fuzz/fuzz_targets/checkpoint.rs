//! Any bytes as a file of a checkpoint: its state, its manifest or the header of its tensors.
//! Reading never panics, and never allocates what the bytes merely claim.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ddp::checkpoint::read_as_anything(bytes));
