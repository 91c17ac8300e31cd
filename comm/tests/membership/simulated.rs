//! A simulated job: the launcher's real decisions and what real ranks hear, with simulated time,
//! processes, hosts and connections. A model is the number of steps it has taken.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use ddp_comm::membership::client::Heard;
use ddp_comm::membership::decide::{self, End, JobAction, JobEvent, silence};
use ddp_comm::membership::state::{Host, JobState};
use ddp_comm::membership::wire::{ToLauncher, ToRank};

use crate::random::Random;
use crate::schedule::{Fault, Schedule};

/// How often the launcher looks at the clock, and agents and ranks say that they work.
const TICK: u64 = 100;
const SIGN: u64 = 250;
/// How often a lost host is called.
const CALL: u64 = 5000;
/// How long a step takes, and an agent or a rank to start.
const STEP: std::ops::Range<u64> = 20..60;
const START: std::ops::Range<u64> = 30..400;
/// No fault makes a job last this much longer.
const BOUND: u64 = 600_000;

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
    /// An agent has come.
    Came,
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
    /// Hosts that do not hear each other.
    is_cut: BTreeSet<(usize, usize)>,
    /// The last generation that has completed a step, and the most steps of it.
    newest: u32,
    taken: u64,
    fails_to_start: Vec<bool>,
    /// Ranks of which one process has not agreed with the others.
    disagrees: Vec<bool>,
    last_fault: u64,
    outcome: Outcome,
}

impl<'a> Job<'a> {
    pub(crate) fn run(schedule: &'a Schedule) -> Outcome {
        let hosts = schedule.hosts + schedule.spares;
        let host = |number: usize| Host {
            name: format!("host {number}"),
            spare: (number >= schedule.hosts).then_some(8),
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
            last_fault: 0,
            outcome: Outcome::default(),
        };
        for (index, (at, _)) in schedule.faults.iter().enumerate() {
            job.plan(*at, Next::Fault(index));
        }
        job.plan(TICK, Next::Tick);
        for host in 1..hosts {
            job.plan(SIGN, Next::Asks(host));
            job.plan(CALL, Next::Calls(host));
        }
        job.decide(JobEvent::Begin);
        job.go();
        job.outcome
    }

