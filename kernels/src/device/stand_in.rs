//! For tests alone: host memory that calls itself `cuda:0`, `cuda:1` … and runs operations as the CPU does, so that
//! everything about placement can be tested where there is no GPU. It is synchronous, knows nothing of CUDA's
//! rules, and says nothing about speed. Only the feature `stand-in-devices`, which no product build turns on,
//! lets another crate see it.
#![doc(hidden)]

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Device;
use crate::memory;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Makes sure of `count` stand-in devices for the rest of the process; new ones have `bytes_each`. Devices only ever
/// come, and those that are there stay as they are, since tests share them.
pub fn install(count: usize, bytes_each: usize) {
    assert!(count <= memory::STAND_IN_COUNT_MAX, "at most {} stand-in devices", memory::STAND_IN_COUNT_MAX);
    let before = COUNT.fetch_max(count, Ordering::SeqCst);
    for index in before..count {
        memory::set_limit_bytes(Device::Cuda(index), Some(bytes_each));
    }
}

/// How many stand-in devices there are.
pub fn count() -> usize {
    COUNT.load(Ordering::Relaxed)
}
