//! A simulated job: the launcher's real decisions and what real ranks hear, with simulated time,
//! processes, hosts and connections. A model is the number of steps it has taken.

mod faults;
mod judged;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use ddp_comm::membership::client::Heard;
use ddp_comm::membership::decide::{self, End, JobAction, JobEvent, silence};
use ddp_comm::membership::state::{Host, JobState};
use ddp_comm::membership::wire::{ToLauncher, ToRank};

use crate::random::Random;
use crate::schedule::{Fault, Kind, Schedule};

/// How often the launcher looks at the clock, and agents and ranks say that they work.
const TICK: u64 = 100;
const SIGN: u64 = 250;
/// How often a lost host is called.
const CALL: u64 = 5000;
/// How long a step takes, and an agent or a rank to start.
const STEP: std::ops::Range<u64> = 20..60;
const START: std::ops::Range<u64> = 30..400;
/// How much longer ranks wait for others that do not reach each other.
const PRECEDENCE: u64 = 1500;
/// When packets are sent again that were not answered.
const RETRY: u64 = 50;
/// A job lasts at most this much longer than the last fault, and so much for each rank that hangs
/// or is stopped: where no other waits for it, that takes two minutes to find.
const BOUND: u64 = 60_000;
const HANG_BOUND: u64 = 130_000;

const KILL: i32 = 9;
const TERM: i32 = 15;

/// What happens at a time.
#[derive(Clone, Debug)]
enum Next {
    Fault(usize),
    /// The end of a fault that passes.
    Passes(usize),
    Tick,
    /// An agent asks the launcher whether it works, and looks whether it has.
    Asks(usize),
    /// The launcher calls a host.
    Calls(usize),
    /// A process does the next thing, unless something came between.
    Goes(usize, u32),
    /// It has the sums of this step.
    HasSums(usize, u32, u64),
    /// It looks whether the others are there.
    Looks(usize, u32),
    /// It shows its progress.
    Shows(usize),
    /// Something arrives over a connection between launcher and host.
    Arrives(usize, u32, Box<Message>),
}

#[derive(Clone, Debug)]
enum Message {
    /// The launcher hears of a process.
    Word(usize, Word),
    /// An agent asks, at this time, and is answered.
    Asked(u64),
    Answered(u64),
    /// An agent has come. It is gone, and with it the connection.
    Came,
    Gone,
    /// A process is started, told something, sent a signal.
    Start(usize),
    ToRank(usize, ToRank),
    Signal(usize, i32),
}

#[derive(Clone, Debug)]
enum Word {
    Said(ToLauncher),
    Ended(End),
    Stopped(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Comes,
    Starts,
    Waits,
    Connects,
    /// Computes a step.
    Computes,
    /// Waits for the sums of the step.
    Sums,
    /// Its work is done, or it saves.
    Ends(u8),
    Ended,
}

/// A process of a rank.
struct Process {
    rank: usize,
    number: u32,
    host: usize,
    agent: u32,
    heard: Heard,
    /// What it was told while it was stopped.
    unheard: VecDeque<ToRank>,
    phase: Phase,
    /// Counts what happens to it: what was planned before counts no more.
    plan: u32,
    is_stopped: bool,
    stopped_at: u64,
    /// For good, and nothing says so.
    hangs: bool,
    /// When it last went on; `u64::MAX` while it is stopped or hangs.
    unwell_until: u64,
    /// When its last word arrives: they arrive in order.
    last_word: u64,
    /// How many steps were taken when it began to wait.
    waits_since: u64,
    /// The generation of which it is; 0 before the first.
    generation: u32,
    /// How many steps its model has taken; None without one. A new rank has one after a step.
    steps: Option<u64>,
    progress: u64,
    was_asked: bool,
    fails_to_start: bool,
    /// When it began to wait for the others.
    since: u64,
}

impl Process {
    fn is_still(&self) -> bool {
        self.is_stopped || self.hangs
    }
}

/// What the ranks of a generation do together.
#[derive(Default)]
struct Together {
    /// Its processes.
    all: Vec<usize>,
    connected: BTreeSet<usize>,
    /// By step: who has given its part of the sums, with whether it knows of newcomers and of a
    /// stop.
    parts: BTreeMap<u64, BTreeMap<usize, [bool; 2]>>,
    /// The step that they take first.
    first: u64,
    /// The exit code with which the first of them failed.
    failed: Option<u8>,
}

/// The launcher's connection to a host, and the agent there.
#[derive(Default)]
struct Link {
    /// From the host, and to it.
    is_cut: [bool; 2],
    /// What a cut holds back, in order.
    held: [VecDeque<Message>; 2],
    /// When the last message arrives: they arrive in order.
    last: [u64; 2],
    /// Counts connections: what is said on an earlier one counts no more.
    number: u32,
    /// Counts agents. Whether the last one works, and when it asked what was answered last.
    agents: u32,
    has_agent: bool,
    answered: u64,
}

/// What a job has done.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) exit_code: u8,
    pub(crate) hours: f64,
    pub(crate) lost: usize,
    pub(crate) joined: usize,
    /// What should not have happened.
    pub(crate) wrong: Option<String>,
    pub(crate) log: Vec<String>,
}

