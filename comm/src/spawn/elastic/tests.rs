use serde_json::json;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(4);

/// A job of rank 0 on host 1 and rank 1 on host 2; its launcher's host has none.
fn job() -> Elastic {
    on_hosts(vec![1, 2])
}

fn on_hosts(hosts: Vec<usize>) -> Elastic {
    let task = Task {
        losses: None,
        place: None,
        program: "none".into(),
        arguments: Vec::new(),
        agent: "",
    };
    let losses = Losses {
        min_ranks: 1,
        restarts: 99,
    };
    Elastic::new(hosts, &task, losses, Vec::new()).unwrap()
}

/// Host `host` says in this generation for which its process `pid` waits, and whom it misses.
fn hear(job: &mut Elastic, host: usize, generation: u32, [pid, waits]: [u64; 2], missed: &[usize]) {
    let words = [0, 0, 0, 0, 0, 0, 0, waits, pid, 0];
    let numbers = [generation, 0, 0];
    let state = json!({"numbers": numbers, "seats": [(host - 1, words)], "missed": missed});
    job.hear(host, serde_json::from_value(state).unwrap());
}

fn decide(job: &mut Elastic, seconds: u64) -> Vec<(usize, u32)> {
    job.decide(Duration::from_secs(seconds), TIMEOUT).0
}

fn again(job: &mut Elastic, rank: usize, seconds: u64) -> bool {
    let now = Duration::from_secs(seconds);
    job.again(rank, None, now).is_ok()
}

fn both_train() -> Elastic {
    let mut job = job();
    hear(&mut job, 1, 0, [70, 1], &[]);
    assert!(decide(&mut job, 0).is_empty());
    assert_eq!(job.roster.current(), 0, "the first generation needs all");
    hear(&mut job, 2, 0, [80, 1], &[]);
    assert!(decide(&mut job, 0).is_empty());
    assert_eq!(job.roster.members(), [(0, 70), (1, 80)]);
    job
}

#[test]
fn of_two_hosts_that_miss_each_other_one_is_left_out() {
    let mut job = both_train();
    hear(&mut job, 2, 1, [80, 0], &[0]);
    hear(&mut job, 1, 1, [70, 0], &[1]);
    assert_eq!(decide(&mut job, 1), [(1, 80)]);
    // What the other one says later has no effect on who is left.
    hear(&mut job, 2, 1, [80, 0], &[0]);
    assert!(decide(&mut job, 1).is_empty());
    // One that shows no progress while the others wait is left out, too.
    hear(&mut job, 1, 1, [70, 2], &[]);
    assert!(decide(&mut job, 2).is_empty() && decide(&mut job, 9).is_empty());
    assert_eq!(decide(&mut job, 10), [(1, 80)]);
}

#[test]
fn ranks_of_several_hosts_that_are_all_stopped_are_left_out() {
    let mut job = both_train();
    // Rank 1 is lost, and the process that comes waits for rank 0.
    hear(&mut job, 1, 1, [70, 2], &[]);
    hear(&mut job, 2, 1, [0, 0], &[]);
    assert!(decide(&mut job, 1).is_empty() && decide(&mut job, 1).is_empty());
    assert_eq!(job.roster.members(), [(0, 70)]);
    hear(&mut job, 2, 2, [81, 1], &[]);
    assert!(decide(&mut job, 2).is_empty() && decide(&mut job, 121).is_empty());
    assert_eq!(decide(&mut job, 123), [(0, 70)]);
}

#[test]
fn one_that_shows_no_progress_before_the_first_meeting_is_left_out() {
    let mut job = job();
    hear(&mut job, 1, 0, [70, 1], &[]);
    hear(&mut job, 2, 0, [80, 0], &[]);
    assert!(decide(&mut job, 0).is_empty() && decide(&mut job, 59).is_empty());
    assert_eq!(decide(&mut job, 61), [(1, 80)]);
}

#[test]
fn a_process_that_comes_and_cannot_connect_is_not_started_again() {
    for (reporter, seconds, left_out, comes_again) in [
        (1, 6, (1, 81), false),
        (2, 6, (1, 81), false),
        // They had connected.
        (1, 60, (1, 81), true),
        (2, 60, (0, 70), true),
    ] {
        let mut job = joined();
        let hosts = [(70, [1]), (81, [0])];
        for (index, (pid, other)) in hosts.into_iter().enumerate() {
            let missed = if reporter == index + 1 {
                &other[..]
            } else {
                &[]
            };
            hear(&mut job, index + 1, 3, [pid, 0], missed);
        }
        assert_eq!(
            decide(&mut job, seconds),
            [left_out],
            "{reporter} {seconds}"
        );
        assert_eq!(
            again(&mut job, 1, seconds),
            comes_again,
            "{reporter} {seconds}"
        );
    }
}

