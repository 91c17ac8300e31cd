//! Which of the runnable pieces runs next. Pure: pieces are numbers, and the same seed gives the
//! same choices.

use crate::config::Schedule;
use crate::handle::StreamId;

/// The choices that CUDA leaves open.
#[derive(Default)]
pub struct Scheduler {
    // Created at first use: its seed is in the machine's configuration.
    pub(super) policy: Option<Policy>,
    /// The trace of what ran, for tests.
    #[cfg(test)]
    pub(crate) ran: Vec<std::sync::Arc<str>>,
}

/// A piece that CUDA would allow to run now: the front of a stream, or a ready node of its graph
/// launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) stream: StreamId,
    pub(crate) node: Option<usize>,
    /// Of its entry among all entries.
    pub(crate) sequence: u64,
    /// Whether the wait needs it.
    pub(crate) is_needed: bool,
}

/// A small generator with 64 bits of state (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9E37_79B9_7F4A_7C15)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Chooses among candidates.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    schedule: Schedule,
    random: Random,
    /// With [`Schedule::Random`], the favoured stream: it runs as long as it can.
    favourite: Option<u64>,
}

impl Policy {
    pub(crate) fn new(schedule: Schedule, seed: u64) -> Self {
        Self {
            schedule,
            random: Random::new(seed),
            favourite: None,
        }
    }

    /// Which of `candidates` (in stream order) to run; None if none should run now.
    pub(crate) fn choose(&mut self, candidates: &[Candidate]) -> Option<Candidate> {
        match self.schedule {
            Schedule::Random => self.random_one(candidates),
            // The latest first: the opposite of what the program's author had in mind.
            Schedule::Lazy => {
                let needed = candidates.iter().filter(|candidate| candidate.is_needed);
                needed
                    .max_by_key(|candidate| (candidate.sequence, candidate.node))
                    .copied()
            }
            Schedule::Eager => candidates
                .iter()
                .min_by_key(|candidate| (candidate.sequence, candidate.node))
                .copied(),
        }
    }

    /// Half of the time all candidates have equal chances; otherwise priorities hold for a while,
    /// because equal chances let all streams advance together and hide bugs that need one to be far
    /// ahead.
    fn random_one(&mut self, candidates: &[Candidate]) -> Option<Candidate> {
        if candidates.is_empty() {
            return None;
        }
        if self.random.below(8) == 0 {
            let draw = self.random.next();
            self.favourite = (draw & 1 == 0).then_some(draw);
        }
        match self.favourite {
            None => Some(candidates[self.random.below(candidates.len())]),
            Some(draw) => {
                let priority = |candidate: &&Candidate| {
                    Random::new(
                        draw ^ ((candidate.stream as u64) << 20
                            | candidate.node.map_or(0, |n| n as u64 + 1)),
                    )
                    .next()
                };
                candidates.iter().max_by_key(priority).copied()
            }
        }
    }

    /// How many pieces to run beyond those that a wait needed.
    pub(crate) fn extra(&mut self) -> usize {
        match self.schedule {
            Schedule::Random => match self.random.below(4) {
                0 => self.random.below(16),
                1 => self.random.below(4),
                _ => 0,
            },
            Schedule::Lazy => 0,
            Schedule::Eager => usize::MAX,
        }
    }

    /// How many pieces a query lets run. Not always none: a loop of queries must end.
    pub(crate) fn query(&mut self) -> usize {
        match self.schedule {
            Schedule::Random => self.random.below(4),
            Schedule::Lazy => 1,
            Schedule::Eager => usize::MAX,
        }
    }

    /// Whether a call waits that may but need not.
    pub(crate) fn waits_unobliged(&mut self) -> bool {
        match self.schedule {
            Schedule::Random => self.random.below(2) == 0,
            Schedule::Lazy => false,
            Schedule::Eager => true,
        }
    }

    /// Whether [`Candidate::is_needed`] must be computed.
    pub(crate) fn asks_what_is_needed(&self) -> bool {
        self.schedule == Schedule::Lazy
    }

    /// Whether waits end only when nothing more can run.
    pub(crate) fn drains(&self) -> bool {
        self.schedule == Schedule::Eager
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates() -> Vec<Candidate> {
        let make = |stream, sequence, is_needed| Candidate {
            stream,
            node: None,
            sequence,
            is_needed,
        };
        vec![make(0, 7, true), make(1, 3, false), make(2, 5, true)]
    }

    #[test]
    fn lazy_takes_the_last_that_is_needed_and_eager_the_first_that_was_given() {
        assert_eq!(
            Policy::new(Schedule::Lazy, 1)
                .choose(&candidates())
                .unwrap()
                .stream,
            0
        );
        assert_eq!(
            Policy::new(Schedule::Eager, 1)
                .choose(&candidates())
                .unwrap()
                .stream,
            1
        );
        let unneeded: Vec<Candidate> = candidates()
            .into_iter()
            .filter(|candidate| !candidate.is_needed)
            .collect();
        assert_eq!(Policy::new(Schedule::Lazy, 1).choose(&unneeded), None);
    }

    #[test]
    fn one_seed_chooses_alike_and_all_are_chosen_some_time() {
        let choices = |seed| {
            let mut policy = Policy::new(Schedule::Random, seed);
            (0..200)
                .map(|_| policy.choose(&candidates()).unwrap().stream)
                .collect::<Vec<_>>()
        };
        assert_eq!(choices(5), choices(5));
        assert_ne!(choices(5), choices(6));
        for stream in 0..3 {
            assert!(choices(5).contains(&stream), "stream {stream} never runs");
        }
        assert_eq!(Policy::new(Schedule::Random, 0).choose(&[]), None);
    }

    #[test]
    fn polling_makes_progress_in_every_schedule() {
        for schedule in [Schedule::Random, Schedule::Lazy, Schedule::Eager] {
            let mut policy = Policy::new(schedule, 3);
            assert!((0..100).any(|_| policy.query() > 0), "{schedule:?}");
        }
    }
}
