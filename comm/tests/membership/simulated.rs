//! A simulated job: the launcher's real decisions, what real ranks hear and agree on, with
//! simulated time, processes, hosts, connections and a disk.

mod disk;
mod faults;
mod hosts;
mod judged;
mod launcher;
mod processes;
mod run;
mod together;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use ddp_comm::membership::client::{CallsEnd, Heard, MeetingOutcome};
use ddp_comm::membership::decide::{self, End, JobAction, JobEvent, silence};
use ddp_comm::membership::lease::RankWatch;
use ddp_comm::membership::state::{Host, JobState};
use ddp_comm::membership::wire::{ToLauncher, ToRank};

use disk::Disk;
use hosts::{ComingAgent, Link, Message, Word};
use run::Run;
use together::{Stage, Together};

use crate::random::Random;
use crate::schedule::{Fault, Kind, Schedule};

/// How often the launcher looks at the clock, and agents and ranks say that they work.
const TICK: u64 = 100;
const SIGN: u64 = 250;
/// How often a lost host is called at most, and something else looks at the agents of pods.
const CALL: u64 = 5000;
/// How long a step takes, and an agent or a rank to start.
const STEP: Range<u64> = 20..60;
const START: Range<u64> = 30..400;
/// How much longer ranks wait for others that do not reach each other.
const PRECEDENCE: u64 = 1500;
/// When packets are sent again that were not answered.
const RETRY: u64 = 50;
/// A job lasts at most this much longer than the last fault, and so much for each rank that hangs
/// or is stopped: where no other waits for it, that takes two minutes to find. And as long as locks
/// stay, and processes start late.
const BOUND: u64 = 60_000;
const HANG_BOUND: u64 = 130_000;

const KILL: i32 = 9;
const INTERRUPT: i32 = 2;
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
    /// Something else may start the agent of a host again.
    Calls(usize),
    /// The launcher's call of a host, counted, fails, or the host refuses.
    CallFails(usize, u32),
    Refuses(usize, u32),
    /// An agent that something else has started comes to the launcher, or is gone.
    AgentComes(usize),
    AgentGone(usize),
    /// A process does the next thing, unless something came between.
    Goes(usize, u32),
    /// It has what all have given in this round.
    HasAll(usize, u32, u64),
    /// It looks whether the others are there.
    Looks(usize, u32),
    /// It shows its progress.
    Shows(usize),
    /// Something arrives over a connection between launcher and host.
    Arrives(usize, u32, Box<Message>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Comes,
    Starts,
    Waits,
    Connects,
    /// Does its part of what the ranks do next.
    Works,
    /// Waits for the parts of the others.
    Exchanges,
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
    watch: RankWatch,
    /// For how long it has run, and was stopped.
    ran: u64,
    stopped_for: u64,
    /// What it was told while it was stopped.
    unheard: VecDeque<ToRank>,
    phase: Phase,
    /// Counts what happens to it: what was planned before counts no more.
    plan: u32,
    is_stopped: bool,
    stopped_at: u64,
    /// When it went on after that.
    went_on: Option<u64>,
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
    /// What it has of the run; None if it has come and got nothing yet.
    run: Option<Run>,
    /// Whether it knows of a generation that was ready for its first step.
    has_begun: bool,
    /// What it does with the others, and how often it has.
    stage: Stage,
    round: u64,
    progress: u64,
    was_asked: bool,
    /// Whether a Ctrl-C came: from elsewhere, and from what has started it.
    interrupts: [bool; 2],
    fails_to_start: bool,
    /// When it began to wait for the others.
    since: u64,
}

impl Process {
    fn is_still(&self) -> bool {
        self.is_stopped || self.hangs
    }

    /// How many steps its model has taken; None without one. A new rank has one after a step.
    fn steps(&self) -> Option<u64> {
        let run = self.run.as_ref().filter(|it| !it.awaits_state);
        run.map(|it| it.progress.steps)
    }

