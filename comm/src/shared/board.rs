//! The job's page at the start of a segment: who is here, what each rank is doing, and why the job ends, if it does.
//!
//! The first cause wins. Everyone who has one writes it into a slot of its own and then tries to publish the slot: a
//! process that dies while it writes leaves a slot unused, and cannot hold up the others.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::activity::{Activity, RECORD_BYTES, Record};
use super::futex;
use super::layout::{CAUSE_BYTES, CAUSES, CHANNELS, GPU_PAGE_BYTES, LINE_BYTES};
use super::segment::Segment;
use crate::collective::Call;
use crate::error::Cause;

/// 0, or 1 + the slot of the first cause. Those who wait for an abort sleep on it.
const PUBLISHED_AT: usize = 1024;
/// How many slots for causes are taken.
const CAUSES_TAKEN_AT: usize = PUBLISHED_AT + LINE_BYTES;

/// In a slot: rank, exit code, length of host, length of text, then both texts.
const HOST_BYTES_MAX: usize = 256;
const TEXT_BYTES_MAX: usize = 4096;
const CAUSE_HEADER_BYTES: usize = 32;
const _: () = assert!(CAUSE_HEADER_BYTES + HOST_BYTES_MAX + TEXT_BYTES_MAX <= CAUSE_BYTES);

/// In a rank's place: its process, whether it has left, the cores it may use, where its threads sleep, and its calls.
const PID_AT: usize = 0;
const LEFT_AT: usize = 4;
const CORES_AT: usize = 64;
const CORES_WORDS: usize = 16;
const ASLEEP_AT: usize = 256;
const RECORDS_AT: usize = 1024;
const _: () = assert!(CORES_AT + 8 * CORES_WORDS <= ASLEEP_AT && ASLEEP_AT + 8 * CHANNELS <= RECORDS_AT);
const _: () = assert!(RECORDS_AT + CHANNELS * RECORD_BYTES <= 4096);

/// How long to wait for a slot when all are being written by ranks that fail at the same time.
const SLOT_WAIT: Duration = Duration::from_millis(100);

/// What all ranks of a host know of each other. A handle: clones are the same board.
#[derive(Clone, Debug)]
pub struct Board {
    segment: Segment,
}

impl Board {
    /// The board of a segment.
    pub fn new(segment: &Segment) -> Board {
        Board { segment: segment.clone() }
    }

    fn u32_at(&self, local_rank: usize, at: usize) -> &AtomicU32 {
        self.segment.u32_at(self.place(local_rank) + at)
    }

    fn place(&self, local_rank: usize) -> usize {
        assert!(local_rank < self.segment.local_size(), "local rank {local_rank} of {}", self.segment.local_size());
        self.segment.layout().place(local_rank)
    }

    fn published(&self) -> &AtomicU32 {
        self.segment.u32_at(PUBLISHED_AT)
    }

