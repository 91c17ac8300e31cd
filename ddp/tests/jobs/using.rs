//! `ddp-train eval` and `ddp-train predict`: a saved model gives for rows what it gave in training,
//! on any number of ranks, and explains why it cannot be used on other rows.

mod predicting;
mod refused;

use std::path::Path;

use ddp::data::{DataSpec, read_rows};
use ddp_kernels::{Device, Tensor};
use serde_json::Value;

use crate::made::npy;
use crate::reading::forge;
use crate::support::job::{Ended, Folder, Job, all_at_once};
use crate::support::metrics_log::{MetricsLog, number};

/// A short training on glyphs; more held-out rows than evaluation takes at a time.
const GLYPHS: &str = "--data glyphs,rows=256,held-out=700 --hidden 16 --batch-size 32 --epochs 2 --lr 0.01 --log-every 1 --out OUT \
                      --device cpu";
/// The same rows again.
const ROWS: &str = "--checkpoint OUT --data glyphs,rows=256,held-out=700 --device cpu";

/// A folder with a run that was trained in it, on one rank.
#[track_caller]
pub(super) fn trained(words: &str) -> Folder {
    let folder = Folder::new("using");
    folder.alone(words).run().assert_well();
    folder
}

/// The JSON that `eval` with these words prints.
#[track_caller]
pub(super) fn evaluated(job: Job) -> Value {
    let ended = job.run();
    ended.assert_well();
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended}"))
}

