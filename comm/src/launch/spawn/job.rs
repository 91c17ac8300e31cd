//! A running job, as its launcher sees it: turns what happens into events, and carries out what
//! `membership/decide.rs` decides.

use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use super::agent::{AgentOrder, Greeting, News, Setup};
use super::children::Children;
use super::hosts::ListedHost;
use super::listener::AgentListener;
use super::remote::{Remote, text_of};
use super::task::{PERIOD, RankCommand, VERSION};
use crate::error::Result;
use crate::identity::host_name;
use crate::launcher::{HOST_ADDRESSES, JOB_NUMBER};
use crate::membership::decide::{self, End, JobAction, JobEvent, silence};
use crate::membership::packets::SOCKETS_MAX;
use crate::membership::state::{self, JobState, Rules};
use crate::membership::wire::ToRank;
use crate::say::{print_line, warn};
use crate::transport::tcp::{self, SECRET};
use crate::waited::Waited;

/// How long other hosts may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// How often the launcher looks whether a lost host is there again.
const CALLED_EVERY: Duration = Duration::from_secs(5);
/// How long agents that others start may take to come, at least.
const GATHERING_MAX: Duration = Duration::from_secs(60);
/// How long other hosts may take to say their last words once their ranks have ended.
const LEAVING: Duration = Duration::from_secs(1);
/// Beginnings and names of variables that ranks of other hosts get, too.
const PASSED: [&str; 7] = ["DDP_", "NCCL_", "CUDA_", "RUST_", "FI_", "OFI_", "UCX_"];
const PASSED_NAMES: [&str; 4] = ["PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"];

/// News, with the number of the connection on which they came.
type Arrived = (usize, News);

/// A job that runs.
pub(super) struct Job {
    /// The program's name, for messages.
    program: String,
    task: RankCommand,
    pub(super) state: JobState,
    /// By host, the variables of its ranks.
    variables: Vec<Vec<(String, String)>>,
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
        [grace, timeout]: [Duration; 2],
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
            timeout,
            grace,
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

    /// Starts an agent on each of the other hosts, or waits for those that others start.
    pub(super) fn connect(&mut self) -> Result<()> {
        let place = self.task.place.as_ref();
        self.listener = place.map(AgentListener::open).transpose()?;
        if self.listener.is_some() && std::env::var_os(SECRET).is_none() {
            let text = format!(
                "MASTER_PORT stays open for the whole job, and whoever reaches it can take the \
                 place of a lost process; help: give all processes the same {SECRET}"
            );
            warn(&self.program, &text);
        }
        let names = self.state.hosts[1..].iter().map(|host| host.name.clone());
        let names: Vec<String> = names.collect();
        self.connections = names.len();
        for (index, name) in names.into_iter().enumerate() {
            let (setup, sender) = (self.setup()?, self.sender.clone());
            let other = match &self.listener {
                None => Remote::connect(&name, index, &self.task, setup, sender)?,
                Some(_) => Remote::absent(name, index),
            };
            self.others.push(other);
        }
        Ok(())
    }

    fn setup(&self) -> Result<Setup> {
        let directory = std::env::current_dir().unwrap_or_default();
        let arguments = self.task.arguments.iter().map(|word| text_of(word));
        Ok(Setup {
            version: VERSION.into(),
            directory: text_of(directory.as_os_str())?,
            arguments: arguments.collect::<Result<_>>()?,
            environment: match &self.task.place {
                None => passed_variables(),
                // What starts the agents gives each its own.
                Some(_) => Vec::new(),
            },
            size: self.state.ranks.len(),
            grace: self.state.rules.grace,
            silence: (self.task.losses).map(|_| silence(self.state.rules.timeout)),
        })
    }

    /// Lets agents in that others have started, for the first time or again.
    fn let_in(&mut self) -> Result<()> {
        let Some(listener) = &mut self.listener else {
            return self.call_again();
        };
        let others = &self.others;
        let (agents, launcher) = (
            listener.agents(|number| others[number - 1].is_free())?,
            listener.host(),
        );
        for agent in agents {
            let (index, number) = (agent.number - 1, self.connections);
            self.connections += 1;
            let (setup, sender) = (self.setup()?, self.sender.clone());
            self.others[index] = Remote::of_agent(agent, number, launcher.clone(), setup, sender)?;
        }
        Ok(())
    }

