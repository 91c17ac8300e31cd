//! Claims about what counts as a difference between ranks.

use super::super::ledger::LedgerLine;
use super::*;

const UPLOAD: &str = "host to device";
const DOWNLOAD: &str = "device to host";
const STEPS: u64 = 100;

fn line(phase: &str, kind: &str, at: &str, count: u64, bytes: u64) -> LedgerLine {
    let (phase, kind, at) = (phase.into(), kind.into(), at.into());
    LedgerLine {
        phase,
        kind,
        at,
        implicit: false,
        announced: None,
        amount: Amount { count, bytes },
    }
}

/// A rank that trained on this many rows in this many passes, with these lines in its steps.
fn rank(rows: u64, passes: u64, lines: &[(&str, &str, u64, u64)]) -> RankLedger {
    let lines = lines
        .iter()
        .map(|&(kind, at, count, bytes)| line(STEP, kind, at, count, bytes))
        .collect();
    RankLedger {
        workload: Workload {
            steps: STEPS,
            rows,
            passes,
        },
        lines,
        ..RankLedger::default()
    }
}

/// Kind and line of each difference.
fn names(ledgers: &[RankLedger]) -> Vec<(String, String)> {
    find(ledgers)
        .into_iter()
        .map(|difference| (difference.kind, difference.at))
        .collect()
}

/// What a rank with `rows` rows moves in a plain training: its batches, 3,136 bytes a row in one
/// copy a step, the numbers of each pass, and the gradients.
fn plain(rows: u64, passes: u64) -> RankLedger {
    let lines = [
        (UPLOAD, "loader.rs:9", STEPS, rows * 3_136),
        (UPLOAD, "numbers.rs:5", STEPS, passes * 16),
        (BETWEEN_RANKS, "lane.rs:3", 4 * STEPS, STEPS << 20),
    ];
    rank(rows, passes, &lines)
}

#[test]
fn ranks_that_do_the_same_do_not_differ() {
    assert_eq!(find(&[]), []);
    assert_eq!(find(&vec![plain(3_200, STEPS); 1]), []);
    assert_eq!(find(&vec![plain(3_200, STEPS); 7]), []);
}

#[test]
fn one_rank_that_downloads_in_the_step_is_named() {
    for lucky in 0..4 {
        let mut ledgers = vec![plain(3_200, STEPS); 4];
        ledgers[lucky]
            .lines
            .push(line(STEP, DOWNLOAD, "debug.rs:7", 3, 12));
        let found = find(&ledgers);
        assert_eq!(
            (found.len(), found[0].at.as_str(), found[0].kind.as_str()),
            (1, "debug.rs:7", DOWNLOAD)
        );
        let bytes: Vec<u64> = found[0].amounts.iter().map(|amount| amount.bytes).collect();
        assert_eq!(
            bytes,
            (0..4)
                .map(|rank| if rank == lucky { 12 } else { 0 })
                .collect::<Vec<_>>()
        );
    }
    // On the CPU a scalar read moves nothing, and would wait on a GPU all the same: it is counted.
    let mut ledgers = vec![plain(3_200, STEPS); 2];
    ledgers[1]
        .lines
        .push(line(STEP, "scalar read", "debug.rs:8", STEPS, 0));
    assert_eq!(
        names(&ledgers),
        [("scalar read".to_string(), "debug.rs:8".to_string())]
    );
}

#[test]
fn uneven_shares_raise_no_alarm_whatever_they_are() {
    // A batch of 10 rows over 4 ranks in micro-batches of 2: 2 or 3 rows in 1 or 2 passes.
    assert_eq!(
        find(&[
            plain(200, 100),
            plain(300, 200),
            plain(200, 100),
            plain(300, 200)
        ]),
        []
    );
    // 101 rows over 2 ranks; a last batch of one row, for which one of them uploads nothing.
    let last =
        |rows: u64, loads: u64| rank(rows, loads, &[(UPLOAD, "loader.rs:9", loads, rows * 3_136)]);
    assert_eq!(find(&[last(5_000, 99), last(5_051, 100)]), []);
    // Fewer rows than ranks: a rank without any uploads nothing.
    assert_eq!(find(&[plain(0, 0), plain(100, 100)]), []);
}

