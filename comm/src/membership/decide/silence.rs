//! Ranks that hang, are stopped, or that others cannot hear, are killed.

use std::time::Duration;

use super::{Decision, ENDING, NOT_HEARD};
use crate::error::{EXIT_PEER_LOST, RankList, Seconds};
use crate::membership::state::GenerationRank;

/// How long ranks may take at least to meet for the first time.
const FIRST_MEETING: Duration = Duration::from_secs(60);
/// For how long ranks that are not stopped may at least show no progress where none does: NCCL may
/// take a minute to connect.
const SLOW: Duration = Duration::from_secs(120);
/// How often in a row a rank may come that cannot connect to all others: it stays out then. The
/// first time a hang of another one may be the reason.
const UNCONNECTED_MAX: u32 = 2;
pub(super) const NO_PROGRESS: &str = "killed because it showed no progress";

impl Decision<'_> {
    /// `by` does not hear these ranks, and the generation is over. Of ranks that miss each other
    /// the first word counts, even if others have left before they heard it.
    pub(super) fn leave_out(&mut self, by: usize, mut missing: Vec<usize>, have_met: bool) {
        missing.retain(|&rank| {
            // A rank that already waits did not cause the hang. But one that could not connect may
            // have started to wait since.
            rank < self.state.ranks.len()
                && self.state.is_member(rank)
                && !(have_met && self.waits(rank))
        });
        let is_lost = |it: &GenerationRank| {
            let process = self.state.ranks[it.rank].process.as_ref();
            process.is_none_or(|now| now.number != it.process || now.killed.is_some())
        };
        if self.state.members.iter().any(is_lost) || missing.is_empty() {
            return;
        }
        let is_stopped = |rank: &usize| self.is_stopped(*rank);
        let host = self.state.ranks[by].host;
        let elsewhere = |rank: &usize| self.state.ranks[*rank].host != host;
        let mut why = NO_PROGRESS;
        // A rank that is missed in a call may wait for one that is stopped.
        let mut stopped = missing.clone();
        if have_met {
            stopped = self.living_members();
        }
        stopped.retain(is_stopped);
        if !stopped.is_empty() {
            missing = stopped;
        } else if missing.iter().any(elsewhere) {
            why = NOT_HEARD;
            // Of two that could not connect, the one that has just come stays out, with the others
            // that came on its host.
            let news = self
                .state
                .members
                .iter()
                .filter(|it| !have_met && it.is_new);
            let new: Vec<usize> = news.map(|it| it.rank).collect();
            let is_new = |rank: &usize| new.contains(rank);
            if is_new(&by) && !missing.iter().any(is_new) {
                missing = new.iter().copied().filter(|it| !elsewhere(it)).collect();
            }
            for &rank in missing.iter().filter(|rank| is_new(rank)) {
                let it = &mut self.state.ranks[rank];
                it.unconnected += 1;
                it.stays_out = it.unconnected == UNCONNECTED_MAX;
            }
        }
        missing.iter().for_each(|&rank| self.kill(rank, why));
        if self.state.over_since.is_none() {
            self.end_generation("one of its ranks does not hear another");
        }
    }

    /// A rank that is lost may be the reason why new ones of its generation could not connect.
    pub(super) fn forgive_new(&mut self) {
        let new = self.state.members.iter().filter(|it| it.is_new);
        new.for_each(|it| self.state.ranks[it.rank].unconnected = 0);
    }

    pub(super) fn is_stopped(&self, rank: usize) -> bool {
        let process = self.state.ranks[rank].process.as_ref();
        process.is_some_and(|it| it.stopped.is_some())
    }

    /// For how long a rank's process has shown no progress after `since`; None if it was killed.
    pub(super) fn silent_for(&self, rank: usize, since: Duration) -> Option<Duration> {
        let process = self.state.ranks[rank].process.as_ref();
        let it = process.filter(|it| it.killed.is_none())?;
        Some(self.now.saturating_sub(it.progress.1.max(since)))
    }

    /// Kills ranks that are waited for and show no progress, and all if none does.
    pub(super) fn kill_silent(&mut self) {
        let timeout = self.state.rules.timeout;
        let living = self.living_members();
        if let (Some(since), None) = (self.state.over_since, self.state.ends) {
            let limit = match self.state.generation {
                0 => timeout.max(FIRST_MEETING),
                _ => timeout,
            };
            let mut absent = self.survey().0;
            absent.retain(|&rank| self.silent_for(rank, since).is_some_and(|it| it > limit));
            absent.iter().for_each(|&rank| self.kill(rank, NO_PROGRESS));
            if !absent.is_empty() {
                self.forgive_new();
            }
        }
        let meets = self.state.over_since.is_some() && self.state.ends.is_none();
        if meets && !living.is_empty() {
            return;
        }
        // Ranks that wait for a stopped one have time to meet the one that comes for it.
        let limit = timeout.saturating_mul(4).max(SLOW);
        let mut all = living;
        if all.is_empty() {
            all = (0..self.state.ranks.len()).collect();
        }
        // A rank that has waited for long takes part from now on.
        let formed = self.state.formed;
        let silences = all.iter().filter_map(|&rank| self.silent_for(rank, formed));
        if silences.min().is_some_and(|silence| silence > limit) {
            self.print(format!(
                "no rank has shown progress for {} or longer: all are killed; help: find out what \
                 stopped them (SIGSTOP, a debugger, a stuck disk or GPU)",
                Seconds(limit)
            ));
            all.iter().for_each(|&rank| self.kill(rank, NO_PROGRESS));
        }
    }

    /// Kills ranks that have been stopped for three timeouts without a break, or for a moment once
    /// the job ends, or an elastic job was asked to stop and other ranks run. Also those that have
    /// not joined the others yet.
    pub(super) fn kill_stopped(&mut self) {
        let mut living = self.living_members().into_iter();
        let some_run = living.any(|rank| !self.is_stopped(rank));
        // Without the stopped ones the others can save what a stop asks for.
        let saves = self.state.rules.is_elastic && self.state.stop.is_some() && some_run;
        let limit = if self.state.ends.is_some() || saves {
            ENDING
        } else {
            self.state.rules.timeout.saturating_mul(3)
        };
        // Of ranks that continue together the launcher hears one after the other.
        let continued = self.state.continued;
        let since = |stopped: Duration| {
            if saves {
                stopped.max(continued)
            } else {
                stopped
            }
        };
        let is_late = |rank: &usize| {
            let process = self.state.ranks[*rank].process.as_ref();
            let stopped = process
                .filter(|it| it.killed.is_none())
                .and_then(|it| it.stopped);
            stopped.is_some_and(|stopped| self.now - since(stopped) >= limit)
        };
        let late: Vec<usize> = (0..self.state.ranks.len()).filter(is_late).collect();
        if late.is_empty() {
            return;
        }
        self.print(format!(
            "killed {}, stopped for {} or longer; help: look for a debugger, or for what sends \
             SIGSTOP",
            RankList(&late),
            Seconds(limit),
        ));
        late.iter().for_each(|&rank| self.kill(rank, NO_PROGRESS));
        if !self.state.rules.is_elastic {
            self.state.failure.get_or_insert(EXIT_PEER_LOST);
            self.kill_all(limit);
        }
    }
}
