//! Which device's context is current on a thread.

use std::cell::Cell;

use super::Machine;
use crate::error::CUresult;

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Makes the context of this device current, or none. Returns what was current before.
pub(crate) fn set(device: Option<usize>) -> Option<usize> {
    CURRENT.replace(device)
}

/// The device whose context is current on this thread, if one is and it is alive.
pub fn current(machine: &Machine) -> Option<usize> {
    CURRENT.get().filter(|device| {
        machine
            .devices
            .get(*device)
            .is_some_and(|device| device.holders > 0)
    })
}

/// As [`current`]; the error is what calls return that need a context.
pub fn current_device(machine: &Machine) -> Result<usize, CUresult> {
    current(machine).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)
}
