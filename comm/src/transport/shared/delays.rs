//! Random delays for ranks, from a seed: tests use them to make ranks arrive in every order. The
//! atomics are relaxed, as they guard no other memory.

use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(test)]
use std::sync::{Mutex, mpsc::Receiver};
use std::time::Duration;

/// The longest pause.
const PAUSE_US_MAX: u64 = 120;

/// Pauses of one rank on one channel.
#[derive(Debug)]
pub(crate) struct Delays {
    state: AtomicU64,
    /// How many points to pass, and what to wait for at the next: the end of the sender.
    #[cfg(test)]
    stop: Option<(AtomicU64, Mutex<Receiver<()>>)>,
}

impl Delays {
    /// Pauses that depend only on the seed, the rank and the channel.
    pub(crate) fn new(seed: u64, rank: usize, channel: usize) -> Delays {
        Delays {
            state: AtomicU64::new(seed ^ mix((rank as u64) << 8 | channel as u64)),
            #[cfg(test)]
            stop: None,
        }
    }

    /// No pauses except one after `places` points, until the sender of `end` is dropped.
    #[cfg(test)]
    pub(super) fn stopping(places: u64, end: Receiver<()>) -> Delays {
        Delays {
            state: AtomicU64::new(0),
            stop: Some((AtomicU64::new(places), Mutex::new(end))),
        }
    }

    /// Mostly does nothing; sometimes yields, spins or sleeps.
    pub(super) fn pause(&self) {
        #[cfg(test)]
        if let Some((places, end)) = &self.stop {
            if places.fetch_sub(1, Ordering::Relaxed) == 0 {
                _ = end.lock().expect("one thread waits").recv();
            }
            return;
        }
        let drawn = mix(self
            .state
            .fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed));
        match drawn % 8 {
            0 => std::thread::sleep(Duration::from_micros((drawn >> 8) % PAUSE_US_MAX)),
            1 | 2 => std::thread::yield_now(),
            3 => (0..(drawn >> 8) % 512).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_pauses_and_ranks_differ() {
        let state = |seed, rank, channel| Delays::new(seed, rank, channel).state.into_inner();
        // A seed that a failure names gives the same pauses in every process and version.
        assert_eq!(state(7, 1, 2), 0xa791_4009_ec98_240d);
        assert!(
            state(7, 1, 2) != state(7, 2, 2)
                && state(7, 1, 2) != state(7, 1, 3)
                && state(7, 1, 2) != state(8, 1, 2)
        );
    }
}
