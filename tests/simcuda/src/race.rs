//! Which accesses are ordered, and which race. Pure: no lock, no driver, no addresses read or written.
//!
//! Everything that can act by itself is an [`Actor`]: a stream, a branch of a graph, a host thread. Each has a [`Clock`], a counter an
//! actor that says up to where the others' past is its own past. What orders two actors in CUDA (an event and its wait, a launch, a
//! synchronisation) is a [`Detector::snapshot`] of the one that [`Detector::join`] gives to the other.
//!
//! Beside every byte stands who wrote it last and who read it since. An access races with one of these when they conflict (one of
//! the two writes; atomics conflict only with what is not atomic) and the earlier one is not in the past of the later one. Since the
//! question is whether an order *exists* and not which order the scheduler happened to take, one schedule finds what any would
//! that makes the same calls.

mod clock;
mod shadow;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use clock::Clock;
use shadow::{Epoch, Kind, Shadow};

use crate::work::{Address, Touched};

/// A stream, a branch of a graph, or a host thread. Numbers are not given out twice.
pub type Actor = usize;

/// One queued operation; what it was is kept by the streams.
pub type OperationId = u64;

/// Two accesses of the same bytes that conflict, and that nothing orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// The first stretch of bytes, in address order, on which these two operations collide.
    pub range: Range<Address>,
    /// The one that the schedule happened to run first.
    pub first: OperationId,
    /// Whether it wrote (or did atomics), otherwise it read.
    pub first_writes: bool,
    /// Whether it did atomics.
    pub first_atomic: bool,
    /// The one that the schedule happened to run second.
    pub second: OperationId,
    /// Whether it wrote (or did atomics), otherwise it read.
    pub second_writes: bool,
    /// Whether it did atomics.
    pub second_atomic: bool,
}

/// What is known of one actor.
#[derive(Debug)]
enum State {
    Live(Clock),
    /// It acts no more, and others may still not know what it did.
    Retired,
    /// It acts no more, and every live actor knows all it did: it is before everything that is still to come.
    Settled,
}

/// The clocks of all actors, and the shadow of all memory.
#[derive(Debug, Default)]
pub struct Detector {
    actors: Vec<State>,
    /// The moment of each actor's last access: who knows that knows all it did.
    last_access: Vec<u64>,
    shadow: Shadow,
    /// Retired and not settled.
    waiting: Vec<Actor>,
    /// How many of those there are when the next attempt to settle them is worth its time.
    attempt_at: usize,
}

impl Detector {
    /// A new actor that knows of nothing yet: what created it is joined to it by the caller.
    pub fn actor(&mut self) -> Actor {
        let actor = self.actors.len();
        self.actors.push(State::Live(Clock::starting(actor)));
        self.last_access.push(0);
        actor
    }

    /// `actor` will not act again. What it did stays in the shadow and may still race.
    pub fn retire(&mut self, actor: Actor) {
        assert!(matches!(self.actors[actor], State::Live(_)), "actor {actor} is retired twice");
        self.actors[actor] = State::Retired;
        self.waiting.push(actor);
        if self.waiting.len() >= self.attempt_at.max(32) {
            self.settle();
            self.attempt_at = self.waiting.len() * 2;
        }
    }

    /// All that `actor` did and knows up to now: what an event record, a launch or a completion keeps. What the actor does from now on is
    /// not part of it.
    pub fn snapshot(&mut self, actor: Actor) -> Clock {
        let clock = self.live_mut(actor);
        let taken = clock.clone();
        clock.advance(actor);
        taken
    }

    /// From now on all that `clock` holds is before what `actor` does: a wait.
    pub fn join(&mut self, actor: Actor, clock: &Clock) {
        if clock.is_within(self.live(actor)) {
            return;
        }
        let mut joined = std::mem::take(self.live_mut(actor));
        // A clock that was kept for long names actors that everybody has known since: they need no entry any more.
        joined.join(clock, |other| !matches!(self.actors[other], State::Settled));
        *self.live_mut(actor) = joined;
    }

    /// Whether all that `clock` holds is in the past of `actor`.
    pub fn knows(&self, actor: Actor, clock: &Clock) -> bool {
        let own = self.live(actor);
        clock.entries().all(|(other, time)| own.of(other) >= time || matches!(self.actors[other], State::Settled))
    }

