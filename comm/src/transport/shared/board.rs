//! The page at the start of a segment: what each rank of the host is doing, and why the job, or
//! this generation of it, ends, if it does.
//!
//! The first cause wins. A rank with a cause writes it into a free slot and then tries to publish
//! the slot: a process that dies while it writes leaves a slot unused, and delays no other rank.
//!
//! Orders of memory. `fetch_add` gives a slot to one rank, in any order (relaxed). The exchange
//! that publishes it releases what was written there; `cause` and `is_aborted` acquire. `leave`
//! releases, too: whoever sees that a rank has left sees all that it counted before. `asleep` only
//! says whom to wake. A rank that looks for an abort just before another publishes one, and goes to
//! sleep just after that one has read `asleep`, misses the wake-up and looks again within
//! `SLEEP_MAX`. Signs of progress are single words that guard nothing (relaxed). `may_speak` is one
//! exchange of one word. Records of calls: `activity.rs`; what a rank shows of its GPU:
//! `gpu_page.rs`.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ddp_kernels::heartbeat::{self, Beats, HasBeats};

use super::activity::{Activity, ActivityRecord, RECORD_BYTES, cut};
use super::futex;
use super::layout::{CAUSE_BYTES, CAUSES, CHANNELS, GPU_PAGE_BYTES, LINE_BYTES, PAGE_BYTES};
use super::segment::Segment;
use crate::collective::Call;
use crate::error::Cause;

/// 0, or 1 + the slot of the first cause. Ranks that wait for an abort sleep on it.
const PUBLISHED_AT: usize = 1024;
/// The number of slots for causes that are taken.
const CAUSES_TAKEN_AT: usize = PUBLISHED_AT + LINE_BYTES;

/// Whether a rank says why this generation ends.
const SPEAKS_AT: usize = CAUSES_TAKEN_AT + 8;

/// A slot: rank, exit code, length of host, length of text, then both texts.
const HOST_BYTES_MAX: usize = 256;
const TEXT_BYTES_MAX: usize = 4096;
const CAUSE_HEADER_BYTES: usize = 32;
const _: () = assert!(CAUSE_HEADER_BYTES + HOST_BYTES_MAX + TEXT_BYTES_MAX <= CAUSE_BYTES);

/// Signs of progress of other hosts, by host; far hosts share words.
const HOSTS_AT: usize = CAUSES_TAKEN_AT + LINE_BYTES;
const HOST_WORDS: usize = 256;
const _: () = assert!(HOSTS_AT + 8 * HOST_WORDS <= PAGE_BYTES);

/// A rank's page: whether it has left, its process, where its threads sleep, its signs of progress,
/// its calls.
const LEFT_AT: usize = 4;
const PID_AT: usize = 8;
const ASLEEP_AT: usize = 256;
const BEATS_AT: usize = ASLEEP_AT + 8 * CHANNELS;
const RECORDS_AT: usize = 1024;
const _: () = assert!(BEATS_AT + 16 <= RECORDS_AT);
const _: () = assert!(RECORDS_AT + CHANNELS * RECORD_BYTES <= 4096);

/// How long to wait for a slot if all are being written by ranks that fail at the same time.
const SLOT_WAIT: Duration = Duration::from_millis(100);

/// The job's page. A handle: clones are the same board.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    segment: Segment,
}

/// The signs of progress of this process, which is a local rank, on its board.
struct OwnBeats(Board, usize);

impl HasBeats for OwnBeats {
    fn beats(&self) -> Beats<'_> {
        self.0.beats(self.1)
    }
}

impl Board {
    /// The board of a segment.
    pub(crate) fn new(segment: &Segment) -> Board {
        Board {
            segment: segment.clone(),
        }
    }

    fn u32_at(&self, local_rank: usize, at: usize) -> &AtomicU32 {
        self.segment.u32_at(self.page(local_rank) + at)
    }

    fn page(&self, local_rank: usize) -> usize {
        assert!(
            local_rank < self.segment.local_size(),
            "local rank {local_rank} of {}",
            self.segment.local_size()
        );
        self.segment.layout().page(local_rank)
    }

    fn published(&self) -> &AtomicU32 {
        self.segment.u32_at(PUBLISHED_AT)
    }

