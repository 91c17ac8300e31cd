//! What a rank tells the others of its GPU on one channel: how far its stream has come in the group's calls, and what those calls are
//! called. Its watch copies here what the device writes (`nccl/watch.rs`), so that the watches of other ranks can compare.
//!
//! All of it is atomic words, which may be read at any time. A name of a call carries its key on both sides of the writing.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use ddp_kernels::progress::{RING, SPARSE, STRIDE, Told};

use super::board::{Board, cut};
use super::layout::GPU_PAGE_BYTES;

/// Lanes of calls: collectives, which all ranks make in one order, and calls between pairs.
pub(crate) const LANES: usize = 2;
/// The lane of collectives.
pub(crate) const COLLECTIVES: usize = 0;
/// The lane of sends and receives.
pub(crate) const PAIRS: usize = 1;

/// In words of the page: how far this rank is with joining the group, and leaving it; the lanes; the ring of the collectives, and that of every
/// so many of them; the names.
const STAGE_AT: usize = 0;
const LANES_AT: usize = 8;
const LANE_WORDS: usize = 2;
const RING_AT: usize = 16;
const RING_WORDS: usize = 3;
const NAMES_AT: usize = 512;
const NAME_WORDS: usize = 32;
/// Of a name: key, peers and length in front, then the text.
const TEXT_AT: usize = 2;
const TEXT_BYTES_MAX: usize = 8 * (NAME_WORDS - TEXT_AT);
/// How many names there is room for. Beyond it the ones met first are forgotten.
const NAMES: usize = 256;
/// In how many places a name may lie.
const PROBES: usize = 8;
const _: () = assert!(LANES_AT + LANES * LANE_WORDS <= RING_AT && RING_AT + (RING + SPARSE) * RING_WORDS <= NAMES_AT);
const _: () = assert!(8 * (NAMES_AT + NAMES * NAME_WORDS) <= GPU_PAGE_BYTES);

/// How far one lane is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lane {
    /// The number of the last call that has begun on the device, and its key; 0 for none.
    pub(crate) begun: u32,
    pub(crate) call: u32,
    /// The number of the last that has ended.
    pub(crate) ended: u32,
}

/// How far a rank is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) lanes: [Lane; LANES],
    /// The last collectives, and some from before, in no order.
    pub(crate) ring: Vec<Told>,
}

/// The page of every rank of this host on one channel.
#[derive(Clone, Debug)]
pub(crate) struct GpuPages {
    board: Board,
    channel: usize,
}

impl GpuPages {
    pub(crate) fn new(board: &Board, channel: usize) -> GpuPages {
        GpuPages { board: board.clone(), channel }
    }

    fn word(&self, local_rank: usize, at: usize) -> &AtomicU64 {
        self.board.gpu_word(self.channel, local_rank, at)
    }

    /// Says how far a rank is with joining, or leaving.
    pub(crate) fn set_stage(&self, local_rank: usize, stage: u64) {
        self.word(local_rank, STAGE_AT).store(stage, Ordering::Release);
    }

    pub(crate) fn stage(&self, local_rank: usize) -> u64 {
        self.word(local_rank, STAGE_AT).load(Ordering::Acquire)
    }

    /// Tells the others how far a rank is.
    pub(crate) fn publish(&self, local_rank: usize, seen: &Seen) {
        // What names the last call comes after what has led to it.
        for told in &seen.ring {
            let number = told.number as usize;
            self.publish_told(local_rank, number % RING, told);
            if number.is_multiple_of(STRIDE) {
                self.publish_told(local_rank, RING + number / STRIDE % SPARSE, told);
            }
        }
        fence(Ordering::Release);
        for (index, lane) in seen.lanes.iter().enumerate() {
            let at = LANES_AT + index * LANE_WORDS;
            let begun = u64::from(lane.begun) << 32 | u64::from(lane.call);
            self.word(local_rank, at + 1).store(u64::from(lane.ended), Ordering::Release);
            self.word(local_rank, at).store(begun, Ordering::Release);
        }
    }