    /// Ends the job: writes down why, unless another cause came first, and wakes everybody who waits. Whether this was
    /// the first. A text beyond 4 KiB is cut.
    pub fn fail(&self, cause: &Cause) -> bool {
        let started = Instant::now();
        let slot = loop {
            if self.is_aborted() {
                return false;
            }
            let slot = self.segment.u32_at(CAUSES_TAKEN_AT).fetch_add(1, Ordering::Relaxed) as usize;
            if slot < CAUSES {
                break slot;
            }
            // So many fail at once: one of them is about to publish.
            self.segment.u32_at(CAUSES_TAKEN_AT).fetch_sub(1, Ordering::Relaxed);
            if started.elapsed() > SLOT_WAIT {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        self.write_cause(slot, cause);
        let first = self.published().compare_exchange(0, slot as u32 + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.wake_all();
        first
    }

    fn write_cause(&self, slot: usize, cause: &Cause) {
        let at = self.segment.layout().cause(slot);
        let (host, text) = (cut(&cause.host, HOST_BYTES_MAX), cut(&cause.text, TEXT_BYTES_MAX));
        let header = [cause.rank as u64, u64::from(cause.exit_code), host.len() as u64, text.len() as u64];
        for (index, value) in header.into_iter().enumerate() {
            self.segment.u64_at(at + 8 * index).store(value, Ordering::Relaxed);
        }
        let texts = at + CAUSE_HEADER_BYTES;
        for (place, text) in [(texts, host), (texts + HOST_BYTES_MAX, text)] {
            let target = self.segment.pointer(place, text.len());
            // SAFETY: `pointer` checked the bounds. `fetch_add` gave this slot to this call alone, and it is read only
            // after it is published (release, acquire), after which nobody writes it.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), target, text.len()) };
        }
    }

    /// Why the job ends, if it does.
    pub fn cause(&self) -> Option<Cause> {
        let slot = (self.published().load(Ordering::Acquire) as usize).checked_sub(1)?;
        let at = self.segment.layout().cause(slot.min(CAUSES - 1));
        let word = |index: usize| self.segment.u64_at(at + 8 * index).load(Ordering::Relaxed);
        let text = |place: usize, bytes: u64, bytes_max: usize| {
            let mut text = vec![0u8; (bytes as usize).min(bytes_max)];
            let source = self.segment.pointer(place, text.len());
            // SAFETY: `pointer` checked the bounds, the vector is ours; a published slot is not written any more.
            unsafe { std::ptr::copy_nonoverlapping(source, text.as_mut_ptr(), text.len()) };
            String::from_utf8_lossy(&text).into_owned()
        };
        let texts = at + CAUSE_HEADER_BYTES;
        Some(Cause {
            rank: word(0) as usize,
            host: text(texts, word(2), HOST_BYTES_MAX),
            exit_code: word(1) as u8,
            text: text(texts + HOST_BYTES_MAX, word(3), TEXT_BYTES_MAX),
        })
    }

    /// Whether the job ends. Costs one load.
    #[inline]
    pub fn is_aborted(&self) -> bool {
        self.published().load(Ordering::Acquire) != 0
    }

    /// Sleeps until the job ends, or `timeout` has passed.
    pub fn wait_for_abort(&self, timeout: Duration) -> Option<Cause> {
        let started = Instant::now();
        while !self.is_aborted() {
            let left = timeout.checked_sub(started.elapsed()).filter(|left| !left.is_zero())?;
            futex::wait(self.published(), 0, left);
        }
        self.cause()
    }

    /// Wakes those who wait for an abort, and every rank that sleeps on a counter.
    fn wake_all(&self) {
        futex::wake(self.published());
        for local_rank in 0..self.segment.local_size() {
            for channel in 0..CHANNELS {
                let at = self.asleep(local_rank, channel).load(Ordering::SeqCst) as usize;
                // Another process wrote this: it is only used where it can do no harm.
                if at != 0 && at.is_multiple_of(4) && at < self.segment.layout().bytes() {
                    futex::wake(self.segment.u32_at(at));
                }
            }
        }
    }

    /// Where the thread that uses `channel` for a rank sleeps: the place of a counter, or 0.
    pub(super) fn asleep(&self, local_rank: usize, channel: usize) -> &AtomicU64 {
        assert!(channel < CHANNELS);
        self.segment.u64_at(self.place(local_rank) + ASLEEP_AT + 8 * channel)
    }

    /// Tells the others which process a rank is.
    pub fn set_pid(&self, local_rank: usize, pid: u32) {
        self.u32_at(local_rank, PID_AT).store(pid, Ordering::Release);
    }

    /// The process of a rank, once it has said so.
    pub fn pid(&self, local_rank: usize) -> Option<u32> {
        Some(self.u32_at(local_rank, PID_AT).load(Ordering::Acquire)).filter(|&pid| pid != 0)
    }

    /// Says that a rank ends in order: it makes no more calls, and its death is no failure.
    pub fn leave(&self, local_rank: usize) {
        self.u32_at(local_rank, LEFT_AT).store(1, Ordering::Release);
        self.wake_all();
    }

    /// Whether a rank has ended in order.
    pub fn has_left(&self, local_rank: usize) -> bool {
        self.u32_at(local_rank, LEFT_AT).load(Ordering::Acquire) != 0
    }

    /// Tells the others which cores a rank may use.
    pub(super) fn set_cores(&self, local_rank: usize, cores: &[usize]) {
        let mut words = [0u64; CORES_WORDS];
        for &core in cores.iter().filter(|&&core| core < 64 * CORES_WORDS) {
            words[core / 64] |= 1 << (core % 64);
        }
        for (index, word) in words.into_iter().enumerate() {
            let at = self.place(local_rank) + CORES_AT + 8 * index;
            self.segment.u64_at(at).store(word, Ordering::Relaxed);
        }
    }

    /// How many cores the ranks that have said so may use together.
    pub(super) fn core_count(&self) -> usize {
        let word = |index: usize| {
            let of = |rank| self.segment.u64_at(self.place(rank) + CORES_AT + 8 * index).load(Ordering::Relaxed);
            (0..self.segment.local_size()).map(of).fold(0, |all, word| all | word)
        };
        (0..CORES_WORDS).map(|index| word(index).count_ones() as usize).sum()
    }

    fn record(&self, local_rank: usize, channel: usize) -> Record<'_> {
        assert!(channel < CHANNELS);
        let at = self.place(local_rank) + RECORDS_AT + channel * RECORD_BYTES;
        Record::new(|index| self.segment.u64_at(at + 8 * index))
    }

    /// Writes down the call that a rank makes on a channel, for others to read. One thread at a time a channel.
    pub(crate) fn enter(&self, local_rank: usize, channel: usize, call: &Call<'_>) {
        self.record(local_rank, channel).enter(call);
    }

    /// Writes down that the call is over.
    pub(crate) fn exit(&self, local_rank: usize, channel: usize) {
        self.record(local_rank, channel).exit();
    }

    /// A word of what a rank tells of its GPU on a channel, counted from the start of that page.
    pub(super) fn gpu_word(&self, channel: usize, local_rank: usize, word: usize) -> &AtomicU64 {
        assert!(channel < CHANNELS && 8 * word < GPU_PAGE_BYTES);
        self.segment.u64_at(self.segment.layout().gpu_page(channel, local_rank) + 8 * word)
    }

    /// The last call that a rank made on a channel, or is in.
    pub fn activity(&self, local_rank: usize, channel: usize) -> Option<Activity> {
        self.record(local_rank, channel).read()
    }

    /// Where a rank is, for a message: "rank 1 is at" this.
    pub fn whereabouts(&self, local_rank: usize) -> String {
        let all: Vec<Activity> = (0..CHANNELS).filter_map(|channel| self.activity(local_rank, channel)).collect();
        let list = |in_progress: bool| {
            let chosen = all.iter().filter(|activity| activity.in_progress == in_progress);
            chosen.map(ToString::to_string).collect::<Vec<_>>().join(" and ")
        };
        match (list(true), list(false)) {
            (now, _) if !now.is_empty() => now,
            _ if self.has_left(local_rank) => "its end: it has left in order".to_string(),
            (_, last) if !last.is_empty() => format!("work of its own since {last}"),
            _ => "its start: it has made no call yet".to_string(),
        }
    }
}

/// `text`, at most `bytes_max` bytes of it, cut between characters.
pub(super) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board(ranks: usize) -> Board {
        Board::new(&Segment::in_process(ranks).unwrap())
    }

    fn cause(rank: usize, text: &str) -> Cause {
        Cause { rank, host: format!("node{rank}"), exit_code: 76, text: text.to_string() }
    }

    #[test]
    fn the_first_cause_is_kept_whole() {
        let board = board(2);
        assert_eq!(board.cause(), None);
        assert!(board.fail(&cause(1, "loss is NaN — at step 7")));
        assert!(!board.fail(&cause(0, "another")));
        assert_eq!(board.cause(), Some(cause(1, "loss is NaN — at step 7")));
    }

    #[test]
    fn of_many_that_fail_at_once_one_is_first() {
        let board = board(2);
        let firsts: Vec<usize> = std::thread::scope(|scope| {
            let fail = |rank: usize| board.fail(&cause(rank, &format!("error of {rank}"))).then_some(rank);
            let all: Vec<_> = (0..40).map(|rank| scope.spawn(move || fail(rank))).collect();
            all.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(firsts.len(), 1);
        assert_eq!(board.cause(), Some(cause(firsts[0], &format!("error of {}", firsts[0]))));
    }

    #[test]
    fn a_rank_that_dies_while_it_writes_holds_up_nobody() {
        let board = board(2);
        // As if a slot had been taken by one that never came to publish it.
        board.segment.u32_at(CAUSES_TAKEN_AT).fetch_add(1, Ordering::Relaxed);
        assert!(board.fail(&cause(0, "the second slot")));
        assert_eq!(board.cause().unwrap().text, "the second slot");
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let board = board(1);
        let text = "é".repeat(3000);
        assert!(board.fail(&Cause { host: text.clone(), ..cause(0, &format!("x{text}")) }));
        let kept = board.cause().unwrap();
        assert_eq!(kept.text, format!("x{}", "é".repeat(2047)));
        assert_eq!(kept.host, "é".repeat(128));
    }

    #[test]
    fn a_waiter_is_woken_by_a_failure() {
        let board = board(1);
        assert_eq!(board.wait_for_abort(Duration::from_millis(3)), None);
        let seen = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| board.wait_for_abort(Duration::from_secs(600)));
            std::thread::sleep(Duration::from_millis(10));
            board.fail(&cause(0, "enough"));
            waiter.join().unwrap()
        });
        assert_eq!(seen.unwrap().text, "enough");
    }

    #[test]
    fn ranks_come_and_leave() {
        let board = board(3);
        assert_eq!((board.pid(2), board.has_left(2)), (None, false));
        board.set_pid(2, 4711);
        board.leave(2);
        assert_eq!((board.pid(2), board.has_left(2), board.has_left(1)), (Some(4711), true, false));
        assert_eq!(board.whereabouts(2), "its end: it has left in order");
        assert_eq!(board.whereabouts(1), "its start: it has made no call yet");
    }

    #[test]
    fn cores_are_counted_once() {
        let board = board(3);
        board.set_cores(0, &[0, 1, 70]);
        board.set_cores(1, &[1, 2, 5000]);
        assert_eq!(board.core_count(), 4);
    }
}
