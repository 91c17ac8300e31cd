//! What a run may be resumed from, what is refused, and which checkpoints are kept.

use std::path::Path;

use crate::made::{CLASSES, ROWS, csv, row};
use crate::resuming::{SHORT, outcome, saved, undisturbed};
use crate::support::job::{Ended, Folder};
use crate::support::metrics_log::{model_bytes, number};

/// A run of which 7 steps are taken, at a constant rate.
fn seven_steps(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.alone(&seven("--steps 7")).run().assert_well();
    assert_eq!(saved(&folder), [3, 6, 7]);
    folder
}

fn seven(flags: &str) -> String {
    format!(
        "{} {flags}",
        SHORT.replace("--steps 20", "--schedule constant --warmup-steps 0")
    )
}

/// A run with these words is refused for a reason that has all these parts, and changes no file.
#[track_caller]
fn assert_refused(folder: &Folder, words: &str, exit_code: i32, parts: &[&str]) {
    let before = folder.tree();
    let ended = folder.alone(words).run();
    let cause = ended.assert_fails(exit_code);
    for part in parts {
        assert!(cause.contains(part), "{part}: {ended}");
    }
    assert!(folder.tree() == before, "files have changed: {ended}");
}

#[test]
fn flags_that_alter_what_is_computed_are_refused_by_name_and_overridden_where_that_is_asked_for() {
    let folder = seven_steps("flags");
    let altered = "--lr 0.01 --seed 7";
    let words = seven(&format!("--steps 9 {altered} --resume auto"));
    let same = words.replace(altered, "");
    let parts = [
        "step 7",
        "--lr 0.01 (was 0.001)",
        "--seed 7 (was 0)",
        "--override",
    ];
    assert_refused(&folder, &words, 2, &parts);
    let other_rows = same.replace("rows=210", "rows=211");
    assert_refused(&folder, &other_rows, 2, &["--data with other rows"]);
    let longer = same.replace("--schedule constant", "--schedule cosine");
    let why =
        "--schedule cosine (was constant), --steps 9 (was 7; --schedule cosine depends on it)";
    assert_refused(&folder, &longer, 2, &[why]);

    let ended = folder.alone(&format!("{words} --override")).run();
    ended.assert_well();
    let resume = folder.metrics_log().all("resume")[0].clone();
    assert_eq!(
        resume["overridden"],
        serde_json::json!(["--lr 0.01 (was 0.001)", "--seed 7 (was 0)"]),
        "{ended}"
    );
    let config = std::fs::read_to_string(folder.out().join("config.toml")).unwrap();
    assert!(
        config.contains("lr = 0.01") && config.contains(r#"resume = "never""#),
        "{config}"
    );
}

#[test]
fn an_occupied_finished_or_missing_run_is_reported() {
    let folder = seven_steps("states");
    let before = folder.tree();
    let ended = folder.alone(&seven("--steps 7 --resume auto")).run();
    ended.assert_well();
    assert!(
        ended
            .stderr
            .contains("has taken all its 7 steps: nothing is left to do"),
        "{ended}"
    );
    assert!(folder.tree() == before, "{ended}");
    for (flags, parts) in [
        (
            "--steps 9",
            &["it holds a run already", "--resume auto"][..],
        ),
        ("--steps 7 --lr 5 --resume auto", &["--lr 5 (was 0.001)"]),
        (
            "--steps 7 --resume true",
            &["--resume true: expected never, auto, or the folder of a checkpoint in"],
        ),
        (
            "--steps 5 --resume auto",
            &["has taken 7 steps: expected a run of as many or more"],
        ),
    ] {
        assert_refused(&folder, &seven(flags), 2, parts);
    }
    let fresh = Folder::new("fresh");
    let ended = fresh.alone(&seven("--steps 2 --resume auto")).run();
    ended.assert_well();
    assert!(
        ended.stderr.contains("holds no run to resume")
            && fresh.metrics_log().all("resume").is_empty(),
        "{ended}"
    );
}

#[test]
fn resuming_an_older_checkpoint_supersedes_later_ones() {
    let folder = seven_steps("older");
    let resume = |step: u64| {
        let checkpoint = folder.checkpoint(step);
        seven(&format!("--steps 8 --resume {}", checkpoint.display()))
    };
    let expected = undisturbed(1, &seven("--steps 8"), 8);
    folder.alone(&resume(3)).run().assert_well();
    assert!(outcome(&folder, 8) == expected);
    assert_eq!(saved(&folder), [3, 6, 8]);
    assert!(
        folder
            .checkpoints()
            .contains(&"superseded-step-00000007".to_string()),
        "{:?}",
        folder.checkpoints()
    );
    // Of another run, and none at all.
    let other = Folder::new("other");
    let parts = ["or the folder of a checkpoint in", "as --out"];
    assert_refused(&other, &resume(3), 2, &parts);
    assert_refused(&folder, &resume(5), 2, &["step-00000005"]);
}

#[test]
fn a_superseded_checkpoint_resumes_under_its_old_name() {
    let folder = seven_steps("aside");
    let checkpoints = folder.out().join("checkpoints");
    let words = |name: &str| {
        seven(&format!(
            "--steps 9 --resume {}",
            checkpoints.join(name).display()
        ))
    };
    folder.alone(&words("step-00000003")).run().assert_well();
    let parts = ["help: rename it to", "step-00000007"];
    assert_refused(&folder, &words("superseded-step-00000007"), 2, &parts);
    let (aside, named) = ("superseded-step-00000007", "step-00000007");
    std::fs::rename(checkpoints.join(aside), checkpoints.join(named)).unwrap();
    folder.alone(&words(named)).run().assert_well();
    assert_eq!(saved(&folder), [6, 7, 9]);
}

#[test]
fn the_command_resume_takes_the_settings_of_the_run_and_flags_that_keep_its_results() {
    let folder = seven_steps("command");
    let (steps, _, model) = undisturbed(1, &seven("--steps 9"), 9);
    let is_same = || {
        // Besides, step 7 was evaluated, where the run ended first.
        let (steps_here, _, model_here) = outcome(&folder, 9);
        steps_here == steps && model_here == model
    };
    let ended = folder.alone("resume OUT --steps 9").run();
    ended.assert_well();
    assert!(is_same(), "{ended}");
    let all = folder.alone("resume OUT").run();
    all.assert_well();
    assert!(all.stderr.contains("nothing is left to do"), "{all}");
    let cases = [
        ("resume OUT --steps 10 --lr 5", "--lr 5 (was 0.001)"),
        ("resume OUT --steps 8", "has taken 9 steps"),
        (
            "resume elsewhere",
            "expected the folder of a run, which has config.toml",
        ),
        ("resume OUT --learning-rate 5", "help: write --lr RATE"),
        ("resume OUT --steps 9 --out other", "--out cannot be given"),
    ];
    for (words, part) in cases {
        assert_refused(&folder, words, 2, &[part]);
    }
    let older = folder.checkpoint(6);
    let older = format!(
        "resume OUT --steps 9 --resume {} --ranks 1",
        older.display()
    );
    folder.alone(&older).run().assert_well();
    assert!(is_same());
}

#[test]
fn resuming_without_the_settings_names_some_and_the_file_that_has_all() {
    let folder = seven_steps("without");
    let file = folder.out().join("config.toml");
    let file = format!("as --config {} does", file.display());
    let words = "--out OUT --resume auto";
    assert_refused(
        &folder,
        words,
        2,
        &["; help: give them as they were", &file],
    );
}

#[test]
fn a_finished_run_without_a_report_gets_one() {
    let folder = seven_steps("over");
    let report = folder.out().join("report.html");
    std::fs::remove_file(&report).unwrap();
    let ended = folder.together(&seven("--steps 7 --resume auto")).run();
    ended.assert_well();
    assert!(report.exists(), "{ended}");
}

#[test]
fn other_held_out_rows_reset_the_best_checkpoint() {
    let folder = Folder::new("held-out");
    let table = |name: &str, rows: std::ops::Range<usize>| {
        let table = csv(rows, |index| CLASSES[row(index).1].into());
        std::fs::write(folder.path().join(name), table).unwrap();
    };
    table("train.csv", 0..ROWS);
    table("held-out.csv", 0..9);
    table("others.csv", 1..10);
    let run = |held_out: &str, steps: u64| {
        let words = "--data train.csv --hidden 8 --batch-size 20 --schedule constant --warmup-steps 0 --lr 1e-5 --resume auto --out OUT";
        let ended = folder
            .alone(&format!("{words} --val-data {held_out} --steps {steps}"))
            .run();
        ended.assert_well();
        let state = std::fs::read(folder.checkpoint(steps).join("state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        (
            state["best"]["step"].as_u64().unwrap(),
            state["held_out"].as_str().unwrap().to_string(),
            ended,
        )
    };
    let (_, rows, _) = run("held-out.csv", 4);
    let (_, same, ended) = run("held-out.csv", 5);
    assert!(
        same == rows && !ended.stderr.contains("determined anew"),
        "{ended}"
    );
    let (best, others, ended) = run("others.csv", 6);
    assert!(best == 6 && others != rows, "{best}: {ended}");
    assert!(
        ended
            .stderr
            .contains("the held-out rows are not those of step"),
        "{ended}"
    );
}

#[test]
fn a_run_without_an_intact_checkpoint_is_left_alone() {
    let folder = seven_steps("unusable");
    for step in [3, 6, 7] {
        std::fs::write(folder.checkpoint(step).join("state.json"), "{}").unwrap();
    }
    let words = seven("--steps 9 --resume auto");
    assert_refused(&folder, &words, 65, &["another --out", "state.json"]);
}

#[test]
fn a_run_whose_checkpoints_are_gone_is_left_alone() {
    let folder = seven_steps("gone");
    std::fs::remove_dir_all(folder.out().join("checkpoints")).unwrap();
    let parts = ["knows 3 of them, the last of step 7", "another --out"];
    assert_refused(&folder, &seven("--steps 9 --resume auto"), 65, &parts);
}

/// The flags of the run that docs/checkpoints.md shows, and of the command that resumes it.
fn documented_example() -> [String; 2] {
    let text = include_str!("../../../docs/checkpoints.md");
    let flags = |line: &str| {
        let (_, flags) = line.split_once("ddp-train ")?;
        let is_of_it = flags.contains(" long") && !flags.contains('`');
        is_of_it.then(|| flags.replace(" long", " OUT"))
    };
    let lines: Vec<String> = text.lines().filter_map(flags).collect();
    lines
        .try_into()
        .expect("docs/checkpoints.md shows two commands with the folder `long`")
}

#[test]
fn the_documented_example_has_the_bytes_of_a_run_that_never_stopped() {
    let [first, longer] = documented_example();
    let steps = longer
        .strip_prefix("resume OUT ")
        .expect("the command resume");
    let folder = Folder::new("readme");
    folder.alone(&first).run().assert_well();
    folder.alone(&longer).run().assert_well();
    let whole = Folder::new("whole");
    let at_once = first.replace("--steps 60", steps);
    whole.alone(&at_once).run().assert_well();
    assert!(model_bytes(&folder.out(), 100) == model_bytes(&whole.out(), 100));
}

#[test]
fn a_longer_run_keeps_the_warm_up_that_it_had() {
    let words = |flags: &str| SHORT.replace("--steps 20", &format!("--schedule constant {flags}"));
    let folder = Folder::new("warm-up");
    folder.alone(&words("--steps 60")).run().assert_well();
    let other = words("--steps 100 --warmup-steps 10 --resume auto");
    assert_refused(&folder, &other, 2, &["--warmup-steps 10 (was 6)"]);
    let ended = folder.alone(&words("--steps 100 --resume auto")).run();
    ended.assert_well();
}

#[test]
fn a_damaged_checkpoint_is_skipped_with_a_warning() {
    let folder = seven_steps("damaged");
    folder.damage_model(7);
    let expected = undisturbed(1, &seven("--steps 8"), 8);
    let ended = folder.alone(&seven("--steps 8 --resume auto")).run();
    ended.assert_well();
    assert!(
        ended.stderr.contains("step-00000007: ") && ended.stderr.contains("model.safetensors"),
        "{ended}"
    );
    assert_eq!(folder.metrics_log().all("resume")[0]["step"], 6);
    assert!(outcome(&folder, 8) == expected, "{ended}");
    // If it is named, there is no other.
    let path = folder.checkpoint(3);
    std::fs::remove_file(path.join("state.json")).unwrap();
    let ended = folder
        .alone(&seven(&format!("--steps 9 --resume {}", path.display())))
        .run();
    let cause = ended.assert_fails(65);
    assert!(cause.contains("it lacks state.json"), "{ended}");
}

#[test]
fn what_a_crash_leaves_at_the_end_of_the_record_is_cut() {
    let expected = undisturbed(1, &seven("--steps 8"), 8);
    for tail in ["{\"event\":\"step\",\"step\":8,\"lo", "\0\0\0\0\0\0"] {
        let folder = seven_steps("half");
        let log = folder.out().join("metrics.jsonl");
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::write(&log, format!("{text}{tail}")).unwrap();
        folder
            .alone(&seven("--steps 8 --resume auto"))
            .run()
            .assert_well();
        let (of_steps, evals, bytes) = outcome(&folder, 8);
        // The run of 7 steps was over, and evaluated once more.
        assert!(
            of_steps == expected.0 && bytes == expected.2 && evals.len() == expected.1.len() + 1,
            "{tail:?}"
        );
    }
    // A metrics log that was lost begins anew.
    let folder = seven_steps("lost");
    std::fs::remove_file(folder.out().join("metrics.jsonl")).unwrap();
    folder
        .alone(&seven("--steps 8 --resume auto"))
        .run()
        .assert_well();
    assert_eq!(
        (
            folder.metrics_log().of_steps("step"),
            folder.metrics_log().all("resume").len()
        ),
        (vec![8.0], 1)
    );
}

#[test]
fn a_nan_loss_leaves_earlier_checkpoints_intact() {
    let folder = Folder::new("nonfinite");
    let words = SHORT
        .replace("--log-every 1", "--log-every 7")
        .replace("--checkpoint-every 3", "--checkpoint-every 1");
    let words = format!("{words} --lr 1e30 --optimizer sgd --warmup-steps 0");
    let ended = folder.together(&words).run();
    let cause = ended.assert_fails(76);
    assert!(
        cause.contains("step 2: the loss or its gradient is not finite"),
        "{ended}"
    );
    assert_eq!(folder.checkpoints(), ["step-00000001"], "{ended}");
    let ended = folder.together(&format!("{words} --resume auto")).run();
    assert!(
        ended.assert_fails(76).contains("step 2: ")
            && ended.stderr.contains("resuming after step 1"),
        "{ended}"
    );
    assert_eq!(folder.checkpoints(), ["step-00000001"], "{ended}");
}

#[test]
fn the_best_model_is_written_before_a_checkpoint_that_names_it_and_others_are_not() {
    let folder = Folder::new("best");
    let words = "--data synthetic:classification,classes=2,features=6,rows=120,held-out=90,noise=2 --hidden 32 \
                 --batch-size 24 --lr 0.01 --steps 100 --eval-every 2 --checkpoint-every 60 --keep 1 --out OUT";
    folder.together(words).run().assert_well();
    let log = folder.metrics_log();
    let losses: Vec<f64> = log
        .all("eval")
        .iter()
        .map(|it| number(it, "loss"))
        .collect();
    let least = losses.iter().copied().fold(f64::INFINITY, f64::min);
    let best = 2 * (1 + losses.iter().position(|loss| *loss == least).unwrap()) as u64;
    let improved = (1..losses.len()).filter(|at| losses[..*at].iter().all(|it| *it > losses[*at]));
    assert!(improved.count() > 3 && best < 60, "{losses:?}");
    assert_eq!(saved(&folder), [best, 100]);
    let written = log.all("checkpoint").into_iter();
    let written: Vec<f64> = written.map(|it| number(it, "step")).collect();
    assert_eq!(written, [best as f64, 60.0, 100.0]);
}

#[test]
fn init_from_takes_a_file_that_fits_the_model() {
    let first = seven_steps("first");
    let model = first.checkpoint(7).join("model.safetensors");
    let begin = |words: &str, path: &Path| -> (Folder, Ended) {
        let folder = Folder::new("init");
        let ended = folder
            .together(&format!("{words} --init-from {}", path.display()))
            .run();
        (folder, ended)
    };
    for path in [model.as_path(), model.parent().unwrap()] {
        let (folder, ended) = begin(&seven("--steps 0"), path);
        ended.assert_well();
        assert!(model_bytes(&folder.out(), 0) == std::fs::read(&model).unwrap());
    }
    let (_, ended) = begin(
        &seven("--steps 0").replace("--hidden 16", "--hidden 17"),
        &model,
    );
    assert!(
        ended
            .assert_fails(65)
            .contains("has the shape [16, 784], and [17, 784] in the model"),
        "{ended}"
    );
    let pickle = first.path().join("model.pt");
    std::fs::write(&pickle, b"PK\x03\x04 and so on").unwrap();
    let (_, ended) = begin(&seven("--steps 0"), &pickle);
    assert!(ended.assert_fails(65).contains("safetensors"), "{ended}");
    let (_, ended) = begin(&seven("--steps 0"), Path::new("nowhere.safetensors"));
    assert!(
        ended.assert_fails(74).contains("nowhere.safetensors"),
        "{ended}"
    );
}
