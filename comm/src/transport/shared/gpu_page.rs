//! What a rank shows the other ranks of its host about its GPU on one channel: the device's marks
//! of the group's calls, and the names of those calls. A rank's watch copies the marks here
//! (`nccl/watch.rs`) so that the watches of other ranks can compare.
//!
//! All of it is atomic words, which may be read at any time. The key of a name is cleared while the
//! name is written, and checked before and after it is read.
//!
//! Orders of memory. Names are as in `activity.rs`: the cleared key, a release fence, the words,
//! the key as a release; the reader acquires the key, reads, and has an acquire fence before it
//! checks the key again. If a key goes and comes back during one read, words of another name may be
//! among them: only the text of an error suffers. The ring is written before the lanes' words
//! (releases), and read after them (acquires): whoever sees the number of a call sees the ring at
//! least up to it. Each word of the ring has the call's number, so words of two calls do not mix.
//! The two words of a lane may be of different moments; the watch acts on what stays the same for a
//! time. `joining` and `stopped` are single words.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use ddp_kernels::progress::{RING, ReportedWork, SPARSE, STRIDE};

use super::activity::cut;
use super::board::Board;
use super::layout::{CHANNELS, GPU_PAGE_BYTES};

/// The number of lanes of calls.
pub(crate) const LANES: usize = 2;
/// The lane of collectives, which all ranks make in one order.
pub(crate) const COLLECTIVES: usize = 0;
/// The lane of sends and receives.
pub(crate) const PAIRS: usize = 1;

/// The sign of a rank that has joined the group.
pub(crate) const JOINED: u64 = u64::MAX;

/// Offsets in words: the sign of a rank that is joining the group; whether its GPU updates nothing
/// any more; the lanes; the ring of the last
/// collectives and of every `STRIDE`th; the names.
const JOINING_AT: usize = 0;
const STOPPED_AT: usize = 1;
const LANES_AT: usize = 8;
const LANE_WORDS: usize = 2;
const RING_AT: usize = 16;
const RING_WORDS: usize = 3;
const NAMES_AT: usize = 512;
const NAME_WORDS: usize = 32;
/// A name: its key, its peer and length, then the text.
const TEXT_AT: usize = 2;
const TEXT_BYTES_MAX: usize = 8 * (NAME_WORDS - TEXT_AT);
/// How many names there is room for. Further names replace others.
const NAMES: usize = 256;
/// In how many slots a name may be.
const PROBES: usize = 8;
const _: () = assert!(
    LANES_AT + LANES * LANE_WORDS <= RING_AT && RING_AT + (RING + SPARSE) * RING_WORDS <= NAMES_AT
);
const _: () = assert!(8 * (NAMES_AT + NAMES * NAME_WORDS) <= GPU_PAGE_BYTES);

/// The device's marks of one lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LaneMarks {
    /// The number of the last call that has begun on the device, and its key; 0 for none.
    pub(crate) begun: u32,
    pub(crate) call: u32,
    /// The number of the last that has ended.
    pub(crate) ended: u32,
}

impl LaneMarks {
    /// The number of the call that the device is in, if it is in one.
    pub(crate) fn current(&self) -> Option<u64> {
        (self.begun != self.ended).then_some(u64::from(self.begun))
    }
}

/// The marks of a rank's device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) lanes: [LaneMarks; LANES],
    /// The last collectives, and some older ones, in no order.
    pub(crate) ring: Vec<ReportedWork>,
}

/// The page of every rank of this host on one channel.
#[derive(Clone, Debug)]
pub(crate) struct GpuPages {
    board: Board,
    channel: usize,
}

impl GpuPages {
    pub(crate) fn new(board: &Board, channel: usize) -> GpuPages {
        GpuPages {
            board: board.clone(),
            channel,
        }
    }

    fn word(&self, local_rank: usize, at: usize) -> &AtomicU64 {
        self.board.gpu_word(self.channel, local_rank, at)
    }

    pub(crate) fn channel(&self) -> usize {
        self.channel
    }

    /// Shows that a rank waits for the others to join the group: called again and again.
    pub(crate) fn show_joining(&self, local_rank: usize) {
        self.word(local_rank, JOINING_AT)
            .fetch_add(1, Ordering::Release);
    }

    /// Records that NCCL has connected a rank.
    pub(crate) fn set_joined(&self, local_rank: usize) {
        self.word(local_rank, JOINING_AT)
            .store(JOINED, Ordering::Release);
    }

    /// A number that changes while a rank waits for the others to join; then `JOINED`.
    pub(crate) fn joining(&self, local_rank: usize) -> u64 {
        self.word(local_rank, JOINING_AT).load(Ordering::Acquire)
    }

    /// Records that the GPU of a rank uses no result of this group any more.
    pub(crate) fn set_stopped(&self, local_rank: usize) {
        self.word(local_rank, STOPPED_AT)
            .store(1, Ordering::Release);
    }

    pub(crate) fn has_stopped(&self, local_rank: usize) -> bool {
        self.word(local_rank, STOPPED_AT).load(Ordering::Acquire) != 0
    }

