//! A running job, as its launcher sees it: turns what happens into events, and carries out what
//! `membership/decide.rs` decides.

mod connecting;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use super::agent::{AgentOrder, Greeting, News, RankVariables};
use super::children::{Children, RankNews};
use super::hosts::ListedHost;
use super::listener::{Agent, AgentListener};
use super::remote::Remote;
use super::task::{PERIOD, RankCommand};
use crate::error::Result;
use crate::identity::host_name;
use crate::launcher::{HOST_ADDRESSES, JOB_NUMBER};
use crate::membership::decide::{self, End, JobAction, JobEvent};
use crate::membership::packets::SOCKETS_MAX;
use crate::membership::state::{self, JobState, Rules};
use crate::membership::wire::ToRank;
use crate::say::print_line;
use crate::transport::tcp;
use crate::waited::Waited;

/// How long other hosts may take to say their last words once their ranks have ended.
const LEAVING: Duration = Duration::from_secs(1);
/// News, with the number of the connection on which they came.
type Arrived = (usize, News);

/// How long ranks have to end.
#[derive(Clone, Copy)]
pub(super) struct JobLimits {
    /// After a signal, when they save.
    pub(super) grace: Duration,
    /// After one has ended well.
    pub(super) timeout: Duration,
}

/// A job that runs.
pub(super) struct Job {
    /// The program's name, for messages.
    program: String,
    task: RankCommand,
    pub(super) state: JobState,
    /// By host, the variables of its ranks.
    variables: Vec<RankVariables>,
    /// By rank of a generation, what it needs to meet the others, until it is told.
    sockets: Vec<Vec<OwnedFd>>,
    /// The ranks of this host.
    here: Children,
    /// The other hosts, from number 1.
    others: Vec<Remote>,
    /// What other hosts say, each by its number.
    news: Receiver<Arrived>,
    sender: Sender<Arrived>,
    /// Where agents come that others start.
    listener: Option<AgentListener>,
    /// Those that have come and were not let in yet, by connection.
    agents: BTreeMap<usize, Agent>,
    /// How many connections to other hosts there were.
    connections: usize,
    /// How long the job has lasted, without the time in which this process was stopped.
    waited: Waited,
    now: Duration,
    /// A signal to stop that an agent got before ranks were started.
    pub(super) asked: Option<c_int>,
}

/// The host of a number: None for the launcher's, else its index among the others.
fn other(host: usize) -> Option<usize> {
    host.checked_sub(1)
}

impl Job {
    /// A job on these hosts, of which the launcher's is the one that `is_here` names.
    pub(super) fn new(
        program: &str,
        hosts: &[ListedHost],
        is_here: impl Fn(usize) -> bool,
        limits: JobLimits,
        task: &RankCommand,
        (sender, news): (Sender<Arrived>, Receiver<Arrived>),
    ) -> Job {
        let (mut known, mut ranks) = (vec![state::Host::default()], Vec::new());
        for (index, host) in hosts.iter().enumerate() {
            let mut number = 0;
            if !is_here(index) {
                number = known.len();
                known.push(state::Host {
                    name: host.name.clone(),
                    spare: host.is_spare.then_some(host.ranks),
                    ..state::Host::default()
                });
            }
            let count = if host.is_spare { 0 } else { host.ranks };
            ranks.extend(std::iter::repeat_n(number, count));
        }
        let losses = task.losses;
        let rules = Rules {
            is_elastic: losses.is_some(),
            min_ranks: losses.map_or(ranks.len(), |losses| losses.min_ranks),
            restarts: losses.map_or(0, |losses| losses.restarts),
            timeout: limits.timeout,
            grace: limits.grace,
            hosts_come: task.place.is_some(),
        };
        Job {
            program: program.to_string(),
            task: task.clone(),
            state: JobState::new(rules, known, &ranks),
            variables: Vec::new(),
            sockets: Vec::new(),
            here: Children::new(false),
            others: Vec::new(),
            news,
            sender,
            listener: None,
            agents: BTreeMap::new(),
            connections: 0,
            waited: Waited::new(),
            now: Duration::ZERO,
            asked: None,
        }
    }

    /// Whether it has ranks on other hosts.
    pub(super) fn has_others(&self) -> bool {
        self.state.hosts.len() > 1
    }

    /// Starts all ranks.
    pub(super) fn start(&mut self) -> Result<()> {
        self.variables = self.variables_by_host()?;
        for index in 0..self.others.len() {
            let address = self.others[index].address().parse().ok();
            self.state.hosts[index + 1].address = address;
        }
        self.handle(JobEvent::Begin)
    }

