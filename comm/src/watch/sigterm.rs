//! SIGTERM, which `mpirun` sends to all other ranks when one has died: a rank that ended at once would not hear why, nor say
//! who died, and its own death would look like another failure. So the watch sees why it came before it does what SIGTERM
//! does by itself.
//!
//! Who wants SIGTERM for something else sets a handler, before or after: then it is left alone.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// What the handler writes to; -1 while nobody listens.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// SIGTERM, caught. Let go when dropped.
#[derive(Debug)]
pub(super) struct Caught {
    /// Readable once the signal has come.
    pub(super) wake: OwnedFd,
}

impl Caught {
    /// Catches SIGTERM where nobody else does.
    pub(super) fn new() -> Option<Caught> {
        if handler()? != libc::SIG_DFL {
            return None;
        }
        // SAFETY: two numbers.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        // SAFETY: where it is one, the kernel has just given this descriptor to us alone.
        let wake = (wake >= 0).then(|| unsafe { OwnedFd::from_raw_fd(wake) })?;
        WAKE.store(wake.as_raw_fd(), Ordering::SeqCst);
        set_handler(ours());
        Some(Caught { wake })
    }

    /// Nobody has failed: the signal was meant. Ends this process as SIGTERM does, unless somebody else handles it by now.
    pub(super) fn obey(self) {
        let is_ours = handler() == Some(ours());
        drop(self);
        if is_ours {
            // SAFETY: sends this process a signal.
            unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
        }
    }
}

impl Drop for Caught {
    fn drop(&mut self) {
        if handler() == Some(ours()) {
            set_handler(libc::SIG_DFL);
        }
        WAKE.store(-1, Ordering::SeqCst);
    }
}

fn ours() -> libc::sighandler_t {
    on_sigterm as extern "C" fn(c_int) as usize
}

/// What happens on SIGTERM now.
fn handler() -> Option<libc::sighandler_t> {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks only. All zeros is a value of this plain struct, whether the call writes it or not.
    unsafe {
        let asked = libc::sigaction(libc::SIGTERM, std::ptr::null(), now.as_mut_ptr()) == 0;
        asked.then(|| now.assume_init().sa_sigaction)
    }
}

fn set_handler(handler: libc::sighandler_t) {
    // SAFETY: all zeros is a value of this plain struct, with an empty mask. The handler is the default, or `on_sigterm`,
    // which may run at any time on any thread: it loads an atomic, and calls only what is safe in a handler.
    unsafe {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(libc::SIGTERM, &action, std::ptr::null_mut());
    }
}

extern "C" fn on_sigterm(_: c_int) {
    let (wake, one) = (WAKE.load(Ordering::SeqCst), 1u64.to_ne_bytes());
    // SAFETY: write is safe in a handler and reads the eight bytes that are there; -1 is an error without effect. The code
    // that was interrupted keeps its errno.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(wake, one.as_ptr().cast(), one.len());
        *errno = before;
    }
}