    /// Shows a rank's marks to the other ranks.
    pub(crate) fn publish(&self, local_rank: usize, seen: &Marks) {
        // The last call is published after the calls before it.
        for work in &seen.ring {
            let number = work.number as usize;
            self.publish_work(local_rank, number % RING, work);
            if number.is_multiple_of(STRIDE) {
                self.publish_work(local_rank, RING + number / STRIDE % SPARSE, work);
            }
        }
        fence(Ordering::Release);
        for (index, lane) in seen.lanes.iter().enumerate() {
            let at = LANES_AT + index * LANE_WORDS;
            let begun = u64::from(lane.begun) << 32 | u64::from(lane.call);
            self.word(local_rank, at + 1)
                .store(u64::from(lane.ended), Ordering::Release);
            self.word(local_rank, at).store(begun, Ordering::Release);
        }
    }

    fn publish_work(&self, local_rank: usize, slot: usize, work: &ReportedWork) {
        let newest = |word: u64| (word >> 32) as u32;
        let at = RING_AT + slot * RING_WORDS;
        // A mark of the sparse ring is older than what this slot may have.
        if newest(self.word(local_rank, at).load(Ordering::Relaxed)).wrapping_sub(work.number)
            as i32
            > 0
        {
            return;
        }
        for (index, word) in [work.call, work.chain, work.place].into_iter().enumerate() {
            let word = u64::from(work.number) << 32 | u64::from(word);
            self.word(local_rank, at + index)
                .store(word, Ordering::Relaxed);
        }
    }

    /// The marks that a rank published last.
    pub(crate) fn read(&self, local_rank: usize) -> Marks {
        let lane = |index: usize| {
            let at = LANES_AT + index * LANE_WORDS;
            let begun = self.word(local_rank, at).load(Ordering::Acquire);
            let ended = self.word(local_rank, at + 1).load(Ordering::Acquire) as u32;
            LaneMarks {
                begun: (begun >> 32) as u32,
                call: begun as u32,
                ended,
            }
        };
        let slot = |slot: usize| {
            let start = RING_AT + slot * RING_WORDS;
            let words = [0, 1, 2].map(|word| self.word(local_rank, start + word));
            ReportedWork::of_words(words.map(|word| word.load(Ordering::Relaxed)))
        };
        Marks {
            lanes: std::array::from_fn(lane),
            ring: (0..RING + SPARSE).filter_map(slot).collect(),
        }
    }

    /// Whether the call `key` has a name here. Later names may have replaced it.
    pub(crate) fn is_named(&self, local_rank: usize, key: u32) -> bool {
        let marked = marked(key);
        probes(key).any(|place| {
            self.word(local_rank, NAMES_AT + place * NAME_WORDS)
                .load(Ordering::Relaxed)
                == marked
        })
    }

    /// Records the name of the call `key`, and the one rank that it is with, if there is one. One
    /// thread a rank at a time.
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
        // No name while it is written.
        self.word(local_rank, start).store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        let about =
            (text.len() as u64) << 32 | peer.map_or(u64::from(u32::MAX), |peer| peer as u64);
        self.word(local_rank, start + 1)
            .store(about, Ordering::Relaxed);
        for (index, part) in text.as_bytes().chunks(8).enumerate() {
            let mut bytes = [0; 8];
            bytes[..part.len()].copy_from_slice(part);
            self.word(local_rank, start + TEXT_AT + index)
                .store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        self.word(local_rank, start)
            .store(marked, Ordering::Release);
    }

    /// A rank's name for the call `key`, and the one rank that it is with.
    pub(crate) fn name_of(&self, local_rank: usize, key: u32) -> Option<(String, Option<usize>)> {
        let marked = marked(key);
        for place in probes(key) {
            let start = NAMES_AT + place * NAME_WORDS;
            if self.word(local_rank, start).load(Ordering::Acquire) != marked {
                continue;
            }
            let about = self.word(local_rank, start + 1).load(Ordering::Relaxed);
            let words = (0..NAME_WORDS - TEXT_AT)
                .map(|index| self.word(local_rank, start + TEXT_AT + index));
            let bytes: Vec<u8> = words
                .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
                .collect();
            fence(Ordering::Acquire);
            if self.word(local_rank, start).load(Ordering::Relaxed) == marked {
                let length = ((about >> 32) as usize).min(TEXT_BYTES_MAX);
                let peer = Some(about as u32)
                    .filter(|&peer| peer != u32::MAX)
                    .map(|peer| peer as usize);
                return Some((String::from_utf8_lossy(&bytes[..length]).into_owned(), peer));
            }
        }
        None
    }
}

/// Whether the device of a rank is in a call of any channel.
pub(super) fn is_in_call(board: &Board, local_rank: usize) -> bool {
    let pages = (0..CHANNELS).map(|channel| GpuPages::new(board, channel));
    let mut lanes = pages.flat_map(|page| page.read(local_rank).lanes);
    lanes.any(|lane| lane.current().is_some())
}

/// A word for the key that is never 0.
fn marked(key: u32) -> u64 {
    1 << 32 | u64::from(key)
}

/// The slots in which the name of a call may be.
fn probes(key: u32) -> std::ops::Range<usize> {
    let first = key as usize % (NAMES / PROBES) * PROBES;
    first..first + PROBES
}

#[cfg(test)]
mod tests;
