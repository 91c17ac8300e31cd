//! One group's part of a segment, seen from one rank: counters that say how far each rank is, and waiting for them.
//!
//! Every call begins with each rank saying what it is about to do and counting `Arrived` up; no call ends on a rank before
//! all have arrived and were found to want the same. So nobody is ever more than one call ahead, and what a rank says of
//! a call may be overwritten two calls later.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use ddp_kernels::threads::cores;
use xxhash_rust::xxh3::xxh3_64;

use super::activity::Asked;
use super::board::Board;
use super::delays::Delays;
use super::futex::{Counter, SLEEP_MAX};
use super::layout::{CHANNELS, DEPTH, LINE_BYTES};
use super::segment::Segment;
use crate::collective::Call;
use crate::error::{Cause, Error, Result};
use crate::waited::Waited;

/// How long to look for the others before sleeping: about what a sleep and a wake-up cost.
const SPIN: Duration = Duration::from_micros(20);
/// How often in one call to look in vain. Then the others are not at it, and the core has better to do.
const VAIN_SPINS_MAX: u8 = 3;

/// What a rank counts on a channel. Each of these is written by that rank alone.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    /// Calls it has come to.
    Arrived,
    /// Pieces it has given to their owners.
    Given,
    /// Pieces of its own slice that it has made.
    Made,
    /// Pieces that it has taken from all owners.
    Taken,
}

/// One call on a channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'a> {
    pub(super) call: &'a Call<'a>,
    /// The number of the call on the channel; wraps.
    pub(super) number: u32,
    pub(super) blame: Blame,
}

/// How to tell who keeps the others waiting when all have arrived and time is up: those who are at the earliest step of the
/// call. Who waits, waits for a step before its own, so those at the earliest wait for nobody.
#[derive(Clone, Copy, Debug)]
pub(super) enum Blame {
    /// All take the same steps in the same order.
    Alike,
    /// The root shows piece k after the others have taken piece k - `DEPTH`, and they take it after that. `first` is the
    /// number of the first piece.
    FromRoot { root: usize, first: u32 },
}

/// In a rank's control page: whether the channel is in use, the counters on lines of their own, what it says of two calls.
const CLAIMED_AT: usize = 0;
const COUNTERS_AT: usize = LINE_BYTES;
const SAID_AT: usize = 1024;
const SAID_BYTES: usize = 64;
const SAID_WORDS: usize = 4;

/// Whether waiting ranks have a core each to spin on.
const UNKNOWN: u8 = 0;
const ROOMY: u8 = 1;
const CROWDED: u8 = 2;

#[derive(Debug)]
pub(super) struct Channel {
    pub(super) segment: Segment,
    pub(super) board: Board,
    pub(super) index: usize,
    /// This rank, among those of the host.
    pub(super) me: usize,
    /// The global rank of each, for messages.
    ranks: Vec<usize>,
    room: AtomicU8,
    /// How often this call has looked in vain.
    vain_spins: AtomicU8,
    delays: Option<Delays>,
}

