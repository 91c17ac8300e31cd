//! Counters in shared memory that ranks wait for: a short look, then sleep in the kernel.
//!
//! A counter only ever goes up, and wraps. Whoever raises it makes a system call only when somebody sleeps on it.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// The longest sleep: within this time a waiter looks up for what nobody wakes it for, an abort or a deadline.
pub(super) const SLEEP_MAX: Duration = Duration::from_millis(50);

/// A counter and how many sleep on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counter<'a> {
    pub(super) value: &'a AtomicU32,
    pub(super) sleepers: &'a AtomicU32,
}

/// Whether `value` is at `target` or past it, for counters that wrap and are never 2³¹ apart.
pub(super) fn is_past(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) <= u32::MAX / 2
}

impl Counter<'_> {
    /// Whether it has come to `target`. What was written before it was raised so far is then visible here.
    #[inline]
    pub(super) fn reached(&self, target: u32) -> bool {
        is_past(self.value.load(Ordering::Acquire), target)
    }

    /// Sets it, and wakes those who sleep on it. What this thread wrote before is visible to whoever sees the new value.
    #[inline]
    pub(super) fn raise(&self, value: u32) {
        self.value.store(value, Ordering::Release);
        // Either this thread sees the sleeper, or the sleeper, who says so before it looks, sees the new value.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            wake(self.value);
        }
    }

    /// Looks for `target` until `for_at_most` has passed. Whether it came.
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

    /// Sleeps until the counter changes, at most `for_at_most`, unless it is at `target` already. May wake for nothing.
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
pub(super) fn wait(word: &AtomicU32, expected: u32, for_at_most: Duration) {
    let for_at_most = for_at_most.min(SLEEP_MAX);
    let time = libc::timespec { tv_sec: 0, tv_nsec: for_at_most.subsec_nanos() as libc::c_long };
    // SAFETY: the word lives while it is borrowed, and the kernel only reads it; the time is ours. Whatever the call
    // returns (woken, interrupted, timed out, changed already), the caller looks again.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const time);
    }
}

/// Wakes all who sleep on `word`.
#[cold]
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: the word lives while it is borrowed, and the kernel takes only its address.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_compare_across_the_wrap() {
        for (value, target, past) in [
            (0, 0, true),
            (1, 0, true),
            (0, 1, false),
            (3, u32::MAX - 2, true),
            (u32::MAX, 2, false),
            (u32::MAX, u32::MAX, true),
        ] {
            assert_eq!(is_past(value, target), past, "{value} {target}");
        }
    }

    #[test]
    fn a_sleeper_is_woken_long_before_its_sleep_is_over() {
        let (value, sleepers) = (AtomicU32::new(u32::MAX), AtomicU32::new(0));
        let counter = Counter { value: &value, sleepers: &sleepers };
        let slept = std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                let started = Instant::now();
                let mut sleeps = 0;
                while !counter.reached(0) {
                    counter.sleep(0, SLEEP_MAX);
                    sleeps += 1;
                }
                (started.elapsed(), sleeps)
            });
            while sleepers.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(2));
            counter.raise(0);
            sleeper.join().unwrap()
        });
        assert!(slept.0 < Duration::from_secs(5) && slept.1 < 10, "{slept:?}");
        assert_eq!(sleepers.into_inner(), 0);
    }

    #[test]
    fn a_sleep_ends_by_itself() {
        let (value, sleepers) = (AtomicU32::new(0), AtomicU32::new(0));
        let counter = Counter { value: &value, sleepers: &sleepers };
        let started = Instant::now();
        counter.sleep(1, Duration::from_secs(3600));
        assert!(started.elapsed() < Duration::from_secs(5));
        assert!(!counter.spin(1, Duration::from_micros(5)));
    }
}