/// The bytes of a file that a job wrote.
#[track_caller]
pub(super) fn bytes(folder: &Folder, name: &str) -> Vec<u8> {
    std::fs::read(folder.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

pub(super) fn array(folder: &Folder, name: &str) -> Tensor {
    Tensor::load_npy(folder.path().join(name), Device::Cpu).unwrap()
}

/// The lines of a table as cells.
pub(super) fn table(folder: &Folder, name: &str) -> Vec<Vec<String>> {
    let text = String::from_utf8(bytes(folder, name)).unwrap();
    text.lines()
        .map(|line| line.split(',').map(String::from).collect())
        .collect()
}

/// The classes of the held-out rows of built-in data.
pub(super) fn classes_of(spec: &str) -> Vec<i64> {
    let rows = ddp::data::open(&spec.parse::<DataSpec>().unwrap())
        .unwrap()
        .held_out;
    let numbers: Vec<u64> = (0..rows.rows()).collect();
    let [_, classes] = read_rows(&*rows, &numbers).unwrap();
    classes.to_vec().unwrap()
}

/// The line named a folder that did not exist, and `eval` used the last model.
#[test]
fn the_best_model_is_saved_and_used_without_checkpoints_between() {
    let words = GLYPHS.replace("--epochs 2 --lr 0.01", "--steps 40 --lr 3 --eval-every 2");
    let folder = Folder::new("using-best");
    let ended = folder.alone(&format!("{words} --checkpoint-every 0")).run();
    ended.assert_well();
    let log = folder.metrics_log();
    let evals = log.all("eval").into_iter();
    let all = evals.map(|it| (number(it, "loss"), number(it, "step") as u64));
    let (loss, step) = all.min_by(|one, other| one.0.total_cmp(&other.0)).unwrap();
    assert!(step < 40, "a later one is worse: {ended}");
    let told = format!(
        "best on held-out rows {}, loss",
        folder.checkpoint(step).display()
    );
    assert!(ended.stderr.contains(&told), "{told}: {ended}");
    let found = evaluated(folder.alone(&format!("eval {ROWS} --json")));
    assert_eq!(found["step"], step);
    assert_eq!(number(&found, "loss").to_bits(), loss.to_bits());
}

#[test]
fn an_evaluation_has_the_bits_of_trainings_own() {
    let weights = "--label-smoothing 0.1 --class-weights 1,2,1,1,1,1,1,1,0.5,1";
    all_at_once(["", weights, "--dropout 0.2 --activation gelu"], |flags| {
        let folder = trained(&format!("{GLYPHS} {flags}"));
        let rows = ROWS.replace(
            "--checkpoint OUT",
            "--checkpoint OUT/checkpoints/step-00000016",
        );
        let found = evaluated(folder.alone(&format!("eval {rows} --json")));
        let log = folder.metrics_log();
        let last = *log.all("eval").last().unwrap();
        assert_eq!(
            number(&found, "loss").to_bits(),
            number(last, "loss").to_bits(),
            "{flags}"
        );
        assert_eq!(
            number(&found, "accuracy"),
            number(last, "accuracy"),
            "{flags}"
        );
        assert_eq!((&found["rows"], &found["step"]), (&700.into(), &16.into()));
        let sum = |field: &str| -> i64 {
            found["classes"]
                .as_array()
                .unwrap()
                .iter()
                .map(|class| class[field].as_i64().unwrap())
                .sum()
        };
        assert_eq!(
            (sum("rows"), sum("right")),
            (700, found["right"].as_i64().unwrap())
        );
    });
}

/// Predicts the held-out rows of `t.csv`, for which `eval` found these figures.
fn predicts_held_out_rows(folder: &Folder, found: &Value) {
    let predict = |job: fn(&Folder, &str) -> Job, name: &str, more: &str| {
        let words = "predict --checkpoint OUT --data t.csv --device cpu --batch-size 4";
        let job = job(folder, &format!("{words} --keep all --out {name} {more}"));
        job.run().assert_well();
        table(folder, name)
    };
    let all = predict(Folder::alone, "all.csv", "");
    let some = predict(Folder::alone, "some.csv", "--held-out");
    assert_eq!(
        predict(Folder::together, "ranks.csv", "--held-out"),
        some,
        "on several ranks"
    );
    // Each line is that of all predictions with its number, in the same order.
    let mut rest = all.iter();
    assert!(some.iter().all(|line| rest.any(|other| other == line)));
    assert_eq!(some.len() as u64 - 1, found["rows"].as_u64().unwrap());
    let cell = |line: &[String], column: usize| line[column].parse::<f64>().unwrap();
    let errors = some[1..].iter().map(|line| cell(line, 2) - cell(line, 4));
    if let Some(right) = found["right"].as_u64() {
        assert_eq!(errors.filter(|error| *error == 0.0).count() as u64, right);
    } else {
        let mean = errors.map(|error| error * error).sum::<f64>() / (some.len() - 1) as f64;
        let rmse = number(found, "root_mean_squared_error");
        assert!((mean.sqrt() - rmse).abs() < 1e-4 * rmse, "{mean} {rmse}");
    }
    let array = "predict --checkpoint OUT --data t.csv --held-out --out a.npy";
    let told = "--out a.npy: expected a .csv with --held-out";
    let ended = folder.alone(array).run();
    assert!(ended.assert_fails(2).contains(told), "{ended}");
}

/// An evaluation on the file of training counted the rows that were trained on, and did not say so.
#[test]
fn held_out_rows_are_those_that_training_kept_out() {
    let row = |at: u32| format!("{},{},{}\n", at % 7, at % 11, u32::from(at % 7 > 3));
    let table = |rows| "a,b,y\n".to_string() + &(0..rows).map(row).collect::<String>();
    let cases = [
        ("t.csv", "--val-split 0.3 --stratify"),
        (
            "t.csv",
            "--val-split 0.2 --normalize standard --task regression",
        ),
        (
            "tokens:tokens.bin",
            "--val-split 0.3 --model gpt,layers=1,heads=2,width=16,context=8",
        ),
    ];
    all_at_once(cases, |(data, how)| {
        let folder = Folder::new("held-out");
        let write = |name: &str, bytes: Vec<u8>| {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        };
        write("t.csv", table(90).into_bytes());
        write(
            "changed.csv",
            table(90).replacen("\n1,1,", "\n1,2,", 1).into_bytes(),
        );
        write("tokens.bin", [1, 0, 2, 0, 3, 0].repeat(40));
        write("changed.bin", [1, 0, 3, 0, 2, 0].repeat(40));
        let train = "--batch-size 8 --steps 4 --threads 1 --device cpu --out OUT";
        folder
            .alone(&format!("--data {data} {how} {train}"))
            .run()
            .assert_well();
        let eval = format!("eval --checkpoint OUT --data {data} --device cpu");
        let found = evaluated(folder.together(&format!("{eval} --held-out --json")));
        let log = folder.metrics_log();
        let last = *log.all("eval").last().unwrap();
        let [loss, of_run] = [&found, last].map(|it| number(it, "loss"));
        assert!(
            (loss - of_run).abs() < 1e-6 * of_run,
            "{how}: {loss} {of_run}"
        );
        if data == "t.csv" {
            predicts_held_out_rows(&folder, &found);
        }
        // Without it all rows count, which is said.
        let ended = folder.alone(&format!("{eval} --json")).run();
        ended.assert_well();
        let told = format!(
            "--data {data}: the model was trained on data of this name; if they are the same, the result says little \
             about new rows; help: --held-out"
        );
        assert!(ended.stderr.contains(&told), "{ended}");
        let all: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert!(
            number(&all, "rows") > 3.0 * number(&found, "rows"),
            "{all} {found}"
        );
        let changed = data
            .replace("t.csv", "changed.csv")
            .replace("tokens.bin", "changed.bin");
        let ended = folder
            .alone(&format!("{} --held-out", eval.replace(data, &changed)))
            .run();
        let told = "expected the rows of training, ";
        assert!(ended.assert_fails(2).contains(told), "{ended}");
    });
    let folder = trained(GLYPHS);
    std::fs::write(folder.path().join("t.csv"), table(9)).unwrap();
    let ended = folder
        .alone("eval --checkpoint OUT --data t.csv --held-out")
        .run();
    let own = evaluated(folder.alone(&format!("eval {ROWS} --held-out --json")));
    assert_eq!(own["rows"], 700);
    let others = ROWS.replace("held-out=700", "held-out=0");
    assert_ne!(others, ROWS);
    let refused = folder.alone(&format!("eval {others} --held-out")).run();
    let told = "expected the rows of training, ";
    assert!(refused.assert_fails(2).contains(told), "{refused}");
    let told = "--held-out: the model was trained without --val-split";
    assert!(ended.assert_fails(2).contains(told), "{ended}");
}

#[test]
fn held_out_rows_of_arrays_have_the_labels_of_training() {
    let folder = Folder::new("held-out-arrays");
    let write = |name: &str, bytes: Vec<u8>| {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    };
    let x: Vec<u8> = (0..120u8)
        .flat_map(|at| f32::from(at % 7).to_le_bytes())
        .collect();
    let y: Vec<u8> = (0..60)
        .flat_map(|row| i64::from(row % 2).to_le_bytes())
        .collect();
    write("x.npy", npy("<f4", &[60, 2], &x));
    write("classes.npy", npy("<i8", &[60], &y));
    let train = "--data x.npy --labels classes.npy --val-split 0.25 --steps 2 --out OUT";
    folder.alone(train).run().assert_well();
    let rows = "--checkpoint OUT --data x.npy --held-out";
    let found = evaluated(folder.alone(&format!("eval {rows} --json")));
    assert_eq!(found["rows"], 15);
    let predict = format!("predict {rows} --out held-out.csv");
    folder.alone(&predict).run().assert_well();
    assert_eq!(table(&folder, "held-out.csv").len(), 16);
}

#[test]
fn an_evaluation_for_people_says_loss_accuracy_classes_and_mistakes() {
    let folder = trained(GLYPHS);
    let ended = folder.alone(&format!("eval {ROWS}")).run();
    ended.assert_well();
    let found = evaluated(folder.alone(&format!("eval {ROWS} --json")));
    let percent = format!(
        "accuracy {:.2}% ({} of 700 rows right), balanced accuracy ",
        100.0 * number(&found, "accuracy"),
        found["right"]
    );
    let checkpoint = format!("checkpoints/step-{:08}", found["step"].as_u64().unwrap());
    for part in [
        &checkpoint[..],
        "glyphs",
        ": 700 rows",
        &percent[..],
        "class ",
        "most common mistakes: ",
    ] {
        assert!(ended.stdout.contains(part), "{part}: {ended}");
    }
    let mistake = &found["mistakes"][0];
    let text = |field: &str| mistake[field].as_str().unwrap().to_string();
    let first = format!(
        "{} predicted as {} ({} of ",
        text("class"),
        text("prediction"),
        mistake["rows"]
    );
    assert!(ended.stdout.contains(&first), "{first}: {ended}");
}

/// Five evaluations in a row with an accuracy of 85.10% were all of them the largest class.
#[test]
fn the_share_of_the_largest_class_stands_beside_accuracy_and_classes_can_be_balanced() {
    let folder = Folder::new("imbalance");
    let row = |row: u32| {
        let moves = row % 20 < 3;
        let (town, answer) = if row.is_multiple_of(2) {
            ("Bern", "b")
        } else {
            ("Oslo", "o")
        };
        let label = if moves { "moves" } else { "stays" };
        format!(
            "{town},{answer},{},{label}\n",
            row % 7 + 3 * u32::from(moves)
        )
    };
    let text = "town,answer,rooms,label\n".to_string() + &(0..400).map(row).collect::<String>();
    std::fs::write(folder.path().join("t.csv"), text).unwrap();
    let words = "--data t.csv --categorical town,answer --normalize standard --val-split 0.25 --hidden 4 --log-every 1 \
                 --batch-size 50 --device cpu";
    let train = |out: &str, weights: &str| {
        let ended = folder
            .alone(&format!("{words} --steps 8 {weights} --out {out}"))
            .run();
        ended.assert_well();
        (MetricsLog::read(&folder.path().join(out)), ended.stderr)
    };
    let (plain, said) = train("plain", "");
    let rows: Vec<f64> = serde_json::from_value(plain.all("confusion")[0]["rows"].clone()).unwrap();
    let share = rows.iter().fold(0.0f64, |a, b| a.max(*b)) / 100.0;
    assert!(share > 0.75 && number(plain.all("eval")[0], "largest_class") == share);
    let note = format!("(the largest class has {:.2}% of the rows)", 100.0 * share);
    assert!(said.contains(&note), "{said}");

    // Of 300 rows to train on.
    let moves = 60.0 - rows[0];
    let given = format!("{},{}", 150.0 / moves, 150.0 / (300.0 - moves));
    let (balanced, _) = train("balanced", "--class-weights balanced");
    let (in_order, _) = train("in-order", &format!("--class-weights {given}"));
    let (named, _) = train("named", &format!("--class-weights moves={}", 340.0 / 60.0));
    let (known, _) = train("known", &format!("--class-weights {},1", 340.0 / 60.0));
    assert_eq!(balanced.losses(), in_order.losses());
    assert_eq!(named.losses(), known.losses());
    assert_ne!(balanced.losses(), plain.losses());
    let found = evaluated(folder.alone("eval --checkpoint plain --data t.csv --json --device cpu"));
    assert_eq!(number(&found, "largest_class"), 0.85);
    assert!(found["balanced_accuracy"].is_f64() && found["classes"][0]["f1"].is_f64());
    // An evaluation weighs classes as training did.
    let config = folder.path().join("balanced/config.toml");
    let config = std::fs::read_to_string(config).unwrap();
    assert!(config.contains("class-weights = \"balanced\""), "{config}");
    let loss = |out: &str| {
        let words = format!("eval --checkpoint {out} --data t.csv --json --device cpu");
        number(&evaluated(folder.alone(&words)), "loss")
    };
    assert_eq!(loss("balanced"), loss("in-order"));
    let resumed =
        format!("{words} --steps 12 --class-weights balanced --out balanced --resume auto");
    folder
        .alone(&format!("{resumed} --override"))
        .run()
        .assert_well();
    let wrong = folder
        .alone(&format!("{words} --class-weights goes=2 --out other"))
        .run();
    assert!(
        wrong
            .assert_fails(2)
            .contains("the first classes are moves, stays"),
        "{wrong}"
    );
}

#[test]
fn a_run_folder_means_its_best_intact_checkpoint() {
    // A rate that is far too high: the model is best early.
    let words = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --epochs 6 --optimizer sgd --lr 1.5 --schedule constant \
                 --warmup-steps 0 --eval-every 8 --checkpoint-every 8 --keep 10 --out OUT --device cpu";
    let folder = trained(words);
    let log = folder.metrics_log();
    let evals = log.all("eval");
    let best = evals
        .iter()
        .min_by(|a, b| number(a, "loss").total_cmp(&number(b, "loss")))
        .unwrap();
    assert_ne!(best["step"], 48, "or nothing is tested: {evals:?}");
    let data = "--data glyphs,rows=256,held-out=64 --device cpu";
    let chosen = |checkpoint: &str| {
        let ended = folder
            .alone(&format!("eval --checkpoint {checkpoint} {data} --json"))
            .run();
        ended.assert_well();
        (serde_json::from_str::<Value>(&ended.stdout).unwrap(), ended)
    };
    let (found, ended) = chosen("OUT");
    assert_eq!(
        (&found["step"], &found["loss"]),
        (&best["step"], &best["loss"]),
        "{ended}"
    );
    assert_eq!(chosen("OUT/checkpoints").0["step"], best["step"]);
    assert_eq!(chosen("OUT/checkpoints/step-00000048").0["step"], 48);
    assert_eq!(
        chosen("OUT/checkpoints/step-00000048/model.safetensors").0["step"],
        48
    );

    // If the best is damaged, the newest is used. If that is damaged too, the one before it, each
    // with a warning.
    folder.damage_model(best["step"].as_u64().unwrap());
    let (found, ended) = chosen("OUT");
    assert_eq!(found["step"], 48);
    assert!(
        ended
            .stderr
            .contains("the best model by validation was that of step"),
        "{ended}"
    );
    folder.damage_model(48);
    let (found, ended) = chosen("OUT");
    assert!(
        found["step"].as_u64().unwrap() < 48 && ended.stderr.contains("skipped the checkpoint"),
        "{ended}"
    );
    let ended = folder
        .alone(&format!(
            "eval --checkpoint OUT/checkpoints/step-00000048 {data}"
        ))
        .run();
    let cause = ended.assert_fails(65);
    let help = "; help: give --checkpoint the folder of the run, ";
    assert!(
        cause.contains("model.safetensors") && cause.contains(help),
        "{ended}"
    );
}

#[test]
fn every_flag_of_the_machine_changes_nothing() {
    let folder = trained(GLYPHS);
    let plain = evaluated(folder.alone(&format!("eval {ROWS} --json")));
    let flags = "--threads 1 --timeout-s 50 --log-level error --cache-dir cache --batch-size 512";
    assert_eq!(
        evaluated(folder.alone(&format!("eval {ROWS} --json {flags}"))),
        plain
    );
    let auto = ROWS.replace("--device cpu", "--device auto --share-gpus");
    assert_eq!(
        evaluated(folder.alone(&format!("eval {auto} --json"))),
        plain
    );
    let ended = folder
        .alone(&format!("predict {ROWS} --out quiet.npy --log-level error"))
        .run();
    ended.assert_well();
    assert_eq!((&ended.stdout[..], &ended.stderr[..]), ("", ""));
    // Other batches, other bits: a logit is a sum of 16 products of sums of 784, off by at most 800
    // roundings of the sum of its terms' magnitudes, which is below 20 here. A loss moves by at
    // most twice as much.
    let others = evaluated(folder.alone(&format!("eval {ROWS} --json --batch-size 7")));
    assert_eq!(others["rows"], plain["rows"]);
    let (a, b) = (number(&others, "loss"), number(&plain, "loss"));
    assert!(
        (a - b).abs() <= 2.0 * 800.0 * f64::from(f32::EPSILON) / 2.0 * 20.0,
        "{a} and {b}"
    );
}
