//! One group's part of a segment, seen from one rank: counters that say how far each rank is, and
//! waiting for them.
//!
//! Every call begins with each rank telling what it is about to do and raising `Arrived`. No call
//! ends on a rank before all have arrived and were found to make the same call. So no rank is more
//! than one call ahead, and what a rank tells of a call may be overwritten two calls later.
//!
//! Orders of memory. The words of a signature are relaxed: they are written before `Arrived` is
//! raised (a release, `futex.rs`) and read after it was seen (an acquire). They are written again
//! `DEPTH` calls later, when this rank has seen all others arrive at a later call, and so after
//! these have read them. A rank reads its own counters relaxed. Taking a channel is one exchange,
//! of which at most one finds 0. `slowest` looks at several counters at different moments: it only
//! chooses whom an error names. `failed_spins` is used by one call at a time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use twox_hash::XxHash3_64;

use super::activity::Signature;
use super::board::Board;
use super::delays::Delays;
use super::futex::{Counter, SLEEP_MAX};
use super::gpu_page::is_in_call;
use super::layout::{CHANNELS, DEPTH, LINE_BYTES};
use super::segment::Segment;
use crate::collective::Call;
use crate::error::{Cause, Error, Result};
use crate::transport::patience::{Awaited, Patience};

/// How long to spin before sleeping: about what a sleep and a wake-up cost.
const SPIN: Duration = Duration::from_micros(20);
/// The shortest sleep while time runs out.
const SLEEP_MIN: Duration = Duration::from_millis(1);
/// How often one call spins without success. After that the other ranks are busy elsewhere.
const FAILED_SPINS_MAX: u8 = 3;

/// What a rank counts on a channel. Each counter is written by that rank alone.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    /// Calls it has arrived at.
    Arrived,
    /// Pieces it has given to their owners.
    Given,
    /// The number of pieces of this rank's slice that are reduced, or published.
    Made,
    /// Pieces that it has copied from all owners.
    Taken,
}

/// One call on a channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct NumberedCall<'a> {
    pub(super) call: &'a Call<'a>,
    /// The number of the call on the channel, which wraps.
    pub(super) number: u32,
    pub(super) order: StepOrder,
}

/// The order of a call's steps, which tells who delays the others when all have arrived and time is
/// up: the ranks at the earliest step. A rank waits for a step before its own, so those at the
/// earliest step wait for no other.
#[derive(Clone, Copy, Debug)]
pub(super) enum StepOrder {
    /// All ranks take the same steps in the same order.
    Alike,
    /// The root shows piece k after the others have taken piece k - `DEPTH`, and they take it after
    /// that. `first` is the number of the first piece.
    FromRoot { root: usize, first: u32 },
}

/// A rank's control page: whether the channel is in use, one counter a line, and the signatures of
/// the last calls.
const CLAIMED_AT: usize = 0;
const COUNTERS_AT: usize = LINE_BYTES;
const SIGNATURES_AT: usize = 1024;
const SIGNATURE_BYTES: usize = 64;
const SIGNATURE_WORDS: usize = 4;

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) segment: Segment,
    pub(super) board: Board,
    pub(super) index: usize,
    /// This rank's local rank.
    pub(super) me: usize,
    /// The global rank of each local rank, for messages.
    ranks: Vec<usize>,
    /// Whether waiting ranks have a core each to spin on.
    is_roomy: bool,
    /// How often this call has spun without success.
    failed_spins: AtomicU8,
    delays: Option<Delays>,
}

