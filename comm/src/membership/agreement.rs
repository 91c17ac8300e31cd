//! What ranks agree on when they meet: with which step and which slices they continue, and who
//! gives its state to whom. It follows only from what each of them says, so all make the same
//! [`Regroup`].
//!
//! Without ZeRO-1 each rank has everything. Ranks that are behind, or new, get it from the lowest
//! rank of those with the most progress.
//!
//! With ZeRO-1 a rank has slices, in a [`Version`]: a number of steps and a way of slicing. It may
//! be ready for the next version, by an update that it has prepared or by slices that it has got,
//! and takes it only when all ranks are ready ([`SliceState`]). So after a loss, if one rank has
//! the next version, all others are ready for it and take it. If none has it and one is not ready,
//! all stay. They also stay if the next version is slices of which more ranks are lost than of
//! those that they have.
//!
//! Each slice has an owner and a backup: the rank that follows the owner by a fixed distance. Both
//! make its updates.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// What a rank has done of a run: the last step that was taken, logged, evaluated, saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RankProgress {
    /// How many steps it has taken.
    pub steps: u64,
    /// The last step that is in the metrics log.
    pub logged: u64,
    /// After which it was evaluated last.
    pub evaluated: u64,
    /// After which a checkpoint was saved last.
    pub saved: u64,
}

/// The slices of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slicing {
    /// The generation of the ranks among which buckets were divided.
    pub number: u64,
    /// How many ranks.
    pub ranks: usize,
    /// The slice of which this rank is the owner.
    pub owns: usize,
    /// The slice of which it is the backup.
    pub backs_up: Option<usize>,
}

impl Slicing {
    /// That of rank `rank` of `ranks` in generation `number`, whose slices have their backup
    /// `distance` ranks further; 0: they have none.
    pub fn new(number: u64, [rank, ranks]: [usize; 2], distance: usize) -> Slicing {
        let has_backup = !distance.is_multiple_of(ranks);
        let before = (rank + ranks - distance % ranks) % ranks;
        Slicing {
            number,
            ranks,
            owns: rank,
            backs_up: has_backup.then_some(before),
        }
    }

    /// Whether ranks that have these slices have all of them.
    pub fn are_whole(all: &[Option<Slicing>]) -> bool {
        let all = || all.iter().flatten();
        let has = |slice| all().any(|it| it.owns == slice || it.backs_up == Some(slice));
        all().next().is_none_or(|it| (0..it.ranks).all(has))
    }
}

/// Under ZeRO-1: how many updates a rank has made, and its slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// How many updates.
    pub steps: u64,
    /// Its slices.
    pub slicing: Slicing,
}

impl Version {
    /// The same for all ranks; greater for a later one.
    fn number(&self) -> [u64; 2] {
        [self.steps, self.slicing.number]
    }
}

/// Which slices a rank has, and what it can do without the others.
#[derive(Clone, Debug, Default)]
pub struct SliceState {
    /// None for a rank that is new.
    slicing: Option<Slicing>,
    next: Option<NextVersion>,
}

/// What a rank takes when all ranks are ready for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextVersion {
    /// The update of a step, which is prepared.
    Update,
    /// These slices, whose values and moments it has got.
    Slices(Slicing),
}

impl SliceState {
    /// Its slices.
    pub fn slicing(&self) -> Option<Slicing> {
        self.slicing
    }

    /// This rank is ready for it.
    pub fn make_ready(&mut self, next: NextVersion) {
        self.next = Some(next);
    }

    /// All ranks are ready, or this one's part of the plan is [`Act::Advance`]. Returns what it
    /// takes.
    pub fn advance(&mut self) -> Option<NextVersion> {
        let next = self.next.take();
        if let Some(NextVersion::Slices(slicing)) = next {
            self.slicing = Some(slicing);
        }
        next
    }

    /// It keeps what it had after its last complete step.
    pub fn go_back(&mut self) {
        self.next = None;
    }

    /// It is not ready for the update, although it has prepared it.
    pub fn forget_update(&mut self) {
        self.next.take_if(|it| *it == NextVersion::Update);
    }

    /// After this many steps: what it has, and what it is ready for.
    pub fn versions(&self, steps: u64) -> [Option<Version>; 2] {
        let version = |steps, slicing| Version { steps, slicing };
        let ready = match self.next {
            Some(NextVersion::Update) => self.slicing.map(|it| version(steps + 1, it)),
            Some(NextVersion::Slices(slicing)) => Some(version(steps, slicing)),
            None => None,
        };
        [self.slicing.map(|it| version(steps, it)), ready]
    }
}

/// What a rank says of its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankReport {
    /// None without a run.
    pub progress: Option<RankProgress>,
    /// Under ZeRO-1: what it has; None if it is new.
    pub has: Option<Version>,
    /// What it is ready for.
    pub ready: Option<Version>,
}

impl RankReport {
    fn offers(&self) -> impl Iterator<Item = Version> {
        [self.has, self.ready].into_iter().flatten()
    }
}

/// What a rank does with what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It continues with what it has.
    Stay,
    /// It takes what it is ready for.
    Advance,
    /// It has nothing that counts, and gets all from the others.
    Forget,
}

