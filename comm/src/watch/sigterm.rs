//! SIGTERM, which `mpirun` sends to all other ranks when one has died: a rank that ended at once would not hear why, nor say
//! who died, and its own death would look like another failure. So the watch sees why it came before it does what SIGTERM
//! does by itself.
//!
//! A program that stops when it is asked to (`stop.rs`) is told at once, and the watch does nothing but look for one who has died. Who wants
//! SIGTERM for something else sets a handler, before or after: then it is left alone.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::{signals, stop};

/// What the handler writes to; -1 before it was first made. Never closed: a handler that has read this number may be about
/// to write, and must not write into what another thread opens under the same number.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// SIGTERM, caught. Let go when dropped. One at a time: who finds our own handler in place leaves it to the other.
#[derive(Debug)]
pub(super) struct Caught {
    /// Readable once the signal has come.
    pub(super) wake: BorrowedFd<'static>,
}

impl Caught {
    /// Catches SIGTERM where nobody else does.
    pub(super) fn new() -> Option<Caught> {
        if signals::current(libc::SIGTERM)? != libc::SIG_DFL {
            return None;
        }
        let wake = wake()?;
        let caught = Caught { wake };
        // What came before is over.
        caught.forget();
        signals::catch(libc::SIGTERM, on_sigterm);
        Some(caught)
    }

    /// What has come is dealt with: waits for the next.
    pub(super) fn forget(&self) {
        let mut count = [0u8; 8];
        // SAFETY: reads at most the eight bytes that are there; does not wait.
        unsafe { libc::read(self.wake.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// Nobody has failed: the signal was meant. Ends this process as SIGTERM does, unless somebody else handles it by now.
    pub(super) fn obey(self) {
        let is_ours = signals::current(libc::SIGTERM) == ours();
        drop(self);
        if is_ours {
            // SAFETY: sends this process a signal.
            unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
        }
    }
}

impl Drop for Caught {
    fn drop(&mut self) {
        if signals::current(libc::SIGTERM) == ours() {
            signals::let_go(libc::SIGTERM);
        }
    }
}

/// The descriptor that the handler writes to, made at the first call.
fn wake() -> Option<BorrowedFd<'static>> {
    let mut wake = WAKE.load(Ordering::SeqCst);
    if wake < 0 {
        // SAFETY: two numbers.
        let made = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if made < 0 {
            return None;
        }
        wake = match WAKE.compare_exchange(-1, made, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => made,
            // Another thread was first. This one nobody knows of.
            Err(first) => {
                // SAFETY: a descriptor that the kernel has just given to this call alone.
                unsafe { libc::close(made) };
                first
            }
        };
    }
    // SAFETY: a descriptor of ours, which nobody ever closes.
    Some(unsafe { BorrowedFd::borrow_raw(wake) })
}

fn ours() -> Option<libc::sighandler_t> {
    Some(signals::address(on_sigterm))
}

extern "C" fn on_sigterm(signal: c_int) {
    // A program that stops when it is asked to hears of it at once: if a rank has died, it does not come far.
    stop::note(signal);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_that_runs_late_writes_into_nobodys_file() {
        let _alone = signals::testing::alone();
        let first = Caught::new().expect("nobody else catches it here");
        let descriptor = first.wake.as_raw_fd();
        assert!(Caught::new().is_none());
        drop(first);
        // What is opened now does not get the number that a late handler knows.
        let opened = std::fs::File::open("/dev/null").unwrap();
        assert!(opened.as_raw_fd() != descriptor && WAKE.load(Ordering::SeqCst) == descriptor);
        on_sigterm(libc::SIGTERM);
        // And what came late is not taken for a new signal.
        let second = Caught::new().expect("the first has let go");
        let is_readable = super::super::ready(&[second.wake.as_raw_fd()], std::time::Duration::ZERO)[0];
        assert!(second.wake.as_raw_fd() == descriptor && !is_readable);
    }
}