impl Channel {
    /// Takes the channel for a rank. A channel is taken once.
    pub(super) fn new(
        segment: Segment,
        index: usize,
        me: usize,
        ranks: Vec<usize>,
        is_roomy: bool,
        delays: Option<Delays>,
    ) -> Result<Channel> {
        assert!(index < CHANNELS, "channel {index}: there are {CHANNELS}");
        assert!(me < ranks.len(), "local rank {me} of {}", ranks.len());
        assert_eq!(
            segment.local_size(),
            ranks.len(),
            "a segment for another number of ranks"
        );
        let board = Board::new(&segment);
        let claimed = segment.u32_at(segment.layout().control(index, me) + CLAIMED_AT);
        if claimed.swap(1, Ordering::AcqRel) != 0 {
            let action = format!("make a group on channel {index}");
            let reason = format!("rank {} already has one there", ranks[me]);
            let help = "keep the group and clone it, or take another channel";
            return Err(Error::setup(action, reason, help));
        }
        Ok(Channel {
            segment,
            board,
            index,
            me,
            ranks,
            is_roomy,
            failed_spins: AtomicU8::new(0),
            delays,
        })
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The other ranks, beginning with the next one: no two ranks begin with the same.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.size());
        (me + 1..size).chain(0..me)
    }

    /// A point where tests may delay this rank.
    #[inline]
    pub(super) fn pause(&self) {
        if let Some(delays) = &self.delays {
            delays.pause();
        }
    }

    fn counter_at(&self, rank: usize, count: Count) -> usize {
        self.segment.layout().control(self.index, rank) + COUNTERS_AT + count as usize * LINE_BYTES
    }

    fn counter(&self, rank: usize, count: Count) -> Counter<'_> {
        self.counter_of(self.counter_at(rank, count))
    }

    /// The counter whose line begins at `at`.
    pub(super) fn counter_of(&self, at: usize) -> Counter<'_> {
        Counter {
            value: self.segment.u32_at(at),
            sleepers: self.segment.u32_at(at + 4),
        }
    }

    /// This rank's `count`.
    pub(super) fn value(&self, count: Count) -> u32 {
        self.counter(self.me, count).value.load(Ordering::Relaxed)
    }

    /// Raises this rank's `count` to `value`.
    pub(super) fn raise(&self, count: Count, value: u32) {
        self.pause();
        self.counter(self.me, count).raise(value);
    }

    /// Waits until `count` of every other rank is `target`.
    #[inline]
    pub(super) fn wait_for_all(
        &self,
        turn: &NumberedCall<'_>,
        count: Count,
        target: u32,
    ) -> Result<()> {
        self.pause();
        self.others()
            .try_for_each(|rank| self.wait_for(turn, rank, count, target))
    }

    /// Waits until `count` of `rank` is `target`.
    #[inline]
    pub(super) fn wait_for(
        &self,
        turn: &NumberedCall<'_>,
        rank: usize,
        count: Count,
        target: u32,
    ) -> Result<()> {
        let at = self.counter_at(rank, count);
        if self.counter_of(at).reached(target) {
            return Ok(());
        }
        self.wait_at(turn.call, at, target, rank, || {
            self.absent(turn)
                .unwrap_or_else(|| self.slowest(turn.order))
        })
    }

    /// Waits until the counter at `at`, which `rank` raises, is `target`. `missing` says who is
    /// missing when time is up.
    pub(super) fn wait_at(
        &self,
        call: &Call<'_>,
        at: usize,
        target: u32,
        rank: usize,
        missing: impl Fn() -> Vec<usize>,
    ) -> Result<()> {
        let counter = self.counter_of(at);
        let failed_spins = self.failed_spins.load(Ordering::Relaxed);
        if failed_spins < FAILED_SPINS_MAX && self.is_roomy {
            if counter.spin(target, SPIN) {
                return Ok(());
            }
            self.failed_spins.store(failed_spins + 1, Ordering::Relaxed);
        }
        let (mut patience, mut slept) = (Patience::new(), Duration::ZERO);
        loop {
            if counter.reached(target) {
                return Ok(());
            }
            self.check_abort()?;
            // What it counted before it left is visible after this.
            if self.board.has_left(rank) && !counter.reached(target) {
                let theirs = self.board.whereabouts(rank);
                return Err(call.out_of_step(self.ranks[rank], theirs));
            }
            let awaited = || {
                missing()
                    .into_iter()
                    .map(|rank| self.awaited(rank))
                    .collect()
            };
            let silent = patience.silent(slept, call.timeout, awaited);
            if !silent.is_empty() {
                let missing = silent.into_iter().map(|rank| self.ranks[rank]).collect();
                return Err(call.timed_out(missing, patience.total));
            }
            self.tell(&mut patience, &missing);
            let asleep = self.board.asleep(self.me, self.index);
            asleep.store(at as u64, Ordering::SeqCst);
            let left = call.timeout.checked_sub(patience.total);
            slept = left.map_or(SLEEP_MAX, |left| left.clamp(SLEEP_MIN, SLEEP_MAX));
            counter.sleep(target, slept);
            asleep.store(0, Ordering::Relaxed);
        }
    }

    /// A local rank that is waited for.
    fn awaited(&self, rank: usize) -> Awaited {
        let beats = self.board.beats(rank);
        Awaited {
            rank,
            own: beats.own.load(Ordering::Relaxed) >> 8,
            total: beats.total(),
            // The host may wait for its GPU, which waits in NCCL: the watch there says why.
            is_waiting: self.board.is_asleep(rank) || is_in_call(&self.board, rank),
            work: beats.work(),
        }
    }

    /// Tells what is waited for: rank 0 does, or if it is missing the first that is not.
    fn tell(&self, patience: &mut Patience, missing: &dyn Fn() -> Vec<usize>) {
        let is_first = || {
            let missing = missing();
            (0..self.size()).find(|rank| !missing.contains(rank)) == Some(self.me)
        };
        let me = self.ranks[self.me];
        if patience.is_time_to_tell() && is_first() && (me == 0 || self.ranks[0] == 0) {
            patience.tell(me, |rank| self.ranks[rank]);
        }
    }

    /// Begins a call: it may spin again.
    pub(super) fn begin(&self) {
        self.failed_spins.store(0, Ordering::Relaxed);
    }

    /// [`Error::PeerFailed`] if the job ends, or this generation of it.
    pub(super) fn check_abort(&self) -> Result<()> {
        if !self.board.is_aborted() {
            return Ok(());
        }
        let unreadable = || Cause {
            rank: 0,
            host: String::new(),
            exit_code: 77,
            text: "an unreadable cause".into(),
        };
        Err(Error::of_peer(
            self.board.cause().unwrap_or_else(unreadable),
        ))
    }

    fn signature(&self, rank: usize, number: u32) -> [&AtomicU64; SIGNATURE_WORDS] {
        let slot = number as usize % DEPTH;
        let at = self.segment.layout().control(self.index, rank)
            + SIGNATURES_AT
            + slot * SIGNATURE_BYTES;
        std::array::from_fn(|word| self.segment.u64_at(at + 8 * word))
    }

    /// Tells what this rank is about to do, and that it has arrived. What it gave before is visible
    /// to ranks that see it arrived.
    pub(super) fn arrive(&self, turn: &NumberedCall<'_>) {
        let (call, number) = (turn.call, turn.number);
        let signature = Signature::of(call);
        let words = [
            signature.operation,
            signature.count,
            call.sequence,
            XxHash3_64::oneshot(call.group.as_bytes()),
        ];
        for (word, value) in self.signature(self.me, number).into_iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.raise(Count::Arrived, number.wrapping_add(1));
    }

    /// Waits until all have arrived, and checks that they make the same call.
    pub(super) fn meet(&self, turn: &NumberedCall<'_>) -> Result<()> {
        self.pause();
        let (call, number) = (turn.call, turn.number);
        let mine = self
            .signature(self.me, number)
            .map(|word| word.load(Ordering::Relaxed));
        for rank in self.others() {
            self.wait_for(turn, rank, Count::Arrived, number.wrapping_add(1))?;
            let theirs = self
                .signature(rank, number)
                .map(|word| word.load(Ordering::Relaxed));
            if theirs != mine {
                let signature = Signature {
                    operation: theirs[0],
                    count: theirs[1],
                };
                // It is still in its call, so the board has it.
                let seen = self.board.activity(rank, self.index);
                let theirs = seen.map_or_else(|| signature.to_string(), |seen| seen.to_string());
                return Err(call.out_of_step(self.ranks[rank], theirs));
            }
        }
        Ok(())
    }

    /// The global rank of a local one, for messages.
    pub(super) fn global(&self, rank: usize) -> usize {
        self.ranks[rank]
    }

    /// The local ranks that have not arrived at this call, if there are any.
    fn absent(&self, turn: &NumberedCall<'_>) -> Option<Vec<usize>> {
        let here = |rank: usize| {
            self.counter(rank, Count::Arrived)
                .reached(turn.number.wrapping_add(1))
        };
        let mut absent: Vec<usize> = self.others().filter(|&rank| !here(rank)).collect();
        absent.sort_unstable();
        Some(absent).filter(|absent| !absent.is_empty())
    }

    /// The other local ranks that are at the earliest step.
    fn slowest(&self, order: StepOrder) -> Vec<usize> {
        // Counters wrap: how far a counter is past a number is what counts.
        let past = |rank: usize, count: Count, from: u32| {
            i64::from(
                self.counter(rank, count)
                    .value
                    .load(Ordering::Acquire)
                    .wrapping_sub(from) as i32,
            )
        };
        let step = |rank: usize| match order {
            StepOrder::Alike => [Count::Given, Count::Made, Count::Taken]
                .map(|count| past(rank, count, self.value(count)))
                .iter()
                .sum(),
            StepOrder::FromRoot { root, first } if rank == root => {
                2 * past(rank, Count::Made, first)
            }
            StepOrder::FromRoot { first, .. } => 2 * past(rank, Count::Taken, first) + 1,
        };
        let all: Vec<(i64, usize)> = self.others().map(|rank| (step(rank), rank)).collect();
        let least = all.iter().map(|&(step, _)| step).min();
        let at_least = all.into_iter().filter(|&(step, _)| Some(step) == least);
        let mut slowest: Vec<usize> = at_least.map(|(_, rank)| rank).collect();
        slowest.sort_unstable();
        slowest
    }

    /// Starts all counters of all ranks at `value`, before the channel is used: for tests of
    /// counters that wrap.
    #[cfg(test)]
    pub(super) fn start_all_at(segment: &Segment, index: usize, value: u32) {
        for rank in 0..segment.local_size() {
            for count in [Count::Arrived, Count::Given, Count::Made, Count::Taken] {
                let at = segment.layout().control(index, rank)
                    + COUNTERS_AT
                    + count as usize * LINE_BYTES;
                segment.u32_at(at).store(value, Ordering::Release);
            }
        }
    }
}
