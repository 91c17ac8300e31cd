//! What happens to a simulated job, by a seed: its size, its settings, and faults.

use std::time::Duration;

use ddp_comm::membership::state::Rules;

use crate::random::Random;

/// How long a rank is stopped that does not go on.
const FOR_GOOD: u64 = 100_000_000;
/// Signals that ask to stop.
const STOPS: [i32; 4] = [15, 2, 10, 1];

/// Something that goes wrong. Times are in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A rank's process is killed.
    Kill(usize),
    /// It is stopped for a while, or for good.
    Stop(usize, u64),
    /// It hangs for good, and nothing says that it is stopped.
    Hangs(usize),
    /// Its next process cannot be started.
    FailsToStart(usize),
    /// It ends because of what no other rank need find, with this exit code.
    Leaves(usize, u8),
    /// It finds what all ranks would find.
    Fails(usize),
    /// No packet passes between the launcher's host and this one: from it, to it, or both.
    Cut(usize, [bool; 2], u64),
    /// Nor between two other hosts: from the first one, to it, or both.
    CutBetween([usize; 2], [bool; 2], u64),
    /// An agent is killed with its ranks.
    LosesHost(usize),
    /// The launcher is suspended.
    Suspends(u64),
    /// The job is asked to stop, by a signal to the launcher, perhaps twice, or to a rank.
    Signal(i32, bool),
    Asked(i32),
    /// A rank gets such a signal, and is killed at once, or not.
    AsksRank(usize, i32, bool),
    /// One Ctrl-C comes to the launcher and to each rank.
    InterruptsAll,
    /// The next process of a rank takes this much longer to start.
    StartsLate(usize, u64),
    /// An agent is stopped.
    AgentStops(usize, u64),
    /// Another agent comes with the number of this host. If it is not let in, it ends after a time.
    AnotherAgent(usize, u64),
    /// The launcher cannot let in the next agent of this host, such as for want of a thread.
    FailsToLetIn(usize),
    /// Messages between the launcher and this host take this much longer, for a while.
    Delays(usize, u64, u64),
    /// Rank 0 cannot write any more.
    DiskIsFull,
    /// The locks of processes that end meanwhile stay.
    LockStays(u64),
}

impl Fault {
    fn rank(&self) -> Option<usize> {
        use Fault::{AsksRank, Fails, FailsToStart, Hangs, Kill, Leaves, StartsLate, Stop};
        match *self {
            AsksRank(rank, ..) => Some(rank),
            Kill(rank) | Hangs(rank) | FailsToStart(rank) | Fails(rank) => Some(rank),
            Stop(rank, _) | StartsLate(rank, _) | Leaves(rank, _) => Some(rank),
            _ => None,
        }
    }
}

/// What a loss means, and who starts the processes of other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The job ends with any of its ranks: `--ranks`, `--hosts`.
    Ordinary,
    /// It continues without lost ranks: `--min-ranks`.
    Elastic,
    /// So it does, and something else starts the processes of other hosts: pods, srun.
    Pods,
}