    /// Whether it does something with others.
    fn takes_part(&self) -> bool {
        matches!(
            self.phase,
            Phase::Connects | Phase::Works | Phase::Exchanges
        )
    }
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
    /// By connection, those that something else has started.
    agents: Vec<ComingAgent>,
    /// By host, whether the launcher cannot let in its next agent; the connections of those that it
    /// could not, until it knows that they are gone.
    fails_to_let_in: Vec<bool>,
    not_let_in: Vec<usize>,
    together: BTreeMap<u32, Together>,
    /// From which host packets do not pass to which, of those without the launcher.
    is_cut: BTreeSet<(usize, usize)>,
    /// The last generation that has completed a step, and the most steps of it.
    newest: u32,
    taken: u64,
    fails_to_start: Vec<bool>,
    /// How much longer the next process of a rank takes to start.
    starts_late: Vec<u64>,
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
    /// Why the job fails, as decided before a rank was heard to end it.
    decided: Option<u8>,
    last_fault: u64,
    disk: Disk,
    /// Under ZeRO-1: the processes that have last divided all among them, in order.
    sliced: Vec<usize>,
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
                .map(|_| Link::new(silence(schedule.rules().timeout)))
                .collect(),
            agents: Vec::new(),
            fails_to_let_in: vec![false; hosts],
            not_let_in: Vec::new(),
            together: BTreeMap::new(),
            is_cut: BTreeSet::new(),
            newest: 0,
            taken: 0,
            fails_to_start: vec![false; schedule.ranks],
            starts_late: vec![0; schedule.ranks],
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
            decided: None,
            last_fault: 0,
            disk: Disk::default(),
            sliced: Vec::new(),
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
        }
        if schedule.kind == Kind::Pods {
            (1..hosts).for_each(|host| job.plan(CALL, Next::Calls(host)));
            job.agents.extend((1..hosts).map(ComingAgent::new));
            (0..hosts - 1).for_each(|connection| job.agent_comes(connection));
        }
        job.decide(JobEvent::Begin);
        job.go();
        job.outcome
    }

    fn is_ordinary(&self) -> bool {
        self.schedule.kind == Kind::Ordinary
    }

    fn go(&mut self) {
        let longer = |(_, fault): &(u64, Fault)| match fault {
            Fault::Hangs(_) | Fault::Stop(..) if !self.is_ordinary() => HANG_BOUND,
            Fault::LockStays(ms) | Fault::StartsLate(_, ms) => *ms,
            _ => 0,
        };
        let bound = BOUND + self.schedule.faults.iter().map(longer).sum::<u64>();
        while self.outcome.wrong.is_none() && self.state.has_ranks() {
            let Reverse((at, _, index)) = self.queue.pop().expect("the launcher looks again");
            self.now = at;
            if at > self.last_fault + bound {
                return self.wrong("the job does not end".into());
            }
            if let Some(next) = self.planned[index].take() {
                self.handle(next);
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

    fn handle(&mut self, next: Next) {
        let is_suspended = self.suspended_since.is_some();
        let waits = match &next {
            Next::Arrives(_, _, message) => {
                matches!(
                    **message,
                    Message::Word(..) | Message::Asked(..) | Message::Came | Message::Gone
                )
            }
            Next::AgentComes(_) | Next::AgentGone(_) | Next::CallFails(..) | Next::Refuses(..) => {
                true
            }
            Next::Fault(index) => {
                matches!(
                    self.schedule.faults[*index].1,
                    Fault::Signal(..) | Fault::Asked(_) | Fault::InterruptsAll
                )
            }
            _ => false,
        };
        if is_suspended && waits {
            return self.unread.push(next);
        }
        let is_stopped = |index: &usize| self.processes[*index].is_still();
        match &next {
            Next::Goes(index, _) | Next::HasAll(index, ..) | Next::Looks(index, _)
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
            Next::CallFails(host, call) if self.links[host].calls == call => {
                self.decide(JobEvent::HostGone(host));
            }
            Next::Refuses(host, call) if self.links[host].calls == call => {
                let why = "expected version 2, got 1; help: install it".into();
                self.decide(JobEvent::HostRefused { host, why });
            }
            Next::CallFails(..) | Next::Refuses(..) => {}
            Next::AgentComes(connection) => self.agent_comes(connection),
            Next::AgentGone(connection) => self.agent_is_gone(connection),
            Next::Goes(index, plan) if is_planned(index, plan) => self.goes(index),
            Next::HasAll(index, plan, round) if is_planned(index, plan) => {
                if self.reaches_all(index) {
                    self.has_all(index, round);
                } else {
                    self.plan(RETRY, Next::HasAll(index, plan, round));
                }
            }
            Next::Looks(index, plan) if is_planned(index, plan) => self.looks(index),
            Next::Goes(..) | Next::HasAll(..) | Next::Looks(..) => {}
            Next::Shows(index) => self.shows(index),
            Next::Arrives(host, number, message) => {
                if self.links[host].number == number {
                    self.arrives(host, *message);
                }
            }
        }
    }
}
