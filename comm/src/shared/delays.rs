//! Ranks that dawdle at random, from a seed: for tests that want every order in which ranks can come to a place.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest pause.
const PAUSE_US_MAX: u64 = 120;

/// Pauses of one rank on one channel.
#[derive(Debug)]
pub(crate) struct Delays {
    state: AtomicU64,
}

impl Delays {
    /// Pauses that follow from the seed, the rank and the channel alone.
    pub(crate) fn new(seed: u64, rank: usize, channel: usize) -> Delays {
        Delays { state: AtomicU64::new(seed ^ mix((rank as u64) << 8 | channel as u64)) }
    }

    /// Mostly goes on; sometimes lets others run, sometimes sleeps.
    pub(super) fn pause(&self) {
        let drawn = mix(self.state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed));
        match drawn % 8 {
            0 => std::thread::sleep(Duration::from_micros((drawn >> 8) % PAUSE_US_MAX)),
            1 | 2 => std::thread::yield_now(),
            3 => (0..(drawn >> 8) % 512).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
    }
}

/// The finaliser of splitmix64: neighbours become unlike.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