#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    pub(crate) ranks: usize,
    pub(crate) hosts: usize,
    pub(crate) spares: usize,
    pub(crate) min_ranks: usize,
    pub(crate) restarts: u32,
    pub(crate) timeout_s: u64,
    pub(crate) steps: u64,
    /// Whether each rank has its slices (ZeRO-1).
    pub(crate) has_slices: bool,
    /// After how many steps a checkpoint is saved.
    pub(crate) save_every: u64,
    /// When what happens.
    pub(crate) faults: Vec<(u64, Fault)>,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Schedule {
        let mut random = Random::new(seed);
        let random = &mut random;
        let ranks = random.of(1..7) as usize;
        let hosts = if random.one_in(2) {
            1
        } else {
            random.of(1..4).min(ranks as u64) as usize
        };
        let kind = match random.of(0..5) {
            0 => Kind::Ordinary,
            1 if hosts > 1 => Kind::Pods,
            _ => Kind::Elastic,
        };
        let min_ranks = if kind == Kind::Ordinary || random.one_in(3) {
            ranks
        } else {
            random.of(1..ranks as u64 + 1) as usize
        };
        let restarts = match kind {
            Kind::Ordinary => 0,
            _ if random.one_in(5) => random.of(0..3) as u32,
            _ => 1000,
        };
        let mut faults: Vec<(u64, Fault)> = Vec::new();
        // Each fault often comes alone.
        let count = if random.one_in(2) { 1 } else { random.of(1..9) };
        for _ in 0..count {
            // Often soon after another one.
            let at = match faults.last() {
                Some((at, _)) if random.one_in(2) => at + random.of(0..300),
                // And often before ranks have met.
                _ if random.one_in(4) => random.of(0..500),
                _ => random.of(0..6000),
            };
            let rank = random.of(0..ranks as u64) as usize;
            let ms = if random.one_in(5) {
                FOR_GOOD
            } else {
                random.of(100..20_000)
            };
            let host = random.of(0..hosts as u64) as usize;
            let ways = [[true, true], [true, false], [false, true]][random.of(0..3) as usize];
            let signal = STOPS[random.of(0..4) as usize];
            let kinds = if kind == Kind::Pods { 33 } else { 25 };
            let fault = match random.of(0..kinds) {
                0..=5 => Fault::Kill(rank),
                6..=8 => Fault::Stop(rank, ms),
                // Where all hang and the job ends with any of its ranks, nothing ends it.
                9..=10 if rank > 0 || kind != Kind::Ordinary => Fault::Hangs(rank),
                11 => Fault::FailsToStart(rank),
                12 => Fault::Leaves(rank, if random.one_in(3) { 78 } else { 77 }),
                13 if random.one_in(4) => Fault::Fails(rank),
                14 => match random.of(0..4) {
                    0 => Fault::Signal(signal, random.one_in(2)),
                    1 => Fault::Asked(signal),
                    2 => Fault::AsksRank(rank, signal, random.one_in(2)),
                    _ => Fault::InterruptsAll,
                },
                15 => Fault::Suspends(ms.min(20_000)),
                16 if host > 0 => Fault::Cut(host, ways, ms.min(20_000)),
                17..=18 if hosts > 2 => Fault::CutBetween([1, 2], ways, ms.min(20_000)),
                19 if host > 0 => Fault::LosesHost(host),
                // Where the job ends with any of its ranks, all come within the timeout.
                20 if kind != Kind::Ordinary => Fault::StartsLate(rank, random.of(500..20_000)),
                21 if host > 0 => Fault::AgentStops(host, ms),
                22 if host > 0 => Fault::Delays(host, random.of(100..1000), ms.min(20_000)),
                23 if random.one_in(4) => Fault::DiskIsFull,
                24 => Fault::LockStays(random.of(1000..200_000)),
                25..=29 if host > 0 => Fault::AnotherAgent(host, ms),
                30.. if host > 0 => Fault::FailsToLetIn(host),
                _ => Fault::Kill(rank),
            };
            faults.push((at, fault));
        }
        faults.sort_by_key(|it| it.0);
        Schedule {
            seed,
            kind,
            ranks,
            hosts,
            spares: if kind == Kind::Elastic && hosts > 1 && restarts > 0 {
                random.of(0..2) as usize
            } else {
                0
            },
            min_ranks,
            restarts,
            timeout_s: random.of(1..6),
            steps: random.of(20..120),
            has_slices: kind != Kind::Ordinary && random.one_in(2),
            save_every: random.of(3..20),
            faults,
        }
    }

    /// For how many ranks a spare host has room.
    pub(crate) fn spare_room(&self) -> usize {
        self.ranks.div_ceil(self.hosts)
    }

    pub(crate) fn rules(&self) -> Rules {
        Rules {
            is_elastic: self.kind != Kind::Ordinary,
            min_ranks: self.min_ranks,
            restarts: self.restarts,
            timeout: Duration::from_secs(self.timeout_s),
            grace: Duration::from_secs(10),
            hosts_come: self.kind == Kind::Pods,
        }
    }

    /// Whether nothing happens that may end such a job before its work is done.
    pub(crate) fn must_succeed(&self) -> bool {
        let is_harmless = |(_, fault): &(u64, Fault)| {
            use Fault::{
                AnotherAgent, FailsToLetIn, FailsToStart, Hangs, Kill, Leaves, StartsLate, Stop,
                Suspends,
            };
            match (self.kind, fault) {
                (Kind::Ordinary, Suspends(_)) => true,
                (Kind::Ordinary, _) => false,
                (
                    _,
                    Kill(_)
                    | Stop(..)
                    | Hangs(_)
                    | FailsToStart(_)
                    | Leaves(_, 77)
                    | StartsLate(..)
                    | AnotherAgent(..)
                    | FailsToLetIn(_),
                ) => true,
                // Agents end while the launcher is suspended.
                (_, Suspends(_)) => self.hosts == 1,
                _ => false,
            }
        };
        let is_enough = self.kind == Kind::Ordinary || self.restarts == 1000;
        is_enough && self.faults.iter().all(is_harmless)
    }

    /// Whether the launcher hears of all within a moment.
    pub(crate) fn is_heard(&self) -> bool {
        let hides = |fault: &Fault| {
            use Fault::{AgentStops, Cut, CutBetween, Delays, LockStays, LosesHost, Suspends};
            matches!(
                fault,
                Cut(..)
                    | CutBetween(..)
                    | LosesHost(_)
                    | Suspends(_)
                    | AgentStops(..)
                    | Delays(..)
                    | LockStays(_)
            )
        };
        !self.faults.iter().any(|(_, fault)| hides(fault))
    }

    /// Smaller ones of which one may fail, too.
    pub(crate) fn smaller(&self) -> Vec<Schedule> {
        let mut all = Vec::new();
        for index in 0..self.faults.len() {
            let mut it = self.clone();
            it.faults.remove(index);
            all.push(it);
        }
        if self.ranks > self.hosts.max(2) {
            let (ranks, min_ranks) = (self.ranks - 1, self.min_ranks.min(self.ranks - 1));
            let mut it = Schedule {
                ranks,
                min_ranks,
                ..self.clone()
            };
            it.faults
                .retain(|(_, fault)| fault.rank().is_none_or(|rank| rank < ranks));
            all.push(it);
        }
        if self.steps > 2 {
            all.push(Schedule {
                steps: self.steps / 2,
                ..self.clone()
            });
        }
        all.push(Schedule {
            spares: 0,
            ..self.clone()
        });
        all.retain(|it| {
            let is_fewer = it.ranks < self.ranks || it.faults.len() < self.faults.len();
            is_fewer || it.steps < self.steps || it.spares < self.spares
        });
        all
    }
}
