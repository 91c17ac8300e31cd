//! Which accesses are ordered, and which race. Pure: no lock, no driver, no memory access.
//!
//! Everything that acts independently is an [`Actor`]: a stream, a branch of a graph, a host
//! thread. Each has a [`Clock`]: a counter per actor that says how much of the others' past is its
//! own past. What orders two actors in CUDA (an event and its wait, a launch, a synchronisation) is
//! a [`Detector::snapshot`] of one that the other [`Detector::join`]s.
//!
//! Each byte records who wrote it last and who read it since. An access races with one of these if
//! they conflict (one of them writes; atomics conflict only with non-atomics) and the earlier is
//! not in the past of the later. The question is whether an order *exists*, not which order the
//! scheduler took, so one schedule finds what any other schedule of the same calls would find.

mod clock;
mod shadow;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use clock::{Actor, Clock};
use shadow::{AccessKind, Epoch, Shadow};

use crate::handle::OperationId;
use crate::work::{Address, Touched};

/// Two conflicting, unordered accesses of the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// The first range of bytes, in address order, where the two collide.
    pub range: Range<Address>,
    /// The one that happened to run first.
    pub first: OperationId,
    /// Whether it wrote (or was atomic); otherwise it read.
    pub first_writes: bool,
    /// Whether it was atomic.
    pub first_atomic: bool,
    /// The one that happened to run second.
    pub second: OperationId,
    /// Whether it wrote (or was atomic); otherwise it read.
    pub second_writes: bool,
    /// Whether it was atomic.
    pub second_atomic: bool,
}

/// What is known of one actor.
#[derive(Debug)]
enum State {
    Live(Clock),
    /// It will not act again, but others may not know all it did.
    Retired,
    /// It will not act again, and every live actor knows all it did: it precedes everything to
    /// come.
    Settled,
}

/// The clocks of all actors, and the shadow of all memory.
#[derive(Debug, Default)]
pub struct Detector {
    actors: Vec<State>,
    /// The time of each actor's last access: who knows it knows all that actor did.
    last_access: Vec<u64>,
    shadow: Shadow,
    /// Retired and not settled.
    waiting: Vec<Actor>,
    /// The number of those at which the next attempt to settle them pays off.
    attempt_at: usize,
}

impl Detector {
    /// A new actor that knows nothing yet; the caller joins its creator.
    pub fn actor(&mut self) -> Actor {
        let actor = self.actors.len();
        self.actors.push(State::Live(Clock::starting(actor)));
        self.last_access.push(0);
        actor
    }

    /// `actor` will not act again. Its accesses stay in the shadow and may still race.
    pub fn retire(&mut self, actor: Actor) {
        assert!(
            matches!(self.actors[actor], State::Live(_)),
            "actor {actor} is retired twice"
        );
        self.actors[actor] = State::Retired;
        self.waiting.push(actor);
        if self.waiting.len() >= self.attempt_at.max(32) {
            self.settle();
            self.attempt_at = self.waiting.len() * 2;
        }
    }

    /// All that `actor` did and knows so far: what an event record, launch or completion keeps.
    /// Later actions are not part of it.
    pub fn snapshot(&mut self, actor: Actor) -> Clock {
        let clock = self.live_mut(actor);
        let taken = clock.clone();
        clock.advance(actor);
        taken
    }

    /// The moment of `actor` that a snapshot taken now would record. An actor that knows this
    /// moment knows all of that snapshot.
    pub fn moment(&mut self, actor: Actor) -> u64 {
        let clock = self.live_mut(actor);
        let moment = clock.of(actor);
        clock.advance(actor);
        moment
    }

    /// Whether that moment of `other` is in the past of `actor`.
    pub fn knows_moment(&self, actor: Actor, other: Actor, moment: u64) -> bool {
        self.live(actor).of(other) >= moment || matches!(self.actors[other], State::Settled)
    }