    /// By host, the variables of its ranks.
    fn variables_by_host(&self) -> Result<Vec<RankVariables>> {
        let hosts = || std::iter::once(None).chain((0..self.others.len()).map(Some));
        let number = tcp::nonce()?;
        // Agents that others start have it already: their connection is not encrypted.
        let is_over_ssh = self.has_others() && self.task.place.is_none();
        let secret = is_over_ssh.then(|| tcp::job_secret(&number)).transpose()?;
        let addresses = |from| {
            let places = hosts().map(|host| self.address_of(host, from));
            places.collect::<Vec<_>>().join(",")
        };
        let of_host = |from| RankVariables {
            job_number: self.task.losses.map(|_| number.clone()),
            host_addresses: self.has_others().then(|| addresses(from)),
            secret: secret.clone(),
        };
        Ok(hosts().map(of_host).collect())
    }

    /// Starts a process.
    fn start_process(&mut self, rank: usize, process: u32) -> Result<()> {
        let (size, host) = (self.state.ranks.len(), self.state.ranks[rank].host);
        let variables = self.variables[host].clone();
        if let Some(index) = other(host) {
            self.others[index].send(&AgentOrder::Start(rank, process, variables));
            return Ok(());
        }
        let mut command = self.task.command();
        // This process may be of another job.
        command.env_remove(JOB_NUMBER).env_remove(HOST_ADDRESSES);
        command.envs(variables.pairs());
        self.here.start((rank, process, size), command)?;
        Ok(())
    }

    /// Tells a rank of this host something. If all are here, it first gets sockets to the others.
    fn tell_here(&mut self, rank: usize, process: u32, message: &ToRank) {
        if let (ToRank::Formed(formed), false) = (message, self.has_others()) {
            let place = formed.members.iter().position(|it| it.rank == rank);
            if place == Some(0) {
                self.sockets = sockets_between(formed.members.len());
            }
            // A rank that gets none says so.
            let sockets = place.and_then(|place| self.sockets.get_mut(place));
            for some in sockets
                .map(std::mem::take)
                .unwrap_or_default()
                .chunks(SOCKETS_MAX)
            {
                let message = ToRank::Sockets(formed.number);
                self.here.tell(rank, process, &message, some);
            }
        }
        self.here.tell(rank, process, message, &[]);
    }

    /// Where ranks of host `from` reach `host`; None is this one.
    fn address_of(&self, host: Option<usize>, from: Option<usize>) -> String {
        match host {
            Some(index) => self.others[index].address(),
            None => {
                let other = self.others.get(from.unwrap_or(0));
                let launcher = other.and_then(|other| other.greeting().launcher);
                launcher.unwrap_or_else(host_name)
            }
        }
    }

    fn print(&self, line: &str) {
        print_line(&format!("{}: {line}\n", self.program));
    }

    /// Takes note of what happens, and carries out what follows. An error if one of the job's first
    /// processes cannot be started, or, before ranks are started again, an agent cannot be let in
    /// or a host called.
    pub(super) fn handle(&mut self, event: JobEvent) -> Result<()> {
        let mut failures = Vec::new();
        tracing::trace!("{event:?}");
        for action in decide::on(&mut self.state, self.now, event) {
            // With its reason.
            tracing::debug!("{action:?}");
            match action {
                JobAction::Start { rank, process, .. } => {
                    if let Err(error) = self.start_process(rank, process) {
                        let end = End::Code(error.exit_code());
                        failures.push((error, JobEvent::Ended(rank, process, end)));
                    }
                }
                JobAction::Kill { rank, process, .. } => match other(self.state.ranks[rank].host) {
                    None => self.here.kill(rank, process),
                    Some(index) => self.others[index].send(&AgentOrder::Kill(rank, process)),
                },
                JobAction::Tell {
                    rank,
                    process,
                    message,
                    ..
                } => match other(self.state.ranks[rank].host) {
                    None => self.tell_here(rank, process, &message),
                    Some(at) => self.others[at].send(&AgentOrder::Tell(rank, process, message)),
                },
                JobAction::Signal(signal, _) => {
                    self.here.signal(signal);
                    let others = self.others.iter_mut();
                    others.for_each(|other| other.send(&AgentOrder::Signal(signal)));
                }
                JobAction::Leave(host, _) => self.others[host - 1].leave(),
                JobAction::Call { host, .. } => {
                    if let Err(error) = self.call(host - 1) {
                        failures.push((error, JobEvent::HostGone(host)));
                    }
                }
                JobAction::LetIn {
                    host, connection, ..
                } => {
                    if let Err(error) = self.let_in(host - 1, connection) {
                        failures.push((error, JobEvent::AgentGone(connection)));
                    }
                }
                JobAction::TurnAway { connection, .. } => _ = self.agents.remove(&connection),
                JobAction::Print(line) => self.print(&line),
            }
        }
        let is_beginning = self.state.processes as usize <= self.state.ranks.len();
        let mut result = Ok(());
        for (error, follows) in failures {
            // An agent may be let in, or a host called, at any time.
            let is_of_agent = matches!(follows, JobEvent::AgentGone(_) | JobEvent::HostGone(_));
            if is_beginning {
                result = result.and(Err(error));
            } else {
                // The job has other processes.
                self.print(&error.to_string());
            }
            if is_of_agent || !is_beginning {
                result = result.and(self.handle(follows));
            }
        }
        result
    }

