//! Ranks without progress, and stopped ones: who is waited for, and who is killed.

use super::*;

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
    assert_eq!((job.state.has_ranks(), job.state.exit_code()), (false, 77));
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
        job.handle(JobEvent::Signal(libc::SIGTERM));
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