/// How the ranks continue. By rank.
#[derive(Debug, PartialEq, Eq)]
pub struct Regroup {
    /// What each does.
    pub acts: Vec<Act>,
    /// After that; None for a rank that has nothing.
    pub progress: Vec<Option<RankProgress>>,
    /// Under ZeRO-1: the slices that it then has.
    pub slicings: Vec<Option<Slicing>>,
    /// Whether no rank that is left has some slice, so that all start from the last checkpoint.
    pub has_lost_slices: bool,
}

impl Regroup {
    /// The plan of ranks that stand like this.
    pub fn of(reports: &[RankReport]) -> Regroup {
        let agreed = agreed(reports);
        let is_agreed = |it: &Option<Version>| it.map(|it| it.number()) == agreed;
        let has_slices = reports.iter().any(|it| it.offers().next().is_some());
        let act = |it: &RankReport| match it.progress {
            None => Act::Forget,
            Some(_) if !has_slices => Act::Stay,
            Some(_) if is_agreed(&it.has) => Act::Stay,
            Some(_) if is_agreed(&it.ready) => Act::Advance,
            Some(_) => Act::Forget,
        };
        let mut acts: Vec<_> = reports.iter().map(act).collect();
        let after = |it: (&RankReport, &Act)| match it.1 {
            Act::Stay => it.0.has,
            Act::Advance => it.0.ready,
            Act::Forget => None,
        };
        let all = reports.iter().zip(&acts);
        let slicings: Vec<_> = all.map(|it| after(it).map(|it| it.slicing)).collect();
        let has_lost_slices = has_slices && (agreed.is_none() || !Slicing::are_whole(&slicings));
        if has_lost_slices {
            acts.fill(Act::Forget);
        }
        let progress = |it: (&RankReport, &Act)| {
            let progress = it.0.progress.filter(|_| *it.1 != Act::Forget)?;
            let steps = after(it).map_or(progress.steps, |it| it.steps);
            Some(RankProgress { steps, ..progress })
        };
        Regroup {
            progress: reports.iter().zip(&acts).map(progress).collect(),
            acts,
            slicings,
            has_lost_slices,
        }
    }

    /// The first of the ranks that are furthest, which gives the others its state; None if no rank
    /// has a run.
    pub fn source(&self) -> Option<usize> {
        let most = self.progress.iter().max()?;
        let source = self.progress.iter().position(|it| it == most);
        source.filter(|_| most.is_some())
    }

    /// Whether each rank has its slices for itself: ZeRO-1.
    pub fn has_slices(&self) -> bool {
        self.slicings.iter().any(Option::is_some)
    }
}

/// The version to continue with: the latest that a rank has, or a later one that every rank with a
/// run has or is ready for and of which no slice is missing. Of those with the most steps the one
/// of which fewest ranks are lost, then the latest.
fn agreed(reports: &[RankReport]) -> Option<[u64; 2]> {
    let made = reports.iter().filter_map(|it| it.has.as_ref());
    let made = made.map(Version::number).max();
    let standing = |number: [u64; 2]| {
        let offers = reports.iter().filter(|it| it.offers().next().is_some());
        let slicings: Vec<Option<Slicing>> = offers
            .map(|it| it.offers().find(|it| it.number() == number))
            .map(|it| it.map(|it| it.slicing))
            .collect();
        let is_whole = slicings.iter().all(Option::is_some) && Slicing::are_whole(&slicings);
        let left = || slicings.iter().flatten();
        let lost = left().next().map_or(0, |it| it.ranks) - left().count();
        (is_whole, Reverse(lost))
    };
    let versions = reports.iter().flat_map(RankReport::offers);
    versions
        .map(|it| (it.number(), standing(it.number())))
        .filter(|(number, (is_whole, _))| {
            Some(*number) == made || Some(*number) > made && *is_whole
        })
        .max_by_key(|(number, standing)| (number[0], *standing, number[1]))
        .map(|it| it.0)
}

/// Elements that one rank gives to another, or has itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Who has them.
    pub from: usize,
    /// Who gets them.
    pub to: usize,
    /// Which.
    pub range: Range<usize>,
}

/// Who gives what, from the ranges that each rank has to those that each gets, in one order for all
/// ranks. Each move is part of one range of either rank. What no rank has is padding.
pub fn moves(held: &[Vec<Range<usize>>], wanted: &[Vec<Range<usize>>]) -> Vec<Move> {
    let all = || held.iter().chain(wanted).flatten();
    let mut edges: Vec<usize> = all().flat_map(|range| [range.start, range.end]).collect();
    edges.sort_unstable();
    edges.dedup();
    let has = |ranges: &[Range<usize>], at: usize| ranges.iter().any(|range| range.contains(&at));
    let mut moves = Vec::new();
    for edge in edges.windows(2) {
        let range = edge[0]..edge[1];
        let having = || (0..held.len()).filter(|&rank| has(&held[rank], range.start));
        for to in (0..wanted.len()).filter(|&rank| has(&wanted[rank], range.start)) {
            let from = having().find(|&rank| rank == to).or(having().next());
            let range = range.clone();
            moves.extend(from.map(|from| Move { from, to, range }));
        }
    }
    moves
}

#[cfg(test)]
mod tests;