pub(crate) struct Job<'a> {
    schedule: &'a Schedule,
    random: Random,
    now: u64,
    /// How long the launcher was suspended so far, and since when it is.
    suspended: u64,
    suspended_since: Option<u64>,
    /// What it reads when it goes on.
    unread: Vec<Next>,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    planned: Vec<Option<Next>>,
    state: JobState,
    processes: Vec<Process>,
    links: Vec<Link>,
    together: BTreeMap<u32, Together>,
    /// From which host packets do not pass to which, of those without the launcher.
    is_cut: BTreeSet<(usize, usize)>,
    /// The last generation that has completed a step, and the most steps of it.
    newest: u32,
    taken: u64,
    fails_to_start: Vec<bool>,
    /// Ranks of which one process has not agreed with the others.
    disagrees: Vec<bool>,
    /// The exit codes that what has happened explains.
    explained: BTreeSet<u8>,
    /// How many ranks were started again, and the host that has just come.
    restarts: u32,
    coming: Option<usize>,
    /// By rank: how many processes in a row came and were left out before ranks had connected.
    unconnected: Vec<u32>,
    /// When the job was asked to stop.
    asked: Option<u64>,
    /// When the generation must be over, and which.
    over_by: Option<(u64, u32)>,
    last_fault: u64,
    outcome: Outcome,
}

impl<'a> Job<'a> {
    pub(crate) fn run(schedule: &'a Schedule) -> Outcome {
        let hosts = schedule.hosts + schedule.spares;
        let host = |number: usize| Host {
            name: format!("host {number}"),
            spare: (number >= schedule.hosts).then_some(schedule.spare_room()),
            ..Host::default()
        };
        let ranks: Vec<usize> = (0..schedule.ranks)
            .map(|rank| rank % schedule.hosts)
            .collect();
        let mut job = Job {
            schedule,
            random: Random::new(schedule.seed),
            now: 0,
            suspended: 0,
            suspended_since: None,
            unread: Vec::new(),
            queue: BinaryHeap::new(),
            planned: Vec::new(),
            state: JobState::new(schedule.rules(), (0..hosts).map(host).collect(), &ranks),
            processes: Vec::new(),
            links: (0..hosts)
                .map(|_| Link {
                    has_agent: true,
                    ..Link::default()
                })
                .collect(),
            together: BTreeMap::new(),
            is_cut: BTreeSet::new(),
            newest: 0,
            taken: 0,
            fails_to_start: vec![false; schedule.ranks],
            disagrees: vec![false; schedule.ranks],
            // Too few ranks are left.
            explained: (schedule.kind != Kind::Ordinary)
                .then_some(77)
                .into_iter()
                .collect(),
            restarts: 0,
            coming: None,
            unconnected: vec![0; schedule.ranks],
            asked: None,
            over_by: None,
            last_fault: 0,
            outcome: Outcome::default(),
        };
        for (index, (at, _)) in schedule.faults.iter().enumerate() {
            job.plan(*at, Next::Fault(index));
        }
        job.plan(TICK, Next::Tick);
        // Others wait for a lost connection.
        let calls = if job.is_ordinary() { 1 } else { hosts };
        for host in 1..calls {
            job.plan(SIGN, Next::Asks(host));
            job.plan(CALL, Next::Calls(host));
        }
        job.decide(JobEvent::Begin);
        job.go();
        job.outcome
    }

