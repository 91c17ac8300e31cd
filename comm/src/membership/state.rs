//! What the launcher knows about a job: plain data, which `decide` changes.

use std::ffi::c_int;
use std::net::IpAddr;
use std::time::Duration;

/// What does not change while a job runs.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Whether the job is elastic: it continues without lost ranks.
    pub is_elastic: bool,
    /// With fewer ranks it saves and ends. All ranks, if it is not elastic.
    pub min_ranks: usize,
    /// How many lost ranks are started again.
    pub restarts: u32,
    /// How long ranks wait for one that shows no progress.
    pub timeout: Duration,
    /// How long ranks have to save after a signal.
    pub grace: Duration,
    /// Something else starts the processes of other hosts, and restarts lost ones.
    pub hosts_come: bool,
}

/// A job. Times are since its start, without the time in which the launcher was stopped.
#[derive(Clone, Debug)]
pub struct JobState {
    /// What does not change.
    pub rules: Rules,
    /// By number.
    pub ranks: Vec<Rank>,
    /// The launcher's host first.
    pub hosts: Vec<Host>,
    /// The current generation; 0 before the first.
    pub generation: u32,
    /// Its ranks.
    pub members: Vec<GenerationRank>,
    /// When it was formed.
    pub formed: Duration,
    /// When it ended and its ranks began to meet. Before the first generation: the start.
    pub over_since: Option<Duration>,
    /// The exit code of a job that ends because a rank said so.
    pub ends: Option<u8>,
    /// The first signal that asked the job to stop.
    pub stop: Option<c_int>,
    /// Whether the launcher has got a Ctrl-C.
    pub interrupted: bool,
    /// When a stopped process continued last.
    pub continued: Duration,
    /// When ranks that are left are killed, and how long they had by then.
    pub end_by: Option<(Duration, Duration)>,
    /// Whether they were.
    pub has_killed: bool,
    /// The exit code of the first rank that failed.
    pub failure: Option<u8>,
    /// How many ranks were started again.
    pub restarted: u32,
    /// How many processes were started.
    pub processes: u32,
    /// Whether ranks were told that processes wait to join.
    pub announced_newcomers: bool,
}

/// A rank of the job.
#[derive(Clone, Debug, Default)]
pub struct Rank {
    /// Its host.
    pub host: usize,
    /// What runs.
    pub process: Option<RankProcess>,
    /// The signal that ended its last process, unless the launcher sent it or it asks to stop.
    pub killed_by: Option<c_int>,
    /// When it is to be started again.
    pub due: Option<Duration>,
    /// How many processes were started since one last took part for a while.
    pub tries: u32,
    /// How many processes in a row came and could not connect to the others.
    pub unconnected: u32,
    /// It is not started again on any host: its last process did not agree with the others, or
    /// could not connect to them.
    pub stays_out: bool,
}

/// A process of a rank.
#[derive(Clone, Debug)]
pub struct RankProcess {
    /// Unique within the job.
    pub number: u32,
    /// It waits for a generation after this one.
    pub waits: Option<u32>,
    /// Where it listens meanwhile.
    pub port: u16,
    /// The number of its last sign of progress, and when that came.
    pub progress: (u64, Duration),
    /// Since when it takes part in generations.
    pub took_part: Option<Duration>,
    /// Since when it is stopped (SIGSTOP, a debugger).
    pub stopped: Option<Duration>,
    /// Why it was killed.
    pub killed: Option<String>,
}

/// A rank of the current generation.
#[derive(Clone, Debug)]
pub struct GenerationRank {
    /// Its number.
    pub rank: usize,
    /// The number of its process.
    pub process: u32,
    /// Whether the generation before did not have it.
    pub is_new: bool,
    /// How it has ended.
    pub ended: Option<String>,
}

/// A host.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// For messages.
    pub name: String,
    /// How many ranks it has room for, if it is a spare for a host that is lost.
    pub spare: Option<usize>,
    /// Where others reach it.
    pub address: Option<IpAddr>,
    /// When it was last heard.
    pub heard: Duration,
    /// The job continues without it.
    pub is_lost: bool,
    /// When it was last called after it was lost.
    pub called: Duration,
    /// A call is under way: its agent may still answer.
    pub may_answer: bool,
    /// Why its agent could not start ranks again, as the user was told.
    pub refusal: String,
    /// The connection of the agent that was let in, if agents come by themselves.
    pub agent: Option<usize>,
    /// An agent waiting for this host to be lost: its connection and address.
    pub waiting: Option<(usize, IpAddr)>,
}

impl JobState {
    /// A job that is about to be started: `hosts` has that of each rank.
    pub fn new(rules: Rules, hosts: Vec<Host>, ranks: &[usize]) -> JobState {
        let rank = |&host: &usize| Rank {
            host,
            tries: 1,
            ..Rank::default()
        };
        JobState {
            rules,
            ranks: ranks.iter().map(rank).collect(),
            hosts,
            generation: 0,
            members: Vec::new(),
            formed: Duration::ZERO,
            over_since: Some(Duration::ZERO),
            ends: None,
            stop: None,
            interrupted: false,
            continued: Duration::ZERO,
            end_by: None,
            has_killed: false,
            failure: None,
            restarted: 0,
            processes: 0,
            announced_newcomers: false,
        }
    }

    /// Whether any rank runs, or is to be started again.
    pub fn has_ranks(&self) -> bool {
        self.ranks.iter().any(Rank::comes)
    }

    /// Whether the job's work is done.
    pub fn is_done(&self) -> bool {
        self.ends == Some(0)
    }

    /// The exit code of a job of which no rank is left.
    pub fn exit_code(&self) -> u8 {
        self.failure.unwrap_or(0)
    }

    /// By rank: its host.
    pub fn hosts_of_ranks(&self) -> Vec<usize> {
        self.ranks.iter().map(|rank| rank.host).collect()
    }

    /// The numbers of the ranks on a host that run, or are to be started again.
    pub fn ranks_of(&self, host: usize) -> Vec<usize> {
        let all = self.ranks.iter().enumerate();
        let of_host = all.filter(|(_, rank)| rank.host == host && rank.comes());
        of_host.map(|(rank, _)| rank).collect()
    }

    /// The number of a rank's process.
    pub fn process(&self, rank: usize) -> Option<u32> {
        self.ranks[rank].process.as_ref().map(|it| it.number)
    }

    /// Whether a rank's process is one of the current generation.
    pub fn is_member(&self, rank: usize) -> bool {
        let process = self.process(rank);
        process.is_some_and(|it| {
            self.members
                .iter()
                .any(|m| (m.rank, m.process) == (rank, it))
        })
    }

    /// The process of a rank, if it is this one.
    pub(crate) fn running(&mut self, rank: usize, process: u32) -> Option<&mut RankProcess> {
        let found = self.ranks.get_mut(rank)?.process.as_mut();
        found.filter(|it| it.number == process)
    }
}

impl Rank {
    /// Whether it runs, or is to be started again.
    pub fn comes(&self) -> bool {
        self.process.is_some() || self.due.is_some()
    }
}
