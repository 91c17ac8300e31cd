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
    job.happens(JobEvent::Begin);
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
    fn happens(&mut self, event: JobEvent) {
        self.actions.extend(on(&mut self.state, self.now, event));
    }

    /// Time goes on to `ms`; other hosts are heard.
    fn at(&mut self, ms: u64) {
        self.now = Duration::from_millis(ms);
        for host in 1..self.state.hosts.len() {
            self.state.hosts[host].heard = self.now;
        }
        self.happens(JobEvent::Tick);
    }

    fn at_s(&mut self, seconds: u64) {
        self.at(1000 * seconds);
    }

    fn process(&self, rank: usize) -> u32 {
        self.state.process(rank).expect("it runs")
    }

    fn says(&mut self, rank: usize, said: ToLauncher) {
        let process = self.process(rank);
        self.happens(JobEvent::Said(rank, process, said));
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
        self.happens(JobEvent::Ended(rank, process, end));
    }

    fn stops(&mut self, rank: usize, is_stopped: bool) {
        let process = self.process(rank);
        self.happens(JobEvent::Stopped(rank, process, is_stopped));
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
fn a_rank_that_was_just_lost_comes_back_a_step_later() {
    let mut job = trains(&[0, 0, 0]);
    job.ends(0, KILLED);
    job.at(20);
    (0..3).for_each(|rank| job.waits(rank));
    assert_eq!(job.members(), [1, 2]);
    assert!(job.state.announced_newcomers);
    [1, 2].iter().for_each(|&rank| job.waits(rank));
    assert_eq!(job.members(), [0, 1, 2]);
    // Unless the others are too few.
    job.state.rules.min_ranks = 3;
    job.ends(0, KILLED);
    job.at(1000);
    [1, 2, 0].iter().for_each(|&rank| job.waits(rank));
    assert_eq!(job.members(), [0, 1, 2]);
    let why = "killed by signal 9".into();
    assert_eq!(job.change(), (vec![(0, why)], vec![0]));
}

#[test]
fn ranks_that_are_started_again_are_waited_for_if_the_others_are_too_few() {
    let mut job = trains(&[0, 0]);
    job.state.rules.min_ranks = 2;
    job.ends(1, KILLED);
    job.waits(0);
    assert_eq!(job.state.generation, 1);
    job.at(20);
    job.waits(1);
    assert_eq!(job.members(), [0, 1]);
    // None comes any more.
    job.state.restarted = 99;
    job.ends(1, KILLED);
    job.waits(0);
    assert_eq!(job.members(), [0]);
}

#[test]
fn a_rank_that_stays_lost_is_not_waited_for_at_the_start() {
    let mut job = job(&[0, 0]);
    job.ends(1, End::Code(EXIT_DISAGREES));
    assert_eq!(job.state.generation, 0);
    job.waits(0);
    assert_eq!(job.members(), [0]);
}

#[test]
fn the_reason_of_a_loss_is_that_of_the_process_that_was_lost() {
    let mut job = trains(&[0, 1, 1]);
    job.stops(1, true);
    job.misses(0, &[1], true);
    assert_eq!(job.kills(), [1]);
    job.ends(1, KILLED);
    job.happens(JobEvent::HostLost {
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

/// On a busy machine the rank that waits for the stopped ones may be named first: it was killed.
#[test]
fn a_rank_that_is_missed_while_others_are_stopped_is_not_taken_for_hung() {
    let mut job = trains(&[0, 0, 1, 1]);
    job.stops(2, true);
    job.stops(3, true);
    job.misses(1, &[0], true);
    assert_eq!(job.kills(), [2, 3]);
    job.waits(0);
    job.waits(1);
    [2, 3].into_iter().for_each(|rank| job.ends(rank, KILLED));
    assert_eq!(job.members(), [0, 1]);
    // None is stopped any more.
    let mut job = trains(&[0, 0, 1, 1]);
    job.stops(2, true);
    job.stops(2, false);
    job.misses(1, &[0], true);
    assert_eq!(job.kills(), [0]);
}

#[test]
fn a_rank_that_ends_again_and_again_waits_longer_each_time() {
    let (mut job, mut began) = (job(&[0, 0]), 0);
    job.starts();
    for put_off in [20, 60, 140] {
        job.ends(1, KILLED);
        job.at(began + put_off - 1);
        assert_eq!(job.starts(), [0; 0], "{put_off}");
        began += put_off;
        job.at(began);
        assert_eq!(job.starts(), [1], "{put_off}");
    }
    for _ in 4..10 {
        job.ends(1, KILLED);
        began += 30_000;
        job.at(began);
        assert_eq!(job.starts(), [1]);
    }
    job.ends(1, KILLED);
    job.at(began + 60_000);
    assert_eq!(job.starts(), [0; 0], "it stays out");
}

#[test]
fn a_rank_that_takes_part_each_time_is_started_at_once_each_time() {
    let mut job = trains(&[0, 0]);
    for times in 1..13 {
        job.at_s(20 * times);
        job.starts();
        job.ends(1, KILLED);
        assert_eq!(job.starts(), [1], "{times}");
        job.waits(0);
        job.waits(1);
        job.waits(0);
        assert_eq!(job.members(), [0, 1], "{times}");
    }
}

#[test]
fn a_rank_that_disagrees_is_not_started_again_on_any_host() {
    let mut job = trains(&[1, 2]);
    job.ends(1, End::Code(EXIT_DISAGREES));
    job.at_s(1);
    job.starts();
    job.waits(0);
    assert_eq!(job.members(), [0]);
    for host in [2, 1] {
        job.happens(JobEvent::HostLost {
            host,
            why: "gone".into(),
        });
        job.happens(JobEvent::HostCame {
            host,
            address: None,
        });
        job.at_s(60);
        assert_eq!(job.starts(), vec![0; usize::from(host == 1)]);
    }
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

/// Rank 1, on another host, was lost and comes again.
fn come_again(job: &mut Job, ms: u64) {
    job.ends(1, KILLED);
    job.waits(0);
    job.at(ms);
    job.waits(1);
    job.waits(0);
    assert_eq!(job.members(), [0, 1]);
    job.kills();
}

#[test]
fn one_that_comes_twice_and_cannot_connect_stays_out() {
    for (by, have_met, left_out) in [
        (0, false, 1),
        (1, false, 1),
        // They had connected.
        (0, true, 1),
        (1, true, 0),
    ] {
        let mut job = trains(&[1, 2]);
        come_again(&mut job, 20);
        job.at_s(6);
        job.misses(by, &[1 - by], have_met);
        assert_eq!(job.kills(), [left_out], "{by} {have_met}");
        if left_out == 0 {
            continue;
        }
        // It may be the other one that hangs.
        come_again(&mut job, 7000);
        job.at_s(13);
        job.misses(by, &[1 - by], have_met);
        assert_eq!(job.kills(), [left_out], "{by} {have_met}");
        job.ends(left_out, KILLED);
        job.at_s(14);
        let started = vec![left_out; usize::from(have_met)];
        assert_eq!(job.starts(), started, "{by} {have_met}");
    }
    // It is only stopped.
    let mut job = trains(&[1, 2]);
    for seconds in [1, 7] {
        come_again(&mut job, 1000 * seconds);
        job.stops(1, true);
        job.at_s(seconds + 5);
        job.misses(0, &[1], false);
    }
    job.ends(1, KILLED);
    job.at_s(14);
    assert_eq!(job.starts(), [1]);
}

#[test]
fn that_one_could_not_connect_does_not_count_if_another_hung() {
    let mut job = trains(&[1, 2, 3]);
    // Rank 2 hangs, and rank 0 names rank 1.
    come_again_of_three(&mut job, 20);
    job.says(2, ToLauncher::Progress(1));
    job.at_s(6);
    job.misses(0, &[1], false);
    assert_eq!(job.kills(), [1]);
    job.ends(1, KILLED);
    job.waits(0);
    job.at_s(12);
    assert_eq!(job.kills(), [2]);
    assert_eq!(job.state.ranks[1].unconnected, 0);
    // Or it hangs and is killed by others before that.
    let mut job = trains(&[1, 2, 3]);
    come_again_of_three(&mut job, 20);
    job.at_s(6);
    job.misses(0, &[1], false);
    assert_eq!(job.state.ranks[1].unconnected, 1);
    job.ends(2, KILLED);
    assert_eq!(job.state.ranks[1].unconnected, 0);
}

/// Rank 1 was lost and comes again.
fn come_again_of_three(job: &mut Job, ms: u64) {
    job.ends(1, KILLED);
    [0, 2].iter().for_each(|&rank| job.waits(rank));
    job.at(ms);
    (0..3).for_each(|rank| job.waits(rank));
    assert_eq!(job.members(), [0, 1, 2]);
}

#[test]
fn one_that_came_is_not_left_out_for_another_of_its_host() {
    let mut job = trains(&[1, 2, 2]);
    come_again_of_three(&mut job, 20);
    job.at_s(6);
    job.misses(2, &[0], false);
    assert_eq!(job.kills(), [0]);
}

#[test]
fn ranks_that_wait_and_processes_that_came_since_are_not_left_out() {
    let mut job = trains(&[0, 0, 0]);
    job.ends(1, KILLED);
    job.waits(0);
    job.at(20);
    job.misses(2, &[0, 1], true);
    assert_eq!(job.kills(), [0; 0]);
}

#[test]
fn a_rank_that_shows_no_progress_is_killed_and_one_that_does_is_waited_for() {
    let mut job = trains(&[0, 0]);
    job.waits(0);
    for seconds in 1..9 {
        job.at_s(seconds);
        job.says(1, ToLauncher::Progress(seconds));
    }
    job.at_s(12);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(13);
    assert_eq!(job.kills(), [1]);
    job.at_s(30);
    assert_eq!(job.kills(), [0; 0], "once is enough");
    assert_eq!(job.state.generation, 1, "it has not ended yet");
}

#[test]
fn before_the_first_meeting_a_rank_has_a_minute() {
    let mut job = job(&[1, 2]);
    job.waits(0);
    job.at_s(60);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(61);
    assert_eq!(job.kills(), [1]);
}

#[test]
fn ranks_that_all_hang_are_killed_also_before_they_have_met() {
    for mut job in [job(&[0, 0]), trains(&[0, 0])] {
        // All wait, or none.
        job.state.over_since = job.state.over_since.map(|_| Duration::from_secs(240));
        job.says(1, ToLauncher::Progress(7));
        job.at_s(120);
        job.says(1, ToLauncher::Progress(8));
        job.at_s(240);
        assert_eq!(job.kills(), [0; 0], "one shows progress");
        job.at_s(241);
        assert_eq!(job.kills(), [0, 1]);
    }
}

#[test]
fn one_that_has_waited_for_a_rank_that_hangs_is_not_killed_when_it_is_taken_in() {
    let mut job = trains(&[0, 0]);
    job.state.rules.min_ranks = 1;
    job.ends(1, KILLED);
    job.waits(0);
    job.at_s(1);
    assert_eq!(job.members(), [0]);
    job.waits(1);
    job.at_s(124);
    assert_eq!(job.kills(), [0]);
    job.ends(0, KILLED);
    assert_eq!(job.members(), [1]);
    job.at_s(125);
    assert_eq!(job.kills(), [0; 0]);
}

#[test]
fn a_rank_that_hangs_after_it_has_ended_the_job_is_killed() {
    let mut job = trains(&[0, 0]);
    job.ends(1, End::Code(77));
    job.says(0, ToLauncher::Ends(77));
    job.at_s(120);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(121);
    assert_eq!(job.kills(), [0]);
    job.ends(0, KILLED);
    assert_eq!((job.state.goes_on(), job.state.exit_code()), (false, 77));
}

#[test]
fn stopped_ranks_are_killed_after_three_timeouts_without_a_break() {
    let mut job = trains(&[0, 0]);
    job.stops(1, true);
    job.at_s(11);
    job.stops(1, false);
    job.stops(1, true);
    job.at_s(22);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(23);
    assert_eq!(job.kills(), [1]);
    // Once the job ends, after three seconds.
    job.stops(0, true);
    job.says(0, ToLauncher::Ends(0));
    job.at_s(25);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(26);
    assert_eq!(job.kills(), [0]);
}

#[test]
fn a_stopped_rank_does_not_keep_others_from_saving_that_are_asked_to_stop() {
    let asked = |stopped: std::ops::Range<usize>| {
        let mut job = trains(&[0, 0, 0]);
        stopped.for_each(|rank| job.stops(rank, true));
        job.at_s(1);
        job.happens(JobEvent::Signal(libc::SIGTERM));
        job.at_s(2);
        assert_eq!(job.kills(), [0; 0]);
        job.at_s(3);
        job
    };
    assert_eq!(asked(0..1).kills(), [0]);
    // All may continue, and save. The launcher hears of one after the other.
    let mut job = asked(0..3);
    job.at_s(10);
    job.stops(0, false);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(11);
    job.stops(1, false);
    job.at_s(13);
    assert_eq!(job.kills(), [0; 0]);
    job.at_s(14);
    assert_eq!(job.kills(), [2]);
}

#[test]
fn a_host_is_lost_a_second_after_its_agent_has_given_up() {
    let mut job = trains(&[0, 1]);
    for (ms, is_lost) in [(5000, false), (5001, true)] {
        job.now = Duration::from_millis(ms);
        job.happens(JobEvent::Tick);
        assert_eq!(job.state.hosts[1].is_lost, is_lost, "{ms}");
    }
    job.waits(0);
    assert_eq!(job.change().0, [(1, "its host was cut off".into())]);
    job.happens(JobEvent::HostCame {
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
    (5..8).for_each(|connection| job.happens(came(connection)));
    assert_eq!(chosen(&mut job), [(5, true), (6, false)]);
    job.happens(JobEvent::AgentGone(6));
    job.now = Duration::from_secs(6);
    job.happens(JobEvent::Tick);
    assert_eq!(chosen(&mut job), [(7, true)], "the first one is lost");
    job.happens(JobEvent::AgentGone(7));
    job.happens(came(8));
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
    job.happens(JobEvent::HostLost {
        host: 1,
        why: why(),
    });
    job.at_s(1);
    assert_eq!(job.starts(), [1, 2]);
    assert_eq!(job.state.hosts_of_ranks(), [0, 2, 2]);
    assert_eq!(job.state.restarted, 2);
}

#[test]
fn a_job_whose_hosts_are_lost_while_it_ends_has_the_code_that_a_rank_has_said() {
    for (said, code) in [(Some(74), 74), (Some(0), 0), (None, 77)] {
        let mut job = trains(&[1, 1]);
        said.iter()
            .for_each(|&code| job.says(0, ToLauncher::Ends(code)));
        let why = "it does not answer".into();
        job.happens(JobEvent::HostLost { host: 1, why });
        assert_eq!(job.state.exit_code(), code, "{said:?}");
    }
}

/// It was 130, the code of the signal.
#[test]
fn a_job_that_is_asked_to_stop_and_killed_has_the_code_that_a_rank_has_said_before() {
    for (said, code) in [(Some(74), 74), (None, 130)] {
        let mut job = trains(&[0, 0]);
        job.happens(JobEvent::Signal(libc::SIGINT));
        said.iter()
            .for_each(|&code| job.says(0, ToLauncher::Ends(code)));
        job.at_s(1000);
        assert_eq!(job.signals().last(), Some(&libc::SIGKILL));
        assert_eq!(job.state.exit_code(), code, "{said:?}");
    }
}

#[test]
fn the_first_exit_code_that_ranks_say_is_that_of_the_job() {
    let mut job = trains(&[0, 0]);
    job.says(1, ToLauncher::Ends(65));
    job.says(0, ToLauncher::Ends(0));
    job.ends(1, End::Code(65));
    job.at_s(1);
    assert_eq!(job.starts(), [0, 1], "none is started again");
    job.ends(0, KILLED);
    assert!(!job.state.goes_on());
    assert_eq!(job.state.exit_code(), 65);
    // How a rank ends after the job has done its work does not matter.
    let mut job = trains(&[0, 0]);
    job.says(1, ToLauncher::Ends(0));
    job.ends(0, KILLED);
    job.ends(1, End::Code(0));
    assert_eq!((job.state.goes_on(), job.state.exit_code()), (false, 0));
}

#[test]
fn a_job_of_which_no_rank_is_left_ends_with_77() {
    let mut job = trains(&[0, 0]);
    job.state.rules.restarts = 0;
    job.ends(0, KILLED);
    assert!(job.state.goes_on());
    job.ends(1, KILLED);
    assert_eq!((job.state.goes_on(), job.state.exit_code()), (false, 77));
}

#[test]
fn a_rank_that_is_killed_is_the_cause_of_an_ordinary_jobs_end() {
    let mut job = job_of(&[0, 0], false);
    // The other one has noticed first.
    job.ends(1, End::Code(EXIT_PEER_LOST));
    job.at(2999);
    assert_eq!(job.signals(), [0; 0]);
    job.ends(0, KILLED);
    assert_eq!((job.state.goes_on(), job.state.exit_code()), (false, 137));
    // What ranks that are killed at the end say is no cause.
    for code in [65, EXIT_PEER_LOST] {
        let mut job = job_of(&[0, 0], false);
        job.ends(0, End::Code(code));
        job.at_s(3);
        assert_eq!(job.signals(), [libc::SIGKILL]);
        job.ends(1, KILLED);
        assert_eq!((job.state.goes_on(), job.state.exit_code()), (false, code));
    }
}

#[test]
fn an_ordinary_job_has_one_generation_of_all_its_ranks() {
    let mut job = job_of(&[0, 0, 1], false);
    job.waits(2);
    job.waits(0);
    assert_eq!(job.state.generation, 0);
    job.waits(1);
    assert_eq!((job.state.generation, job.members()), (1, vec![0, 1, 2]));
    // What is said later forms no other one.
    job.waits(0);
    assert_eq!(job.state.generation, 1);
}

#[test]
fn ranks_of_an_ordinary_job_do_not_wait_for_one_that_has_ended_or_does_not_come() {
    let ends = |job: &mut Job| {
        let lines = job.done(|action| match action {
            JobAction::Print(line) => Some(line.clone()),
            _ => None,
        });
        (lines.concat(), job.state.ends)
    };
    let mut job = job_of(&[0; 4], false);
    job.at_s(100);
    assert_eq!(ends(&mut job).1, None, "none waits");
    job.waits(1);
    job.waits(2);
    job.stops(3, true);
    job.at_s(104);
    assert_eq!(ends(&mut job).1, None);
    job.at(104_001);
    let (line, code) = ends(&mut job);
    let expected = "ranks 0 and 3 did not come to the others within 4 s; help";
    assert!(line.starts_with(expected), "{line}");
    assert!(!line.contains("killed"), "{line}");
    let is_killed = |rank: usize| job.state.ranks[rank].process.as_ref()?.killed.clone();
    assert_eq!(
        [0, 1, 2, 3].map(|rank| is_killed(rank).is_some()),
        [true, false, false, true]
    );
    assert_eq!(code, Some(EXIT_PEER_LOST));
    // One that comes later forms nothing.
    job.waits(0);
    assert_eq!(job.state.generation, 0);
    for (end, code) in [(End::Code(0), 77), (End::Code(65), 65), (KILLED, 137)] {
        let mut job = job_of(&[0; 3], false);
        job.waits(2);
        job.ends(1, end);
        let (line, message) = ends(&mut job);
        assert!(
            line.starts_with("rank 1 ended before all ranks had met"),
            "{line}"
        );
        assert_eq!(message, Some(code));
        job.ends(2, End::Code(code));
        job.ends(0, End::Code(code));
        assert_eq!((job.state.goes_on(), job.state.exit_code()), (false, code));
    }
}

#[test]
fn a_stopped_rank_of_an_ordinary_job_waits_for_nobody() {
    let mut job = job_of(&[0; 2], false);
    job.waits(1);
    job.stops(0, true);
    job.stops(1, true);
    job.at_s(11);
    assert_eq!(job.state.ends, None);
    job.at_s(12);
    assert_eq!(job.signals(), [libc::SIGKILL]);
    assert_eq!(job.state.exit_code(), EXIT_PEER_LOST);
}

#[test]
fn a_second_ctrl_c_ends_all_within_three_seconds() {
    for (second, seconds) in [(libc::SIGINT, 4), (libc::SIGTERM, 60)] {
        let mut job = trains(&[0, 0]);
        job.happens(JobEvent::Signal(libc::SIGINT));
        job.at_s(1);
        job.happens(JobEvent::Signal(second));
        assert_eq!(job.signals(), [libc::SIGINT, second]);
        job.at_s(seconds - 1);
        assert_eq!(job.signals(), [0; 0]);
        job.at_s(seconds);
        assert_eq!(job.signals(), [libc::SIGKILL]);
        [0, 1].iter().for_each(|&rank| job.ends(rank, KILLED));
        assert_eq!(job.state.exit_code(), of_signal(libc::SIGINT));
    }
}

#[test]
fn a_signal_to_one_rank_stops_the_job_and_none_is_started_again() {
    for end in [End::Code(EXIT_STOPPED), End::Signal(libc::SIGTERM)] {
        let mut job = trains(&[0, 0, 0]);
        job.ends(2, KILLED);
        job.starts();
        job.ends(1, end);
        assert_eq!(job.signals(), [libc::SIGTERM]);
        job.at_s(1);
        assert_eq!(job.starts(), [0; 0]);
        job.ends(0, End::Code(EXIT_STOPPED));
        assert_eq!(job.state.exit_code(), EXIT_STOPPED);
    }
}

#[test]
fn what_an_older_process_of_a_rank_does_has_no_effect() {
    let mut job = trains(&[0, 0]);
    let (rank, process, end) = (1, job.process(1), KILLED);
    job.ends(1, KILLED);
    job.at(20);
    job.happens(JobEvent::Ended(rank, process, end));
    let said = ToLauncher::Waits { after: 1, port: 7 };
    job.happens(JobEvent::Said(rank, process, said));
    assert!(job.state.goes_on() && job.state.restarted == 1);
    assert_eq!(job.state.ranks[1].process.as_ref().unwrap().waits, None);
}
