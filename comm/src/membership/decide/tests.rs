mod ending;
mod ordinary;
mod others;
mod progress;
mod returning;

use super::super::state::{Host, JobState, Rules};
use super::*;
use crate::error::EXIT_PEER_LOST;

const TIMEOUT: Duration = Duration::from_secs(4);
const KILLED: End = End::Signal(libc::SIGKILL);

/// A job, and what its launcher did since it was last asked.
struct Job {
    state: JobState,
    now: Duration,
    actions: Vec<JobAction>,
}

/// A job whose ranks are on these hosts.
fn job(ranks: &[usize]) -> Job {
    job_of(ranks, true)
}

fn job_of(ranks: &[usize], is_elastic: bool) -> Job {
    let rules = Rules {
        is_elastic,
        min_ranks: if is_elastic { 1 } else { ranks.len() },
        restarts: 99,
        timeout: TIMEOUT,
        grace: Duration::from_secs(60),
        hosts_come: false,
    };
    let host = |number: usize| Host {
        name: format!("host{number}"),
        ..Host::default()
    };
    let hosts = 0..=ranks.iter().max().copied().unwrap_or(0);
    let mut job = Job {
        state: JobState::new(rules, hosts.map(host).collect(), ranks),
        now: Duration::ZERO,
        actions: Vec::new(),
    };
    job.handle(JobEvent::Begin);
    job
}

/// One whose ranks have met for the first time.
fn trains(ranks: &[usize]) -> Job {
    let mut job = job(ranks);
    (0..ranks.len()).for_each(|rank| job.waits(rank));
    assert_eq!(job.state.generation, 1);
    job
}

impl Job {
    fn handle(&mut self, event: JobEvent) {
        self.actions.extend(on(&mut self.state, self.now, event));
    }

    /// Time goes on to `ms`; other hosts are heard.
    fn at(&mut self, ms: u64) {
        self.now = Duration::from_millis(ms);
        for host in 1..self.state.hosts.len() {
            self.state.hosts[host].heard = self.now;
        }
        self.handle(JobEvent::Tick);
    }

    fn at_s(&mut self, seconds: u64) {
        self.at(1000 * seconds);
    }

    fn process(&self, rank: usize) -> u32 {
        self.state.process(rank).expect("it runs")
    }

    fn says(&mut self, rank: usize, said: ToLauncher) {
        let process = self.process(rank);
        self.handle(JobEvent::Said(rank, process, said));
    }

    fn waits(&mut self, rank: usize) {
        let after = if self.state.is_member(rank) {
            self.state.generation
        } else {
            0
        };
        self.says(rank, ToLauncher::Waits { after, port: 7 });
    }

    fn misses(&mut self, rank: usize, ranks: &[usize], have_met: bool) {
        let (generation, ranks) = (self.state.generation, ranks.to_vec());
        self.says(
            rank,
            ToLauncher::Misses {
                generation,
                ranks,
                have_met,
            },
        );
    }

    fn ends(&mut self, rank: usize, end: End) {
        let process = self.process(rank);
        self.handle(JobEvent::Ended(rank, process, end));
    }

    fn stops(&mut self, rank: usize, is_stopped: bool) {
        let process = self.process(rank);
        self.handle(JobEvent::Stopped(rank, process, is_stopped));
    }

    /// The ranks of the current generation.
    fn members(&self) -> Vec<usize> {
        self.state.members.iter().map(|it| it.rank).collect()
    }

    /// What the launcher has done since this was asked last.
    fn done<T>(&mut self, what: impl Fn(&JobAction) -> Option<T>) -> Vec<T> {
        std::mem::take(&mut self.actions)
            .iter()
            .filter_map(what)
            .collect()
    }

    fn kills(&mut self) -> Vec<usize> {
        self.done(|action| match action {
            JobAction::Kill { rank, .. } => Some(*rank),
            _ => None,
        })
    }

    fn starts(&mut self) -> Vec<usize> {
        self.done(|action| match action {
            JobAction::Start { rank, .. } => Some(*rank),
            _ => None,
        })
    }

    fn signals(&mut self) -> Vec<c_int> {
        self.done(|action| match action {
            JobAction::Signal(signal, _) => Some(*signal),
            _ => None,
        })
    }

    /// Who was lost before the generation that has just been formed, and why; and who came.
    fn change(&mut self) -> (Vec<(usize, String)>, Vec<usize>) {
        let message = self.done(|action| match action {
            JobAction::Tell {
                message: ToRank::Formed(generation),
                ..
            } => Some(generation.change.clone()),
            _ => None,
        });
        let change = message.last().expect("a generation was formed").clone();
        let lost = change.lost.into_iter().map(|it| (it.rank, it.why));
        (lost.collect(), change.joined)
    }
}

