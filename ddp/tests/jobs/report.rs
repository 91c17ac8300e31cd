//! `OUT/report.html`: made at the end of every run, and again from the files of the run.

use serde_json::Value;

use crate::support::job::{Folder, QUICK};

fn html(folder: &Folder) -> String {
    std::fs::read_to_string(folder.out().join("report.html")).expect("there is a report")
}

#[test]
fn a_run_leaves_a_report_and_it_can_be_made_again() {
    let folder = Folder::new("report");
    let ended = folder.together(QUICK).run();
    ended.assert_well();
    let out = folder.out();
    let last = ended.stderr.trim_end().lines().last().unwrap_or_default();
    assert_eq!(
        last,
        format!("report {}", out.join("report.html").display()),
        "{ended}"
    );
    let made = html(&folder);
    for text in [
        "✓</span> done",
        "\"title\":\"Loss\"",
        "\"title\":\"Accuracy\"",
        "predicted as that class",
    ] {
        assert!(made.contains(text), "{text}");
    }
    std::fs::remove_file(out.join("report.html")).unwrap();
    let again = folder.alone("report OUT").run();
    again.assert_well();
    assert_eq!(
        again.stdout.trim_end(),
        format!("report {}", out.join("report.html").display()),
        "{again}"
    );
    assert_eq!(html(&folder), made);
}

#[test]
fn a_failed_run_leaves_a_report_too() {
    let folder = Folder::new("report-failed");
    // Rates like these end in no number.
    let ended = folder
        .together(&format!(
            "{QUICK} --optimizer sgd --lr 1e30 --warmup-steps 0"
        ))
        .run();
    ended.assert_fails(76);
    let made = html(&folder);
    assert!(
        made.contains("✕</span> failed") && made.contains("(exit code 76)"),
        "{made}"
    );
}

#[test]
fn a_run_is_summarised_without_a_terminal() {
    let folder = Folder::new("report-others");
    folder.alone(QUICK).run().assert_well();
    let ended = folder.alone("watch OUT").run();
    ended.assert_well();
    assert!(ended.stdout.contains(": done\nstep 8 of 8\n"), "{ended}");
    folder.alone("watch nothing").run().assert_fails(2);
}

#[test]
fn a_folder_without_a_run_has_none() {
    let folder = Folder::new("report-none");
    let ended = folder.alone("report OUT").run();
    ended.assert_fails(74);
    assert!(ended.stderr.contains("metrics.jsonl"), "{ended}");
}

/// The event of the model as it began, and its accuracy.
fn untrained(ranks: usize) -> (Value, f64) {
    let folder = Folder::new("report-classes");
    let words =
        "--data glyphs,rows=64,held-out=101 --hidden 16 --batch-size 32 --steps 0 --out OUT";
    folder.ranks(ranks, words).run().assert_well();
    let log = folder.metrics_log();
    let accuracy = crate::support::metrics_log::number(log.all("eval")[0], "accuracy");
    (log.all("confusion")[0].clone(), accuracy)
}

#[test]
fn what_is_taken_for_what_does_not_depend_on_the_number_of_ranks() {
    let (confusion, accuracy) = untrained(1);
    let sum = |name: &str| {
        confusion[name]
            .as_array()
            .unwrap()
            .iter()
            .map(|count| count.as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!((sum("rows"), sum("predicted")), (101, 101), "{confusion}");
    assert!(
        (sum("right") as f64 / 101.0 - accuracy).abs() < 1e-12,
        "{confusion}, {accuracy}"
    );
    for ranks in [2, 3] {
        assert_eq!(untrained(ranks).0, confusion, "{ranks} ranks");
    }
}
