//! Signs of progress of this process. Work that may take long beats regularly, so that waiting
//! ranks can tell a slow rank from one that is stuck. All orders of memory are relaxed: a beat says
//! only that time was not lost, and guards no other memory.

use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::named;
use crate::panics::{read, write};

named! {
    /// What work is being done, for messages.
    pub enum Work {
        /// Starting.
        Starts = "starts",
        /// Reading rows or labels.
        ReadsData = "reads data",
        /// Converting files into the cache.
        ConvertsData = "converts data",
        /// Reading a checkpoint.
        ReadsCheckpoint = "reads a checkpoint",
        /// Writing files.
        Writes = "writes files",
        /// Steps and evaluations.
        Computes = "computes",
    }
}

/// Two counters of a process. Each is in the upper 56 bits of its word; the kind of the last work
/// is in the lower ones.
#[derive(Clone, Copy, Debug)]
pub struct Beats<'a> {
    /// Work of the process.
    pub own: &'a AtomicU64,
    /// Progress of other ranks that it has seen while it waited for them.
    pub seen: &'a AtomicU64,
}

static OWN: AtomicU64 = AtomicU64::new(0);
static SEEN: AtomicU64 = AtomicU64::new(0);
static COUNTED: RwLock<Option<Box<dyn HasBeats>>> = RwLock::new(None);

/// What has the counters of a process.
pub trait HasBeats: Send + Sync {
    /// The counters.
    fn beats(&self) -> Beats<'_>;
}

/// Calls `body` with the counters of this process.
fn with_beats<R>(body: impl FnOnce(Beats<'_>) -> R) -> R {
    let counted = read(&COUNTED);
    let (own, seen) = (&OWN, &SEEN);
    body((counted.as_ref()).map_or(Beats { own, seen }, |counted| counted.beats()))
}

/// Counts in `counted` from now on, where other processes can read.
pub fn share(counted: impl HasBeats + 'static) {
    *write(&COUNTED) = Some(Box::new(counted));
}

/// Some work is done.
#[inline]
pub fn beat(work: Work) {
    with_beats(|beats| count(beats.own, work as u64));
}

/// Another rank, for which this one waits, has made progress.
pub fn see() {
    with_beats(|beats| count(beats.seen, 0));
}

fn count(word: &AtomicU64, kind: u64) {
    // Threads that count at the same time may lose a beat: any change is progress.
    let beats = (word.load(Ordering::Relaxed) >> 8).wrapping_add(1);
    word.store(beats << 8 | kind, Ordering::Relaxed);
}

/// A number that changes with each beat of this process and each progress that it has seen.
pub fn total() -> u64 {
    with_beats(|beats| beats.total())
}

impl Beats<'_> {
    /// A number that changes with each beat, whether own or seen.
    pub fn total(&self) -> u64 {
        let [own, seen] = [self.own, self.seen].map(|word| word.load(Ordering::Relaxed) >> 8);
        own.wrapping_add(seen)
    }

    /// The last work; None before the first.
    pub fn work(&self) -> Option<Work> {
        let word = self.own.load(Ordering::Relaxed);
        let work = Work::ALL.get((word & 0xff) as usize);
        work.filter(|_| word >> 8 > 0).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_beat_changes_the_total_and_the_last_work_is_known() {
        let [own, seen] = [AtomicU64::new(0), AtomicU64::new(0)];
        let (own, seen) = (&own, &seen);
        let beats = Beats { own, seen };
        assert_eq!((beats.total(), beats.work()), (0, None));
        count(own, Work::ConvertsData as u64);
        assert_eq!((beats.total(), beats.work()), (1, Some(Work::ConvertsData)));
        count(seen, 0);
        assert_eq!((beats.total(), beats.work()), (2, Some(Work::ConvertsData)));
    }
}