    /// Starts an agent again on a host that was lost, if it is there again.
    fn call_again(&mut self) -> Result<()> {
        let (state, now) = (&self.state, self.now);
        let may_start = state.restarted < state.rules.restarts && state.ends.is_none();
        if !may_start || state.stop.is_some() {
            return Ok(());
        }
        for index in 0..self.others.len() {
            let host = index + 1;
            let has_ranks = self.state.ranks.iter().any(|rank| rank.host == host);
            let other = &mut self.others[index];
            let since = now.saturating_sub(other.called.max(self.state.hosts[host].heard));
            if !has_ranks || !self.state.hosts[host].is_lost || since < CALLED_EVERY {
                continue;
            }
            // A call that is under way may take longer.
            if other.answer.is_none() && since < ANSWER_MAX && !other.has_left() {
                continue;
            }
            let (name, refusal) = (other.name.clone(), std::mem::take(&mut other.refusal));
            let number = self.connections;
            self.connections += 1;
            let (setup, sender) = (self.setup()?, self.sender.clone());
            let mut other = Remote::connect(&name, number, &self.task, setup, sender)?;
            (other.called, other.refusal) = (now, refusal);
            self.others[index] = other;
        }
        Ok(())
    }

    /// The index of the host whose news have this number. None if it has come again since.
    fn other_of(&self, number: usize) -> Option<usize> {
        self.others.iter().position(|other| other.number == number)
    }

    /// Whether all other hosts have answered. An error if one cannot start ranks; the others that
    /// cannot are printed.
    pub(super) fn are_all_ready(&mut self, waited: Duration) -> Result<bool> {
        self.let_in()?;
        while let Ok((number, news)) = self.news.try_recv() {
            let Some(index) = self.other_of(number) else {
                continue;
            };
            let other = &mut self.others[index];
            match news {
                News::Ready(greeting) => other.is_ready(greeting),
                News::Refused(why) => other.answer = Some(Err(other.refused(&why))),
                News::Alive(time) => other.send(&AgentOrder::Heard(time)),
                News::Signal(signal) => self.asked = Some(signal),
                // It may come again.
                News::Gone if self.listener.is_some() => other.leave(),
                News::Gone if other.answer.is_none() => {
                    other.answer = Some(Err(other.why_no_answer(&self.task)));
                }
                _ => {}
            }
        }
        let others = self.others.iter_mut().enumerate();
        let mut silent = others.filter(|(_, other)| other.answer.is_none());
        let limit = match &self.task.place {
            None => ANSWER_MAX,
            Some(_) => self.state.rules.timeout.max(GATHERING_MAX),
        };
        match (waited > limit, &self.listener) {
            (true, Some(listener)) => {
                let missing: Vec<usize> = silent.map(|(index, _)| index + 1).collect();
                if !missing.is_empty() {
                    return Err(listener.too_late(&missing, limit));
                }
            }
            (true, None) => silent.for_each(|(_, it)| it.answer = Some(Err(it.silent(limit)))),
            _ if silent.next().is_some() => return Ok(false),
            _ => {}
        }
        let answers = self
            .others
            .iter_mut()
            .filter_map(|other| other.answer.take_if(|it| it.is_err()));
        let mut failures = answers.filter_map(Result::err);
        let Some(first) = failures.next() else {
            return Ok(true);
        };
        failures.for_each(|error| print_line(&format!("{}: {error}\n", self.program)));
        Err(first)
    }

    /// Starts all ranks.
    pub(super) fn start(&mut self) -> Result<()> {
        self.variables = self.variables_by_host()?;
        for index in 0..self.others.len() {
            let address = self.others[index].address().parse().ok();
            self.state.hosts[index + 1].address = address;
        }
        self.happens(JobEvent::Begin)
    }

