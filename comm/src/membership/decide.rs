//! What follows from what happens: who takes part, who is started, killed or left out, and how the
//! job ends. A pure function of the state, the time and the event.

use std::ffi::c_int;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use super::state::{Member, Process, State};
use super::wire::{self, Change, Generation, LostRank, Said, Told};
use crate::error::{EXIT_PEER_LOST, Ranks, Seconds};
use crate::stop::STOPS;

/// How long ranks have to end after another has failed: only a stopped one needs more than one.
pub const ENDING: Duration = Duration::from_secs(3);
/// The exit code of ranks that were asked to stop and saved.
pub const EXIT_STOPPED: u8 = 75;
/// The exit code of a rank whose program, settings or data are not those of the others.
pub const EXIT_DISAGREES: u8 = 78;
/// How often a rank may be started in a row without taking part for a while, and by how much the
/// second start is put off; each later one by twice as much.
pub const TRIES_MAX: u32 = 10;
const PUT_OFF: Duration = Duration::from_millis(20);
/// That while: one that fails in every step is not started for ever.
const TOOK_PART: Duration = Duration::from_secs(5);
/// How long ranks may take at least to meet for the first time.
const FIRST_MEETING: Duration = Duration::from_secs(60);
/// For how long ranks that are not stopped may at least show no progress where none does: NCCL may
/// take a minute to connect.
const SLOW: Duration = Duration::from_secs(120);
/// After which silence launcher and agent count each other as lost: the timeout within these
/// bounds. The launcher waits longer by the margin: when the others continue, a host's ranks have
/// ended.
const SILENCE: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(20)];
/// See `silence`.
pub const SILENCE_MARGIN: Duration = Duration::from_secs(1);

const NO_PROGRESS: &str = "killed because it showed no progress";
const NOT_HEARD: &str = "killed because another host did not hear from it";
const CUT_OFF: &str = "its host was cut off";

/// How long hosts of a job that continues without lost ranks may be silent.
pub fn silence(timeout: Duration) -> Duration {
    timeout.clamp(SILENCE[0], SILENCE[1])
}

/// What has happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The job begins.
    Begin,
    /// A rank has said something.
    Said {
        /// Its number.
        rank: usize,
        /// The number of its process.
        process: u32,
        /// What.
        said: Said,
    },
    /// A process has ended, or could not be started.
    Ended {
        /// Its rank.
        rank: usize,
        /// Its number.
        process: u32,
        /// How.
        end: End,
    },
    /// A process is stopped (SIGSTOP, a debugger), or goes on.
    Stopped {
        /// Its rank.
        rank: usize,
        /// Its number.
        process: u32,
        /// Which of the two.
        is_stopped: bool,
    },
    /// The launcher has got a signal that asks the job to stop.
    Signal(c_int),
    /// A rank or an agent has got such a signal.
    Asked(c_int),
    /// An agent has come again, on a host that was lost.
    HostCame {
        /// Its number.
        host: usize,
        /// Where others reach it.
        address: Option<IpAddr>,
    },
    /// A host has said something.
    HostHeard(usize),
    /// A host is out of reach.
    HostLost {
        /// Its number.
        host: usize,
        /// How that is known.
        why: String,
    },
    /// Time has passed.
    Tick,
}

/// How a process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this exit code.
    Code(u8),
    /// By this signal.
    Signal(c_int),
}

impl End {
    /// As shells say it.
    pub fn code(self) -> u8 {
        match self {
            End::Code(code) => code,
            End::Signal(signal) => of_signal(signal),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Code(code) => write!(f, "ended with exit code {code}"),
            End::Signal(signal) => write!(f, "killed by signal {signal}"),
        }
    }
}

/// What the launcher does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a process.
    Start {
        /// Its rank.
        rank: usize,
        /// Its number.
        process: u32,
    },
    /// Kill a process.
    Kill {
        /// Its rank.
        rank: usize,
        /// Its number.
        process: u32,
        /// For logs.
        why: String,
    },
    /// Tell a process something.
    Tell {
        /// Its rank.
        rank: usize,
        /// Its number.
        process: u32,
        /// What.
        told: Told,
    },
    /// Send all processes a signal.
    Signal(c_int),
    /// Close the connection to a host.
    Leave(usize),
    /// Print a line.
    Print(String),
}