    fn go(&mut self) {
        while self.outcome.wrong.is_none() && self.state.goes_on() {
            let Some(Reverse((at, _, index))) = self.queue.pop() else {
                return self.wrong("nothing happens any more".into());
            };
            self.now = at;
            if at > self.last_fault + BOUND {
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

    fn check_end(&mut self) {
        let (code, schedule) = (self.state.exit_code(), self.schedule);
        // A process never started if its agent had ended before the request arrived.
        let is_of_agent = |it: &&Process| {
            let link = &self.links[it.host];
            link.has_agent && link.agents == it.agent
        };
        let lives = |it: &&Process| it.phase != Phase::Ended && is_of_agent(it);
        if let Some(it) = self.processes.iter().find(lives)
            && !self.state.hosts[it.host].is_lost
        {
            return self.wrong(format!("process {} of rank {} stays", it.number, it.rank));
        }
        let is_done = self.taken == schedule.steps;
        match code {
            0 if !is_done => self.wrong(format!("0 after {} steps", self.taken)),
            // A stop may come when the work is done.
            0 => {}
            75 if self.state.stop.is_some() => {}
            // What a rank has found.
            65 if self.state.ends == Some(65) => {}
            code if self.state.ends == Some(65) => {
                self.wrong(format!("{code} after a rank has ended the job with 65"));
            }
            _ if schedule.must_succeed() => self.wrong(format!("it ended with {code}")),
            _ => {}
        }
    }

    fn say(&mut self, text: String) {
        self.outcome
            .log
            .push(format!("{:>9.3} s  {text}", self.now as f64 / 1e3));
    }

    fn wrong(&mut self, what: String) {
        self.say(format!("WRONG: {what}"));
        self.outcome.wrong.get_or_insert(what);
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
                    Message::Word(..) | Message::Asked(_) | Message::Came
                )
            }
            Next::Fault(index) => self.schedule.faults[*index].1 == Fault::Signal,
            _ => false,
        };
        if is_suspended && waits {
            return self.unread.push(next);
        }
        let is_stopped = |index: &usize| self.processes[*index].is_stopped;
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
                }
                self.plan(TICK, Next::Tick);
            }
            Next::Asks(host) => self.asks(host),
            Next::Calls(host) => self.calls(host),
            Next::Goes(index, plan) if is_planned(index, plan) => self.goes(index),
            Next::HasSums(index, plan, step) if is_planned(index, plan) => {
                self.has_sums(index, step)
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
                self.decide(JobEvent::HostCame {
                    host,
                    address: None,
                });
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
                if self.processes[index].is_stopped {
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
        for action in decide::on(&mut self.state, now, event) {
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
                if self.disagrees[rank] {
                    self.wrong(format!("rank {rank}, which disagrees, is started again"));
                }
                if self.state.restarted > self.schedule.restarts {
                    self.wrong("more ranks are started again than may be".into());
                }
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
                self.send(self.processes[index].host, 1, Message::Signal(index, KILL));
            }
            JobAction::Tell {
                process, message, ..
            } => {
                if let ToRank::Formed(formed) = &message {
                    let members = self.state.members.iter();
                    let all: Vec<usize> = members.map(|it| it.process as usize - 1).collect();
                    if !self.together.contains_key(&formed.number) {
                        let ranks: Vec<usize> = formed.members.iter().map(|it| it.rank).collect();
                        self.outcome.joined += formed.change.joined.len();
                        let comes = self.state.ranks.iter().filter(|rank| rank.comes());
                        if formed.number == 1 && ranks.len() < comes.count() {
                            self.wrong("the first generation is without a rank that comes".into());
                        }
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
        if may_start && has_ranks && is_lost && link.is_cut == [false; 2] && !link.has_agent {
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
        self.word(index, Word::Ended(end));
    }

    fn shows(&mut self, index: usize) {
        let it = &mut self.processes[index];
        if it.phase == Phase::Ended {
            return;
        }
        if !it.is_stopped {
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
        it.phase = Phase::Waits;
        let after = it.generation;
        self.says(index, ToLauncher::Waits { after, port: 1 });
    }

    fn hears(&mut self, index: usize, message: ToRank) {
        let it = &mut self.processes[index];
        it.heard.hear(message.clone());
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
                self.ends(index, End::Code(71))
            }
            Phase::Starts => self.waits(index),
            Phase::Connects => {
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
            if self.processes[index].phase == Phase::Ended {
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
        if generation < self.newest {
            self.wrong(format!(
                "generation {generation} takes step {step} after {}",
                self.newest
            ));
        }
        if steps.is_some_and(|steps| steps + 1 != step) {
            self.wrong(format!("step {step} follows step {steps:?}"));
        }
        let is_again = generation == self.newest || step >= self.taken;
        let holds = |it: &Process| {
            it.generation < generation && it.steps >= Some(step) && it.phase != Phase::Ended
        };
        if !is_again && self.processes.iter().any(holds) {
            self.wrong(format!(
                "step {step} is taken again, though a rank has taken it"
            ));
        }
        (self.newest, self.taken) = (generation, step);
        self.processes[index].steps = Some(step);
        let parts = self.together[&generation].parts[&step].values();
        let [meets, stops] = [0, 1].map(|which| parts.clone().any(|it| it[which]));
        if step == self.schedule.steps {
            self.says(index, ToLauncher::Ends(0));
            self.goes_after(index, Phase::Ends(0), 10..60);
        } else if stops {
            self.goes_after(index, Phase::Ends(75), 10..300);
        } else if meets {
            self.waits(index);
        } else {
            self.goes_after(index, Phase::Computes, STEP);
        }
    }

    /// Looks whether the others of its generation are there.
    fn looks(&mut self, index: usize) {
        let it = &self.processes[index];
        if !matches!(it.phase, Phase::Connects | Phase::Computes | Phase::Sums) {
            return;
        }
        let together = &self.together[&it.generation];
        let hears = |other: &usize| {
            let [low, high] = [
                it.host.min(self.processes[*other].host),
                it.host.max(self.processes[*other].host),
            ];
            let is_far = low == 0 && high > 0 && self.links[high].is_cut != [false; 2];
            !is_far && !self.is_cut.contains(&(low, high))
        };
        let has_ended =
            |other: &usize| self.processes[*other].phase == Phase::Ended && hears(other);
        // One that has done its work says farewell.
        let is_done = self.taken == self.schedule.steps;
        if !is_done && together.all.iter().any(has_ended) {
            return self.waits(index);
        }
        let step = it.steps.map_or(together.first, |steps| steps + 1);
        let parts = together.parts.get(&step);
        let has_given = |other: &usize| match it.phase {
            Phase::Connects => together.connected.contains(other),
            _ => parts.is_some_and(|parts| parts.contains_key(other)),
        };
        let limit = self.schedule.timeout_s * 1000;
        if it.phase != Phase::Computes && self.now - it.since > limit {
            let missing = together
                .all
                .iter()
                .filter(|other| !has_given(other) || !hears(other));
            let ranks: Vec<usize> = missing.map(|&other| self.processes[other].rank).collect();
            let (generation, rank) = (it.generation, it.rank);
            let have_met = it.phase != Phase::Connects;
            self.say(format!("rank {rank} misses ranks {ranks:?}"));
            self.says(
                index,
                ToLauncher::Misses {
                    generation,
                    ranks,
                    have_met,
                },
            );
            return self.waits(index);
        }
        let plan = it.plan;
        self.plan(50, Next::Looks(index, plan));
    }

    // Faults.

    fn living(&self, rank: usize) -> Option<usize> {
        let lives =
            |it: &Process| it.rank == rank && it.phase != Phase::Ended && it.phase != Phase::Comes;
        self.processes.iter().rposition(lives)
    }

    fn fault(&mut self, index: usize) {
        let fault = self.schedule.faults[index].1;
        self.say(format!("FAULT: {fault:?}"));
        self.last_fault = self.now;
        match fault {
            Fault::Kill(rank) => self
                .living(rank)
                .into_iter()
                .for_each(|it| self.ends(it, End::Signal(KILL))),
            Fault::Leaves(rank, code) => {
                self.living(rank)
                    .into_iter()
                    .for_each(|it| self.ends(it, End::Code(code)));
            }
            Fault::Fails(rank) => {
                if let Some(it) = self.living(rank) {
                    self.says(it, ToLauncher::Ends(65));
                    self.ends(it, End::Code(65));
                }
            }
            Fault::FailsToStart(rank) => self.fails_to_start[rank] = true,
            Fault::Stop(rank, ms) => {
                if let Some(it) = self.living(rank) {
                    self.processes[it].is_stopped = true;
                    self.word(it, Word::Stopped(true));
                }
                self.plan(ms, Next::Passes(index));
            }
            Fault::Cut(host, ways, ms) => {
                for (is_cut, cut) in self.links[host].is_cut.iter_mut().zip(ways) {
                    *is_cut |= cut;
                }
                self.plan(ms, Next::Passes(index));
            }
            Fault::CutBetween(low, high, ms) => {
                self.is_cut.insert((low, high));
                self.plan(ms, Next::Passes(index));
            }
            Fault::LosesHost(host) => self.agent_ends(host),
            Fault::Suspends(ms) => {
                if self.suspended_since.is_none() {
                    self.suspended_since = Some(self.now);
                    self.plan(ms, Next::Passes(index));
                }
            }
            Fault::Signal => self.decide(JobEvent::Signal(TERM)),
        }
    }

    fn passes(&mut self, index: usize) {
        let fault = self.schedule.faults[index].1;
        self.say(format!("passes: {fault:?}"));
        self.last_fault = self.now;
        match fault {
            Fault::Stop(rank, _) => {
                for it in 0..self.processes.len() {
                    if self.processes[it].rank != rank || !self.processes[it].is_stopped {
                        continue;
                    }
                    self.processes[it].is_stopped = false;
                    if self.processes[it].phase != Phase::Ended {
                        self.word(it, Word::Stopped(false));
                        let unheard = std::mem::take(&mut self.processes[it].unheard);
                        unheard
                            .into_iter()
                            .for_each(|message| self.hears(it, message));
                    }
                }
            }
            Fault::Cut(host, ..) => {
                self.links[host].is_cut = [false; 2];
                for way in [0, 1] {
                    let held = std::mem::take(&mut self.links[host].held[way]);
                    held.into_iter()
                        .for_each(|message| self.send(host, way, message));
                }
            }
            Fault::CutBetween(low, high, _) => _ = self.is_cut.remove(&(low, high)),
            Fault::Suspends(_) => {
                let since = self.suspended_since.take().unwrap_or(self.now);
                self.suspended += self.now - since;
                let unread = std::mem::take(&mut self.unread);
                unread.into_iter().for_each(|next| self.happens(next));
            }
            _ => {}
        }
    }
}
