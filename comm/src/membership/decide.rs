//! Decides who takes part, who is started, killed or left out, and how the job ends. The same
//! state, time and event always give the same actions and the same next state.

mod ending;
mod generations;
pub(crate) mod hosts;
mod silence;

use std::ffi::c_int;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use super::state::{JobState, RankProcess};
use super::wire::{ToLauncher, ToRank};

/// The signals that ask to stop.
pub(crate) const STOPS: [c_int; 5] = [
    libc::SIGUSR1,
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
];

/// How long ranks have to end after another has failed: only a stopped one needs more than a
/// second.
pub const ENDING: Duration = Duration::from_secs(3);
/// The exit code of ranks that were asked to stop and saved.
pub const EXIT_STOPPED: u8 = 75;
/// The exit code of a rank whose program, settings or data are not those of the others.
pub const EXIT_DISAGREES: u8 = 78;
/// How long launcher and agent may be silent before each counts the other as lost: the timeout,
/// within these bounds. The launcher waits longer by the margin, so that a lost host's ranks have
/// ended when the others continue.
const SILENCE: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(20)];
/// See `silence`.
pub const SILENCE_MARGIN: Duration = Duration::from_secs(1);

const NOT_HEARD: &str = "killed because another host did not hear from it";

/// How long hosts of an elastic job may be silent.
pub fn silence(timeout: Duration) -> Duration {
    timeout.clamp(SILENCE[0], SILENCE[1])
}

/// What has happened.
#[derive(Clone, Debug)]
pub enum JobEvent {
    /// The job begins.
    Begin,
    /// The process with this number, of this rank, has said something.
    Said(usize, u32, ToLauncher),
    /// Such a process has ended, or could not be started.
    Ended(usize, u32, End),
    /// Such a process is stopped (SIGSTOP, a debugger), or continues.
    Stopped(usize, u32, bool),
    /// The launcher has got a signal that asks the job to stop.
    Signal(c_int),
    /// An agent has got such a signal.
    Asked(c_int),
    /// An agent has come that something else has started, for the first time or again.
    AgentCame {
        /// The number of its process, and so of its host.
        host: usize,
        /// That of its connection.
        connection: usize,
        /// Where it comes from.
        address: IpAddr,
    },
    /// The agent of this connection was let in and ended before its host could start ranks.
    AgentGone(usize),
    /// A host that was lost can start ranks again.
    HostCame {
        /// Its number.
        host: usize,
        /// Where others reach it.
        address: Option<IpAddr>,
    },
    /// A host has said something.
    HostHeard(usize),
    /// The connection to a host has ended, or a call of a lost one has failed.
    HostGone(usize),
    /// The agent of a host cannot start ranks.
    HostRefused {
        /// Its number.
        host: usize,
        /// As the agent says it.
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
    /// The signal that ended it.
    pub fn signal(self) -> Option<c_int> {
        match self {
            End::Signal(signal) => Some(signal),
            End::Code(_) => None,
        }
    }

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
pub enum JobAction {
    /// Start a process.
    Start {
        /// Its rank.
        rank: usize,
        /// Its number.
        process: u32,
        /// For logs.
        why: &'static str,
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
        message: ToRank,
        /// For logs.
        why: &'static str,
    },
    /// Send all processes a signal, for this reason.
    Signal(c_int, &'static str),
    /// Close the connection to a host, for this reason.
    Leave(usize, String),
    /// Start an agent again on a lost host, if it can be reached.
    Call {
        /// Its number.
        host: usize,
        /// For logs.
        why: &'static str,
    },
    /// Let an agent in.
    LetIn {
        /// The number of its host.
        host: usize,
        /// That of its connection.
        connection: usize,
        /// For logs.
        why: &'static str,
    },
    /// Turn an agent away.
    TurnAway {
        /// The agent's connection.
        connection: usize,
        /// For logs.
        why: &'static str,
    },
    /// Print a line.
    Print(String),
}

/// What follows from `event`.
pub fn on(state: &mut JobState, now: Duration, event: JobEvent) -> Vec<JobAction> {
    let actions = Vec::new();
    let mut turn = Decision {
        state,
        now,
        actions,
    };
    turn.take(event);
    turn.settle();
    turn.actions
}

/// The exit code that shells report for a process that a signal ended.
pub fn of_signal(signal: c_int) -> u8 {
    128 + signal as u8
}

/// One event, with what follows from it so far.
struct Decision<'a> {
    state: &'a mut JobState,
    now: Duration,
    actions: Vec<JobAction>,
}

impl Decision<'_> {
    fn take(&mut self, event: JobEvent) {
        match event {
            JobEvent::Begin => {
                let all = 0..self.state.ranks.len();
                all.for_each(|rank| self.start(rank, "the job begins"));
            }
            JobEvent::Said(rank, process, said) => self.hear(rank, process, said),
            JobEvent::Ended(rank, process, end) => self.has_ended(rank, process, end),
            JobEvent::Stopped(rank, process, is_stopped) => {
                let since = is_stopped.then_some(self.now);
                if let Some(it) = self.state.running(rank, process) {
                    it.stopped = it.stopped.filter(|_| is_stopped).or(since);
                }
                if !is_stopped {
                    self.state.continued = self.now;
                }
            }
            JobEvent::Signal(signal) => self.stop(signal),
            JobEvent::Asked(signal) => self.asked(signal),
            JobEvent::AgentCame {
                host,
                connection,
                address,
            } => self.agent_came(host, connection, address),
            JobEvent::AgentGone(connection) => {
                let hosts = self.state.hosts.iter_mut();
                hosts.for_each(|it| _ = it.agent.take_if(|agent| *agent == connection));
            }
            JobEvent::HostCame { host, address } => self.host_came(host, address),
            JobEvent::HostHeard(host) => self.state.hosts[host].heard = self.now,
            JobEvent::HostGone(host) => self.host_gone(host),
            JobEvent::HostRefused { host, why } => self.host_refused(host, why),
            JobEvent::Tick => {}
        }
    }

    /// What time and the new state require.
    fn settle(&mut self) {
        self.lose_silent_hosts();
        self.let_agents_in();
        self.call_lost_hosts();
        self.start_due();
        if self.state.rules.is_elastic {
            self.form();
            self.tell_of_newcomers();
            self.kill_silent();
        } else if self.state.generation == 0 && self.state.ends.is_none() {
            self.form_once();
        }
        self.kill_stopped();
        self.kill_late();
    }

    fn start(&mut self, rank: usize, why: &'static str) {
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

    fn kill(&mut self, rank: usize, why: &str) {
        if let Some(it) = &mut self.state.ranks[rank].process
            && it.killed.is_none()
        {
            it.killed = Some(why.into());
            let (process, why) = (it.number, why.into());
            self.actions.push(JobAction::Kill { rank, process, why });
        }
    }

    fn tell(&mut self, rank: usize, message: ToRank, why: &'static str) {
        if let Some(process) = self.state.process(rank) {
            self.actions.push(JobAction::Tell {
                rank,
                process,
                message,
                why,
            });
        }
    }

    fn tell_members(&mut self, message: &ToRank, why: &'static str) {
        for rank in self.living_members() {
            self.tell(rank, message.clone(), why);
        }
    }

    fn print(&mut self, line: String) {
        self.actions.push(JobAction::Print(line));
    }

    /// Those of the current generation whose process runs.
    fn living_members(&self) -> Vec<usize> {
        let all = self.state.members.iter();
        let living = all.filter(|it| self.state.process(it.rank) == Some(it.process));
        living.map(|it| it.rank).collect()
    }
}

#[cfg(test)]
mod tests;
