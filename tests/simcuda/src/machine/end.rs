//! The end of the process: what nobody has waited for runs after all, so that its races and other findings show, and what was
//! never freed is told if it is asked for.
//!
//! It happens when the process exits by itself, and not when a finding or a signal ends it. By then the product may have
//! destroyed what it had, and other threads may still go on: so the lock is kept from beginning to end, nothing of the product
//! is called (a host function counts as called), and what hangs, with all that stands behind it, is left alone.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Held, is_held_by_this_thread};
use crate::{memory, scheduler};

/// How long a piece of work of another thread may take that is running when the process ends. A kernel that never ends
/// must not keep the process.
const PATIENCE: Duration = Duration::from_secs(5);

/// The process that registered: a child that it forks has its handlers, but neither its threads nor its work.
static PROCESS: OnceLock<u32> = OnceLock::new();

static HAS_COME: AtomicBool = AtomicBool::new(false);

/// Whether the process ends: memory of the product may be gone.
pub fn has_come() -> bool {
    HAS_COME.load(Ordering::Relaxed)
}

/// Has the end handled, once a process.
pub fn register() {
    PROCESS.get_or_init(|| {
        // SAFETY: the handler has the type that is asked for, and is code of this library, which nobody unloads: its users find
        // it by name and keep it. Were it unloaded, its handlers would be called before.
        if unsafe { libc::atexit(at_exit) } != 0 {
            eprintln!("simcuda: the end of the process cannot be watched: what is pending then will not be looked at");
        }
        std::process::id()
    });
}

extern "C" fn at_exit() {
    // Held by this thread: exit was called from within, by the handler of a signal or after a failure of the simulator.
    if PROCESS.get() != Some(&std::process::id()) || is_held_by_this_thread() {
        return;
    }
    let Some(mut held) = Held::take_within(PATIENCE) else {
        eprintln!(
            "simcuda: another thread is inside the simulator and does not come out: what is pending is not looked at"
        );
        return;
    };
    HAS_COME.store(true, Ordering::Relaxed);
    held.report.is_at_the_end = true;
    if held.config.drain {
        scheduler::drain(&mut held);
    }
    if held.config.leaks
        && let Some(note) = memory::leaks::note(&held)
    {
        eprintln!("simcuda: {note}");
    }
}

#[cfg(test)]
mod tests;