    /// `range` is new memory: what it was before is forgotten, and being made is a write, so that whoever uses it must be ordered behind.
    pub fn allocate(&mut self, range: Range<Address>, by: Actor, operation: OperationId) {
        let epoch = self.epoch(by, operation);
        self.shadow.forget(range.clone());
        self.shadow.access(range, Kind::Write, epoch, &|_| true);
    }

    /// `range` goes back: a write that every use must be ordered before. Then it is forgotten.
    pub fn free(&mut self, range: Range<Address>, by: Actor, operation: OperationId) -> Option<Race> {
        let touched = Touched { writes: vec![range.clone()], ..Touched::default() };
        let race = self.access(by, operation, &touched);
        self.shadow.forget(range);
        race
    }

    /// Checks what `operation` of `actor` touched against all before it, and records it, also where it races. Of several
    /// races the one at the lowest address is told, of those at one address the one that writes.
    pub fn access(&mut self, actor: Actor, operation: OperationId, touched: &Touched) -> Option<Race> {
        let epoch = self.epoch(actor, operation);
        let Self { actors, shadow, .. } = self;
        let State::Live(clock) = &actors[actor] else { unreachable!("epoch has asserted that it is live") };
        let past = |earlier: &Epoch| {
            clock.of(earlier.actor) >= earlier.time || matches!(actors[earlier.actor], State::Settled)
        };
        let mut found: Option<(shadow::Collision, Kind)> = None;
        // Its own accesses do not race with one another: they are all of one moment of one actor.
        for (kind, ranges) in
            [(Kind::Write, &touched.writes), (Kind::Atomic, &touched.atomics), (Kind::Read, &touched.reads)]
        {
            for range in merged(ranges) {
                if let Some(collision) = shadow.access(range, kind, epoch, &past)
                    && found.as_ref().is_none_or(|(best, _)| collision.range.start < best.range.start)
                {
                    found = Some((collision, kind));
                }
            }
        }
        found.map(|(collision, kind)| Race {
            range: collision.range,
            first: collision.with.operation,
            first_writes: collision.kind != Kind::Read,
            first_atomic: collision.kind == Kind::Atomic,
            second: operation,
            second_writes: kind != Kind::Read,
            second_atomic: kind == Kind::Atomic,
        })
    }

    fn epoch(&mut self, actor: Actor, operation: OperationId) -> Epoch {
        let time = self.live(actor).of(actor);
        self.last_access[actor] = time;
        Epoch { actor, time, operation }
    }

    fn live(&self, actor: Actor) -> &Clock {
        match &self.actors[actor] {
            State::Live(clock) => clock,
            other => panic!("actor {actor} acts after it was retired: {other:?}"),
        }
    }

    fn live_mut(&mut self, actor: Actor) -> &mut Clock {
        match &mut self.actors[actor] {
            State::Live(clock) => clock,
            other => panic!("actor {actor} acts after it was retired: {other:?}"),
        }
    }

    /// Takes retired actors out of all clocks once every live actor knows all they did: clocks stay as long as there are actors.
    fn settle(&mut self) {
        let live: Vec<Actor> =
            (0..self.actors.len()).filter(|&actor| matches!(self.actors[actor], State::Live(_))).collect();
        let waiting = std::mem::take(&mut self.waiting);
        for actor in waiting {
            if live.iter().all(|&other| self.live(other).of(actor) >= self.last_access[actor]) {
                self.actors[actor] = State::Settled;
            } else {
                self.waiting.push(actor);
            }
        }
        for actor in live {
            let mut clock = std::mem::take(self.live_mut(actor));
            clock.retain(|other| !matches!(self.actors[other], State::Settled));
            *self.live_mut(actor) = clock;
        }
    }
}

/// The same bytes in as few ranges as there can be, in address order.
fn merged(ranges: &[Range<Address>]) -> Vec<Range<Address>> {
    let mut sorted: Vec<Range<Address>> = ranges.iter().filter(|range| range.start < range.end).cloned().collect();
    sorted.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<Address>> = Vec::with_capacity(sorted.len());
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}
