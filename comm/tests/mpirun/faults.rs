//! One rank dies, all end.

use std::time::Duration;

use crate::job::{
    END_MAX_MS, EXPIRES_MS, Ended, FOLLOWS, Job, LEAVES, SLEEPS, STARTS_ONLY, all_at_once,
};
use crate::rank::{JOIN_TIMEOUT_MS, now_ms};

/// Ends a job of three by a fault on its last rank while the others reduce, and while they compute.
#[track_caller]
fn faults(kind: &str, exit_codes: &[i32], expected: &[&str]) {
    for others in ["reduce", "compute"] {
        let ended = Job::new(3, &format!("fault {kind} 2 {others}")).run();
        let exit_code = exit_codes
            .iter()
            .find(|&&code| ended.exit_code == Some(code))
            .unwrap_or(&exit_codes[0]);
        let cause = ended.assert_ended_with(*exit_code);
        assert!(cause.contains("ddp-train: rank 2 on "), "{ended}");
        assert!(expected.iter().all(|part| cause.contains(part)), "{ended}");
    }
}

#[test]
fn a_panic_ends_all_with_70_and_its_line() {
    faults(
        "panic",
        &[70],
        &["panicked at", "mpirun/rank.rs:", ": seven is not a number"],
    );
}

#[test]
fn an_error_ends_all_with_its_own_code() {
    faults("error", &[76], &[": the loss is not finite"]);
}

#[test]
fn another_rank_reports_a_killed_rank() {
    faults(
        "kill",
        &[137],
        &["ended without reporting an error", "kill -9"],
    );
}

#[test]
fn a_rank_that_just_leaves_ends_all() {
    // 1 is mpirun's code for a rank that returns 0 without having ended MPI; 77 that of the other
    // ranks, which on a busy machine end before mpirun has noticed.
    faults(
        "exit",
        &[1, 77],
        &["ended without reporting an error", "left before the others"],
    );
}

#[test]
fn a_rank_that_is_stopped_on_any_host_is_named() {
    let hosts = [("left", 2), ("right", 1)];
    let job = |rank: usize| {
        Job::on_hosts(&hosts, &format!("fault stop {rank} reduce")).timeout_ms(EXPIRES_MS)
    };
    for (rank, ended) in [1, 2].into_iter().zip(all_at_once([1, 2].map(job))) {
        let cause = ended.assert_ended_with(77);
        assert!(
            cause.contains(&format!("rank {rank} did not arrive within ")),
            "{ended}"
        );
    }
}

#[test]
fn ranks_of_hosts_that_make_different_calls_end_with_78_and_both_calls() {
    let role = "fault other 2 reduce";
    for hosts in [[("left", 1), ("right", 2)], [("left", 2), ("right", 1)]] {
        let ended = Job::on_hosts(&hosts, role).run();
        let cause = ended.assert_ended_with(78);
        assert!(
            cause.contains("all_reduce sum of") && cause.contains("all_reduce max of"),
            "{ended}"
        );
    }
}

#[test]
fn ranks_that_are_asked_to_end_do_so_without_an_error() {
    let mut running = Job::new(3, "fault none 0 reduce").start();
    running.wait_until_told("pid", 3);
    running.ask_to_end();
    let asked_at_ms = now_ms();
    let ended = running.wait();
    assert!(now_ms() - asked_at_ms <= END_MAX_MS, "{ended}");
    assert!(ended.causes().is_empty(), "{ended}");
    ended.assert_clean();
}

#[test]
fn killing_the_launcher_ends_its_ranks() {
    let mut running = Job::new(3, "fault none 0 reduce").start();
    running.wait_until_told("pid", 3);
    running.kill_launcher();
    let killed_at_ms = now_ms();
    // Also for the ranks.
    let ended = running.wait();
    assert!(now_ms() - killed_at_ms <= END_MAX_MS, "{ended}");
    ended.assert_clean();
}

