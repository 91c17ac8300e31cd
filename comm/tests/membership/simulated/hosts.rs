//! Connections between the launcher and hosts, and the agents there.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::time::Duration;

use ddp_comm::membership::decide::{End, JobEvent, SILENCE_MARGIN, silence};
use ddp_comm::membership::lease::Lease;
use ddp_comm::membership::wire::{ToLauncher, ToRank};

use super::{CALL, Job, KILL, Next, Phase, Process, SIGN, START};

#[derive(Clone, Debug)]
pub(super) enum Message {
    /// The launcher hears of a process.
    Word(usize, Word),
    /// A question of an agent, and its answer. The agent had run for so long then; when it was.
    Asked(Duration, u64),
    Answered(Duration, u64),
    /// An agent has come. It is gone, and with it the connection.
    Came,
    Gone,
    /// A process is started, told something, sent a signal.
    Start(usize),
    ToRank(usize, ToRank),
    Signal(usize, i32),
}

#[derive(Clone, Debug)]
pub(super) enum Word {
    Said(ToLauncher),
    Ended(End),
    Stopped(bool),
}

/// The launcher's connection to a host, and the agent there.
pub(super) struct Link {
    /// From the host, and to it.
    pub(super) is_cut: [bool; 2],
    /// What a cut holds back, in order.
    pub(super) held: [VecDeque<Message>; 2],
    /// When the last message arrives: they arrive in order.
    pub(super) last: [u64; 2],
    /// Counts connections: what is said on an earlier one counts no more.
    pub(super) number: u32,
    /// Counts the launcher's calls.
    pub(super) calls: u32,
    /// When the last one was.
    called: u64,
    /// Counts agents. Whether the last one works, or is stopped.
    pub(super) agents: u32,
    pub(super) has_agent: bool,
    pub(super) is_stopped: bool,
    /// When it went on after that.
    pub(super) went_on: Option<u64>,
    /// Its right to have ranks, and for how long it has run.
    lease: Lease,
    /// Whether the last agent has heard of the launcher. Before, it has no ranks.
    has_heard: bool,
    ran: Duration,
    /// How much longer messages take.
    pub(super) delay: u64,
}

/// An agent that something else has started. Several may have the number of one host.
pub(super) struct ComingAgent {
    host: usize,
    /// Until when it lives if it is not let in.
    lives_until: u64,
    state: AgentState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AgentState {
    Comes,
    Waits,
    IsIn,
    /// It was turned away, or the launcher knows that it is gone.
    IsOut,
}

impl ComingAgent {
    pub(super) fn new(host: usize) -> ComingAgent {
        ComingAgent {
            host,
            lives_until: u64::MAX,
            state: AgentState::Comes,
        }
    }
}

impl Link {
    /// With an agent, which may hear nothing for so long.
    pub(super) fn new(silence: Duration) -> Link {
        Link {
            is_cut: [false; 2],
            held: Default::default(),
            last: [0; 2],
            number: 0,
            calls: 0,
            called: 0,
            agents: 0,
            has_agent: true,
            is_stopped: false,
            went_on: None,
            lease: Lease::of_agent(silence),
            has_heard: true,
            ran: Duration::ZERO,
            delay: 0,
        }
    }
}

impl Job<'_> {
    pub(super) fn send(&mut self, host: usize, way: usize, message: Message) {
        if let (0, Message::Word(index, _)) = (host, &message) {
            // Each process here has its own connection to the launcher.
            let at = self.now + self.random.of(1..60);
            let it = &mut self.processes[*index];
            it.last_word = it.last_word.max(at);
            let after = it.last_word - self.now;
            return self.plan(after, Next::Arrives(0, 0, message.into()));
        }
        let delay = if host == 0 { 1 } else { self.random.of(1..30) };
        let link = &mut self.links[host];
        if link.is_cut[way] || link.is_stopped {
            return link.held[way].push_back(message);
        }
        let at = (self.now + delay + link.delay).max(link.last[way]);
        link.last[way] = at;
        let number = link.number;
        self.plan(at - self.now, Next::Arrives(host, number, message.into()));
    }