#[test]
fn ranks_that_are_left_and_ranks_that_come_form_the_next_generation() {
    let mut job = job(&[0, 0, 0]);
    job.waits(0);
    job.waits(2);
    assert_eq!(job.state.generation, 0, "the first one needs all");
    job.waits(1);
    assert_eq!(job.members(), [0, 1, 2]);
    job.ends(1, KILLED);
    job.waits(2);
    assert_eq!(job.state.generation, 1, "rank 0 lives");
    job.waits(0);
    assert_eq!(job.members(), [0, 2]);
    assert_eq!(
        job.change(),
        (vec![(1, "killed by signal 9".into())], vec![])
    );
    job.at(20);
    job.waits(1);
    assert!(job.state.announced_newcomers);
    job.waits(0);
    job.waits(2);
    assert_eq!(job.members(), [0, 1, 2]);
    assert_eq!(job.change(), (vec![], vec![1]));
    assert!(!job.state.announced_newcomers);
}

#[test]
fn a_generation_is_told_for_how_long_the_one_before_was_over() {
    let mut job = trains(&[0, 0, 0]);
    job.at(1000);
    job.ends(0, KILLED);
    job.at(1500);
    job.waits(1);
    job.at(3500);
    job.waits(2);
    let over_for = |it: &JobAction| match it {
        JobAction::Tell {
            message: ToRank::Formed(formed),
            ..
        } => Some(formed.over_for),
        _ => None,
    };
    let all = job.done(over_for);
    assert_eq!(all.last(), Some(&Duration::from_millis(2500)));
    assert_eq!(all[0], Duration::ZERO);
}

#[test]
fn the_reason_of_a_loss_is_that_of_the_process_that_was_lost() {
    let mut job = trains(&[0, 1, 1]);
    job.stops(1, true);
    job.misses(0, &[1], true);
    assert_eq!(job.kills(), [1]);
    job.ends(1, KILLED);
    job.handle(JobEvent::HostRefused {
        host: 1,
        why: "it was silent".into(),
    });
    job.waits(0);
    let why = [
        (1, "killed because it showed no progress".into()),
        (2, "its host was cut off".into()),
    ];
    assert_eq!(job.change().0, why);
}

#[test]
fn of_two_hosts_that_miss_each_other_one_is_left_out() {
    let mut job = trains(&[1, 2]);
    job.at_s(60);
    job.misses(0, &[1], true);
    job.misses(1, &[0], true);
    assert_eq!(job.kills(), [1]);
    // What is said of a generation before has no effect on who is left.
    job.waits(0);
    job.ends(1, KILLED);
    assert_eq!(job.members(), [0]);
    let (generation, ranks, have_met) = (1, vec![0], true);
    job.says(
        0,
        ToLauncher::Misses {
            generation,
            ranks,
            have_met,
        },
    );
    assert_eq!(job.kills(), [0; 0]);
}

#[test]
fn a_host_is_lost_a_second_after_its_agent_has_given_up() {
    let mut job = trains(&[0, 1]);
    for (ms, is_lost) in [(5000, false), (5001, true)] {
        job.now = Duration::from_millis(ms);
        job.handle(JobEvent::Tick);
        assert_eq!(job.state.hosts[1].is_lost, is_lost, "{ms}");
    }
    job.waits(0);
    assert_eq!(job.change().0, [(1, "its host was cut off".into())]);
    job.handle(JobEvent::HostCame {
        host: 1,
        address: None,
    });
    job.at(6000);
    assert_eq!(job.starts(), [1]);
}

/// An agent that waited for more than a minute ends. It kept its number, so no other could join.
#[test]
fn of_agents_of_one_number_one_is_let_in_and_the_last_one_waits() {
    let mut job = trains(&[0, 1]);
    let address = std::net::Ipv4Addr::LOCALHOST.into();
    let came = |connection| JobEvent::AgentCame {
        host: 1,
        connection,
        address,
    };
    let chosen = |job: &mut Job| {
        job.done(|action| match action {
            JobAction::LetIn { connection, .. } => Some((*connection, true)),
            JobAction::TurnAway { connection, .. } => Some((*connection, false)),
            _ => None,
        })
    };
    (5..8).for_each(|connection| job.handle(came(connection)));
    assert_eq!(chosen(&mut job), [(5, true), (6, false)]);
    job.handle(JobEvent::AgentGone(6));
    job.now = Duration::from_secs(6);
    job.handle(JobEvent::Tick);
    assert_eq!(chosen(&mut job), [(7, true)], "the first one is lost");
    job.handle(JobEvent::AgentGone(7));
    job.handle(came(8));
    assert_eq!(chosen(&mut job), [(8, true)]);
}

#[test]
fn ranks_of_a_lost_host_start_on_a_spare_one() {
    let mut job = trains(&[0, 1, 1, 2]);
    job.state.ranks.pop();
    job.state.members.pop();
    job.state.hosts[2].spare = Some(2);
    job.starts();
    let why = || "it does not answer".into();
    job.handle(JobEvent::HostRefused {
        host: 1,
        why: why(),
    });
    job.at_s(1);
    assert_eq!(job.starts(), [1, 2]);
    assert_eq!(job.state.hosts_of_ranks(), [0, 2, 2]);
    assert_eq!(job.state.restarted, 2);
}
