//! When one rank dies, all end: a fault on each rank in each part of a step, under `mpirun`.
//! Where a job need not wait for its timeout, the test gives up before the timeout expires.
//!
//! The fault comes in step 3 of 8, when the metrics log has step 2. `mpirun` ends with the code of
//! the rank that failed first, or with 128 plus the signal's number if that rank was killed.

use crate::support::job::{Ended, FAR, Folder, QUICK, all_at_once, host};
use crate::support::metrics_log::MetricsLog;
use crate::support::test_name;

const PLACES: [&str; 4] = ["forward", "reduction", "optimizer", "log"];
/// For ranks that can only be noticed by the deadline.
const NEAR: u64 = 20;

/// What a job of `ranks` came to in which rank `rank` met its fault, and its metrics log.
fn fault(ranks: usize, rank: usize, place: &str, kind: &str, flags: &str) -> (Ended, MetricsLog) {
    let folder = Folder::new(&format!("{kind}-{rank}-{place}"));
    let job = folder.ranks(ranks, &format!("{QUICK} {flags}"));
    let ended = job
        .env("DDP_TEST_FAULT", &format!("{rank}:{place}:3:{kind}"))
        .run();
    let log = folder.metrics_log();
    // Two steps are in the metrics log and none after the fault. While another rank fails, rank 0
    // may log one more, or may not have logged the second one yet.
    let steps = log.of_steps("step");
    let least = if rank == 0 { 2 } else { 1 };
    assert!(
        [1.0, 2.0, 3.0].starts_with(&steps) && steps.len() >= least,
        "{steps:?}: {ended}"
    );
    assert_eq!(folder.checkpoints(), [""; 0], "{ended}");
    (ended, log)
}

/// The job said once why it ended, naming this rank.
#[track_caller]
fn assert_over(ended: &Ended, exit_code: i32, rank: usize) -> String {
    let cause = ended.assert_fails(exit_code);
    let named = format!("ddp-train: rank {rank} on {}: ", host());
    cause
        .strip_prefix(&named)
        .unwrap_or_else(|| panic!("it begins with {named}: {ended}"))
        .to_string()
}

/// Every place on both ranks of two; three of these eight.
fn everywhere(check: impl Fn(usize, &str) + Sync) {
    let cases = PLACES.iter().flat_map(|place| [(0, place), (1, place)]);
    let cases = ddp_testing::cases_of(&test_name(), cases, 3);
    all_at_once(cases, |(rank, place)| check(rank, place));
}

/// As a panic or an error on purpose says it.
fn on_purpose(place: &str) -> String {
    let capital = place[..1].to_uppercase();
    format!("a fault on purpose in {capital}{} of step 3", &place[1..])
}

#[test]
fn a_killed_rank_ends_all_and_another_reports_it() {
    everywhere(|rank, place| {
        let (ended, _) = fault(2, rank, place, "kill", FAR);
        let cause = assert_over(&ended, 137, rank);
        assert!(
            cause.starts_with("process ")
                && cause.contains("ended without reporting an error: it was killed"),
            "{ended}"
        );
    });
}

#[test]
fn a_panic_ends_all_with_70_and_its_source_line() {
    everywhere(|rank, place| {
        let (ended, _) = fault(2, rank, place, "panic", FAR);
        let cause = assert_over(&ended, 70, rank);
        assert!(
            cause.starts_with("panicked at ") && cause.contains("src/faults.rs:"),
            "{ended}"
        );
        assert!(cause.ends_with(&on_purpose(place)), "{ended}");
    });
}

#[test]
fn an_error_ends_all_with_its_code_and_in_its_words() {
    everywhere(|rank, place| {
        let (ended, log) = fault(2, rank, place, "error", FAR);
        assert_eq!(assert_over(&ended, 65, rank), on_purpose(place), "{ended}");
        // The rank that keeps the metrics log closes it with its own error. Another's may end it
        // before.
        assert!(rank != 0 || log.end().is_some(), "{log:?}");
        if let Some(end) = log.end() {
            let reason = end["reason"].as_str().unwrap();
            assert!(
                end["exit_code"] == 65 && reason.contains(&on_purpose(place)),
                "{end}"
            );
        }
    });
}

/// The other rank waited in vain: it names the missing rank, the operation, and the source line
/// that calls it.
#[track_caller]
fn assert_missed(ended: &Ended, rank: usize, speaker: usize, place: &str) {
    let cause = assert_over(ended, 77, speaker);
    let missing = format!(": rank {rank} did not arrive within {NEAR} s; help: ");
    assert!(cause.contains(&missing), "{ended}");
    // About four times a second ranks ask each other for signals. On a slow machine they do in the
    // step of the fault, and miss the rank there.
    if cause.starts_with("all_reduce max of \"stop poll\" f64[3]") {
        return;
    }
    // Who stops behind the reduction is missed by the next, which begins with the losses.
    let what = if place == "reduction" {
        "gradients, bucket 0"
    } else {
        "loss statistics"
    };
    assert!(
        cause.starts_with(&format!("all_reduce sum of {what:?} f32[")),
        "{ended}"
    );
    assert!(cause.contains(" of group gradients, at "), "{ended}");
    let (file, source) = match place {
        "reduction" => (
            "reduced",
            include_str!("../../engine/src/reducer/reduced.rs"),
        ),
        _ => ("job", include_str!("../../engine/src/reducer/job.rs")),
    };
    let (_, rest) = cause
        .split_once(&format!("src/reducer/{file}.rs:"))
        .unwrap_or_else(|| panic!("it names a line: {ended}"));
    let line: usize = rest
        .split(')')
        .next()
        .and_then(|line| line.parse().ok())
        .expect("a number");
    let source = source.lines().nth(line - 1).unwrap_or_default();
    assert!(source.contains(".all_reduce("), "line {line} is {source}");
}

#[test]
fn a_stopped_rank_is_named_with_what_waited_for_it() {
    everywhere(|rank, place| {
        let (ended, _) = fault(2, rank, place, "stop", &format!("--timeout-s {NEAR}"));
        assert_missed(&ended, rank, 1 - rank, place);
    });
}

#[test]
fn a_rank_that_hangs_is_named_with_what_waited_for_it() {
    all_at_once(
        [
            (0, "log", ""),
            (1, "forward", ""),
            (1, "reduction", "--overlap on"),
        ],
        |(rank, place, flags)| {
            let (ended, _) = fault(
                2,
                rank,
                place,
                "hang",
                &format!("--timeout-s {NEAR} {flags}"),
            );
            assert_missed(&ended, rank, 1 - rank, place);
        },
    );
}

#[test]
fn a_fault_on_the_thread_that_reduces_ends_all() {
    all_at_once(
        [("kill", 137), ("panic", 70), ("error", 65)],
        |(kind, exit_code)| {
            let (ended, _) = fault(2, 1, "reduction", kind, &format!("{FAR} --overlap on"));
            let cause = assert_over(&ended, exit_code, 1);
            assert!(
                kind == "kill" || cause.ends_with(&on_purpose("reduction")),
                "{ended}"
            );
        },
    );
}

/// It was ignored, and the test that named it tested nothing.
#[test]
fn a_fault_that_does_not_exist_is_refused() {
    let folder = Folder::new("no-such-fault");
    let job = folder.ranks(2, QUICK);
    let ended = job.env("DDP_TEST_FAULT", "1:lunch:3:kill").run();
    let cause = ended.assert_fails(2);
    assert!(cause.contains("DDP_TEST_FAULT 1:lunch:3:kill"), "{ended}");
}