#[test]
fn more_than_the_shares_explain_is_a_difference_and_even_shares_explain_nothing() {
    let with = |rows: u64, bytes: u64| rank(rows, STEPS, &[(UPLOAD, "loader.rs:9", STEPS, bytes)]);
    let is_one = |least: (u64, u64), most: (u64, u64)| {
        find(&[with(least.0, least.1), with(most.0, most.1)]).len() == 1
    };
    // A hundredth more rows explains a hundredth more bytes, and not one more.
    assert!(!is_one((10_000, 40_000), (10_100, 40_400)));
    assert!(is_one((10_000, 40_000), (10_100, 40_401)));
    assert!(is_one((10_000, 40_000), (10_000, 40_001)));
    // As many bytes in more copies.
    let copies = |count: u64| rank(6_400, STEPS, &[(UPLOAD, "loader.rs:9", count, 64_000)]);
    assert_eq!(find(&[copies(STEPS), copies(2 * STEPS)]).len(), 1);
    // Sums that do not fit 64 bits when they are compared.
    assert!(!is_one((1 << 40, 1 << 60), (1 << 40, 1 << 60)));
}

#[test]
fn collectives_are_the_same_on_all_ranks_whatever_their_shares() {
    let with =
        |rows: u64, bytes: u64| rank(rows, STEPS, &[(BETWEEN_RANKS, "lane.rs:3", STEPS, bytes)]);
    assert_eq!(find(&[with(100, 4_000), with(200, 4_000)]), []);
    assert_eq!(
        names(&[with(100, 4_000), with(200, 4_004)]),
        [(BETWEEN_RANKS.to_string(), "lane.rs:3".to_string())]
    );
}

#[test]
fn what_ranks_give_unequally_as_announced_is_no_difference() {
    let given = |bytes: u64, kind: &str, announced: Option<&str>| {
        let mut ledger = rank(100, STEPS, &[(kind, "tree.rs:5", STEPS, bytes)]);
        ledger.lines[0].announced = announced.map(str::to_string);
        ledger
    };
    let differ = |kind: &str, reason| find(&[1, 2].map(|it| given(it * 4_000, kind, reason))).len();
    assert_eq!(differ(BETWEEN_RANKS, Some("partial sums")), 0);
    assert_eq!(differ(BETWEEN_RANKS, None), 1);
    assert_eq!(differ(UPLOAD, Some("numbers of the step")), 1);
}

#[test]
fn steps_alone_are_compared() {
    for phase in ["setup", "log", "evaluation", "checkpoint"] {
        let mut ledgers = vec![plain(3_200, STEPS); 2];
        ledgers[0]
            .lines
            .push(line(phase, DOWNLOAD, "checkpoint.rs:4", 1, 1 << 30));
        assert_eq!(find(&ledgers), [], "{phase}");
    }
}

#[test]
fn the_largest_difference_comes_first_and_what_a_policy_moved_is_apart() {
    let mut ledgers = vec![plain(3_200, STEPS); 2];
    ledgers[0]
        .lines
        .push(line(STEP, DOWNLOAD, "a.rs:1", STEPS, 400));
    ledgers[1].lines.push(LedgerLine {
        implicit: true,
        ..line(STEP, DOWNLOAD, "a.rs:1", STEPS, 400)
    });
    ledgers[1]
        .lines
        .push(line(STEP, UPLOAD, "b.rs:1", STEPS, 4_000));
    let found = find(&ledgers);
    let seen: Vec<_> = found
        .iter()
        .map(|difference| (difference.at.as_str(), difference.implicit))
        .collect();
    assert_eq!(
        seen,
        [("b.rs:1", false), ("a.rs:1", false), ("a.rs:1", true)]
    );
}
