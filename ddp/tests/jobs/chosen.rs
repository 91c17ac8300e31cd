//! Runs on tables with nothing but the label: what they choose is written down, and they have the
//! same bits on any number of ranks, if they are resumed, and without a lost rank.

use std::fmt::Write;
use std::fs;

use crate::reading::forge;
use crate::resuming::saved;
use crate::support::job::Folder;
use crate::support::metrics_log::{model_bytes, number};

/// Rows with an index without a name, texts, dates, gaps, identifiers and a few missing labels.
fn table(rows: u32) -> String {
    let mut text = String::from(",town,day,size,id,y\n");
    for row in 0..rows {
        let town = ["Bern", "Oslo", "Rome"][row as usize * 7 % 3];
        let (month, day) = (1 + row % 12, 1 + row % 28);
        let size = f64::from(row * 37 % 101) / 10.0;
        let shown = if row % 19 == 5 {
            String::new()
        } else {
            size.to_string()
        };
        let y = match row % 50 {
            3 => "NA".into(),
            _ => (size * 2.0
                + (size - 5.0).powi(2) / 4.0
                + f64::from(row * 7 % 3)
                + f64::from(row * 53 % 17) / 8.0)
                .to_string(),
        };
        writeln!(
            text,
            "{row},{town},2024-{month:02}-{day:02},{shown},K{row},{y}"
        )
        .unwrap();
    }
    text
}

/// A folder with such a table.
fn with_table(name: &str, rows: u32) -> Folder {
    let folder = Folder::new(name);
    fs::write(folder.path().join("t.csv"), table(rows)).unwrap();
    folder
}

const RUN: &str =
    "--data t.csv --labels y --hidden 8 --same-bits 6 --threads 1 --device cpu --out OUT";

/// The number of steps that were chosen.
fn steps(folder: &Folder) -> u64 {
    let log = folder.metrics_log();
    number(log.start(), "steps") as u64
}