    /// Ends the job, or this generation of it: records why, unless another cause came first, and
    /// wakes all waiting ranks. Whether this was the first cause. A text beyond 4 KiB is cut.
    pub(crate) fn fail(&self, cause: &Cause) -> bool {
        let started = Instant::now();
        let slot = loop {
            if self.is_aborted() {
                return false;
            }
            let slot = self
                .segment
                .u32_at(CAUSES_TAKEN_AT)
                .fetch_add(1, Ordering::Relaxed) as usize;
            if slot < CAUSES {
                break slot;
            }
            // Many ranks fail at once: one of them is about to publish.
            self.segment
                .u32_at(CAUSES_TAKEN_AT)
                .fetch_sub(1, Ordering::Relaxed);
            if started.elapsed() > SLOT_WAIT {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        self.write_cause(slot, cause);
        let first = self
            .published()
            .compare_exchange(0, slot as u32 + 1, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        self.wake_all();
        first
    }

    fn write_cause(&self, slot: usize, cause: &Cause) {
        let at = self.segment.layout().cause(slot);
        let (host, text) = (
            cut(&cause.host, HOST_BYTES_MAX),
            cut(&cause.text, TEXT_BYTES_MAX),
        );
        let header = [
            cause.rank as u64,
            u64::from(cause.exit_code),
            host.len() as u64,
            text.len() as u64,
        ];
        for (index, value) in header.into_iter().enumerate() {
            self.segment
                .u64_at(at + 8 * index)
                .store(value, Ordering::Relaxed);
        }
        let texts = at + CAUSE_HEADER_BYTES;
        for (place, text) in [(texts, host), (texts + HOST_BYTES_MAX, text)] {
            let target = self.segment.pointer(place, text.len());
            // SAFETY: `pointer` checked the bounds. `fetch_add` gave this slot to this call alone.
            // It is read only after it is published (release, acquire), and then never written.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), target, text.len()) };
        }
    }

    /// Whether the caller is the first that wants to say why this generation ends.
    pub(crate) fn may_speak(&self) -> bool {
        self.segment.u32_at(SPEAKS_AT).swap(1, Ordering::SeqCst) == 0
    }

    #[cfg(test)]
    pub(crate) fn has_speaker(&self) -> bool {
        self.segment.u32_at(SPEAKS_AT).load(Ordering::SeqCst) == 1
    }

    /// Why the job, or this generation of it, ends, if it does.
    pub(crate) fn cause(&self) -> Option<Cause> {
        let slot = (self.published().load(Ordering::Acquire) as usize).checked_sub(1)?;
        let at = self.segment.layout().cause(slot.min(CAUSES - 1));
        let word = |index: usize| self.segment.u64_at(at + 8 * index).load(Ordering::Relaxed);
        let text = |place: usize, bytes: u64, bytes_max: usize| {
            let mut text = vec![0u8; (bytes as usize).min(bytes_max)];
            let source = self.segment.pointer(place, text.len());
            // SAFETY: `pointer` checked the bounds, the vector is ours, and a published slot is not
            // written any more.
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

    /// Whether the job, or this generation of it, ends: one load.
    #[inline]
    pub(crate) fn is_aborted(&self) -> bool {
        self.published().load(Ordering::Acquire) != 0
    }

    /// Sleeps until the job ends, or `timeout` has passed.
    pub(crate) fn wait_for_abort(&self, timeout: Duration) -> Option<Cause> {
        let started = Instant::now();
        while !self.is_aborted() {
            let left = timeout
                .checked_sub(started.elapsed())
                .filter(|left| !left.is_zero())?;
            futex::wait(self.published(), 0, left);
        }
        self.cause()
    }

    /// Wakes ranks that wait for an abort or sleep on a counter.
    fn wake_all(&self) {
        futex::wake(self.published());
        for local_rank in 0..self.segment.local_size() {
            for channel in 0..CHANNELS {
                let at = self.asleep(local_rank, channel).load(Ordering::SeqCst) as usize;
                // Another process wrote this: checked before use.
                if at != 0 && at.is_multiple_of(4) && at < self.segment.layout().bytes() {
                    futex::wake(self.segment.u32_at(at));
                }
            }
        }
    }

    /// Where the thread that uses `channel` for a rank sleeps: the offset of a counter, or 0.
    pub(super) fn asleep(&self, local_rank: usize, channel: usize) -> &AtomicU64 {
        assert!(channel < CHANNELS);
        self.segment
            .u64_at(self.page(local_rank) + ASLEEP_AT + 8 * channel)
    }

    /// Whether a thread of a rank sleeps in a call, waiting for another rank.
    pub(super) fn is_asleep(&self, local_rank: usize) -> bool {
        let mut channels = 0..CHANNELS;
        channels.any(|channel| self.asleep(local_rank, channel).load(Ordering::Relaxed) != 0)
    }

    /// The signs of progress of a rank.
    pub(crate) fn beats(&self, local_rank: usize) -> Beats<'_> {
        let at = self.page(local_rank) + BEATS_AT;
        Beats {
            own: self.segment.u64_at(at),
            seen: self.segment.u64_at(at + 8),
        }
    }

    /// From now on this process, which is `local_rank`, shows its signs of progress here.
    pub(crate) fn show_beats(&self, local_rank: usize) {
        heartbeat::share(OwnBeats(self.clone(), local_rank));
    }

    /// Signs of progress of another host.
    pub(crate) fn host_beats(&self, host: usize) -> &AtomicU64 {
        self.segment.u64_at(HOSTS_AT + 8 * (host % HOST_WORDS))
    }

    /// A number that changes with each beat of a rank of this host.
    pub(crate) fn all_beats(&self) -> u64 {
        let ranks = 0..self.segment.local_size();
        let own = ranks.map(|rank| self.beats(rank).own.load(Ordering::Relaxed) >> 8);
        own.fold(0, u64::wrapping_add)
    }

    /// Records which process this rank is. Only processes that have opened this memory can say so.
    pub(crate) fn enrol(&self, local_rank: usize) {
        self.u32_at(local_rank, PID_AT)
            .store(std::process::id(), Ordering::Release);
    }

    /// The process of a rank; None if it has not opened this memory.
    pub(crate) fn pid(&self, local_rank: usize) -> Option<u32> {
        let pid = self.u32_at(local_rank, PID_AT).load(Ordering::Acquire);
        (pid != 0).then_some(pid)
    }

    /// Records that a rank ends in order: it makes no more calls, and its end is not a failure.
    pub(crate) fn leave(&self, local_rank: usize) {
        self.u32_at(local_rank, LEFT_AT).store(1, Ordering::Release);
        self.wake_all();
    }

    /// Whether a rank has ended in order.
    pub(crate) fn has_left(&self, local_rank: usize) -> bool {
        self.u32_at(local_rank, LEFT_AT).load(Ordering::Acquire) != 0
    }

    fn record(&self, local_rank: usize, channel: usize) -> ActivityRecord<'_> {
        assert!(channel < CHANNELS);
        let at = self.page(local_rank) + RECORDS_AT + channel * RECORD_BYTES;
        ActivityRecord::new(|index| self.segment.u64_at(at + 8 * index))
    }

    /// Records the call that a rank makes on a channel. One thread at a time on a channel.
    pub(crate) fn enter(&self, local_rank: usize, channel: usize, call: &Call<'_>) {
        self.record(local_rank, channel).enter(call);
    }

    /// Records that the call is over.
    pub(crate) fn exit(&self, local_rank: usize, channel: usize) {
        self.record(local_rank, channel).exit();
    }

    /// A word of a rank's GPU page on a channel (`gpu_page.rs`).
    pub(super) fn gpu_word(&self, channel: usize, local_rank: usize, word: usize) -> &AtomicU64 {
        assert!(channel < CHANNELS && 8 * word < GPU_PAGE_BYTES);
        self.segment
            .u64_at(self.segment.layout().gpu_page(channel, local_rank) + 8 * word)
    }

    /// The last call that a rank made on a channel, or is in.
    pub(crate) fn activity(&self, local_rank: usize, channel: usize) -> Option<Activity> {
        self.record(local_rank, channel).read()
    }

    /// Where a rank is, for a message: "rank 1 is at …".
    pub(crate) fn whereabouts(&self, local_rank: usize) -> String {
        let all: Vec<Activity> = (0..CHANNELS)
            .filter_map(|channel| self.activity(local_rank, channel))
            .collect();
        let list = |in_progress: bool| {
            let chosen = all
                .iter()
                .filter(|activity| activity.in_progress == in_progress);
            chosen
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" and ")
        };
        match (list(true), list(false)) {
            (now, _) if !now.is_empty() => now,
            _ if self.has_left(local_rank) => "its end: it left in order".to_string(),
            (_, last) if !last.is_empty() => format!("other work since {last}"),
            _ => "its start, before its first call".to_string(),
        }
    }
}

#[cfg(test)]
mod tests;
