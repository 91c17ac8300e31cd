//! What ranks agree on when they meet: with which step and which slices they continue, and who
//! gives its state to whom. It follows only from what each of them says, so all make the same
//! [`Regroup`].
//!
//! Without ZeRO-1 each rank has everything, and those that are behind, or new, get it from the
//! first that is furthest. With ZeRO-1 a rank has slices, in a [`Version`], and may be ready for
//! the next one: for an update that it has prepared, or for slices that it has got. It takes that
//! only when all ranks are ready. So either a rank has the next version, and then all others are
//! ready for it; or none has it, and if one is not ready, they do without.

use serde::{Deserialize, Serialize};

/// The last step that was taken, logged, evaluated, saved.
pub(crate) type RankProgress = [u64; 4];

/// Which slices a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cut {
    /// The generation of the ranks for which slices were cut.
    pub(crate) number: u64,
    /// Among how many ranks.
    pub(crate) ranks: usize,
    /// The slice of which this rank is the owner.
    pub(crate) owns: usize,
    /// The slice of which it is the keeper.
    pub(crate) keeps: Option<usize>,
}

impl Cut {
    /// Whether ranks that have these slices have all of them.
    pub(crate) fn are_whole(cuts: &[Option<Cut>]) -> bool {
        let all = || cuts.iter().flatten();
        let has = |slice| all().any(|cut| cut.owns == slice || cut.keeps == Some(slice));
        all().next().is_none_or(|cut| (0..cut.ranks).all(has))
    }
}

/// Under ZeRO-1: how many updates a rank has made, and its slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Version {
    pub(crate) steps: u64,
    pub(crate) cut: Cut,
}

impl Version {
    /// The same for all ranks; greater for a later one.
    fn number(&self) -> [u64; 2] {
        [self.steps, self.cut.number]
    }
}

/// What a rank says of its run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// None without a run.
    pub(crate) progress: Option<RankProgress>,
    /// Under ZeRO-1: what it has; None if it is new.
    pub(crate) has: Option<Version>,
    /// What it is ready for.
    pub(crate) ready: Option<Version>,
}

impl RankReport {
    fn offers(&self) -> impl Iterator<Item = Version> {
        [self.has, self.ready].into_iter().flatten()
    }
}

/// What a rank does with what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// It continues with what it has.
    Stay,
    /// It takes what it is ready for.
    Advance,
    /// It has nothing that counts, and gets all from the others.
    Forget,
}

/// How the ranks continue. By rank.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Regroup {
    pub(crate) acts: Vec<Act>,
    /// After that; None for a rank that has nothing.
    pub(crate) progress: Vec<Option<RankProgress>>,
    /// Under ZeRO-1: the slices that it then has.
    pub(crate) cuts: Vec<Option<Cut>>,
    /// Whether no rank that is left has some slice, so that all start from the last checkpoint.
    pub(crate) has_lost_slices: bool,
}

impl Regroup {
    /// The plan of ranks that stand like this.
    pub(crate) fn of(reports: &[RankReport]) -> Regroup {
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
        let cuts: Vec<_> = all.map(|it| after(it).map(|it| it.cut)).collect();
        let has_lost_slices = has_slices && (agreed.is_none() || !Cut::are_whole(&cuts));
        if has_lost_slices {
            acts.fill(Act::Forget);
        }
        let progress = |it: (&RankReport, &Act)| {
            let [steps, others @ ..] = it.0.progress.filter(|_| *it.1 != Act::Forget)?;
            let [logged, evaluated, saved] = others;
            let steps = after(it).map_or(steps, |it| it.steps);
            Some([steps, logged, evaluated, saved])
        };
        Regroup {
            progress: reports.iter().zip(&acts).map(progress).collect(),
            acts,
            cuts,
            has_lost_slices,
        }
    }

    /// The first of the ranks that are furthest, which gives the others its state; None if no rank
    /// has a run.
    pub(crate) fn source(&self) -> Option<usize> {
        let most = self.progress.iter().max()?;
        let source = self.progress.iter().position(|it| it == most);
        source.filter(|_| most.is_some())
    }

    /// Whether each rank has its slices for itself: ZeRO-1.
    pub(crate) fn has_slices(&self) -> bool {
        self.cuts.iter().any(Option::is_some)
    }
}

/// The latest version that a rank has, or that all that have a run have or are ready for, with
/// every slice.
fn agreed(reports: &[RankReport]) -> Option<[u64; 2]> {
    let counts = |number: &[u64; 2]| {
        let is_it = |it: &Version| it.number() == *number;
        let mut made = reports.iter().filter_map(|it| it.has.as_ref());
        let is_made = made.any(is_it);
        let offers: Vec<Option<Version>> = reports
            .iter()
            .filter(|it| it.offers().next().is_some())
            .map(|it| it.offers().find(is_it))
            .collect();
        let cuts: Vec<_> = offers.iter().map(|it| it.map(|it| it.cut)).collect();
        is_made || cuts.iter().all(Option::is_some) && Cut::are_whole(&cuts)
    };
    let versions = reports.iter().flat_map(RankReport::offers);
    versions.map(|it| it.number()).filter(counts).max()
}

#[cfg(test)]
mod tests;