/// Rank 1 was lost and has come again.
fn joined() -> Elastic {
    let mut job = both_train();
    hear(&mut job, 2, 1, [0, 0], &[]);
    hear(&mut job, 1, 1, [70, 2], &[]);
    decide(&mut job, 1);
    assert_eq!(job.roster.members(), [(0, 70)]);
    assert!(again(&mut job, 1, 1));
    hear(&mut job, 2, 2, [81, 1], &[]);
    hear(&mut job, 1, 2, [70, 3], &[]);
    decide(&mut job, 2);
    assert_eq!(job.roster.members(), [(0, 70), (1, 81)]);
    job
}

#[test]
fn a_rank_that_disagrees_is_not_started_again_on_any_host() {
    let mut job = both_train();
    hear(&mut job, 2, 1, [0, 0], &[]);
    let disagrees = Some(EXIT_DISAGREES);
    assert!(job.again(1, disagrees, Duration::ZERO).is_err());
    job.seat(1, 3, "127.0.0.1");
    assert!(!again(&mut job, 1, 1) && job.stays_out(1));
    // The other seats do not wait for it.
    hear(&mut job, 1, 1, [70, 2], &[]);
    decide(&mut job, 2);
    assert_eq!(job.roster.members(), [(0, 70)]);
}

#[test]
fn a_rank_that_ends_again_and_again_waits_longer_each_time() {
    let mut job = job();
    for put_off_ms in [20, 60, 140] {
        assert!(again(&mut job, 1, 0));
        let at = Duration::from_millis(put_off_ms);
        assert!(job.due(at - Duration::from_millis(1), false).is_empty());
        assert_eq!(job.due(at, false), [1]);
    }
    for _ in 4..TRIES_MAX {
        assert!(again(&mut job, 1, 0));
    }
    assert!(!again(&mut job, 1, 0), "it stays out");
    // One that has taken part for a while is started at once.
    let (mut job, later) = (both_train(), TOOK_PART);
    assert!(job.due(Duration::ZERO, false).is_empty());
    assert!(job.again(1, None, later).is_ok());
    assert_eq!(job.due(later, false), [1]);
    assert!(job.again(1, None, later).is_ok());
    assert!(job.due(later, false).is_empty());
    assert_eq!(job.due(later, true), [1], "the job ends");
}

#[test]
fn a_rank_that_takes_part_each_time_is_started_at_once_each_time() {
    let mut job = both_train();
    for times in 0..12 {
        let (generation, pid) = (2 * times + 1, 81 + u64::from(times));
        let (came, now) = (20 * times, 20 * times + 10);
        let [came, now] = [came, now].map(|s| Duration::from_secs(s.into()));
        assert!(job.due(came, false).is_empty());
        assert!(job.due(now, false).is_empty());
        hear(&mut job, 2, generation, [0, 0], &[]);
        hear(
            &mut job,
            1,
            generation,
            [70, u64::from(generation) + 1],
            &[],
        );
        decide(&mut job, 1);
        assert_eq!(job.roster.members(), [(0, 70)]);
        // Its host comes back when the others train already.
        assert!(job.again(1, None, now).is_ok(), "{times}");
        assert_eq!(job.due(now, false), [1], "{times}");
        hear(&mut job, 2, generation + 1, [pid, 1], &[]);
        hear(
            &mut job,
            1,
            generation + 1,
            [70, u64::from(generation) + 2],
            &[],
        );
        decide(&mut job, 2);
        assert_eq!(job.roster.members(), [(0, 70), (1, pid as u32)]);
    }
}

#[test]
fn ranks_that_all_hang_are_killed_also_before_they_have_met() {
    let mut job = on_hosts(vec![0, 0]);
    let mut sleeper = std::process::Command::new("sleep");
    let mut processes = [0, 1].map(|_| sleeper.arg("600").spawn().unwrap());
    for (seat, process) in processes.iter().enumerate() {
        job.roster.take(seat, process.id());
    }
    let mut kills = |seconds| job.kill_silent(Duration::from_secs(seconds), SLOW);
    assert!(!kills(0) && !kills(100));
    assert!(kills(121));
    for process in &mut processes {
        assert!(!process.wait().unwrap().success());
    }
    // A rank that shows progress saves all.
    let mut processes = [0, 1].map(|_| sleeper.spawn().unwrap());
    for (seat, process) in processes.iter().enumerate() {
        job.roster.take(seat, process.id());
    }
    assert!(!job.kill_silent(Duration::from_secs(200), SLOW));
    job.roster.show_pulse(1, 7);
    assert!(!job.kill_silent(Duration::from_secs(300), SLOW));
    assert!(!job.kill_silent(Duration::from_secs(330), SLOW));
    for process in &mut processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
