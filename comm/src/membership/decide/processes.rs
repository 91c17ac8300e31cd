//! Processes: starting and killing them, their ends, and starting them again.

use std::time::Duration;

use super::{
    Decision, ENDING, EXIT_DISAGREES, EXIT_STOPPED, End, JobAction, NOT_HEARD, STOPS, of_signal,
};
use crate::error::EXIT_PEER_LOST;
use crate::membership::state::{GenerationRank, RankProcess};
use crate::membership::wire::ToRank;

/// How often a rank may be started in a row without taking part for a while, and by how much the
/// second restart is put off; each later one is put off by more than twice as much.
const TRIES_MAX: u32 = 10;
const PUT_OFF: Duration = Duration::from_millis(20);
/// That while: one that fails in every step is not started for ever.
const TOOK_PART: Duration = Duration::from_secs(5);

impl Decision<'_> {
    pub(super) fn start(&mut self, rank: usize, why: &'static str) {
        self.state.processes += 1;
        let number = self.state.processes;
        self.state.ranks[rank].process = Some(RankProcess {
            number,
            waits: None,
            port: 0,
            progress: (0, self.now),
            took_part: None,
            stopped: None,
            killed: None,
        });
        let process = number;
        self.actions.push(JobAction::Start { rank, process, why });
        let message = ToRank::Welcome {
            is_elastic: self.state.rules.is_elastic,
            min_ranks: self.state.rules.min_ranks,
            hosts: self.state.hosts_of_ranks(),
            generation: self.state.generation,
        };
        self.tell(rank, message, why);
    }

    pub(super) fn kill(&mut self, rank: usize, why: &str) {
        if let Some(it) = &mut self.state.ranks[rank].process
            && it.killed.is_none()
        {
            it.killed = Some(why.into());
            let (process, why) = (it.number, why.into());
            self.actions.push(JobAction::Kill { rank, process, why });
        }
    }

    pub(super) fn tell(&mut self, rank: usize, message: ToRank, why: &'static str) {
        if let Some(process) = self.state.process(rank) {
            self.actions.push(JobAction::Tell {
                rank,
                process,
                message,
                why,
            });
        }
    }

    pub(super) fn tell_members(&mut self, message: &ToRank, why: &'static str) {
        for rank in self.living_members() {
            self.tell(rank, message.clone(), why);
        }
    }

    pub(super) fn print(&mut self, line: String) {
        self.actions.push(JobAction::Print(line));
    }

    /// Those of the current generation whose process runs.
    pub(super) fn living_members(&self) -> Vec<usize> {
        let all = self.state.members.iter();
        let living = all.filter(|it| self.state.process(it.rank) == Some(it.process));
        living.map(|it| it.rank).collect()
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

    pub(super) fn has_ended(&mut self, rank: usize, process: u32, end: End) {
        if self.state.running(rank, process).is_none() {
            return;
        }
        let mut how = self.remove(rank, end.to_string());
        // Those that are killed at the end are not a cause.
        if self.state.has_killed {
            return;
        }
        if self.state.rules.is_elastic && self.state.ends.is_none() && end != End::Code(0) {
            // One that was asked to stop and had nothing to save: so is the job.
            let asked = match end {
                End::Code(EXIT_STOPPED) => Some(libc::SIGTERM),
                End::Signal(signal) if STOPS.contains(&signal) => Some(signal),
                _ => None,
            };
            if let (Some(signal), None) = (asked, self.state.stop) {
                self.stop(signal);
            }
            if self.state.stop.is_none() {
                if end == End::Signal(libc::SIGKILL) && how.ends_with('9') {
                    how += " (kill -9, or no memory was left: see dmesg)";
                }
                self.start_again(rank, Some(end), &how, "");
            }
            if self.state.goes_on() {
                return;
            }
        }
        self.end_after(end);
    }

    /// The job ends because a rank of it has ended like this.
    pub(super) fn end_after(&mut self, end: End) {
        let signal = match end {
            End::Signal(signal) => Some(signal),
            End::Code(_) => None,
        };
        // How a rank ends after the job has done its work does not matter.
        let mut code = if self.state.is_done() { 0 } else { end.code() };
        let is_killed = signal.is_some_and(|it| !STOPS.contains(&it));
        if self.state.rules.is_elastic && self.state.ends.is_none() && is_killed {
            code = EXIT_PEER_LOST;
            self.print("no rank is left; help: resume the run from its last checkpoint".into());
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
            } else if !self.state.goes_on() && !self.state.is_done() {
                let said = self.state.ends.unwrap_or(EXIT_PEER_LOST);
                self.state.failure.get_or_insert(said);
            }
        }
    }
}