fn settings(folder: &Folder) -> String {
    let path = folder.out().join("config.toml");
    let text = fs::read_to_string(path).unwrap();
    let is_own = |line: &&str| !line.starts_with("out = ");
    text.lines().filter(is_own).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_small_table_chooses_the_same_on_any_ranks_resumed_or_with_a_lost_one() {
    // Of so many features the best model comes early.
    let run = RUN.replace("--hidden 8", "--hidden 32 --checkpoint-every 20");
    let alone = with_table("chosen-alone", 150);
    let ended = alone.alone(&run).run();
    ended.assert_well();
    let (all, chosen) = (steps(&alone), settings(&alone));
    for part in [
        "linear-path = true",
        "categorical = [\"common\"]",
        "missing = \"indicator\"",
        "normalize = \"standard\"",
        "task = \"regression\"",
        "schedule-steps = 1000",
        "grad-clip = 1.0",
        "match = \"linear.*\"\nlr = 0.01",
        &format!("\nsteps = {all}\n"),
    ] {
        assert!(chosen.contains(part), "{chosen} lacks {part}");
    }
    for part in [
        "\"town\" 3 (--drop",
        "day (--drop",
        "\"id\" (free text or identifiers, 147 different in 147 cells)",
        "another feature says where: \"size\" 8 (--missing mean",
        "columns without a name, as an index has, are left out: 1",
        "3 rows without a label are left out of t.csv",
        &format!("--steps {all}, --schedule-steps 1000, --warmup-steps 100: "),
        "(--plain true keeps the defaults of version 0.8)",
    ] {
        assert!(ended.stderr.contains(part), "{ended} lacks {part}");
    }
    assert!(all > 40 && all.is_multiple_of(10), "{all}");
    let log = alone.metrics_log();
    let found = &log.start()["out_of_fold"];
    assert!(number(found, "loss") < 0.5, "{found}");
    let shown = alone.alone("inspect OUT").run();
    let part = "out of fold R² on rows that were not trained on: this model 0.";
    assert!(shown.stdout.contains(part), "{shown}");
    let expected = model_bytes(&alone.out(), all);

    // The command says nothing of what was chosen.
    let last = format!("checkpoints/step-{all:08}");
    fs::remove_dir_all(alone.out().join(last)).unwrap();
    assert!(saved(&alone).last().is_some_and(|last| *last < all));
    let ended = alone.started(2, &format!("{run} --resume auto")).run();
    ended.assert_well();
    assert!(!ended.stderr.contains("folds"), "{ended}");
    assert!(model_bytes(&alone.out(), all) == expected, "{ended}");

    // The new process of a lost rank learns from the others what was chosen.
    let three = with_table("chosen-three", 150);
    let (killed, taken_in) = (all - 40, all - 20);
    let fault = format!("1:snapshot:{killed}:kill,0:newcomer:{taken_in}:hold");
    let words = format!("{run} --min-ranks 1 --restarts 1");
    let ended = three.started(3, &words).env("DDP_TEST_FAULT", &fault).run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let changes = three.metrics_log().all("ranks").len();
    assert!(changes == 2, "{changes}: {ended}");
    assert_eq!(settings(&three), chosen);
    assert!(model_bytes(&three.out(), all) == expected, "{ended}");
}

#[test]
fn a_linear_start_without_steps_is_the_linear_model() {
    let folder = with_table("chosen-start", 300);
    // The penalty of the linear model beside the score.
    let words = format!("{RUN} --val-split 0.2 --steps 0 --linear-start");
    let ended = folder.alone(&format!("{words} 1")).run();
    ended.assert_well();
    let line = ended.stderr.lines().find(|it| it.contains("this model"));
    let line = line.unwrap_or_else(|| panic!("{ended}"));
    let score = |who: &str| {
        line.split(who)
            .nth(1)
            .unwrap()
            .trim_start()
            .split(',')
            .next()
    };
    assert_eq!(score("this model"), score("a linear model"), "{line}");
    let alone = model_bytes(&folder.out(), 0);
    let two = with_table("chosen-start-two", 300);
    two.started(2, &format!("{words} 1")).run().assert_well();
    assert!(model_bytes(&two.out(), 0) == alone);
    let other = with_table("chosen-start-zero", 300);
    let ended = other.alone(&format!("{words} 1 --linear-path false")).run();
    assert_eq!(ended.exit_code(), Some(2), "{ended}");
    let expected = "--linear-start 1: expected a perceptron with --linear-path true";
    assert!(ended.stderr.contains(expected), "{ended}");
    other.alone(&format!("{words} 0")).run().assert_well();
    assert!(model_bytes(&other.out(), 0) != alone);
    // Without the path there is no group of its parameters.
    let plain = with_table("chosen-start-without", 300);
    let words = format!("{RUN} --val-split 0.2 --steps 0 --linear-path false");
    plain.alone(&words).run().assert_well();
}

#[test]
fn a_larger_table_holds_rows_out_and_has_the_same_best_model_on_any_ranks() {
    let run = RUN.replace("--hidden 8", "--hidden 8 --lr 0.02");
    let alone = with_table("chosen-larger", 5200);
    let ended = alone.alone(&run).run();
    ended.assert_well();
    let chosen = settings(&alone);
    for part in [
        "val-split = 0.2",
        "stop-after = 15",
        "eval-every = 30",
        "steps = 1500",
    ] {
        assert!(chosen.contains(part), "{chosen} lacks {part}");
    }
    let log = alone.metrics_log();
    let last = number(log.end().unwrap(), "steps") as u64;
    let evals = log.all("eval").len();
    let best = saved(&alone);
    // The best ones are written with the checkpoints that are due, and the last.
    assert!(best.len() < evals, "{best:?} {evals}");
    let expected = model_bytes(&alone.out(), last);

    let two = with_table("chosen-larger-two", 5200);
    let words = run.replace("--hidden", "--checkpoint-every 40 --hidden");
    let fault = format!("1:forward:{}:kill", last - 7);
    two.started(2, &words).env("DDP_TEST_FAULT", &fault).run();
    let ended = two.started(3, &format!("{words} --resume auto")).run();
    ended.assert_well();
    assert!(model_bytes(&two.out(), last) == expected, "{ended}");
    let step = |folder: &Folder| {
        let ended = folder
            .alone("eval --checkpoint OUT --data t.csv --held-out")
            .run();
        ended.assert_well();
        let (_, figures) = ended.stdout.split_once("step-").unwrap();
        figures.to_string()
    };
    let (one, other) = (step(&alone), step(&two));
    assert!(one.contains("the best by validation loss"), "{one}");
    assert_eq!(one, other);
    // It once asked only the settings that were given, and these do not stop the run.
    assert!(last < 1500, "{last}");
    let again = alone.alone(&format!("{run} --resume auto")).run();
    assert!(again.stderr.contains("has stopped early"), "{again}");
}

/// A run of version 0.8, which had no such settings, gains nothing when it is resumed.
#[test]
fn a_run_of_a_version_that_chose_nothing_goes_on_as_it_was() {
    let run = "--data t.csv --labels y --drop id,day,size --categorical auto --hidden 4 --batch-size 32 \
               --schedule constant --warmup-steps 1 --device cpu";
    let folder = with_table("chosen-older", 3);
    // An index had to be removed, and so had gaps.
    let text = table(120)
        .replace("\n", "\nr")
        .replacen(',', "row,", 1)
        .replace(",NA\n", ",7\n");
    fs::write(folder.path().join("t.csv"), text.trim_end_matches('r')).unwrap();
    let run = run.replace("--drop id", "--drop row,id");
    let whole = format!("{run} --plain --steps 8 --out OUT");
    folder.alone(&whole).run().assert_well();
    let part = format!("{run} --plain --steps 4 --out old");
    folder.alone(&part).run().assert_well();
    let old = folder.path().join("old");
    let checkpoint = old.join("checkpoints/step-00000004");
    let state = fs::read(checkpoint.join("state.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&state).unwrap();
    let mut config = json["config"].as_object().unwrap().clone();
    for name in ["plain", "linear-path", "stop-after"] {
        config.remove(name).unwrap();
    }
    forge(&checkpoint, &state, "/config", &config.into());
    let words = format!("{run} --steps 8 --out old --resume auto");
    let ended = folder.alone(&words).run();
    ended.assert_well();
    assert!(
        model_bytes(&folder.out(), 8) == model_bytes(&old, 8),
        "{ended}"
    );
    assert!(!ended.stderr.contains("--normalize standard"), "{ended}");
}

/// What the program chose made its own flags fail, or the user's.
#[test]
fn choices_fit_what_the_user_has_set() {
    let refused = with_table("chosen-stratify", 40);
    let ended = refused.alone(&format!("{RUN} --stratify")).run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("--stratify: expected held-out rows"),
        "{ended}"
    );
    let muon = with_table("chosen-muon", 40);
    let words = format!("{RUN} --optimizer muon --lr 0.01");
    muon.alone(&words).run().assert_well();
    let folder = with_table("chosen-frozen", 40);
    let words = format!("{RUN} --freeze linear.weight");
    folder.alone(&words).run().assert_well();
    // More steps than were chosen follow a schedule of their own.
    let words = format!("{words} --resume auto --steps 1200");
    let ended = folder.alone(&words).run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("--schedule-steps not given (was 1000)"),
        "{cause}"
    );
    let words = format!("{words} --override");
    folder.alone(&words).run().assert_well();
    let log = folder.metrics_log();
    let rates = log.of_steps("lr");
    assert!(rates[rates.len() - 2] > 0.0, "{rates:?}");
}

/// A row whose feature is far from all others had decided which model is the best.
#[test]
fn errors_are_of_predictions_that_are_clipped() {
    let folder = with_table("chosen-far", 150);
    folder
        .alone(&format!("{RUN} --steps 60"))
        .run()
        .assert_well();
    let far = table(20).replace(",Bern,2024-01-01,0,", ",Bern,2024-01-01,1e25,");
    fs::write(folder.path().join("far.csv"), far).unwrap();
    let ended = folder
        .alone("eval --checkpoint OUT --data far.csv --labels y")
        .run();
    ended.assert_well();
    let during = with_table("chosen-far-during", 150);
    fs::copy(folder.path().join("far.csv"), during.path().join("far.csv")).unwrap();
    let words = format!("{RUN} --val-data far.csv --steps 20");
    during.alone(&words).run().assert_well();
    let losses: Vec<f64> = during
        .metrics_log()
        .all("eval")
        .iter()
        .map(|it| number(it, "loss"))
        .collect();
    // A clipped prediction is at most the range of the labels away: a few of their deviations.
    assert!(
        !losses.is_empty() && losses.iter().all(|loss| *loss < 100.0),
        "{losses:?}"
    );
}

#[test]
fn a_rare_label_far_from_all_others_is_warned_of() {
    let folder = Folder::new("chosen-mark");
    let rows = (0..400).map(|row| match row % 50 {
        7 => format!("{row}.5,99\n"),
        _ => format!("{row}.5,{}\n", row % 3),
    });
    let rows: String = rows.collect();
    fs::write(folder.path().join("t.csv"), format!("x,y\n{rows}")).unwrap();
    let ended = folder.alone("--data t.csv --labels y --dry-run").run();
    ended.assert_well();
    let said = "99 is the label of 8 rows, far from all others";
    assert!(ended.stderr.contains(said), "{ended}");
}
