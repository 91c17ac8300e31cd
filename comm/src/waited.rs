//! Time spent waiting, counted only while this process could run: a job that was suspended
//! (SIGSTOP) did not wait for other ranks meanwhile.

use std::time::{Duration, Instant};

use crate::error::Result;

/// How much longer than its sleep one look may take on a busy machine. The rest is not counted.
const LOOK_MAX: Duration = Duration::from_millis(50);

/// How long one wait has lasted.
#[derive(Debug)]
pub(crate) struct Waited {
    total: Duration,
    looked: Instant,
}

impl Waited {
    /// A wait that begins now.
    pub(crate) fn new() -> Waited {
        Waited {
            total: Duration::ZERO,
            looked: Instant::now(),
        }
    }

    /// How long it has lasted. `slept` is the sleep that was asked for since the last look.
    pub(crate) fn after(&mut self, slept: Duration) -> Duration {
        let now = Instant::now();
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.looked, now));
        self.count(passed, slept)
    }

    /// As if this long had passed: for tests.
    #[cfg(test)]
    pub(crate) fn pretend(&mut self, passed: Duration) {
        self.total += passed;
    }

    fn count(&mut self, passed: Duration, slept: Duration) -> Duration {
        self.total += passed.min(slept.saturating_mul(2).saturating_add(LOOK_MAX));
        self.total
    }
}

/// Sleeps that grow from 20 µs to 1 ms: a short wait ends soon, and a long one uses no core.
#[derive(Debug)]
pub(crate) struct Pause(Duration);

impl Default for Pause {
    fn default() -> Pause {
        Pause(Duration::from_micros(20))
    }
}

impl Pause {
    /// Sleeps, and returns for how long it was asked to.
    pub(crate) fn sleep(&mut self) -> Duration {
        std::thread::sleep(self.0);
        let longer = (self.0 * 3 / 2).min(Duration::from_millis(1));
        std::mem::replace(&mut self.0, longer)
    }
}

/// Asks `is_done` again and again, for at most `limit`. Whether it was.
pub(crate) fn wait_until(
    limit: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let (mut waited, mut pause, mut slept) = (Waited::new(), Pause::default(), Duration::ZERO);
    while !is_done()? {
        if waited.after(slept) >= limit {
            return Ok(false);
        }
        slept = pause.sleep();
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_in_which_the_process_was_stopped_does_not_count() {
        let (mut waited, slice) = (Waited::new(), Duration::from_millis(50));
        (0..10).for_each(|_| _ = waited.count(slice, slice));
        assert_eq!(waited.total, 10 * slice);
        let total = waited.count(Duration::from_secs(3600), slice);
        assert!(total < Duration::from_secs(1), "{total:?}");
    }

    #[test]
    fn sleeps_that_take_a_little_longer_count_in_full() {
        let mut waited = Waited::new();
        // 20 µs requested, plus the kernel's timer slack; then a core that others use too.
        let (slack, crowded) = (Duration::from_micros(75), Duration::from_millis(40));
        assert_eq!(waited.count(slack, Duration::from_micros(20)), slack);
        assert_eq!(
            waited.count(crowded, Duration::from_millis(1)),
            crowded + slack
        );
    }

    #[test]
    fn a_wait_counts_elapsed_time() {
        let started = Instant::now();
        let mut waited = Waited::new();
        // Sleep: it is the time that counts.
        std::thread::sleep(Duration::from_millis(20));
        let total = waited.after(Duration::from_millis(20));
        assert!(total >= Duration::from_millis(20) && total <= started.elapsed());
    }
}