    fn happens_later(&mut self, event: JobEvent) {
        if let Err(error) = self.handle(event) {
            self.print(&error.to_string());
        }
    }

    /// Takes note of what has happened. Whether any ranks are left.
    pub(super) fn poll(&mut self) -> bool {
        self.now = self.waited.after(PERIOD);
        for (rank, process, news) in self.here.news() {
            self.happens_later(match news {
                RankNews::Said(said) => JobEvent::Said(rank, process, said),
                RankNews::Ended(status) => JobEvent::Ended(rank, process, end_of(status)),
            });
        }
        for (rank, process, is_stopped) in self.here.stopped(self.now) {
            self.happens_later(JobEvent::Stopped(rank, process, is_stopped));
        }
        if let Err(error) = self.look_for_agents() {
            self.print(&error.to_string());
        }
        while let Ok((number, news)) = self.news.try_recv() {
            if let Some(index) = self.other_of(number) {
                self.hear(index, news);
            }
        }
        self.happens_later(JobEvent::Tick);
        self.state.has_ranks()
    }

    /// Another host says something.
    fn hear(&mut self, index: usize, news: News) {
        let host = index + 1;
        let is_lost = self.task.losses.is_some() && self.state.hosts[host].is_lost;
        let is_of_agent = matches!(news, News::Ready(_) | News::Gone | News::Refused(_));
        if is_lost && !is_of_agent {
            return;
        }
        let is_its = |rank: usize| self.state.ranks.get(rank).is_some_and(|it| it.host == host);
        let event = match news {
            News::Gone => JobEvent::HostGone(host),
            News::Refused(why) => JobEvent::HostRefused { host, why },
            News::Alive(time) => {
                self.others[index].send(&AgentOrder::Heard(time));
                JobEvent::HostHeard(host)
            }
            News::Signal(signal) => JobEvent::Asked(signal),
            News::Said(rank, process, said) if is_its(rank) => JobEvent::Said(rank, process, said),
            News::Stopped(rank, process, is_stopped) if is_its(rank) => {
                JobEvent::Stopped(rank, process, is_stopped)
            }
            News::Ended(rank, process, status) if is_its(rank) => {
                let end = end_of(ExitStatus::from_raw(status));
                JobEvent::Ended(rank, process, end)
            }
            News::Ready(greeting) => return self.is_back(index, greeting),
            News::Said(..) | News::Stopped(..) | News::Ended(..) | News::Printed(_) => {
                JobEvent::HostHeard(host)
            }
        };
        self.happens_later(event);
        if !is_of_agent && !self.state.hosts[host].is_lost {
            self.happens_later(JobEvent::HostHeard(host));
        }
    }

    /// A host has come again.
    fn is_back(&mut self, index: usize, greeting: Greeting) {
        self.others[index].is_ready(greeting);
        let address = self.others[index].address().parse().ok();
        let host = index + 1;
        self.happens_later(JobEvent::HostCame { host, address });
    }
}

/// How a process has ended that had this status.
fn end_of(status: ExitStatus) -> End {
    match (status.signal(), status.code()) {
        (Some(signal), _) => End::Signal(signal),
        (None, code) => End::Code(code.unwrap_or_default() as u8),
    }
}

/// A socket from the first of `size` ranks to each other, by rank. Fewer if there are too many open
/// files.
pub(super) fn sockets_between(size: usize) -> Vec<Vec<OwnedFd>> {
    let mut all: Vec<Vec<OwnedFd>> = vec![Vec::new()];
    for (first, other) in (1..size).map_while(|_| UnixStream::pair().ok()) {
        all[0].push(first.into());
        all.push(vec![other.into()]);
    }
    all
}

impl Drop for Job {
    fn drop(&mut self) {
        self.others.iter_mut().for_each(Remote::leave);
        let started = std::time::Instant::now();
        while started.elapsed() < LEAVING && !self.others.iter_mut().all(Remote::has_left) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl RankCommand {
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments);
        command
    }
}

#[cfg(test)]
mod tests;
