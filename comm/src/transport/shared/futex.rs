//! Counters in shared memory that ranks wait for: a short spin, then a sleep in the kernel.
//!
//! A counter only goes up, and wraps. Raising it makes a system call only if a thread sleeps on it.
//!
//! Orders of memory. Raising is a release and `reached` an acquire: what a rank wrote before it
//! raised a counter is visible to a rank that sees the new value. All data in shared memory rely on
//! this alone. A rank that raises stores the value and then reads `sleepers`; one that goes to
//! sleep counts itself in `sleepers` and then reads the value. The fences of SeqCst between the two
//! steps let at least one see the other. The kernel compares the value once more under its lock
//! before a thread sleeps, so a wake-up between that look and the sleep is not lost either. And no
//! sleep is longer than `SLEEP_MAX`.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// The longest sleep. After it a waiter checks for an abort and for its deadline.
pub(super) const SLEEP_MAX: Duration = Duration::from_millis(50);

/// A counter, and how many threads sleep on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counter<'a> {
    pub(super) value: &'a AtomicU32,
    pub(super) sleepers: &'a AtomicU32,
}

/// Whether `value` is `target` or past it, for counters that wrap and are never 2³¹ apart.
pub(super) fn is_past(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) <= u32::MAX / 2
}

impl Counter<'_> {
    /// Whether it is `target` or past it. What was written before it was raised is then visible.
    #[inline]
    pub(super) fn reached(&self, target: u32) -> bool {
        is_past(self.value.load(Ordering::Acquire), target)
    }

    /// Sets it, and wakes the threads that sleep on it. What this thread wrote before is visible to
    /// threads that see the new value.
    #[inline]
    pub(super) fn raise(&self, value: u32) {
        self.value.store(value, Ordering::Release);
        // Either this thread sees the sleeper, or the sleeper, which registers before it looks,
        // sees the new value.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            wake(self.value);
        }
    }

    /// Spins until it is `target`, at most `for_at_most`. Whether it is.
    pub(super) fn spin(&self, target: u32, for_at_most: Duration) -> bool {
        let started = Instant::now();
        loop {
            for _ in 0..8 {
                if self.reached(target) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if started.elapsed() >= for_at_most {
                return false;
            }
        }
    }

    /// Sleeps until the counter changes, at most `for_at_most`, unless it is `target` already. May
    /// wake early.
    pub(super) fn sleep(&self, target: u32, for_at_most: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let value = self.value.load(Ordering::Acquire);
        if !is_past(value, target) {
            wait(self.value, value, for_at_most);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sleeps while `word` is `expected`, until a `wake`, a signal, or `for_at_most` has passed.
pub(crate) fn wait(word: &AtomicU32, expected: u32, for_at_most: Duration) {
    let for_at_most = for_at_most.min(SLEEP_MAX);
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: for_at_most.subsec_nanos() as libc::c_long,
    };
    // SAFETY: the word lives while it is borrowed, and the kernel only reads it; the time is ours.
    // Whatever the call returns (woken, interrupted, timed out, changed), the caller looks again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const time,
        );
    }
}

/// Wakes all threads that sleep on `word`.
#[cold]
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: the word lives while it is borrowed, and the kernel takes only its address.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}

#[cfg(test)]
mod tests;