    fn publish_told(&self, local_rank: usize, slot: usize, told: &Told) {
        let newest = |word: u64| (word >> 32) as u32;
        let at = RING_AT + slot * RING_WORDS;
        // What comes from the ring of every so many is older than what this one has there.
        if newest(self.word(local_rank, at).load(Ordering::Relaxed)).wrapping_sub(told.number) as i32 > 0 {
            return;
        }
        for (index, word) in [told.call, told.chain, told.place].into_iter().enumerate() {
            let word = u64::from(told.number) << 32 | u64::from(word);
            self.word(local_rank, at + index).store(word, Ordering::Relaxed);
        }
    }

    /// How far a rank is, as it told last.
    pub(crate) fn read(&self, local_rank: usize) -> Seen {
        let lane = |index: usize| {
            let at = LANES_AT + index * LANE_WORDS;
            let begun = self.word(local_rank, at).load(Ordering::Acquire);
            let ended = self.word(local_rank, at + 1).load(Ordering::Acquire) as u32;
            Lane { begun: (begun >> 32) as u32, call: begun as u32, ended }
        };
        let slot = |slot: usize| {
            let words =
                [0, 1, 2].map(|word| self.word(local_rank, RING_AT + slot * RING_WORDS + word).load(Ordering::Relaxed));
            let number = (words[0] >> 32) as u32;
            let whole = number != 0 && words.iter().all(|word| (word >> 32) as u32 == number);
            whole.then(|| Told { number, call: words[0] as u32, chain: words[1] as u32, place: words[2] as u32 })
        };
        Seen { lanes: std::array::from_fn(lane), ring: (0..RING + SPARSE).filter_map(slot).collect() }
    }

    /// Whether the name of the call `key` is there. It may have been forgotten for others since it was written.
    pub(crate) fn is_named(&self, local_rank: usize, key: u32) -> bool {
        let marked = marked(key);
        probes(key).any(|place| self.word(local_rank, NAMES_AT + place * NAME_WORDS).load(Ordering::Relaxed) == marked)
    }

    /// Writes down what the call `key` is called, and which rank alone it is about, if it is. One thread a rank at a time.
    pub(crate) fn name(&self, local_rank: usize, key: u32, peer: Option<usize>, text: &str) {
        if self.is_named(local_rank, key) {
            return;
        }
        let places = probes(key);
        let marked = marked(key);
        let at = |place: usize| NAMES_AT + place * NAME_WORDS;
        let taken = |place: &usize| self.word(local_rank, at(*place)).load(Ordering::Relaxed);
        let free = places.clone().find(|place| taken(place) == 0);
        let start = at(free.unwrap_or_else(|| places.start + key as usize / NAMES % PROBES));
        let text = cut(text, TEXT_BYTES_MAX);
        // Nobody's, while it is written.
        self.word(local_rank, start).store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        let about = (text.len() as u64) << 32 | peer.map_or(u64::from(u32::MAX), |peer| peer as u64);
        self.word(local_rank, start + 1).store(about, Ordering::Relaxed);
        for (index, part) in text.as_bytes().chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..part.len()].copy_from_slice(part);
            self.word(local_rank, start + TEXT_AT + index).store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        self.word(local_rank, start).store(marked, Ordering::Release);
    }

    /// What a rank calls the call `key`, and the one rank that it is about.
    pub(crate) fn called(&self, local_rank: usize, key: u32) -> Option<(String, Option<usize>)> {
        let marked = marked(key);
        for place in probes(key) {
            let start = NAMES_AT + place * NAME_WORDS;
            if self.word(local_rank, start).load(Ordering::Acquire) != marked {
                continue;
            }
            let about = self.word(local_rank, start + 1).load(Ordering::Relaxed);
            let words = (0..NAME_WORDS - TEXT_AT).map(|index| self.word(local_rank, start + TEXT_AT + index));
            let bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            fence(Ordering::Acquire);
            if self.word(local_rank, start).load(Ordering::Relaxed) == marked {
                let length = ((about >> 32) as usize).min(TEXT_BYTES_MAX);
                let peer = Some(about as u32).filter(|&peer| peer != u32::MAX).map(|peer| peer as usize);
                return Some((String::from_utf8_lossy(&bytes[..length]).into_owned(), peer));
            }
        }
        None
    }
}