    pub(super) fn arrives(&mut self, host: usize, message: Message) {
        if host > 0 && matches!(message, Message::Word(..) | Message::Asked(..)) {
            self.decide(JobEvent::HostHeard(host));
        }
        match message {
            Message::Word(index, word) => {
                let (rank, process) = (self.processes[index].rank, self.processes[index].number);
                let disagrees = matches!(word, Word::Ended(End::Code(78)));
                self.disagrees[rank] |= disagrees && self.state.stop.is_none();
                self.decide(match word {
                    Word::Said(said) => JobEvent::Said(rank, process, said),
                    Word::Ended(end) => JobEvent::Ended(rank, process, end),
                    Word::Stopped(is_stopped) => JobEvent::Stopped(rank, process, is_stopped),
                });
            }
            Message::Asked(ran, at) => self.send(host, 1, Message::Answered(ran, at)),
            Message::Answered(ran, at) => {
                let link = &mut self.links[host];
                if link.is_stopped {
                    return link.held[1].push_back(Message::Answered(ran, at));
                }
                link.lease.hears(ran);
                link.has_heard = true;
                let (agent, ago) = (link.agents, Duration::from_millis(self.now - at));
                for index in 0..self.processes.len() {
                    let it = &self.processes[index];
                    if (it.host, it.agent) == (host, agent) && it.phase != Phase::Comes {
                        self.tells(index, ToRank::Alive(ago));
                    }
                }
            }
            Message::Came => {
                self.say(format!("host {host} has come"));
                self.coming = Some(host);
                self.decide(JobEvent::HostCame {
                    host,
                    address: None,
                });
                self.judge_host(host);
                self.coming = None;
            }
            Message::Gone => {
                self.decide(JobEvent::HostGone(host));
            }
            // What was sent to an agent that has ended.
            _ if host > 0 && !self.links[host].has_agent => {}
            Message::Start(index) => {
                self.links[host].lease.hears(Duration::ZERO);
                self.links[host].has_heard = true;
                let rank = self.processes[index].rank;
                let late = std::mem::take(&mut self.starts_late[rank]);
                let after = late + self.random.of(START);
                self.processes[index].phase = Phase::Starts;
                self.plan(after, Next::Goes(index, 0));
                self.plan(SIGN, Next::Shows(index));
            }
            Message::ToRank(index, message) => self.tells(index, message),
            Message::Signal(index, KILL) => self.ends(index, End::Signal(KILL)),
            Message::Signal(index, signal) => self.is_signalled(index, signal, true),
        }
    }

    fn tells(&mut self, index: usize, message: ToRank) {
        let it = &mut self.processes[index];
        if it.is_stopped {
            it.unheard.push_back(message);
        } else if it.phase != Phase::Ended {
            self.hears(index, message);
        }
    }

    /// The launcher closes the connection to a host.
    pub(super) fn leaves(&mut self, host: usize) {
        // A rank that was stopped beside its agent does not count that time, in which the whole job
        // may have been suspended. What it does later is judged then.
        let waits = (silence(self.state.rules.timeout) + SILENCE_MARGIN).as_millis() as u64;
        let is_late = |at: Option<u64>| at.is_some_and(|at| at + waits > self.now);
        let link = &self.links[host];
        // An agent that works ends its ranks, stopped or not.
        let agent_was_stopped = link.is_stopped || is_late(link.went_on);
        let lives = |it: &&Process| {
            let was_stopped = it.is_stopped || is_late(it.went_on);
            // One that has not been in a generation does nothing.
            let runs = it.phase != Phase::Ended && it.generation > 0;
            it.host == host && runs && !(agent_was_stopped && was_stopped)
        };
        let is_early = self.state.ends.is_none() && !self.state.has_killed;
        let agent_lives = link.has_agent && link.has_heard && !agent_was_stopped;
        if let Some(it) = self.processes.iter().find(lives).filter(|_| is_early) {
            let (rank, number) = (it.rank, it.number);
            self.wrong(format!(
                "host {host} counts as lost while process {number} of rank {rank} lives"
            ));
        }
        if is_early && agent_lives && !self.is_ordinary() {
            self.wrong(format!("host {host} counts as lost while its agent lives"));
        }
        for it in self.agents.iter_mut().filter(|it| it.host == host) {
            if it.state == AgentState::IsIn {
                it.state = AgentState::IsOut;
            }
        }
        let link = &mut self.links[host];
        link.number += 1;
        link.held = Default::default();
        if !link.has_heard || !link.is_cut[1] && !link.is_stopped {
            self.agent_ends(host);
        }
    }

    /// Of pods: something else looks whether it should start an agent again.
    pub(super) fn calls(&mut self, host: usize) {
        self.plan(CALL, Next::Calls(host));
        if !self.is_reachable(host) || self.state.stop.is_some() {
            return;
        }
        let comes = |it: &ComingAgent| {
            let is_on_its_way = matches!(it.state, AgentState::Comes | AgentState::Waits);
            it.host == host && is_on_its_way && it.lives_until > self.now
        };
        if !self.agents.iter().any(comes) {
            self.starts_agent(host, u64::MAX);
        }
    }

    fn is_reachable(&self, host: usize) -> bool {
        self.links[host].is_cut == [false; 2] && !self.links[host].has_agent
    }

    /// The launcher calls a lost host. The call of an unreachable host fails within ten seconds;
    /// another host answers or refuses.
    pub(super) fn is_called(&mut self, host: usize) {
        let link = &mut self.links[host];
        let (is_again, call) = (link.calls > 0, link.calls + 1);
        let since = self.now - std::mem::replace(&mut link.called, self.now);
        link.calls = call;
        let is_early = is_again && since < CALL;
        if is_early || !self.state.hosts[host].is_lost || self.state.stop.is_some() {
            self.wrong(format!(
                "host {host} is called, {since} ms after the last time"
            ));
        }
        if !self.is_reachable(host) {
            let after = self.random.of(1..10_000);
            self.plan(after, Next::CallFails(host, call));
        } else if self.random.one_in(8) {
            self.plan(20, Next::Refuses(host, call));
        } else {
            self.has_new_agent(host);
        }
    }