    fn is_ordinary(&self) -> bool {
        self.schedule.kind == Kind::Ordinary
    }

    fn go(&mut self) {
        let hangs = |fault: &Fault| matches!(fault, Fault::Hangs(_) | Fault::Stop(..));
        let hangs = self.schedule.faults.iter().filter(|(_, it)| hangs(it));
        let hangs = hangs.count() as u64 * u64::from(!self.is_ordinary());
        let bound = BOUND + HANG_BOUND * hangs;
        while self.outcome.wrong.is_none() && self.state.goes_on() {
            let Some(Reverse((at, _, index))) = self.queue.pop() else {
                return self.wrong("nothing happens any more".into());
            };
            self.now = at;
            if at > self.last_fault + bound {
                return self.wrong("the job does not end".into());
            }
            if let Some(next) = self.planned[index].take() {
                self.happens(next);
            }
        }
        self.outcome.hours = self.now as f64 / 3.6e6;
        self.outcome.exit_code = self.state.exit_code();
        if self.outcome.wrong.is_none() {
            self.check_end();
        }
    }

    fn say(&mut self, text: String) {
        self.outcome
            .log
            .push(format!("{:>9.3} s  {text}", self.now as f64 / 1e3));
    }

    fn plan(&mut self, after: u64, next: Next) {
        let index = self.planned.len();
        self.queue
            .push(Reverse((self.now + after, index as u64, index)));
        self.planned.push(Some(next));
    }

    fn happens(&mut self, next: Next) {
        let is_suspended = self.suspended_since.is_some();
        let waits = match &next {
            Next::Arrives(_, _, message) => {
                matches!(
                    **message,
                    Message::Word(..) | Message::Asked(_) | Message::Came | Message::Gone
                )
            }
            Next::Fault(index) => self.schedule.faults[*index].1 == Fault::Signal,
            _ => false,
        };
        if is_suspended && waits {
            return self.unread.push(next);
        }
        let is_stopped = |index: &usize| self.processes[*index].is_still();
        match &next {
            Next::Goes(index, _) | Next::HasSums(index, ..) | Next::Looks(index, _)
                if is_stopped(index) =>
            {
                return self.plan(50, next);
            }
            _ => {}
        }
        let is_planned = |index: usize, plan: u32| {
            let it = &self.processes[index];
            it.plan == plan && it.phase != Phase::Ended
        };
        match next {
            Next::Fault(index) => self.fault(index),
            Next::Passes(index) => self.passes(index),
            Next::Tick => {
                if !is_suspended {
                    self.decide(JobEvent::Tick);
                    self.judge_times();
                }
                self.plan(TICK, Next::Tick);
            }
            Next::Asks(host) => self.asks(host),
            Next::Calls(host) => self.calls(host),
            Next::Goes(index, plan) if is_planned(index, plan) => self.goes(index),
            Next::HasSums(index, plan, step) if is_planned(index, plan) => {
                if self.reaches_all(index) {
                    self.has_sums(index, step);
                } else {
                    self.plan(RETRY, Next::HasSums(index, plan, step));
                }
            }
            Next::Looks(index, plan) if is_planned(index, plan) => self.looks(index),
            Next::Goes(..) | Next::HasSums(..) | Next::Looks(..) => {}
            Next::Shows(index) => self.shows(index),
            Next::Arrives(host, number, message) => {
                if self.links[host].number == number {
                    self.arrives(host, *message);
                }
            }
        }
    }

    // Connections.

    fn send(&mut self, host: usize, way: usize, message: Message) {
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
        if link.is_cut[way] {
            return link.held[way].push_back(message);
        }
        let at = (self.now + delay).max(link.last[way]);
        link.last[way] = at;
        let number = link.number;
        self.plan(at - self.now, Next::Arrives(host, number, message.into()));
    }