impl Channel {
    /// Takes the channel for a rank; a channel is taken once.
    pub(super) fn new(
        segment: Segment,
        index: usize,
        me: usize,
        ranks: Vec<usize>,
        delays: Option<Delays>,
    ) -> Result<Channel> {
        assert!(index < CHANNELS, "channel {index}: there are {CHANNELS}");
        assert!(me < ranks.len(), "local rank {me} of {}", ranks.len());
        assert_eq!(segment.local_size(), ranks.len(), "a segment for another number of ranks");
        let board = Board::new(&segment);
        let claimed = segment.u32_at(segment.layout().control(index, me) + CLAIMED_AT);
        if claimed.swap(1, Ordering::AcqRel) != 0 {
            return Err(Error::Setup {
                action: format!("make a group on channel {index}"),
                reason: format!("rank {} has one there already", ranks[me]),
                way_out: "Keep the group and clone it, or take another channel.".to_string(),
            });
        }
        board.set_cores(me, cores());
        Ok(Channel {
            segment,
            board,
            index,
            me,
            ranks,
            room: AtomicU8::new(UNKNOWN),
            vain_spins: AtomicU8::new(0),
            delays,
        })
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The other ranks, each beginning with a different one so that not all run to the first.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, size) = (self.me, self.size());
        (1..size).map(move |step| if me + step < size { me + step } else { me + step - size })
    }

    /// A place where tests may hold this rank up.
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
        Counter { value: self.segment.u32_at(at), sleepers: self.segment.u32_at(at + 4) }
    }

    /// How far this rank is.
    pub(super) fn value(&self, count: Count) -> u32 {
        self.counter(self.me, count).value.load(Ordering::Relaxed)
    }

    /// Counts this rank's `count` up to `value`.
    pub(super) fn raise(&self, count: Count, value: u32) {
        self.pause();
        self.counter(self.me, count).raise(value);
    }

    /// Waits until every other rank has counted to `target`.
    #[inline]
    pub(super) fn wait_for_all(&self, turn: &Turn<'_>, count: Count, target: u32) -> Result<()> {
        self.pause();
        self.others().try_for_each(|rank| self.wait_for(turn, rank, count, target))
    }

    /// Waits until `rank` has counted to `target`.
    #[inline]
    pub(super) fn wait_for(&self, turn: &Turn<'_>, rank: usize, count: Count, target: u32) -> Result<()> {
        let at = self.counter_at(rank, count);
        if self.counter_of(at).reached(target) {
            return Ok(());
        }
        self.wait_at(turn.call, at, target, rank, || self.absent(turn).unwrap_or_else(|| self.slowest(turn.blame)))
    }

    /// Waits until the counter at `at`, which is `rank`'s to count, has come to `target`. `missing` says, when time is up,
    /// who is to blame.
    pub(super) fn wait_at(
        &self,
        call: &Call<'_>,
        at: usize,
        target: u32,
        rank: usize,
        missing: impl Fn() -> Vec<usize>,
    ) -> Result<()> {
        let counter = self.counter_of(at);
        let vain_spins = self.vain_spins.load(Ordering::Relaxed);
        if vain_spins < VAIN_SPINS_MAX && self.room.load(Ordering::Relaxed) == ROOMY {
            if counter.spin(target, SPIN) {
                return Ok(());
            }
            self.vain_spins.store(vain_spins + 1, Ordering::Relaxed);
        }
        let (mut waited, mut slept) = (Waited::new(), Duration::ZERO);
        loop {
            if counter.reached(target) {
                return Ok(());
            }
            self.check_abort()?;
            // What it counted before it left is seen after this.
            if self.board.has_left(rank) && !counter.reached(target) {
                let theirs = self.board.whereabouts(rank);
                return Err(Error::OutOfStep { call: call.to_string(), peer: self.ranks[rank], theirs });
            }
            let left = call.timeout.saturating_sub(waited.after(slept));
            if left.is_zero() {
                let missing = missing().into_iter().map(|rank| self.ranks[rank]).collect();
                return Err(Error::Timeout { call: call.to_string(), missing, waited: call.timeout });
            }
            let asleep = self.board.asleep(self.me, self.index);
            asleep.store(at as u64, Ordering::SeqCst);
            slept = left.min(SLEEP_MAX);
            counter.sleep(target, slept);
            asleep.store(0, Ordering::Relaxed);
        }
    }

    /// Begins a call: whoever was late in the last one may be in time in this one.
    pub(super) fn begin(&self) {
        self.vain_spins.store(0, Ordering::Relaxed);
    }

    /// The error that ends this call if the job ends.
    pub(super) fn check_abort(&self) -> Result<()> {
        if !self.board.is_aborted() {
            return Ok(());
        }
        let unreadable =
            || Cause { rank: 0, host: String::new(), exit_code: 77, text: "an unreadable cause".to_string() };
        Err(Error::PeerFailed(Box::new(self.board.cause().unwrap_or_else(unreadable))))
    }

    fn said(&self, rank: usize, number: u32) -> [&AtomicU64; SAID_WORDS] {
        let slot = number as usize % DEPTH;
        let at = self.segment.layout().control(self.index, rank) + SAID_AT + slot * SAID_BYTES;
        std::array::from_fn(|word| self.segment.u64_at(at + 8 * word))
    }

    /// Says what this rank is about to do in call `number` of the channel, and that it is here. What it gave before is
    /// visible to those who see it here.
    pub(super) fn arrive(&self, turn: &Turn<'_>) {
        let (call, number) = (turn.call, turn.number);
        let asked = Asked::of(call);
        let words = [asked.operation, asked.count, call.sequence, xxh3_64(call.group.as_bytes())];
        for (word, value) in self.said(self.me, number).into_iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.raise(Count::Arrived, number.wrapping_add(1));
    }

    /// Waits until all have arrived, and sees whether they want the same.
    pub(super) fn meet(&self, turn: &Turn<'_>) -> Result<()> {
        self.pause();
        let (call, number) = (turn.call, turn.number);
        let mine = self.said(self.me, number).map(|word| word.load(Ordering::Relaxed));
        for rank in self.others() {
            self.wait_for(turn, rank, Count::Arrived, number.wrapping_add(1))?;
            let theirs = self.said(rank, number).map(|word| word.load(Ordering::Relaxed));
            if theirs != mine {
                return Err(self.out_of_step(call, rank, Asked { operation: theirs[0], count: theirs[1] }));
            }
        }
        if self.room.load(Ordering::Relaxed) == UNKNOWN {
            let roomy = self.board.core_count() >= self.size();
            self.room.store(if roomy { ROOMY } else { CROWDED }, Ordering::Relaxed);
        }
        Ok(())
    }

    /// `rank` came with another call. It cannot have gone on from there, so what the board says of it is that call.
    pub(super) fn out_of_step(&self, call: &Call<'_>, rank: usize, asked: Asked) -> Error {
        let theirs = self.board.activity(rank, self.index).map_or_else(|| asked.to_string(), |seen| seen.to_string());
        Error::OutOfStep { call: call.to_string(), peer: self.ranks[rank], theirs }
    }

    /// `rank` sent another message than this one wants. It may have gone on since.
    pub(super) fn other_message(&self, call: &Call<'_>, rank: usize, asked: Asked) -> Error {
        Error::OutOfStep { call: call.to_string(), peer: self.ranks[rank], theirs: asked.to_string() }
    }

    /// The local ranks that have not come to this call, if there are any.
    fn absent(&self, turn: &Turn<'_>) -> Option<Vec<usize>> {
        let here = |rank: usize| self.counter(rank, Count::Arrived).reached(turn.number.wrapping_add(1));
        let mut absent: Vec<usize> = self.others().filter(|&rank| !here(rank)).collect();
        absent.sort_unstable();
        Some(absent).filter(|absent| !absent.is_empty())
    }

    /// The other local ranks that are at the earliest step.
    fn slowest(&self, blame: Blame) -> Vec<usize> {
        // Counters wrap: how far one is past a number is what counts.
        let past = |rank: usize, count: Count, from: u32| {
            i64::from(self.counter(rank, count).value.load(Ordering::Acquire).wrapping_sub(from) as i32)
        };
        let step = |rank: usize| match blame {
            Blame::Alike => {
                [Count::Given, Count::Made, Count::Taken].map(|count| past(rank, count, self.value(count))).iter().sum()
            }
            Blame::FromRoot { root, first } if rank == root => 2 * past(rank, Count::Made, first),
            Blame::FromRoot { first, .. } => 2 * past(rank, Count::Taken, first) + 1,
        };
        let all: Vec<(i64, usize)> = self.others().map(|rank| (step(rank), rank)).collect();
        let least = all.iter().map(|&(step, _)| step).min();
        let at_least = all.into_iter().filter(|&(step, _)| Some(step) == least);
        let mut slowest: Vec<usize> = at_least.map(|(_, rank)| rank).collect();
        slowest.sort_unstable();
        slowest
    }

    /// Starts all counters of all ranks at `value`, before anybody uses the channel: for tests of what happens when they
    /// wrap.
    #[cfg(test)]
    pub(super) fn start_all_at(segment: &Segment, index: usize, value: u32) {
        for rank in 0..segment.local_size() {
            for count in [Count::Arrived, Count::Given, Count::Made, Count::Taken] {
                let at = segment.layout().control(index, rank) + COUNTERS_AT + count as usize * LINE_BYTES;
                segment.u32_at(at).store(value, Ordering::Release);
            }
        }
    }
}