#[test]
fn a_failure_on_one_host_ends_the_others() {
    for others in ["reduce", "compute"] {
        let hosts = [("left", 2), ("right", 2)];
        let ended = Job::on_hosts(&hosts, &format!("fault error 2 {others}")).run();
        let cause = ended.assert_ended_with(76);
        assert!(cause.contains("ddp-train: rank 2 on right: "), "{ended}");
    }
}

#[test]
fn a_rank_killed_on_one_host_ends_the_others() {
    for faulty in [0, 1] {
        let ended = Job::on_hosts(
            &[("left", 2), ("right", 2)],
            &format!("fault kill {faulty} reduce"),
        )
        .run();
        let cause = ended.assert_ended_with(137);
        assert!(
            cause.contains(&format!("ddp-train: rank {faulty} on left: process ")),
            "{ended}"
        );
    }
}

/// Checks the one line of a job that has ended while it started.
#[track_caller]
fn assert_never_began(ended: &Ended, expected: &str) {
    assert_eq!(ended.exit_code, Some(77), "{ended}");
    let [cause] = ended.causes()[..] else {
        panic!("one line says why: {ended}")
    };
    assert!(cause.contains(expected), "{ended}");
}

#[test]
fn a_rank_that_never_starts_mpi_ends_the_job() {
    let said = "not all ranks started MPI within 20 s; help: check";
    let hosts = [
        &[(SLEEPS, 1), ("", 2)][..],
        &[(FOLLOWS, 1), (LEAVES, 1), (FOLLOWS, 1)],
    ];
    let job = |hosts| {
        let job = Job::on_hosts(hosts, "facts").timeout_ms(EXPIRES_MS);
        job.env(JOIN_TIMEOUT_MS, &EXPIRES_MS.to_string())
    };
    for ended in all_at_once(hosts.map(job)) {
        assert_never_began(&ended, said);
    }
}

#[test]
fn a_rank_that_stops_in_the_bootstrap_is_named_once() {
    let hosts = [
        &[(STARTS_ONLY, 1), ("", 2)][..],
        &[("", 1), (STARTS_ONLY, 1), ("", 1)],
    ];
    let job = |hosts| Job::on_hosts(hosts, "facts").timeout_ms(EXPIRES_MS);
    for (rank, ended) in all_at_once(hosts.map(job)).iter().enumerate() {
        let said = format!(
            "cannot exchange addresses between ranks: rank {rank} did not come within 20 s; help: check"
        );
        assert_never_began(ended, &said);
    }
}

#[test]
fn a_rank_that_never_ends_mpi_ends_the_job() {
    let ended = Job::new(3, "stays 1").timeout_ms(EXPIRES_MS).run();
    let cause = ended.assert_ended_with(77);
    assert!(cause.contains("MPI did not end within 10 s: "), "{ended}");
}

#[test]
fn a_job_suspended_past_its_timeout_continues() {
    let job = Job::on_hosts(&[("left", 1), ("right", 1)], "steps");
    let mut running = job.timeout_ms(EXPIRES_MS).start();
    running.wait_until_told("steps", 2);
    running.suspend(Duration::from_millis(EXPIRES_MS + 1000));
    running.let_end();
    running.wait().assert_well();
}

/// Ranks on two hosts, where another rank of the slow one's host waits as well.
fn slow(kind: &str) -> Job {
    let hosts = [("left", 2), ("right", 2)];
    Job::on_hosts(&hosts, &format!("slow {kind}")).timeout_ms(EXPIRES_MS)
}

#[test]
fn a_rank_that_shows_progress_is_waited_for_beyond_the_timeout() {
    slow("none").run().assert_well();
}

#[test]
fn a_rank_that_showed_progress_is_named_when_it_dies_or_stops() {
    let [killed, stopped] = all_at_once(["kill", "stop"].map(slow));
    let cause = killed.assert_ended_with(137);
    let expected = "ended without reporting an error";
    assert!(cause.contains(expected), "{killed}");
    let cause = stopped.assert_ended_with(77);
    for part in [
        "barrier (call 1 of group control, at ",
        "rank 3 did not arrive within ",
        ", and showed no progress for 20 s; help: ",
    ] {
        assert!(cause.contains(part), "{part}: {stopped}");
    }
}