/// What follows from `event`.
pub fn on(state: &mut State, now: Duration, event: Event) -> Vec<Action> {
    let actions = Vec::new();
    let mut turn = Turn {
        state,
        now,
        actions,
    };
    turn.take(event);
    turn.settle();
    turn.actions
}

/// The exit code that shells give to the end by a signal.
pub fn of_signal(signal: c_int) -> u8 {
    128 + signal as u8
}

/// One event, with what follows from it so far.
struct Turn<'a> {
    state: &'a mut State,
    now: Duration,
    actions: Vec<Action>,
}

impl Turn<'_> {
    fn take(&mut self, event: Event) {
        match event {
            Event::Begin => (0..self.state.ranks.len()).for_each(|rank| self.start(rank)),
            Event::Said {
                rank,
                process,
                said,
            } => self.hear(rank, process, said),
            Event::Ended { rank, process, end } => self.has_ended(rank, process, end),
            Event::Stopped {
                rank,
                process,
                is_stopped,
            } => {
                let since = is_stopped.then_some(self.now);
                if let Some(it) = self.state.running(rank, process) {
                    it.stopped = it.stopped.filter(|_| is_stopped).or(since);
                }
            }
            Event::Signal(signal) => self.stop(signal),
            Event::Asked(signal) => {
                if self.state.stop.is_none() {
                    self.stop(signal);
                }
            }
            Event::HostCame { host, address } => self.host_came(host, address),
            Event::HostHeard(host) => self.state.hosts[host].heard = self.now,
            Event::HostLost { host, why } => self.host_lost(host, &why),
            Event::Tick => {}
        }
    }

    /// What time and the new state require.
    fn settle(&mut self) {
        self.lose_silent_hosts();
        self.start_due();
        if self.state.rules.is_elastic {
            self.form();
            self.tell_of_newcomers();
            self.kill_silent();
        }
        self.kill_stopped();
        self.kill_late();
    }

    // Processes.

    fn start(&mut self, rank: usize) {
        self.state.processes += 1;
        let number = self.state.processes;
        self.state.ranks[rank].process = Some(Process {
            number,
            waits: None,
            port: 0,
            progress: (0, self.now),
            took_part: None,
            stopped: None,
            killed: None,
        });
        let process = number;
        self.actions.push(Action::Start { rank, process });
        if self.state.rules.is_elastic {
            let told = Told::Welcome {
                min_ranks: self.state.rules.min_ranks,
                hosts: self.state.hosts_of_ranks(),
                generation: self.state.generation,
            };
            self.tell(rank, told);
        }
    }

    fn kill(&mut self, rank: usize, why: &str) {
        if let Some(it) = &mut self.state.ranks[rank].process
            && it.killed.is_none()
        {
            it.killed = Some(why.into());
            let (process, why) = (it.number, why.into());
            self.actions.push(Action::Kill { rank, process, why });
        }
    }

    fn tell(&mut self, rank: usize, told: Told) {
        if let Some(process) = self.state.process(rank) {
            self.actions.push(Action::Tell {
                rank,
                process,
                told,
            });
        }
    }

    fn tell_members(&mut self, told: &Told) {
        for rank in self.living_members() {
            self.tell(rank, told.clone());
        }
    }

    fn print(&mut self, line: String) {
        self.actions.push(Action::Print(line));
    }

    /// Those of the current generation whose process runs.
    fn living_members(&self) -> Vec<usize> {
        let all = self.state.members.iter();
        let living = all.filter(|it| self.state.process(it.rank) == Some(it.process));
        living.map(|it| it.rank).collect()
    }

    /// A rank has no process any more. How that one ended.
    fn remove(&mut self, rank: usize, how: String) -> String {
        let Some(process) = self.state.ranks[rank].process.take() else {
            return how;
        };
        let took_part = process.took_part;
        if took_part.is_some_and(|since| self.now - since >= TOOK_PART) {
            self.state.ranks[rank].tries = 0;
        }
        let how = process.killed.unwrap_or(how);
        let members = self.state.members.iter_mut();
        let of_process = members.filter(|it| it.process == process.number);
        of_process.for_each(|it| it.ended = Some(how.clone()));
        how
    }

    fn has_ended(&mut self, rank: usize, process: u32, end: End) {
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
    fn end_after(&mut self, end: End) {
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
    fn start_again(&mut self, rank: usize, end: Option<End>, how: &str, on_host: &str) {
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
    fn start_due(&mut self) {
        let is_ending = self.state.stop.is_some() || self.state.ends.is_some();
        for rank in 0..self.state.ranks.len() {
            let due = &mut self.state.ranks[rank].due;
            if due.take_if(|due| is_ending || *due <= self.now).is_none() {
                continue;
            }
            if !is_ending {
                self.start(rank);
            } else if !self.state.goes_on() && !self.state.is_done() {
                self.state.failure.get_or_insert(EXIT_PEER_LOST);
            }
        }
    }

    // Generations.

    fn hear(&mut self, rank: usize, process: u32, said: Said) {
        let now = self.now;
        let Some(it) = self.state.running(rank, process) else {
            return;
        };
        match said {
            Said::Waits { after, port } => {
                (it.waits, it.port) = (Some(after), port);
                it.progress.1 = now;
            }
            Said::Progress(number) => {
                if number != it.progress.0 {
                    it.progress = (number, now);
                }
            }
            Said::Misses {
                generation,
                ranks,
                have_met,
            } => {
                if generation == self.state.generation && self.state.is_member(rank) {
                    self.leave_out(rank, ranks, have_met);
                }
            }
            Said::Ends(code) => self.end(code),
        }
    }

    /// The job ends with this exit code.
    fn end(&mut self, code: u8) {
        if self.state.ends.is_some() {
            return;
        }
        self.state.ends = Some(code);
        for rank in 0..self.state.ranks.len() {
            self.tell(rank, Told::Ends(code));
        }
    }

    /// Whether a rank's process waits for the next generation.
    fn waits(&self, rank: usize) -> bool {
        let Some(it) = &self.state.ranks[rank].process else {
            return false;
        };
        // One that was killed may live for a moment.
        let waits = it.waits.filter(|_| it.killed.is_none());
        let least = if self.state.is_member(rank) {
            self.state.generation
        } else {
            0
        };
        waits.is_some_and(|after| after >= least)
    }

    /// The ranks that the next generation waits for, and those of which it would consist.
    fn survey(&self) -> (Vec<usize>, Vec<usize>) {
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
    fn form(&mut self) {
        if self.state.ends.is_some() {
            return;
        }
        let (absent, next) = self.survey();
        if absent.is_empty() && !next.is_empty() {
            return self.form_of(next);
        }
        let has_left =
            |it: &Member| self.state.process(it.rank) != Some(it.process) || self.waits(it.rank);
        if self.state.over_since.is_none() && self.state.members.iter().any(has_left) {
            self.end_generation();
        }
    }

    fn end_generation(&mut self) {
        self.state.over_since = Some(self.now);
        self.tell_members(&Told::Over(self.state.generation));
    }

    fn form_of(&mut self, next: Vec<usize>) {
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
            process.waits = None;
            process.took_part.get_or_insert(now);
            members.push(Member {
                rank,
                process: process.number,
                is_new: change.joined.contains(&rank),
                ended: None,
            });
            described.push(wire::Member {
                rank,
                address,
                port: process.port,
            });
        }
        self.state.members = members;
        (self.state.formed, self.state.over_since) = (now, None);
        self.state.told_newcomers = false;
        self.tell_members(&Told::Formed(Generation {
            number,
            members: described,
            hosts: self.state.hosts_of_ranks(),
            change,
        }));
    }

    fn tell_of_newcomers(&mut self) {
        let is_new = |rank: usize| self.waits(rank) && !self.state.is_member(rank);
        let has_newcomers = (0..self.state.ranks.len()).any(is_new);
        if has_newcomers != self.state.told_newcomers {
            self.state.told_newcomers = has_newcomers;
            self.tell_members(&Told::Newcomers(has_newcomers));
        }
    }

    /// `by` does not hear these ranks, and the generation is over. Of ranks that miss each other
    /// the first word counts.
    fn leave_out(&mut self, by: usize, mut missing: Vec<usize>, have_met: bool) {
        missing.retain(|&rank| {
            rank < self.state.ranks.len() && self.state.is_member(rank) && !self.waits(rank)
        });
        if self.state.over_since.is_some() || missing.is_empty() {
            return;
        }
        let is_stopped = |rank: &usize| {
            let process = self.state.ranks[*rank].process.as_ref();
            process.is_some_and(|it| it.stopped.is_some())
        };
        let host = self.state.ranks[by].host;
        let elsewhere = |rank: &usize| self.state.ranks[*rank].host != host;
        let mut why = NO_PROGRESS;
        if missing.iter().any(is_stopped) {
            missing.retain(is_stopped);
        } else if missing.iter().any(elsewhere) {
            why = NOT_HEARD;
            // Of two that could not connect, the one that has just come stays out.
            let news = self
                .state
                .members
                .iter()
                .filter(|it| !have_met && it.is_new);
            let new: Vec<usize> = news.map(|it| it.rank).collect();
            let is_new = |rank: &usize| new.contains(rank);
            if !missing.iter().any(is_new) {
                let came = new.iter().copied().filter(|rank| !elsewhere(rank));
                let came: Vec<usize> = came.collect();
                missing = if came.is_empty() { missing } else { came };
            }
            let new = missing.iter().filter(|rank| is_new(rank));
            new.for_each(|&rank| self.state.ranks[rank].stays_out = true);
        }
        missing.iter().for_each(|&rank| self.kill(rank, why));
        self.end_generation();
    }

    /// For how long a rank's process has shown no progress after `since`; None if it was killed.
    fn silent_for(&self, rank: usize, since: Duration) -> Option<Duration> {
        let process = self.state.ranks[rank].process.as_ref();
        let it = process.filter(|it| it.killed.is_none())?;
        Some(self.now.saturating_sub(it.progress.1.max(since)))
    }

    /// Kills ranks that are waited for and show no progress, and all if none does.
    fn kill_silent(&mut self) {
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
        }
        if self.state.over_since.is_some() && !living.is_empty() {
            return;
        }
        // Ranks that wait for a stopped one have time to meet the one that comes for it.
        let limit = timeout.saturating_mul(4).max(SLOW);
        let mut all = living;
        if all.is_empty() {
            all = (0..self.state.ranks.len()).collect();
        }
        let silences = all
            .iter()
            .filter_map(|&rank| self.silent_for(rank, Duration::ZERO));
        if silences.min().is_some_and(|silence| silence > limit) {
            self.print(format!(
                "no rank has shown progress for {} or longer: all are killed; help: find out what \
                 stopped them (SIGSTOP, a debugger, a stuck disk or GPU)",
                Seconds(limit)
            ));
            all.iter().for_each(|&rank| self.kill(rank, NO_PROGRESS));
        }
    }

    /// Kills ranks that have been stopped for three timeouts without a break, or, once the job
    /// ends, for a moment. Also those that have not joined the others yet.
    fn kill_stopped(&mut self) {
        let timeout = self.state.rules.timeout;
        let limit = match self.state.ends {
            Some(_) => ENDING,
            None => timeout.saturating_mul(3),
        };
        let is_late = |rank: &usize| {
            let process = self.state.ranks[*rank].process.as_ref();
            let stopped = process
                .filter(|it| it.killed.is_none())
                .and_then(|it| it.stopped);
            stopped.is_some_and(|since| self.now - since >= limit)
        };
        let late: Vec<usize> = (0..self.state.ranks.len()).filter(is_late).collect();
        if late.is_empty() {
            return;
        }
        self.print(format!(
            "killed {}, stopped for {} or longer; help: look for a debugger, or for what sends \
             SIGSTOP",
            Ranks(&late),
            Seconds(limit),
        ));
        late.iter().for_each(|&rank| self.kill(rank, NO_PROGRESS));
        if !self.state.rules.is_elastic {
            self.state.failure.get_or_insert(EXIT_PEER_LOST);
            self.kill_all(limit);
        }
    }

    // Hosts.

    fn lose_silent_hosts(&mut self) {
        let limit = silence(self.state.rules.timeout) + SILENCE_MARGIN;
        for host in 1..self.state.hosts.len() {
            let it = &self.state.hosts[host];
            if self.state.rules.is_elastic && !it.is_lost && self.now - it.heard > limit {
                self.host_lost(host, &format!("it was silent for {}", Seconds(limit)));
            }
        }
    }

    fn host_lost(&mut self, host: usize, why: &str) {
        self.state.hosts[host].is_lost = true;
        self.actions.push(Action::Leave(host));
        let lost = self.state.ranks_of(host);
        if lost.is_empty() {
            return;
        }
        let name = self.state.hosts[host].name.clone();
        self.print(format!("host {name}, with {}: {why}", Ranks(&lost)));
        for &rank in &lost {
            self.state.ranks[rank].due = None;
            if let Some(it) = &mut self.state.ranks[rank].process {
                it.killed = None;
            }
            self.remove(rank, CUT_OFF.into());
        }
        if self.state.rules.is_elastic {
            if self.state.ends.is_none() {
                self.replace(&name, lost);
            }
            if self.state.goes_on() {
                return;
            }
        }
        if !self.state.is_done() {
            self.state.failure.get_or_insert(EXIT_PEER_LOST);
        }
        self.end_within(ENDING);
    }

    fn may_start(&self) -> bool {
        self.state.stop.is_none() && self.state.ends.is_none()
    }

    /// Starts the lost ranks of host `name` on a spare one, if one has room for them.
    fn replace(&mut self, name: &str, lost: Vec<usize>) {
        let is_left = self.state.restarted < self.state.rules.restarts;
        let mut spares = self.state.hosts.iter_mut().enumerate();
        let found =
            spares.find(|(_, it)| !it.is_lost && it.spare.is_some_and(|room| room >= lost.len()));
        let Some((spare, it)) = found.filter(|_| is_left && self.state.stop.is_none()) else {
            return;
        };
        it.spare = None;
        let (how, on_host) = (format!("was on {name}"), format!(" on {}", it.name));
        for rank in lost {
            self.state.ranks[rank].host = spare;
            self.start_again(rank, None, &how, &on_host);
        }
    }

    fn host_came(&mut self, host: usize, address: Option<IpAddr>) {
        let it = &mut self.state.hosts[host];
        (it.is_lost, it.address, it.heard) = (false, address, self.now);
        let how = format!("was on {}", it.name);
        if !self.may_start() {
            return;
        }
        self.print(format!(
            "{} has come: starting its ranks",
            self.state.hosts[host].name
        ));
        for rank in 0..self.state.ranks.len() {
            let it = &self.state.ranks[rank];
            if it.host != host || it.comes() || it.stays_out {
                continue;
            }
            if self.state.rules.hosts_come {
                self.start(rank);
            } else {
                self.start_again(rank, None, &how, "");
            }
        }
    }

    // The end.

    /// Asks the ranks to save and end.
    fn stop(&mut self, signal: c_int) {
        let passed = match signal {
            libc::SIGINT | libc::SIGUSR1 | libc::SIGHUP => signal,
            _ => libc::SIGTERM,
        };
        match self.state.stop {
            None => self.end_within(self.state.rules.grace),
            // A second Ctrl-C ends all but stopped ranks at once.
            Some(libc::SIGINT) if signal == libc::SIGINT => self.end_within(ENDING),
            Some(_) => {}
        }
        self.state.stop = self.state.stop.or(Some(signal));
        self.actions.push(Action::Signal(passed));
    }

    /// Ranks that are left after `limit` are killed.
    fn end_within(&mut self, limit: Duration) {
        let end_by = self.now + limit;
        if self
            .state
            .end_by
            .is_none_or(|(earlier, _)| end_by < earlier)
        {
            self.state.end_by = Some((end_by, limit));
        }
    }

    fn kill_late(&mut self) {
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
    fn kill_all(&mut self, limit: Duration) {
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
            let (ranks, limit) = (Ranks(&left), Seconds(limit));
            self.print(format!("{ranks} did not end within {limit}{note}"));
            self.state.failure = Some(self.state.stop.map_or(EXIT_PEER_LOST, of_signal));
        }
        self.state.has_killed = true;
        self.actions.push(Action::Signal(libc::SIGKILL));
        self.end_within(ENDING);
    }
}

#[cfg(test)]
mod tests;