/// Not 0, whatever the key.
fn marked(key: u32) -> u64 {
    1 << 32 | u64::from(key)
}

/// The places in which the name of a call may lie.
fn probes(key: u32) -> std::ops::Range<usize> {
    let first = key as usize % (NAMES / PROBES) * PROBES;
    first..first + PROBES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::Segment;

    fn pages() -> GpuPages {
        GpuPages::new(&Board::new(&Segment::in_process(2).unwrap()), 3)
    }

    #[test]
    fn what_a_rank_tells_is_read_by_the_others() {
        let pages = pages();
        assert_eq!((pages.read(1), pages.stage(1)), (Seen::default(), 0));
        let told = |number: u32| Told { number, call: 7 * number, chain: !number, place: 3 };
        let mut seen = Seen::default();
        seen.lanes[COLLECTIVES] = Lane { begun: 70, call: 490, ended: 69 };
        seen.lanes[PAIRS] = Lane { begun: u32::MAX, call: 5, ended: u32::MAX };
        seen.ring = (7..71).map(told).collect();
        pages.publish(1, &seen);
        pages.set_stage(1, 2);
        let mut read = pages.read(1);
        read.ring.sort_by_key(|told| told.number);
        assert_eq!((read, pages.stage(1)), (seen, 2));
        assert_eq!((pages.read(0), pages.stage(0)), (Seen::default(), 0));
    }

    #[test]
    fn of_what_was_long_ago_every_so_many_are_kept() {
        let pages = pages();
        let told = |number: u32| Told { number, call: number, chain: !number, place: 0 };
        let length = (STRIDE * SPARSE) as u32;
        // As the device tells it: the last ones, and those of the strides, in whatever order.
        for last in (1..3 * length).step_by(50) {
            let strides = (1..=last).rev().filter(|number| number % STRIDE as u32 == 0).take(SPARSE);
            let dense = (last.saturating_sub(RING as u32 - 1).max(1)..=last).map(told);
            pages.publish(0, &Seen { ring: strides.map(told).chain(dense).collect(), ..Seen::default() });
            let read = pages.read(0).ring;
            assert!(read.iter().all(|one| *one == told(one.number)) && read.contains(&told(last)));
            if last > length {
                // Whatever another rank was at within so many collectives has a number in common with this one.
                for other in (last - length..last - STRIDE as u32).step_by(37) {
                    let common = |one: &Told| (other..other + STRIDE as u32).contains(&one.number);
                    assert!(read.iter().any(common), "{last} {other}");
                }
            }
        }
    }

    #[test]
    fn a_ring_that_is_being_written_shows_what_is_whole() {
        let pages = pages();
        let told = Told { number: 5, call: 1, chain: 2, place: 3 };
        pages.publish(0, &Seen { ring: vec![told], ..Seen::default() });
        // The next lap has come to the first word alone.
        pages.word(0, RING_AT + 5 * RING_WORDS).store(69 << 32 | 9, Ordering::Relaxed);
        assert_eq!(pages.read(0).ring, []);
    }

    #[test]
    fn calls_have_names_and_the_newest_are_kept() {
        let pages = pages();
        assert_eq!(pages.called(0, 0), None);
        for key in [0, 1, u32::MAX] {
            pages.name(0, key, (key == 1).then_some(3), &format!("call {key}"));
        }
        assert_eq!(pages.called(0, 0), Some(("call 0".into(), None)));
        assert_eq!(pages.called(0, 1), Some(("call 1".into(), Some(3))));
        assert_eq!(pages.called(0, u32::MAX), Some((format!("call {}", u32::MAX), None)));
        assert_eq!(pages.called(1, 0), None);
        pages.name(1, 9, None, &"é".repeat(200));
        assert_eq!(pages.called(1, 9), Some(("é".repeat(TEXT_BYTES_MAX / 2), None)));
        for key in 100..10_000 {
            pages.name(1, key, None, &format!("call {key}"));
            assert!(pages.is_named(1, key) && !pages.is_named(0, key));
            assert_eq!(pages.called(1, key).unwrap().0, format!("call {key}"));
        }
    }
}
