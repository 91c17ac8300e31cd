//! Any bytes as a file of a checkpoint: state, manifest, or the header of its tensors. Never a panic, never memory because the bytes claim it.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| ddp::fuzzing::checkpoint(bytes));
