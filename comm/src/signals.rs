//! What happens on a signal: asked and set, for the few signals that this crate catches. Whoever else catches one of them is left alone.

use std::ffi::c_int;
use std::mem::MaybeUninit;

/// A handler of ours. It may run at any time on any thread: it does nothing but what is safe in a handler.
pub(crate) type Handler = extern "C" fn(c_int);

/// What happens on `signal` now: `SIG_DFL`, `SIG_IGN`, or the address of a handler.
pub(crate) fn current(signal: c_int) -> Option<libc::sighandler_t> {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks only. All zeros is a value of this plain struct, whether the call writes it or not.
    unsafe {
        let asked = libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) == 0;
        asked.then(|| now.assume_init().sa_sigaction)
    }
}

/// From now on `handler` runs on `signal`, and calls that it interrupts go on.
pub(crate) fn catch(signal: c_int, handler: Handler) {
    set(signal, address(handler));
}

/// From now on `signal` does what it does by itself. Safe in a handler.
pub(crate) fn let_go(signal: c_int) {
    set(signal, libc::SIG_DFL);
}

pub(crate) fn address(handler: Handler) -> libc::sighandler_t {
    handler as usize
}

fn set(signal: c_int, handler: libc::sighandler_t) {
    // SAFETY: all zeros is a value of this plain struct, with an empty mask. The handler is the default, or a `Handler`, which is
    // safe to run at any time.
    unsafe {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &action, std::ptr::null_mut());
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Signals are the whole process's: one test at a time catches them.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
