//! Ranks that are started again, and come back, wait or stay out.

use super::*;

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
        job.handle(JobEvent::HostRefused {
            host,
            why: "gone".into(),
        });
        job.handle(JobEvent::HostCame {
            host,
            address: None,
        });
        job.at_s(60);
        assert_eq!(job.starts(), vec![0; usize::from(host == 1)]);
    }
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

/// A rank that cannot connect closes its sockets, so other ranks may report first.
#[test]
fn a_word_about_one_that_cannot_connect_counts_after_others_have_left() {
    for leave in [vec![0], vec![2], vec![0, 2]] {
        let mut job = trains(&[1, 2, 3]);
        come_again_of_three(&mut job, 20);
        job.at_s(6);
        leave.iter().for_each(|&rank| job.waits(rank));
        job.misses(2, &[1], false);
        assert_eq!(job.kills(), [1], "{leave:?}");
        assert_eq!(job.state.ranks[1].unconnected, 1, "{leave:?}");
        // After a second report no other rank is killed.
        job.misses(0, &[1, 2], false);
        assert_eq!(job.kills(), [0; 0], "{leave:?}");
    }
    // Rank 0, which no rank misses, is stopped for a moment: it is not killed.
    let mut job = trains(&[1, 2, 3]);
    come_again_of_three(&mut job, 20);
    job.at_s(6);
    job.stops(0, true);
    job.misses(2, &[1], false);
    assert_eq!(job.kills(), [1]);
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
fn what_an_older_process_of_a_rank_does_has_no_effect() {
    let mut job = trains(&[0, 0]);
    let (rank, process, end) = (1, job.process(1), KILLED);
    job.ends(1, KILLED);
    job.at(20);
    job.handle(JobEvent::Ended(rank, process, end));
    let said = ToLauncher::Waits { after: 1, port: 7 };
    job.handle(JobEvent::Said(rank, process, said));
    assert!(job.state.has_ranks() && job.state.restarted == 1);
    assert_eq!(job.state.ranks[1].process.as_ref().unwrap().waits, None);
}

#[test]
fn a_lost_host_is_called_again_five_seconds_after_it_has_not_answered() {
    let mut job = trains(&[0, 1]);
    let refuses = |job: &mut Job, why: &str| {
        let why = why.to_string();
        job.handle(JobEvent::HostRefused { host: 1, why });
    };
    let calls_at_s = |job: &mut Job, seconds: u64| {
        job.now = Duration::from_secs(seconds);
        job.handle(JobEvent::Tick);
        job.done(|action| match action {
            JobAction::Call { host, .. } => Some(*host),
            _ => None,
        })
    };
    let lines = |job: &mut Job| {
        job.done(|action| match action {
            JobAction::Print(line) => Some(line.clone()),
            _ => None,
        })
    };
    refuses(&mut job, "it stalls");
    assert!(calls_at_s(&mut job, 4).is_empty());
    assert_eq!(calls_at_s(&mut job, 5), [1]);
    // It may still answer.
    assert!(calls_at_s(&mut job, 34).is_empty());
    assert_eq!(calls_at_s(&mut job, 35), [1]);
    job.handle(JobEvent::HostGone(1));
    assert!(calls_at_s(&mut job, 39).is_empty());
    assert_eq!(calls_at_s(&mut job, 40), [1]);
    // The user is told once why.
    refuses(&mut job, "expected version 2, got 1; help: install it");
    let told = lines(&mut job);
    assert!(
        told[0].contains("start ranks on host1") && told[0].contains("help: install it"),
        "{told:?}"
    );
    assert_eq!(calls_at_s(&mut job, 45), [1]);
    refuses(&mut job, "expected version 2, got 1; help: install it");
    assert_eq!(lines(&mut job).len(), 0);
    job.handle(JobEvent::HostCame {
        host: 1,
        address: None,
    });
    assert!(calls_at_s(&mut job, 46).is_empty());
}

#[test]
fn no_host_is_called_that_could_start_no_rank() {
    let spoilers: [fn(&mut JobState); 4] = [
        |state| state.rules.restarts = 0,
        |state| state.rules.hosts_come = true,
        |state| state.ends = Some(0),
        |state| state.ranks[1].host = 0,
    ];
    for spoil in spoilers {
        let mut job = trains(&[0, 1]);
        let why = "it stalls".into();
        job.handle(JobEvent::HostRefused { host: 1, why });
        spoil(&mut job.state);
        job.now = Duration::from_secs(60);
        job.handle(JobEvent::Tick);
        assert!(
            !job.actions
                .iter()
                .any(|it| matches!(it, JobAction::Call { .. }))
        );
    }
}
