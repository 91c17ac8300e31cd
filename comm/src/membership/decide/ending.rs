//! How a job ends: ranks are asked to save, and those that do not end are killed.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::time::Duration;

use super::{Decision, ENDING, EXIT_STOPPED, End, JobAction, STOPS, of_signal};
use crate::error::{EXIT_PEER_LOST, RankList, Seconds};
use crate::membership::wire::ToRank;

pub(super) const NO_RANK_LEFT: &str =
    "no rank is left; help: resume the run from its last checkpoint";

impl Decision<'_> {
    /// A rank or an agent was asked to stop, and so is the job. The launcher may get the same
    /// Ctrl-C, which is not a second one then.
    pub(super) fn asked(&mut self, signal: c_int) {
        // Another host may say any number.
        if self.state.stop.is_none() && STOPS.contains(&signal) {
            self.stop(if signal == libc::SIGINT {
                libc::SIGTERM
            } else {
                signal
            });
        }
    }

    /// Asks the ranks to save and end.
    pub(super) fn stop(&mut self, signal: c_int) {
        let passed = match signal {
            libc::SIGINT | libc::SIGUSR1 | libc::SIGHUP => signal,
            _ => libc::SIGTERM,
        };
        if self.state.stop.is_none() {
            self.end_within(self.state.rules.grace);
        }
        // A second Ctrl-C ends all but stopped ranks at once.
        let is_interrupt = signal == libc::SIGINT;
        if is_interrupt && std::mem::replace(&mut self.state.interrupted, true) {
            self.end_within(ENDING);
        }
        self.state.stop = self.state.stop.or(Some(signal));
        let why = "the job was asked to stop";
        self.actions.push(JobAction::Signal(passed, why));
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

    /// The job ends because a rank of it has ended like this.
    pub(super) fn end_after(&mut self, end: End) {
        let signal = end.signal();
        // How a rank ends after the job has done its work does not matter.
        let mut code = if self.state.is_done() { 0 } else { end.code() };
        let is_killed = signal.is_some_and(|it| !STOPS.contains(&it));
        if self.state.rules.is_elastic && self.state.ends.is_none() && is_killed {
            code = EXIT_PEER_LOST;
            self.print(NO_RANK_LEFT.into());
        }
        if !self.state.rules.is_elastic && !self.state.has_ranks() && !self.state.is_done() {
            self.name_killed();
        }
        self.end_within(match code {
            0 => self.state.rules.timeout,
            // Another rank may still save.
            EXIT_STOPPED => self.state.rules.grace,
            _ => ENDING,
        });
        let is_cause = match self.state.failure {
            None => code != 0,
            // Others may see the end of a killed rank before this process does.
            Some(EXIT_PEER_LOST) => signal.is_some_and(|signal| code == of_signal(signal)),
            Some(_) => false,
        };
        if is_cause {
            // A rank that is killed while the job ends has not made it end.
            let said = self.state.ends.filter(|&code| code > 0);
            self.state.failure = Some(said.unwrap_or(code));
        }
    }

    /// Where all ranks were killed, none could say so.
    fn name_killed(&mut self) {
        let mut by_signal: BTreeMap<c_int, Vec<usize>> = BTreeMap::new();
        for (rank, it) in self.state.ranks.iter().enumerate() {
            let Some(signal) = it.killed_by else { return };
            by_signal.entry(signal).or_default().push(rank);
        }
        let by_signal = by_signal.iter();
        let parts =
            by_signal.map(|(by, ranks)| format!("{} killed by signal {by}", RankList(ranks)));
        self.print(format!(
            "{}: no rank is left that could say more; help: the kernel's log (dmesg) shows crashes \
             and kills for lack of memory, but not a kill -9",
            parts.collect::<Vec<_>>().join(", ")
        ));
    }

    /// Ranks that are left after `limit` are killed.
    pub(super) fn end_within(&mut self, limit: Duration) {
        let end_by = self.now + limit;
        if self
            .state
            .end_by
            .is_none_or(|(earlier, _)| end_by < earlier)
        {
            self.state.end_by = Some((end_by, limit));
        }
    }

    pub(super) fn kill_late(&mut self) {
        let end_by = &mut self.state.end_by;
        let Some((_, limit)) = end_by.take_if(|(by, _)| *by <= self.now) else {
            return;
        };
        if !self.state.has_killed {
            return self.kill_all(limit);
        }
        // Where it does no good, a host is out of reach.
        (1..self.state.hosts.len()).for_each(|host| self.host_lost(host, "it does not answer"));
    }

    /// Kills the ranks that are left after `limit`.
    pub(super) fn kill_all(&mut self, limit: Duration) {
        // After a failure other ranks have named the missing ones; after success none is missing.
        if self.state.failure.is_none() && !self.state.is_done() {
            let all = 0..self.state.ranks.len();
            let left: Vec<usize> = all.filter(|&rank| self.state.ranks[rank].comes()).collect();
            let note = match self.state.stop {
                Some(_) => ": killed",
                None => {
                    " of another's end: killed; help: find out what stopped it (SIGSTOP, a \
                     debugger, a stuck disk or GPU)"
                }
            };
            let (ranks, limit) = (RankList(&left), Seconds(limit));
            self.print(format!("{ranks} did not end within {limit}{note}"));
            let said = self.state.ends.filter(|&code| code > 0);
            let asked = self.state.stop.map(of_signal);
            self.state.failure = said.or(asked).or(Some(EXIT_PEER_LOST));
        }
        self.state.has_killed = true;
        let why = "they have had the time to end";
        self.actions.push(JobAction::Signal(libc::SIGKILL, why));
        self.end_within(ENDING);
    }
}