    fn arrives(&mut self, host: usize, message: Message) {
        if host > 0 && matches!(message, Message::Word(..) | Message::Asked(_)) {
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
            Message::Asked(at) => self.send(host, 1, Message::Answered(at)),
            Message::Answered(at) => self.links[host].answered = at,
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
                let why = "the connection to it was lost".into();
                self.decide(JobEvent::HostLost { host, why });
            }
            // What was sent to an agent that has ended.
            _ if host > 0 && !self.links[host].has_agent => {}
            Message::Start(index) => {
                let after = self.random.of(START);
                self.processes[index].phase = Phase::Starts;
                self.plan(after, Next::Goes(index, 0));
                self.plan(SIGN, Next::Shows(index));
            }
            Message::ToRank(index, message) => {
                if self.processes[index].is_still() {
                    self.processes[index].unheard.push_back(message);
                } else if self.processes[index].phase != Phase::Ended {
                    self.hears(index, message);
                }
            }
            Message::Signal(index, KILL) => self.ends(index, End::Signal(KILL)),
            Message::Signal(index, signal) => {
                let it = &mut self.processes[index];
                it.was_asked = true;
                if it.phase == Phase::Starts {
                    self.ends(index, End::Signal(signal));
                }
            }
        }
    }

    // The launcher.

    fn decide(&mut self, event: JobEvent) {
        let now = Duration::from_millis(self.now - self.suspended);
        let was_over = self.state.over_since.is_some();
        let actions = decide::on(&mut self.state, now, event);
        if !was_over && self.state.over_since.is_some() {
            self.judge_end_of_generation(&actions);
        }
        for action in actions {
            self.carry_out(action);
        }
    }

    fn carry_out(&mut self, action: JobAction) {
        match action {
            JobAction::Start { rank, process } => {
                let host = self.state.ranks[rank].host;
                self.say(format!(
                    "rank {rank}: process {process} is started on host {host}"
                ));
                self.judge_start(rank, host);
                self.processes.push(Process {
                    rank,
                    number: process,
                    host,
                    agent: self.links[host].agents,
                    heard: Heard::default(),
                    unheard: VecDeque::new(),
                    phase: Phase::Comes,
                    plan: 0,
                    is_stopped: false,
                    stopped_at: 0,
                    hangs: false,
                    unwell_until: 0,
                    last_word: 0,
                    waits_since: 0,
                    generation: 0,
                    steps: None,
                    progress: 0,
                    was_asked: false,
                    fails_to_start: std::mem::take(&mut self.fails_to_start[rank]),
                    since: 0,
                });
                let index = process as usize - 1;
                assert_eq!(
                    index,
                    self.processes.len() - 1,
                    "processes are numbered in order"
                );
                self.send(host, 1, Message::Start(index));
            }
            JobAction::Kill { rank, process, why } => {
                self.say(format!("rank {rank}: process {process} is {why}"));
                let index = process as usize - 1;
                self.judge_kill(index, &why);
                self.send(self.processes[index].host, 1, Message::Signal(index, KILL));
            }
            JobAction::Tell {
                process, message, ..
            } => {
                if let ToRank::Welcome { generation, .. } = message
                    && generation as usize != self.together.len()
                {
                    self.wrong(format!("a newcomer hears of generation {generation}"));
                }
                if let ToRank::Formed(formed) = &message {
                    let members = self.state.members.iter();
                    let all: Vec<usize> = members.map(|it| it.process as usize - 1).collect();
                    if !self.together.contains_key(&formed.number) {
                        let ranks: Vec<usize> = formed.members.iter().map(|it| it.rank).collect();
                        self.outcome.joined += formed.change.joined.len();
                        self.judge_generation(formed);
                        self.say(format!(
                            "generation {} of ranks {ranks:?}: {:?}",
                            formed.number, formed.change
                        ));
                        self.together.insert(
                            formed.number,
                            Together {
                                all,
                                ..Together::default()
                            },
                        );
                    }
                }
                let index = process as usize - 1;
                self.send(
                    self.processes[index].host,
                    1,
                    Message::ToRank(index, message),
                );
            }
            JobAction::Signal(signal) => {
                self.say(format!("all are sent signal {signal}"));
                if signal == KILL {
                    self.judge_kill_of_all();
                }
                for index in 0..self.processes.len() {
                    if self.processes[index].phase != Phase::Ended {
                        self.send(
                            self.processes[index].host,
                            1,
                            Message::Signal(index, signal),
                        );
                    }
                }
            }
            JobAction::Leave(host) => self.leaves(host),
            JobAction::Print(line) => self.say(format!("launcher: {line}")),
        }
    }

    /// The launcher closes the connection to a host.
    fn leaves(&mut self, host: usize) {
        let lives =
            |it: &&Process| it.host == host && !matches!(it.phase, Phase::Comes | Phase::Ended);
        let is_early = self.state.ends.is_none() && !self.state.has_killed;
        if let Some(it) = self.processes.iter().find(lives).filter(|_| is_early) {
            let (rank, number) = (it.rank, it.number);
            self.wrong(format!(
                "host {host} counts as lost while process {number} of rank {rank} lives"
            ));
        }
        let link = &mut self.links[host];
        link.number += 1;
        link.held = Default::default();
        if !link.is_cut[1] {
            self.agent_ends(host);
        }
    }

    fn calls(&mut self, host: usize) {
        self.plan(CALL, Next::Calls(host));
        let (state, link) = (&self.state, &mut self.links[host]);
        let may_start = state.restarted < state.rules.restarts && state.ends.is_none();
        let has_ranks = state.ranks.iter().any(|rank| rank.host == host);
        let is_lost = state.hosts[host].is_lost && state.stop.is_none();
        let is_wanted = self.schedule.kind == Kind::Pods || may_start && has_ranks;
        if is_wanted && is_lost && link.is_cut == [false; 2] && !link.has_agent {
            link.agents += 1;
            link.number += 1;
            (link.has_agent, link.answered) = (true, self.now);
            self.send(host, 0, Message::Came);
        }
    }

    // Agents.

    fn asks(&mut self, host: usize) {
        self.plan(SIGN, Next::Asks(host));
        if !self.links[host].has_agent {
            return;
        }
        let limit = silence(self.state.rules.timeout).as_millis() as u64;
        if self.now - self.links[host].answered > limit {
            self.say(format!(
                "the agent of host {host} has not heard of the launcher"
            ));
            return self.agent_ends(host);
        }
        self.send(host, 0, Message::Asked(self.now));
    }

    /// An agent ends, and its ranks with it.
    fn agent_ends(&mut self, host: usize) {
        self.links[host].has_agent = false;
        for it in self.processes.iter_mut().filter(|it| it.host == host) {
            it.phase = Phase::Ended;
        }
    }

    // Ranks.

    fn says(&mut self, index: usize, said: ToLauncher) {
        self.word(index, Word::Said(said));
    }

    fn word(&mut self, index: usize, word: Word) {
        let it = &self.processes[index];
        let link = &self.links[it.host];
        if it.host == 0 || link.has_agent && link.agents == it.agent {
            self.send(it.host, 0, Message::Word(index, word));
        }
    }

    fn ends(&mut self, index: usize, end: End) {
        if self.processes[index].phase == Phase::Ended {
            return;
        }
        self.processes[index].phase = Phase::Ended;
        let (rank, number) = (self.processes[index].rank, self.processes[index].number);
        self.say(format!("rank {rank}: process {number} {end}"));
        self.outcome.lost += usize::from(end != End::Code(0));
        let generation = self.processes[index].generation;
        if let (Some(together), true) = (self.together.get_mut(&generation), end != End::Code(0)) {
            let code = match end {
                End::Code(code) => code,
                End::Signal(_) => 77,
            };
            together.failed.get_or_insert(code);
        }
        self.word(index, Word::Ended(end));
    }

    fn shows(&mut self, index: usize) {
        let it = &mut self.processes[index];
        if it.phase == Phase::Ended {
            return;
        }
        if !it.is_still() {
            it.progress += u64::from(!matches!(it.phase, Phase::Waits | Phase::Sums));
            let said = ToLauncher::Progress(it.progress);
            self.says(index, said);
        }
        self.plan(SIGN, Next::Shows(index));
    }

    fn goes_after(&mut self, index: usize, phase: Phase, after: std::ops::Range<u64>) {
        let it = &mut self.processes[index];
        it.plan += 1;
        (it.phase, it.since) = (phase, self.now);
        let (plan, after) = (it.plan, self.random.of(after));
        self.plan(after, Next::Goes(index, plan));
        self.plan(after + 50, Next::Looks(index, plan));
    }

    /// Waits for the next generation.
    fn waits(&mut self, index: usize) {
        let it = &mut self.processes[index];
        it.plan += 1;
        (it.phase, it.waits_since) = (Phase::Waits, self.taken);
        let after = it.generation;
        self.says(index, ToLauncher::Waits { after, port: 1 });
    }

    fn hears(&mut self, index: usize, message: ToRank) {
        let it = &mut self.processes[index];
        it.heard.hear(message.clone());
        if matches!(message, ToRank::Over(over) if over == it.heard.current())
            && !it.heard.is_over()
        {
            return self.wrong("a rank does not know that its generation is over".into());
        }
        let it = &mut self.processes[index];
        match message {
            ToRank::Formed(_) if it.phase == Phase::Waits && it.heard.current() > it.generation => {
                it.generation = it.heard.current();
                self.goes_after(index, Phase::Connects, 5..40);
            }
            ToRank::Over(_) if it.heard.is_over() && it.heard.current() == it.generation => {
                if matches!(it.phase, Phase::Connects | Phase::Computes | Phase::Sums) {
                    self.waits(index);
                }
            }
            ToRank::Ends(code) => {
                let works = matches!(it.phase, Phase::Connects | Phase::Computes | Phase::Sums);
                if code > 0 || !works {
                    self.goes_after(index, Phase::Ends(code), 1..50);
                }
            }
            _ => {}
        }
    }

    fn goes(&mut self, index: usize) {
        let (generation, steps) = (
            self.processes[index].generation,
            self.processes[index].steps,
        );
        match self.processes[index].phase {
            Phase::Starts if self.processes[index].fails_to_start => {
                self.explained.insert(71);
                self.ends(index, End::Code(71))
            }
            Phase::Starts => self.waits(index),
            Phase::Connects if !self.reaches_all(index) => {
                let plan = self.processes[index].plan;
                self.plan(RETRY, Next::Goes(index, plan));
            }
            Phase::Connects => {
                self.judge_members(index);
                let together = self.together.get_mut(&generation).expect("it was formed");
                together.connected.insert(index);
                if together.connected.len() == together.all.len() {
                    self.begin(generation);
                }
            }
            Phase::Computes => {
                let (knows, asked) = (
                    self.processes[index].heard.newcomers,
                    self.processes[index].was_asked,
                );
                let together = self.together.get_mut(&generation).expect("it was formed");
                let step = steps.map_or(together.first, |steps| steps + 1);
                let parts = together.parts.entry(step).or_default();
                parts.insert(index, [knows, asked]);
                let all = (parts.len() == together.all.len()).then(|| together.all.clone());
                let it = &mut self.processes[index];
                (it.phase, it.since) = (Phase::Sums, self.now);
                for other in all.into_iter().flatten() {
                    let after = self.random.of(1..10);
                    self.plan(
                        after,
                        Next::HasSums(other, self.processes[other].plan, step),
                    );
                }
            }
            Phase::Ends(code) => self.ends(index, End::Code(code)),
            Phase::Comes | Phase::Waits | Phase::Sums | Phase::Ended => {}
        }
    }

    /// The ranks of a generation have connected, and agree where they continue.
    fn begin(&mut self, generation: u32) {
        let all = self.together[&generation].all.clone();
        let from = all
            .iter()
            .filter_map(|&index| self.processes[index].steps)
            .max();
        self.say(format!(
            "generation {generation} continues after step {from:?}"
        ));
        self.together
            .get_mut(&generation)
            .expect("it was formed")
            .first = from.unwrap_or(0) + 1;
        for (place, &index) in all.iter().enumerate() {
            // It may have ended, or found that another has.
            let it = &self.processes[index];
            if (it.phase, it.generation) != (Phase::Connects, generation) {
                continue;
            }
            if all.len() < self.schedule.min_ranks {
                if place == 0 {
                    self.says(index, ToLauncher::Ends(77));
                }
                self.goes_after(index, Phase::Ends(77), 10..60);
                continue;
            }
            let it = &mut self.processes[index];
            self.unconnected[it.rank] = 0;
            // A new rank gets the state while the others train already.
            it.steps = it.steps.and(from);
            if from == Some(self.schedule.steps) {
                self.says(index, ToLauncher::Ends(0));
                self.goes_after(index, Phase::Ends(0), 10..60);
            } else {
                self.goes_after(index, Phase::Computes, STEP);
            }
        }
    }

    fn has_sums(&mut self, index: usize, step: u64) {
        if self.processes[index].phase != Phase::Sums {
            return;
        }
        let (generation, steps) = (
            self.processes[index].generation,
            self.processes[index].steps,
        );
        self.judge_step(generation, steps, step);
        (self.newest, self.taken) = (generation, step);
        self.processes[index].steps = Some(step);
        let parts = self.together[&generation].parts[&step].values();
        let [meets, stops] = [0, 1].map(|which| parts.clone().any(|it| it[which]));
        if step == self.schedule.steps {
            if !self.is_ordinary() {
                self.says(index, ToLauncher::Ends(0));
            }
            self.goes_after(index, Phase::Ends(0), 10..60);
        } else if stops {
            self.goes_after(index, Phase::Ends(75), 10..300);
        } else if meets {
            self.waits(index);
        } else {
            self.goes_after(index, Phase::Computes, STEP);
        }
    }

    /// Whether packets pass from one process's host to another's.
    fn passes_between(&self, from: usize, to: usize) -> bool {
        let (from, to) = (self.processes[from].host, self.processes[to].host);
        match (from, to) {
            _ if from == to => true,
            (0, host) => !self.links[host].is_cut[1],
            (host, 0) => !self.links[host].is_cut[0],
            pair => !self.is_cut.contains(&pair),
        }
    }

    /// Whether a process can exchange something with all others of its generation.
    fn reaches_all(&self, index: usize) -> bool {
        let all = &self.together[&self.processes[index].generation].all;
        all.iter().all(|&other| self.is_connected(index, other))
    }

    /// Whether two processes can exchange something: packets are answered.
    fn is_connected(&self, one: usize, other: usize) -> bool {
        self.passes_between(one, other) && self.passes_between(other, one)
    }

    /// Looks whether the others of its generation are there.
    fn looks(&mut self, index: usize) {
        let it = &self.processes[index];
        if !matches!(it.phase, Phase::Connects | Phase::Computes | Phase::Sums) {
            return;
        }
        let together = &self.together[&it.generation];
        let hears = |other: &usize| self.passes_between(*other, index);
        let has_ended =
            |other: &usize| self.processes[*other].phase == Phase::Ended && hears(other);
        // One that has done its work says farewell.
        let is_done = self.taken == self.schedule.steps;
        if !is_done && together.all.iter().any(has_ended) {
            let code = together.failed.unwrap_or(77);
            return self.misses(index, code);
        }
        let waited = self.now - it.since;
        let limit = self.schedule.timeout_s * 1000;
        // Those that show no sign of life here. Who connects names others only after those that
        // do not reach them.
        let is_missing = |other: &usize| {
            *other != index
                && (!self.is_connected(*other, index)
                    || self.processes[*other].is_still()
                    || it.phase == Phase::Connects
                        && waited > limit + PRECEDENCE
                        && !together.connected.contains(other))
        };
        let missing = together.all.iter().copied().filter(is_missing);
        let ranks: Vec<usize> = missing.map(|other| self.processes[other].rank).collect();
        if it.phase != Phase::Computes && waited > limit && !ranks.is_empty() {
            let (generation, rank) = (it.generation, it.rank);
            let have_met = it.phase != Phase::Connects;
            self.say(format!("rank {rank} misses ranks {ranks:?}"));
            if !self.is_ordinary() {
                self.says(
                    index,
                    ToLauncher::Misses {
                        generation,
                        ranks,
                        have_met,
                    },
                );
            }
            return self.misses(index, 77);
        }
        let plan = it.plan;
        self.plan(50, Next::Looks(index, plan));
    }

    /// A rank does not hear the others: it waits for the next generation, or fails with them.
    fn misses(&mut self, index: usize, code: u8) {
        if self.is_ordinary() {
            self.goes_after(index, Phase::Ends(code), 1..50);
        } else {
            self.waits(index);
        }
    }
}
