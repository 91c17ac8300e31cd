//! Vector clocks: one counter per actor, sparse and sorted by actor, since most actors never learn
//! of most others.

/// A stream, a branch of a graph, or a host thread. Numbers are not reused.
pub type Actor = usize;

/// Up to which moment each actor is known. A missing actor is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(Vec<(Actor, u64)>);

impl Clock {
    /// The clock of a new actor. Moments count from 1; 0 means never.
    pub(super) fn starting(actor: Actor) -> Self {
        Self(vec![(actor, 1)])
    }

    /// The last known moment of `actor`.
    pub(super) fn of(&self, actor: Actor) -> u64 {
        self.0
            .binary_search_by_key(&actor, |entry| entry.0)
            .map_or(0, |at| self.0[at].1)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (Actor, u64)> {
        self.0.iter().copied()
    }

    /// The next moment of `actor` begins.
    pub(super) fn advance(&mut self, actor: Actor) {
        match self.0.binary_search_by_key(&actor, |entry| entry.0) {
            Ok(at) => self.0[at].1 += 1,
            Err(at) => self.0.insert(at, (actor, 1)),
        }
    }

    /// Whether `other` knows everything known here.
    pub(super) fn is_within(&self, other: &Self) -> bool {
        let mut theirs = other.0.iter().peekable();
        self.0.iter().all(|&(actor, time)| {
            while theirs.next_if(|entry| entry.0 < actor).is_some() {}
            theirs
                .peek()
                .is_some_and(|entry| entry.0 == actor && entry.1 >= time)
        })
    }

    /// Learns all that `other` knows of the actors in `wanted`.
    pub(super) fn join(&mut self, other: &Self, wanted: impl Fn(Actor) -> bool) {
        let mut joined = Vec::with_capacity(self.0.len() + other.0.len());
        let (mut ours, mut theirs) = (
            self.0.iter().copied().peekable(),
            other.0.iter().copied().peekable(),
        );
        loop {
            match (ours.peek().copied(), theirs.peek().copied()) {
                (Some((a, time)), Some((b, its_time))) if a == b => {
                    joined.push((a, time.max(its_time)));
                    ours.next();
                    theirs.next();
                }
                (Some(entry), Some((b, _))) if entry.0 < b => {
                    joined.push(entry);
                    ours.next();
                }
                (_, Some(entry)) => {
                    if wanted(entry.0) {
                        joined.push(entry);
                    }
                    theirs.next();
                }
                (Some(entry), None) => {
                    joined.push(entry);
                    ours.next();
                }
                (None, None) => break,
            }
        }
        self.0 = joined;
    }

    pub(super) fn retain(&mut self, wanted: impl Fn(Actor) -> bool) {
        self.0.retain(|entry| wanted(entry.0));
    }
}