    /// An agent has a connection to the launcher, and can start ranks.
    fn has_new_agent(&mut self, host: usize) {
        let link = &mut self.links[host];
        link.agents += 1;
        link.number += 1;
        link.has_agent = true;
        link.lease = Lease::of_agent(silence(self.state.rules.timeout));
        link.has_heard = false;
        link.ran = Duration::ZERO;
        self.send(host, 0, Message::Came);
    }

    /// Something else starts an agent, which lives for `ms` if it is not let in.
    pub(super) fn starts_agent(&mut self, host: usize, ms: u64) {
        let after = self.random.of(START);
        self.plan(after, Next::AgentComes(self.agents.len()));
        self.agents.push(ComingAgent {
            lives_until: self.now.saturating_add(ms),
            ..ComingAgent::new(host)
        });
    }

    pub(super) fn agent_comes(&mut self, connection: usize) {
        let host = self.agents[connection].host;
        self.say(format!("agent {connection} has come, of host {host}"));
        self.agents[connection].state = AgentState::Waits;
        self.decide(JobEvent::AgentCame {
            host,
            connection,
            address: Ipv4Addr::LOCALHOST.into(),
        });
    }

    pub(super) fn agent_is_gone(&mut self, connection: usize) {
        self.say(format!("agent {connection} is gone"));
        if self.agents[connection].state == AgentState::IsIn {
            self.agents[connection].state = AgentState::IsOut;
            self.decide(JobEvent::HostGone(self.agents[connection].host));
        }
    }

    /// The launcher could not let it in.
    pub(super) fn is_not_in(&mut self, connection: usize) {
        self.agents[connection].state = AgentState::IsOut;
        self.decide(JobEvent::AgentGone(connection));
    }

    pub(super) fn lets_in(&mut self, host: usize, connection: usize) {
        let is_in = |it: &ComingAgent| it.host == host && it.state == AgentState::IsIn;
        let is_second = self.agents.iter().any(is_in);
        let it = &mut self.agents[connection];
        let before = std::mem::replace(&mut it.state, AgentState::IsIn);
        // Some have just ended.
        let lives = it.lives_until > self.now && !self.random.one_in(4);
        if is_second || before != AgentState::Waits || it.host != host {
            self.wrong(format!(
                "agent {connection}, {before:?}, is let in beside another"
            ));
        }
        if std::mem::take(&mut self.fails_to_let_in[host]) {
            self.say(format!("agent {connection} cannot be let in"));
            self.last_fault = self.now;
            return self.not_let_in.push(connection);
        }
        // The first ones are there. One beside another that is stopped or cut off ends.
        let is_first = self.processes.is_empty();
        if lives && !is_first && !self.links[host].has_agent {
            self.has_new_agent(host);
        } else if !is_first {
            self.plan(10, Next::AgentGone(connection));
        }
    }

    pub(super) fn turns_away(&mut self, connection: usize) {
        let it = &mut self.agents[connection];
        let before = std::mem::replace(&mut it.state, AgentState::IsOut);
        if before != AgentState::Waits {
            self.wrong(format!("agent {connection}, {before:?}, is turned away"));
        }
    }

    /// At most one agent of a number waits, and only while another is let in.
    pub(super) fn judge_agents(&mut self) {
        for host in 1..self.links.len() {
            let waiting = self.agents_of(host, AgentState::Waits);
            let inside = self.agents_of(host, AgentState::IsIn);
            if waiting > inside {
                self.wrong(format!(
                    "host {host}: {waiting} agents wait and {inside} are let in; expected at most \
                     one to wait, and only beside one that is let in"
                ));
            }
        }
    }

    fn agents_of(&self, host: usize, state: AgentState) -> usize {
        let agents = self.agents.iter();
        let are_so = agents.filter(|it| (it.host, it.state) == (host, state));
        are_so.count()
    }

    pub(super) fn asks(&mut self, host: usize) {
        self.plan(SIGN, Next::Asks(host));
        let link = &mut self.links[host];
        if !link.has_agent || link.is_stopped {
            return;
        }
        link.ran += Duration::from_millis(SIGN);
        if link.lease.is_over(link.ran) {
            self.say(format!(
                "the agent of host {host} has not heard of the launcher"
            ));
            return self.agent_ends(host);
        }
        let asked = Message::Asked(link.ran, self.now);
        self.send(host, 0, asked);
    }

    /// An agent ends, and its ranks with it.
    pub(super) fn agent_ends(&mut self, host: usize) {
        self.links[host].has_agent = false;
        self.links[host].is_stopped = false;
        for it in self.processes.iter_mut().filter(|it| it.host == host) {
            it.phase = Phase::Ended;
        }
    }
}
