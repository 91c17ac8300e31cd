//! The end of the process: runs pending work so that its races are found, and reports memory that
//! was never freed if asked to.
//!
//! This happens when the process exits normally, not after a finding or a signal. By then the
//! product may have destroyed its state, and other threads may still run. So the lock is held
//! throughout, no function of the product is called (a host function counts as called), and hanging
//! work is left alone with everything after it.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{IS_ENDING, LockedMachine, is_held_by_this_thread};
use crate::report::{self, FindingKind};
use crate::{memory, scheduler};

/// How long another thread's running piece of work may take at the end. An endless kernel must not
/// keep the process.
const PATIENCE: Duration = Duration::from_secs(5);

/// The process that registered: a forked child has its handlers, but neither its threads nor its
/// work.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Registers the handler once per process.
pub fn register() {
    PROCESS.get_or_init(|| {
        // SAFETY: the handler has the required type and is code of this library, which is never
        // unloaded while in use; unloading would call it first.
        if unsafe { libc::atexit(at_exit) } != 0 {
            eprintln!(
                "simcuda: atexit failed: work pending at the end of the process will not run"
            );
        }
        std::process::id()
    });
}

extern "C" fn at_exit() {
    // LockedMachine by this thread: exit was called from a signal handler or after a failure of the
    // simulator.
    if PROCESS.get() != Some(&std::process::id()) || is_held_by_this_thread() {
        return;
    }
    let Some(mut held) = LockedMachine::take_within(PATIENCE) else {
        eprintln!("simcuda: another thread holds the simulator's lock: pending work does not run");
        return;
    };
    IS_ENDING.store(true, Ordering::Relaxed);
    held.report.is_at_the_end = true;
    if held.config.drain {
        scheduler::drain(&mut held);
    }
    memory::settle_unwritten(&mut held);
    if held.config.leaks
        && let Some(message) = memory::leaks::message(&held)
    {
        report::finding(&mut held, FindingKind::NeverFreed, message);
    }
}

#[cfg(test)]
mod tests;
