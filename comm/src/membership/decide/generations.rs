//! Who takes part. A rank whose process ends is lost, and perhaps started again. The generation is
//! over then; the next one is formed when all of its ranks that live wait for it, and they are
//! told.

use std::ffi::c_int;
use std::time::Duration;

use super::ending::NO_RANK_LEFT;
use super::silence::NO_PROGRESS;
use super::{Decision, EXIT_DISAGREES, EXIT_STOPPED, End, NOT_HEARD, STOPS};
use crate::error::{EXIT_PEER_LOST, RankList, Seconds};
use crate::membership::state::GenerationRank;
use crate::membership::wire::{self, Change, Generation, LostRank, ToLauncher, ToRank};

/// How often a rank is started in a row, the first start included, if it never takes part for as
/// long as `TOOK_PART`: so a rank that fails in every step is not restarted without end.
const TRIES_MAX: u32 = 10;
const TOOK_PART: Duration = Duration::from_secs(5);
/// By how much the third of these starts is put off; each later one more than twice as long.
const PUT_OFF: Duration = Duration::from_millis(20);

impl Decision<'_> {
    pub(super) fn has_ended(&mut self, rank: usize, process: u32, end: End) {
        if self.state.running(rank, process).is_none() {
            return;
        }
        let mut how = self.remove(rank, end.to_string());
        // Those that are killed at the end are not a cause.
        if self.state.has_killed {
            return;
        }
        let is_stop = |signal: &c_int| STOPS.contains(signal);
        self.state.ranks[rank].killed_by = end.signal().filter(|it| !is_stop(it));
        if end != End::Code(0) {
            self.end_done();
        }
        if self.state.rules.is_elastic && self.state.ends.is_none() && end != End::Code(0) {
            // One that was asked to stop and had nothing to save: so is the job.
            match end {
                End::Code(EXIT_STOPPED) => self.asked(libc::SIGTERM),
                End::Signal(signal) if STOPS.contains(&signal) => self.asked(signal),
                End::Code(_) | End::Signal(_) => {}
            }
            if self.state.stop.is_none() {
                if end == End::Signal(libc::SIGKILL) && how.ends_with('9') {
                    how += " (kill -9, or no memory was left: see dmesg)";
                }
                self.start_again(rank, Some(end), &how, "");
            }
            if self.state.has_ranks() {
                return;
            }
        }
        self.end_after(end);
    }

    /// A rank has no process any more. How that one ended.
    pub(super) fn remove(&mut self, rank: usize, how: String) -> String {
        let Some(process) = self.state.ranks[rank].process.take() else {
            return how;
        };
        let took_part = process.took_part;
        if took_part.is_some_and(|since| self.now - since >= TOOK_PART) {
            self.state.ranks[rank].tries = 0;
        }
        let is_old = |it: &GenerationRank| it.process == process.number && !it.is_new;
        let has_left = process.killed.is_none() && self.state.members.iter().any(is_old);
        if has_left && self.state.over_since.is_some() {
            self.forgive_new();
        }
        let how = process.killed.unwrap_or(how);
        if how != NOT_HEARD {
            self.state.ranks[rank].unconnected = 0;
        }
        let members = self.state.members.iter_mut();
        let of_process = members.filter(|it| it.process == process.number);
        of_process.for_each(|it| it.ended = Some(how.clone()));
        how
    }

    /// A lost rank is to be started again, if the job may, perhaps `on_host`. One that ends again
    /// and again before it takes part, or soon after, waits longer each time, and then stays out.
    pub(super) fn start_again(&mut self, rank: usize, end: Option<End>, how: &str, on_host: &str) {
        let (restarts, restarted) = (self.state.rules.restarts, self.state.restarted);
        let it = &mut self.state.ranks[rank];
        // One that does not agree with the others will not agree later.
        it.stays_out |= end == Some(End::Code(EXIT_DISAGREES));
        let tries = it.tries + 1;
        let refusal = match restarts {
            0 => Some(String::new()),
            _ if it.stays_out => Some(": it is not started again".into()),
            _ if tries > TRIES_MAX => Some(format!(
                ": it ended {TRIES_MAX} times before or soon after it took part, and is not \
                 started again"
            )),
            _ if restarts == restarted => Some(format!(
                ": all {restarts} restarts are used up, and it is not started again"
            )),
            _ => None,
        };
        let again = refusal.unwrap_or_else(|| {
            it.tries = tries;
            it.due = Some(self.now + PUT_OFF * ((1 << (tries - 1)) - 1));
            self.state.restarted += 1;
            format!(
                ": starting it again{on_host} ({} of {restarts})",
                self.state.restarted
            )
        });
        self.print(format!("rank {rank} {how}{again}"));
    }

    /// Starts the lost ranks for which it is time, unless the job ends.
    pub(super) fn start_due(&mut self) {
        let is_ending = self.state.stop.is_some() || self.state.ends.is_some();
        for rank in 0..self.state.ranks.len() {
            let due = &mut self.state.ranks[rank].due;
            if due.take_if(|due| is_ending || *due <= self.now).is_none() {
                continue;
            }
            if !is_ending {
                self.start(rank, "its last process was lost");
            } else if !self.state.has_ranks() && !self.state.is_done() {
                if self.state.failure.or(self.state.ends).is_none() {
                    self.print(NO_RANK_LEFT.into());
                }
                let said = self.state.ends.unwrap_or(EXIT_PEER_LOST);
                self.state.failure.get_or_insert(said);
            }
        }
    }

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
            ToLauncher::Asked(signal) => self.asked(signal),
            ToLauncher::Ends(code) => self.end(code, "a rank has said so"),
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

    /// In a job that has done its work, a rank was lost: ends the calls in which others wait for
    /// it.
    pub(super) fn end_done(&mut self) {
        if self.state.is_done() && self.state.over_since.is_none() {
            self.end_generation("a rank was lost after the last step");
        }
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
        let over_since = self.state.over_since.take();
        self.state.formed = now;
        self.state.announced_newcomers = false;
        let formed = Generation {
            number,
            members: described,
            hosts: self.state.hosts_of_ranks(),
            change,
            over_for: over_since.map_or(Duration::ZERO, |since| now - since),
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
}
