//! The placement audit at the end of a run: what it reports if all ranks do the same, and when it
//! is left out.

use serde_json::Value;

use crate::support::job::{Folder, QUICK};
use crate::support::metrics_log::{MetricsLog, number};

/// The event, which is the last but one; and what the run said on standard error.
#[track_caller]
fn placement(log: &MetricsLog) -> &Value {
    let [.., placement, end] = &log.0[..] else {
        panic!("a log of two lines or more: {log:?}")
    };
    assert_eq!(
        (&placement["event"], &end["event"]),
        (&"placement".into(), &"end".into())
    );
    placement
}

#[test]
fn a_run_alone_on_the_cpu_moves_nothing() {
    let folder = Folder::new("audit-alone");
    let ended = folder.alone(QUICK).run();
    ended.assert_well();
    // That is news only with GPUs or several ranks.
    assert!(!ended.stderr.contains("placement"), "{ended}");
    let log = folder.metrics_log();
    let placement = placement(&log);
    assert_eq!(
        (&placement["steps"], &placement["simulated"]),
        (&8.into(), &false.into())
    );
    assert_eq!(placement["ranks"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        placement["ranks"][0]["per_step"]
            .as_object()
            .map(|kinds| kinds.len()),
        Some(0),
        "{placement}"
    );
}

#[test]
fn every_rank_is_in_it_with_what_it_gave_to_the_others() {
    let folder = Folder::new("audit-ranks");
    let ended = folder.ranks(3, QUICK).run();
    ended.assert_well();
    let log = folder.metrics_log();
    let buckets = number(&log.start()["world"], "buckets");
    let placement = placement(&log);
    let ranks = placement["ranks"].as_array().expect("one entry a rank");
    assert_eq!(ranks.len(), 3);
    for (rank, entry) in ranks.iter().enumerate() {
        assert_eq!(
            (&entry["rank"], &entry["devices"]),
            (&rank.into(), &serde_json::json!(["cpu"]))
        );
        let given = &entry["per_step"]["between ranks"];
        // One call for each bucket and one for the sums of losses: four f32 beside 12,730
        // gradients, whose buckets may be padded.
        assert_eq!(number(given, "count"), buckets + 1.0, "{placement}");
        let bytes = (12_730 + 4) as f64 * 4.0;
        assert!(
            (bytes..bytes + 4096.0).contains(&number(given, "bytes")),
            "{placement}"
        );
    }
    // Of each batch of 32 rows two ranks have one more than the third.
    let rows: f64 = ranks.iter().map(|rank| number(rank, "rows")).sum();
    assert_eq!((rows, number(&ranks[0], "passes")), (256.0, 8.0));
    assert!(
        ended
            .stderr
            .contains("\nplacement, per rank and step, mean of 8 steps:\n  rank    on "),
        "{ended}"
    );
    assert!(ended.stderr.contains("\n  0 to 2  cpu "), "{ended}");
    assert!(
        ended
            .stderr
            .contains("\n  no differences between ranks in a step\n"),
        "{ended}"
    );
}

/// With shards ranks give different amounts, as `--dry-run` and the tree say.
#[test]
fn partial_sums_are_given_as_planned() {
    let words = "--data glyphs,rows=64,held-out=0 --hidden 500 --batch-size 24 --steps 2 \
                 --same-bits 12 --out OUT";
    let parameters = 785 * 500 + 501 * 10;
    crate::support::job::all_at_once([2, 3, 5], |ranks| {
        let folder = Folder::new("audit-shards");
        let dry = folder.started(ranks, &format!("{words} --dry-run")).run();
        let (_, stated) = dry.stdout.split_once("a rank sends at most ").unwrap();
        let stated_mb: f64 = stated.split_once(" MB").unwrap().0.parse().unwrap();
        folder.started(ranks, words).run().assert_well();
        let log = folder.metrics_log();
        let placement = placement(&log);
        let tree = ddp_comm::SumTree::new(12, ranks);
        let mut most = 0.0f64;
        for (rank, entry) in placement["ranks"].as_array().unwrap().iter().enumerate() {
            let counted = number(&entry["per_step"]["between ranks"], "bytes");
            let planned = (tree.given_by(rank) * parameters * 4) as f64;
            assert_eq!(placement["differences"], serde_json::json!([]));
            // Buckets are padded, and the losses are summed too.
            let range = planned..planned * 1.001 + 1024.0;
            assert!(range.contains(&counted), "{ranks} ranks: {placement}");
            most = most.max(counted);
        }
        assert!(
            (most / 1e6 - stated_mb).abs() < 0.06,
            "{stated_mb}: {placement}"
        );
    });
}

#[test]
fn copies_of_slices_are_no_difference() {
    let words = format!("{QUICK} --zero 1 --min-ranks 2");
    crate::support::job::all_at_once([3, 5], |ranks| {
        let folder = Folder::new("audit-copies");
        folder.started(ranks, &words).run().assert_well();
        let log = folder.metrics_log();
        assert_eq!(placement(&log)["differences"], serde_json::json!([]));
    });
}

#[test]
fn uneven_shares_are_no_difference() {
    let words = "--data glyphs,rows=203,held-out=7 --hidden 16 --out OUT";
    crate::support::job::all_at_once(
        [
            "--batch-size 10 --micro-batch 2 --epochs 2",
            "--batch-size 3 --steps 9",
            "--batch-size 200 --epochs 2",
        ],
        |flags| {
            let folder = Folder::new("audit-uneven");
            folder
                .ranks(4, &format!("{words} {flags}"))
                .run()
                .assert_well();
            let log = folder.metrics_log();
            let placement = placement(&log);
            let rows: Vec<f64> = placement["ranks"]
                .as_array()
                .unwrap()
                .iter()
                .map(|rank| number(rank, "rows"))
                .collect();
            assert!(
                rows.iter().any(|&own| own != rows[0]),
                "{flags}: {placement}"
            );
            assert_eq!(
                placement["differences"].as_array().map(Vec::len),
                Some(0),
                "{flags}: {placement}"
            );
        },
    );
}

#[test]
fn a_failed_run_has_no_placement_audit() {
    let folder = Folder::new("audit-failed");
    // Rates like these end in no number.
    let words = format!("{QUICK} --optimizer sgd --lr 1e30 --warmup-steps 0");
    let ended = folder.together(&words).run();
    ended.assert_fails(76);
    assert!(!ended.stderr.contains("placement"), "{ended}");
    let log = folder.metrics_log();
    assert!(log.all("placement").is_empty(), "{log:?}");
    assert_eq!(log.end().expect("it says how it ended")["exit_code"], 76);
}
