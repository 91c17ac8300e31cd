//! Ranks that do not agree end with 78 before the first step, and the message has both values.

use crate::support::job::{Ended, Folder, QUICK, all_at_once, host};

/// What ranks compare, by the calls in the source: a field that is added there is tested here.
fn compared(kind: &str) -> Vec<&'static str> {
    let source = include_str!("../../engine/src/trainer/agree.rs");
    let calls = source.split(kind).skip(1);
    calls
        .map(|call| {
            call.split('"')
                .next()
                .expect("split gives one part at least")
        })
        .collect()
}

/// The job never trained, and said once on which field which rank differs. Both values.
#[track_caller]
fn assert_refused<'a>(
    ended: &'a Ended,
    folder: &Folder,
    field: &str,
    odd: usize,
    reference: usize,
) -> (&'a str, &'a str) {
    let cause = ended.assert_fails(78);
    // All ranks find it; the first one reports it.
    let said = format!(" on {}: ranks disagree on {field}: rank {odd} has ", host());
    let (rank, values) = cause
        .split_once(&said)
        .unwrap_or_else(|| panic!("it says{said}: {ended}"));
    assert!(
        rank.strip_prefix("ddp-train: rank ")
            .is_some_and(|rank| rank.parse::<usize>().is_ok()),
        "{ended}"
    );
    assert!(!folder.out().exists(), "nothing was begun: {ended}");
    values
        .split_once(&format!(", rank {reference} has "))
        .unwrap_or_else(|| panic!("both values: {ended}"))
}

#[test]
fn each_field_is_refused_when_it_alone_differs() {
    let fields = compared("Field::must_match(\"");
    assert!(fields.len() >= 7, "{fields:?}");
    all_at_once(fields, |field| {
        let folder = Folder::new("field");
        let ended = folder
            .ranks(2, QUICK)
            .env("DDP_TEST_DISAGREE", &format!("1:{field}"))
            .run();
        let (theirs, ours) = assert_refused(&ended, &folder, field, 1, 0);
        // Help follows the last value.
        assert!(
            theirs.ends_with("and something else") && ours.contains("; help: "),
            "{ended}"
        );
        assert!(
            !ours.contains("and something else") && !ours.starts_with("; "),
            "{ended}"
        );
    });
}

#[test]
fn the_one_that_differs_from_most_is_named_even_if_it_is_the_first() {
    let folder = Folder::new("first");
    let ended = folder
        .ranks(3, QUICK)
        .env("DDP_TEST_DISAGREE", "0:the model's initial weights")
        .run();
    assert_refused(&ended, &folder, "the model's initial weights", 0, 1);
}

#[test]
fn a_warning_is_given_once_and_the_job_trains() {
    all_at_once(compared("Field::warn(\""), |field| {
        let folder = Folder::new("warn");
        let ended = folder
            .ranks(2, QUICK)
            .env("DDP_TEST_DISAGREE", &format!("1:{field}"))
            .run();
        ended.assert_well();
        let warning = format!("ranks disagree on {field}: rank 1 has ");
        assert_eq!(ended.stderr.matches(&warning).count(), 1, "{ended}");
        assert!(
            ended.stderr.contains("and something else, rank 0 has "),
            "{ended}"
        );
        assert!(
            folder
                .metrics_log()
                .end()
                .is_some_and(|end| end["exit_code"] == 0)
        );
    });
}

#[cfg(feature = "mpi")]
#[test]
fn other_flags_are_another_configuration() {
    for (first, second, values) in [
        (
            "--lr 1e-3",
            "--lr 2e-3",
            ("lr = 0.002", "lr = 0.001; help: "),
        ),
        (
            "--seed 1",
            "--grad-clip 1 --seed 1",
            ("grad-clip = 1.0", "no grad-clip; help: "),
        ),
        (
            "",
            "--micro-batch 4",
            ("micro-batch = 4", "no micro-batch; help: "),
        ),
    ] {
        let folder = Folder::new("flags");
        let [first, second] = [first, second].map(|flags| format!("{QUICK} {flags}"));
        let ended = folder.each(&[(1, &first), (1, &second)]).run();
        let (theirs, ours) = assert_refused(&ended, &folder, "the configuration", 1, 0);
        assert!(theirs == values.0 && ours.starts_with(values.1), "{ended}");
    }
}

#[cfg(feature = "mpi")]
#[test]
fn what_is_a_ranks_own_may_differ() {
    let folder = Folder::new("own");
    let second = format!(
        "{} --threads 2 --progress never --log-level debug --timeout-s 60",
        QUICK.replace("OUT", "OUT-2")
    );
    let ended = folder
        .each(&[(1, &format!("{QUICK} --threads 1")), (1, &second)])
        .run();
    ended.assert_well();
    assert_eq!(folder.metrics_log().start()["world"]["ranks"], 2);
    assert!(
        !folder.path().join("out-2").exists(),
        "the first rank alone writes"
    );
}

#[cfg(feature = "mpi")]
#[test]
fn different_programs_do_not_train_together() {
    let folder = Folder::new("programs");
    let ended = folder
        .each(&[(1, QUICK), (1, "bench mlp --seconds 0.1")])
        .run();
    assert_refused(&ended, &folder, "the command", 1, 0);
    let ended = folder
        .each(&[
            (1, "bench mlp --seconds 0.1"),
            (1, "bench mlp --seconds 0.1 --batch 64"),
        ])
        .run();
    let (theirs, ours) = assert_refused(&ended, &folder, "the flags of the bench", 1, 0);
    assert!(
        theirs.contains("batch: 64") && ours.contains("batch: 128"),
        "{ended}"
    );
}
