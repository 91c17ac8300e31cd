//! Ordinary jobs, which end when a rank is lost.

use super::*;

#[test]
fn a_rank_that_is_killed_is_the_cause_of_an_ordinary_jobs_end() {
    let mut job = job_of(&[0, 0], false);
    // The other one has noticed first.
    job.ends(1, End::Code(EXIT_PEER_LOST));
    job.at(2999);
    assert_eq!(job.signals(), [0; 0]);
    job.ends(0, KILLED);
    assert_eq!((job.state.has_ranks(), job.state.exit_code()), (false, 137));
    // What ranks that are killed at the end say is no cause.
    for code in [65, EXIT_PEER_LOST] {
        let mut job = job_of(&[0, 0], false);
        job.ends(0, End::Code(code));
        job.at_s(3);
        assert_eq!(job.signals(), [libc::SIGKILL]);
        job.ends(1, KILLED);
        assert_eq!(
            (job.state.has_ranks(), job.state.exit_code()),
            (false, code)
        );
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
        assert_eq!(
            (job.state.has_ranks(), job.state.exit_code()),
            (false, code)
        );
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