    /// From now on everything in `clock` precedes what `actor` does: a wait.
    pub fn join(&mut self, actor: Actor, clock: &Clock) {
        if clock.is_within(self.live(actor)) {
            return;
        }
        let mut joined = std::mem::take(self.live_mut(actor));
        // A clock that was kept for long may name actors that everyone knows by now; drop those
        // entries.
        joined.join(clock, |other| !matches!(self.actors[other], State::Settled));
        *self.live_mut(actor) = joined;
    }

    /// Whether everything in `clock` is in the past of `actor`.
    pub fn knows(&self, actor: Actor, clock: &Clock) -> bool {
        let own = self.live(actor);
        clock.entries().all(|(other, time)| {
            own.of(other) >= time || matches!(self.actors[other], State::Settled)
        })
    }

    /// `range` is new memory: its history is forgotten, and its creation counts as a write, so that
    /// every use must be ordered after it.
    pub fn allocate(&mut self, range: Range<Address>, by: Actor, operation: OperationId) {
        let epoch = self.epoch(by, operation);
        self.shadow.forget(range.clone());
        self.shadow
            .access(range, AccessKind::Write, epoch, &|_| true);
    }

    /// `range` is released: a write that must come after every use. Then it is forgotten.
    pub fn free(
        &mut self,
        range: Range<Address>,
        by: Actor,
        operation: OperationId,
    ) -> Option<Race> {
        let touched = Touched {
            writes: vec![range.clone()],
            ..Touched::default()
        };
        let race = self.access(by, operation, &touched);
        self.shadow.forget(range);
        race
    }

    /// Checks the accesses of `operation` of `actor` against all earlier ones and records them,
    /// even if they race. Reports the race at the lowest address, and there the one that writes.
    pub fn access(
        &mut self,
        actor: Actor,
        operation: OperationId,
        touched: &Touched,
    ) -> Option<Race> {
        let epoch = self.epoch(actor, operation);
        let Self { actors, shadow, .. } = self;
        let State::Live(clock) = &actors[actor] else {
            unreachable!("epoch has asserted that it is live")
        };
        let past = |earlier: &Epoch| {
            clock.of(earlier.actor) >= earlier.time
                || matches!(actors[earlier.actor], State::Settled)
        };
        let mut found: Option<(shadow::Collision, AccessKind)> = None;
        // Accesses of one operation do not race with each other.
        for (kind, ranges) in [
            (AccessKind::Write, &touched.writes),
            (AccessKind::Atomic, &touched.atomics),
            (AccessKind::Read, &touched.reads),
        ] {
            for range in merged(ranges) {
                if let Some(collision) = shadow.access(range, kind, epoch, &past)
                    && found
                        .as_ref()
                        .is_none_or(|(best, _)| collision.range.start < best.range.start)
                {
                    found = Some((collision, kind));
                }
            }
        }
        found.map(|(collision, kind)| Race {
            range: collision.range,
            first: collision.with.operation,
            first_writes: collision.kind != AccessKind::Read,
            first_atomic: collision.kind == AccessKind::Atomic,
            second: operation,
            second_writes: kind != AccessKind::Read,
            second_atomic: kind == AccessKind::Atomic,
        })
    }

    fn epoch(&mut self, actor: Actor, operation: OperationId) -> Epoch {
        let time = self.live(actor).of(actor);
        self.last_access[actor] = time;
        Epoch {
            actor,
            time,
            operation,
        }
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

    /// Removes retired actors from all clocks once every live actor knows all they did.
    fn settle(&mut self) {
        let live: Vec<Actor> = (0..self.actors.len())
            .filter(|&actor| matches!(self.actors[actor], State::Live(_)))
            .collect();
        let waiting = std::mem::take(&mut self.waiting);
        for actor in waiting {
            if live
                .iter()
                .all(|&other| self.live(other).of(actor) >= self.last_access[actor])
            {
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

/// The same bytes in the fewest ranges, in address order.
fn merged(ranges: &[Range<Address>]) -> Vec<Range<Address>> {
    let mut sorted: Vec<Range<Address>> = ranges
        .iter()
        .filter(|range| range.start < range.end)
        .cloned()
        .collect();
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