    /// By host, the variables of its ranks.
    fn variables_by_host(&self) -> Result<Vec<Vec<(String, String)>>> {
        let hosts = || std::iter::once(None).chain((0..self.others.len()).map(Some));
        let (secret, number) = (tcp::job_secret()?, tcp::nonce()?);
        let of_host = |from| {
            let mut variables = Vec::new();
            if self.task.losses.is_some() {
                variables.push((JOB_NUMBER.into(), number.clone()));
            }
            if self.has_others() {
                let places = hosts().map(|host| self.address_of(host, from));
                let addresses = places.collect::<Vec<_>>().join(",");
                variables.push((HOST_ADDRESSES.into(), addresses));
                variables.push((SECRET.into(), secret.clone()));
            }
            variables
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
        command.envs(variables);
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
            // Without them, it says so.
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

    /// Takes note of what happens, and carries out what follows. An error if a process cannot be
    /// started.
    pub(super) fn happens(&mut self, event: JobEvent) -> Result<()> {
        let mut result = Ok(());
        tracing::trace!("{event:?}");
        for action in decide::on(&mut self.state, self.now, event) {
            tracing::trace!("{action:?}");
            match action {
                JobAction::Start { rank, process, .. } => {
                    if let Err(error) = self.start_process(rank, process) {
                        let end = End::Code(error.exit_code());
                        result = result.and(Err((error, JobEvent::Ended(rank, process, end))));
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
                JobAction::Print(line) => self.print(&line),
            }
        }
        let Err((error, ended)) = result else {
            return Ok(());
        };
        if self.state.processes as usize <= self.state.ranks.len() {
            return Err(error);
        }
        // The job has others.
        self.print(&error.to_string());
        self.happens(ended)
    }

    fn happens_later(&mut self, event: JobEvent) {
        if let Err(error) = self.happens(event) {
            self.print(&error.to_string());
        }
    }

    /// Takes note of what has happened. Whether any ranks are left.
    pub(super) fn goes_on(&mut self) -> bool {
        self.now = self.waited.after(PERIOD);
        let ended = self.here.collect();
        for (rank, process, said) in self.here.words() {
            self.happens_later(JobEvent::Said(rank, process, said));
        }
        for (rank, process, status) in ended {
            let end = end_of(status);
            self.happens_later(JobEvent::Ended(rank, process, end));
        }
        for (rank, process, is_stopped) in self.here.stopped(self.now) {
            self.happens_later(JobEvent::Stopped(rank, process, is_stopped));
        }
        if let Err(error) = self.let_in() {
            self.print(&error.to_string());
        }
        while let Ok((number, news)) = self.news.try_recv() {
            if let Some(index) = self.other_of(number) {
                self.hear(index, news);
            }
        }
        self.happens_later(JobEvent::Tick);
        self.state.goes_on()
    }

    /// Another host says something.
    fn hear(&mut self, index: usize, news: News) {
        let host = index + 1;
        let is_elastic = self.task.losses.is_some();
        if is_elastic && self.state.hosts[host].is_lost && !matches!(news, News::Ready(_)) {
            if let News::Refused(why) = news
                && self.others[index].refusal != why
            {
                self.print(&self.others[index].refused(&why).to_string());
                self.others[index].refusal = why;
            }
            return;
        }
        let is_its = |rank: usize| self.state.ranks.get(rank).is_some_and(|it| it.host == host);
        let event = match news {
            // Its ranks may live until its agent counts this process as lost.
            News::Gone if is_elastic => return,
            News::Gone => JobEvent::HostLost {
                host,
                why: "the connection to it was lost".into(),
            },
            News::Refused(why) => JobEvent::HostLost { host, why },
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
        if !self.state.hosts[host].is_lost {
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

/// The variables of this process that ranks of other hosts get.
fn passed_variables() -> Vec<(String, String)> {
    let is_passed = |name: &str| {
        PASSED.iter().any(|start| name.starts_with(start)) || PASSED_NAMES.contains(&name)
    };
    let texts = std::env::vars_os();
    let texts = texts
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.filter(|(name, _)| is_passed(name)).collect()
}
