//! Who takes part. Forms the next generation when all living ranks of one wait, and tells them.
//! Kills ranks that make no progress, or that others cannot hear.

use std::time::Duration;

use super::{Decision, ENDING, NOT_HEARD};
use crate::error::{EXIT_PEER_LOST, RankList, Seconds};
use crate::membership::state::GenerationRank;
use crate::membership::wire::{self, Change, Generation, LostRank, ToLauncher, ToRank};

/// How long ranks may take at least to meet for the first time.
const FIRST_MEETING: Duration = Duration::from_secs(60);
/// For how long ranks that are not stopped may at least show no progress where none does: NCCL may
/// take a minute to connect.
const SLOW: Duration = Duration::from_secs(120);
/// How often in a row a rank may come that cannot connect to all others: it stays out then. The
/// first time a hang of another one may be the reason.
const UNCONNECTED_MAX: u32 = 2;
const NO_PROGRESS: &str = "killed because it showed no progress";

impl Decision<'_> {
    pub(super) fn hear(&mut self, rank: usize, process: u32, said: ToLauncher) {
        let now = self.now;
        let Some(it) = self.state.running(rank, process) else {
            return;
        };
        match said {
            ToLauncher::Waits { after, port } => {
                (it.waits, it.port) = (Some(after), port);
                it.progress.1 = now;
            }
            ToLauncher::Progress(number) => {
                if number != it.progress.0 {
                    it.progress = (number, now);
                }
            }
            ToLauncher::Misses {
                generation,
                ranks,
                have_met,
            } => {
                if generation == self.state.generation && self.state.is_member(rank) {
                    self.leave_out(rank, ranks, have_met);
                }
            }
            ToLauncher::Ends(code) => self.end(code, "a rank has said so"),
        }
    }

    /// The job ends with this exit code, for this reason.
    pub(super) fn end(&mut self, code: u8, why: &'static str) {
        if self.state.ends.is_some() {
            return;
        }
        self.state.ends = Some(code);
        for rank in 0..self.state.ranks.len() {
            self.tell(rank, ToRank::Ends(code), why);
        }
    }

    /// Whether a rank's process waits for the next generation.
    pub(super) fn waits(&self, rank: usize) -> bool {
        let Some(it) = &self.state.ranks[rank].process else {
            return false;
        };
        // One that was killed may live for a moment.
        let waits = it.waits.filter(|_| it.killed.is_none());
        waits.is_some_and(|after| after >= self.state.generation || !self.state.is_member(rank))
    }

    /// The ranks that the next generation waits for, and those of which it would consist.
    pub(super) fn survey(&self) -> (Vec<usize>, Vec<usize>) {
        let state = &*self.state;
        let all = 0..state.ranks.len();
        let mut next: Vec<usize> = all.clone().filter(|&rank| self.waits(rank)).collect();
        let is_absent = |&rank: &usize| {
            // All ranks that are started are in the first generation.
            let is_first = state.generation == 0 && state.ranks[rank].comes();
            (is_first || state.is_member(rank)) && !next.contains(&rank)
        };
        let mut absent: Vec<usize> = all.clone().filter(is_absent).collect();
        if next.len() + absent.len() < state.rules.min_ranks {
            // Lost ranks that are started again are needed.
            absent = all
                .filter(|rank| state.ranks[*rank].comes() && !next.contains(rank))
                .collect();
        }
        // A rank that was just lost comes back after a step: it may be that step that ends it.
        let is_back = |rank: &usize| {
            !state.is_member(*rank) && state.members.iter().any(|it| it.rank == *rank)
        };
        let back = next.iter().filter(|rank| is_back(rank)).count();
        if next.len() - back >= state.rules.min_ranks {
            next.retain(|rank| !is_back(rank));
        }
        (absent, next)
    }

    /// Forms the next generation if all of this one that live wait for it. If some do, or have
    /// ended, this one is over.
    pub(super) fn form(&mut self) {
        if self.state.ends.is_some() {
            return;
        }
        let (absent, next) = self.survey();
        if absent.is_empty() && !next.is_empty() {
            return self.form_of(next);
        }
        let has_left = |it: &GenerationRank| {
            self.state.process(it.rank) != Some(it.process) || self.waits(it.rank)
        };
        if self.state.over_since.is_none() && self.state.members.iter().any(has_left) {
            self.end_generation("one of its ranks has ended, or waits for the next one");
        }
    }

    /// In a job that ends with any of its ranks: forms the only generation, of all of them, or ends
    /// the job because of those that do not come.
    pub(super) fn form_once(&mut self) {
        let all = 0..self.state.ranks.len();
        let (waiting, others): (Vec<usize>, Vec<usize>) = all.partition(|&rank| self.waits(rank));
        if others.is_empty() {
            return self.form_of(waiting);
        }
        // One that is stopped waits for nobody.
        let runs = waiting.iter().filter(|&&rank| !self.is_stopped(rank));
        let silent_for = |&rank: &usize| self.silent_for(rank, Duration::ZERO);
        let Some(waited) = runs.filter_map(silent_for).max() else {
            return;
        };
        let timeout = self.state.rules.timeout;
        let has_ended = |rank: &usize| self.state.process(*rank).is_none();
        let gone: Vec<usize> = others.iter().copied().filter(has_ended).collect();
        if gone.is_empty() && waited <= timeout {
            return;
        }
        let line = if gone.is_empty() {
            others.iter().for_each(|&rank| self.kill(rank, NO_PROGRESS));
            format!(
                "{} did not come to the others within {}; help: check whether they are \
                 stopped or still starting, or give them more time",
                RankList(&others),
                Seconds(timeout)
            )
        } else {
            format!(
                "{} ended before all ranks had met; help: look above for an error; the kernel's \
                 log (dmesg) shows crashes and kills",
                RankList(&gone)
            )
        };
        // Ranks that were asked to stop may end.
        if self.state.stop.is_none() {
            self.print(line);
        }
        let code = self.state.failure.unwrap_or(EXIT_PEER_LOST);
        self.end(code, "a rank does not come to the others");
    }

    pub(super) fn end_generation(&mut self, why: &'static str) {
        self.state.over_since = Some(self.now);
        self.tell_members(&ToRank::Over(self.state.generation), why);
    }

    pub(super) fn form_of(&mut self, next: Vec<usize>) {
        self.state.generation += 1;
        let (number, now) = (self.state.generation, self.now);
        let mut change = Change::default();
        for it in &self.state.members {
            if self.state.process(it.rank) != Some(it.process) {
                let why = it.ended.clone();
                change.lost.push(LostRank {
                    rank: it.rank,
                    why: why.unwrap_or_else(|| "its process ended".into()),
                });
            }
        }
        let is_new = |rank: &usize| number > 1 && !self.state.is_member(*rank);
        change.joined = next.iter().copied().filter(is_new).collect();
        let (mut members, mut described) = (Vec::new(), Vec::new());
        for &rank in &next {
            let address = self.state.hosts[self.state.ranks[rank].host].address;
            let Some(process) = &mut self.state.ranks[rank].process else {
                continue;
            };
            process.took_part.get_or_insert(now);
            members.push(GenerationRank {
                rank,
                process: process.number,
                is_new: change.joined.contains(&rank),
                ended: None,
            });
            described.push(wire::MemberAddress {
                rank,
                address,
                port: process.port,
            });
        }
        self.state.members = members;
        (self.state.formed, self.state.over_since) = (now, None);
        self.state.announced_newcomers = false;
        let formed = Generation {
            number,
            members: described,
            hosts: self.state.hosts_of_ranks(),
            change,
        };
        self.tell_members(&ToRank::Formed(formed), "all that live wait for it");
    }

    pub(super) fn tell_of_newcomers(&mut self) {
        let is_new = |rank: usize| self.waits(rank) && !self.state.is_member(rank);
        let has_newcomers = (0..self.state.ranks.len()).any(is_new);
        if has_newcomers != self.state.announced_newcomers {
            self.state.announced_newcomers = has_newcomers;
            let why = "ranks have come or gone that wait to join";
            self.tell_members(&ToRank::Newcomers(has_newcomers), why);
        }
    }

    /// `by` does not hear these ranks, and the generation is over. Of ranks that miss each other
    /// the first word counts.
    pub(super) fn leave_out(&mut self, by: usize, mut missing: Vec<usize>, have_met: bool) {
        missing.retain(|&rank| {
            rank < self.state.ranks.len() && self.state.is_member(rank) && !self.waits(rank)
        });
        if self.state.over_since.is_some() || missing.is_empty() {
            return;
        }
        let is_stopped = |rank: &usize| self.is_stopped(*rank);
        let host = self.state.ranks[by].host;
        let elsewhere = |rank: &usize| self.state.ranks[*rank].host != host;
        let mut why = NO_PROGRESS;
        // A rank that is missed may wait for one that is stopped.
        let mut stopped = self.living_members();
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
        self.end_generation("one of its ranks does not hear another");
    }

    /// A rank that is lost may be the reason why new ones of its generation could not connect.
    pub(super) fn forgive_new(&mut self) {
        let new = self.state.members.iter().filter(|it| it.is_new);
        new.for_each(|it| self.state.ranks[it.rank].unconnected = 0);
    }

    fn is_stopped(&self, rank: usize) -> bool {
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
