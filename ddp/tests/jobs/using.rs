//! `ddp-train eval` and `ddp-train predict`: a saved model gives for rows what it gave in training,
//! on any number of ranks, and explains why it cannot be used on other rows.

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

/// `ddp-train` listed the names of 110 settings.
#[test]
fn a_checkpoint_of_a_family_that_the_program_lacks_is_refused_by_its_name() {
    let folder = trained(GLYPHS);
    let checkpoint = folder.checkpoint(16);
    let whole = std::fs::read(checkpoint.join("state.json")).unwrap();
    forge(&checkpoint, &whole, "/config/model", &"mine".into());
    forge(
        &checkpoint,
        &std::fs::read(checkpoint.join("state.json")).unwrap(),
        "/config/knobs",
        &3.into(),
    );
    let eval = format!("eval --checkpoint {} --data glyphs", checkpoint.display());
    let ended = folder.alone(&eval).run();
    let cause = ended.assert_fails(65);
    let told = "got the unknown family \"mine\"; help: use the program that trained it";
    assert!(cause.contains(told), "{cause}");
}

#[test]
fn a_checkpoint_of_another_run_is_refused_by_every_command() {
    let model = "--model gpt,layers=1,heads=2,width=16,context=8 --data tokens:tokens.bin --batch-size 2 --threads 1 \
                 --warmup-steps 0 --schedule constant --steps";
    let folder = Folder::new("foreign");
    std::fs::write(folder.path().join("tokens.bin"), [1, 0, 2, 0].repeat(40)).unwrap();
    std::fs::write(folder.path().join("other.bin"), [1, 0, 3, 0].repeat(40)).unwrap();
    for words in [
        format!("{model} 2 --out OUT"),
        format!("{model} 4 --seed 7 --out seed"),
        format!("{} 4 --out data", model.replace("tokens.bin", "other.bin")),
    ] {
        folder.alone(&words).run().assert_well();
    }
    let named = "OUT/checkpoints/step-00000004";
    let copy = |from: &str| {
        let to = folder.out().join("checkpoints/step-00000004");
        _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir(&to).unwrap();
        let from = folder.path().join(from).join("checkpoints/step-00000004");
        for file in std::fs::read_dir(from).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    };
    for (from, with) in [
        ("seed", "with --seed 7 (was 0)"),
        ("data", "with --data with other rows"),
    ] {
        copy(from);
        for words in [
            "eval --checkpoint OUT --data tokens:tokens.bin",
            &format!("predict --checkpoint {named} --data tokens:tokens.bin --out p.npy"),
            "generate --checkpoint OUT --tokenizer bytes --prompt a",
            "export --format hf --checkpoint OUT exported",
        ] {
            let ended = folder.alone(words).run();
            let cause = ended.assert_fails(65);
            let expected = format!("got one of another run, {with}; help: move it");
            assert!(cause.contains(&expected), "{words}: {ended}");
        }
    }
    // What a resume with --override changed is the run's own, as are more steps.
    copy("seed");
    let changed = format!("{model} 4 --resume {named} --override --out OUT");
    folder
        .alone(&format!("{changed} --seed 0"))
        .run()
        .assert_well();
    std::fs::remove_dir_all(folder.out().join("checkpoints/step-00000004")).unwrap();
    let more = format!("{model} 5 --resume auto --override --lr 0.5 --out OUT");
    folder.alone(&more).run().assert_well();
    let eval = "eval --checkpoint OUT --data tokens:tokens.bin";
    folder.alone(eval).run().assert_well();
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
fn predictions_are_what_the_evaluation_counts() {
    let folder = trained(GLYPHS);
    let predict = |out: &str| {
        folder
            .alone(&format!("predict {ROWS} --out {out}"))
            .run()
            .assert_well()
    };
    all_at_once(
        [
            "c.npy",
            "p.npy --probabilities",
            "l.npy --logits",
            "all.csv --probabilities --logits",
            "few.csv",
        ],
        predict,
    );
    let classes = array(&folder, "c.npy").to_vec::<i64>().unwrap();
    let [p, logits] = ["p.npy", "l.npy"].map(|name| {
        let rows = array(&folder, name);
        assert_eq!(rows.shape().dims(), [700, 10]);
        rows.to_vec::<f32>().unwrap()
    });
    let right = classes
        .iter()
        .zip(classes_of("glyphs,rows=256,held-out=700"))
        .filter(|(a, b)| **a == *b)
        .count();
    let found = evaluated(folder.alone(&format!("eval {ROWS} --json")));
    assert_eq!(found["right"], right);

    let (all, few) = (table(&folder, "all.csv"), table(&folder, "few.csv"));
    assert_eq!(all[0][..4], ["row", "prediction", "probability", "p:0"]);
    assert_eq!((all[0].len(), &all[0][22][..]), (23, "logit:9"));
    assert_eq!(few[0], all[0][..3]);
    assert_eq!((all.len(), few.len()), (701, 701));
    for (row, ((line, short), class)) in all[1..].iter().zip(&few[1..]).zip(&classes).enumerate() {
        assert_eq!(line[..3], short[..]);
        assert_eq!((&line[0], &line[1]), (&row.to_string(), &class.to_string()));
        let numbers: Vec<f32> = line[3..].iter().map(|text| text.parse().unwrap()).collect();
        assert_eq!(numbers[..10], p[10 * row..][..10], "row {row}");
        assert_eq!(numbers[10..], logits[10 * row..][..10], "row {row}");
        assert_eq!(
            line[2].parse::<f32>().unwrap(),
            p[10 * row + *class as usize]
        );
        // Ten numbers, each rounded to half an ulp of at most 1.
        let sum: f64 = numbers[..10].iter().map(|&p| f64::from(p)).sum();
        assert!(
            (sum - 1.0).abs() <= 10.0 * f64::from(f32::EPSILON) / 2.0,
            "row {row}: {sum}"
        );
    }
}

#[test]
fn any_number_of_ranks_gives_the_same_bytes() {
    let folder = trained(GLYPHS);
    // Twenty-two batches, the last of which is short.
    let rows = format!("{ROWS} --batch-size 32");
    let alone = evaluated(folder.alone(&format!("eval {rows} --json")));
    let files = [
        "a.csv --probabilities --logits",
        "b.npy",
        "c.npy --probabilities",
        "d.npy --logits",
    ];
    let write = |ranks: usize| {
        all_at_once(files, |file| {
            let words = format!("predict {rows} --out {ranks}-{file}");
            if ranks == 1 {
                folder.alone(&words)
            } else {
                folder.ranks(ranks, &words)
            }
            .run()
            .assert_well();
        });
    };
    write(1);
    for ranks in [2, 3] {
        assert_eq!(
            evaluated(folder.ranks(ranks, &format!("eval {rows} --json"))),
            alone,
            "{ranks} ranks"
        );
        write(ranks);
        for name in files.map(|file| file.split(' ').next().unwrap()) {
            assert!(
                bytes(&folder, &format!("{ranks}-{name}")) == bytes(&folder, &format!("1-{name}")),
                "{ranks} ranks: {name}"
            );
        }
    }
    // Fewer rows than ranks.
    let few = "--checkpoint OUT --data glyphs,rows=2,held-out=0 --device cpu";
    folder
        .ranks(3, &format!("predict {few} --out three.csv"))
        .run()
        .assert_well();
    folder
        .alone(&format!("predict {few} --out one.csv"))
        .run()
        .assert_well();
    assert_eq!(table(&folder, "one.csv").len(), 3);
    assert!(bytes(&folder, "three.csv") == bytes(&folder, "one.csv"));
}

#[test]
fn numbers_are_predicted_and_measured() {
    let data = "--data synthetic:regression,rows=256,held-out=90,features=8,outputs=2";
    let folder = trained(&format!(
        "{data} --hidden 16 --batch-size 32 --epochs 2 --log-every 1 --out OUT --device cpu"
    ));
    let use_it = format!("--checkpoint OUT {data} --device cpu");
    let found = evaluated(folder.alone(&format!("eval {use_it} --json")));
    let log = folder.metrics_log();
    let last = *log.all("eval").last().unwrap();
    assert_eq!(
        number(&found, "loss").to_bits(),
        number(last, "loss").to_bits()
    );
    assert!(found["accuracy"].is_null());
    let ended = folder.alone(&format!("eval {use_it}")).run();
    ended.assert_well();
    assert!(
        ended.stdout.contains("\ncolumn ") && ended.stdout.contains("\nmean "),
        "{ended}"
    );

    folder
        .alone(&format!("predict {use_it} --out a.npy"))
        .run()
        .assert_well();
    folder
        .alone(&format!("predict {use_it} --out a.csv"))
        .run()
        .assert_well();
    let (rows, lines) = (array(&folder, "a.npy"), table(&folder, "a.csv"));
    assert_eq!(
        (rows.shape().dims(), &lines[0][..]),
        (
            &[90, 2][..],
            &["row", "prediction:0", "prediction:1"].map(String::from)[..]
        )
    );
    let values = rows.to_vec::<f32>().unwrap();
    let written: Vec<f32> = lines[1..]
        .iter()
        .flat_map(|line| &line[1..])
        .map(|text| text.parse().unwrap())
        .collect();
    assert_eq!(written, values);
    let held_out = ddp::data::open(&data[7..].parse::<DataSpec>().unwrap())
        .unwrap()
        .held_out;
    let [_, targets] = read_rows(&*held_out, &(0..90).collect::<Vec<_>>()).unwrap();
    let targets = targets.to_vec::<f32>().unwrap();
    let mut squared = 0.0;
    for (output, column) in found["columns"].as_array().unwrap().iter().enumerate() {
        assert_eq!(column["name"], output.to_string());
        let of_column = |values: &[f32]| -> Vec<f64> {
            let own = values.chunks(2).map(|row| f64::from(row[output]));
            own.collect()
        };
        let (given, wanted) = (of_column(&values), of_column(&targets));
        let apart = given.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        let apart: Vec<f64> = apart.collect();
        let absolute = apart.iter().sum::<f64>() / 90.0;
        let of_squares = apart.iter().map(|a| a * a).sum::<f64>() / 90.0;
        squared += of_squares / 2.0;
        // 90 additions in f64 in another order, and a root.
        for (name, value) in [
            ("mean_absolute_error", absolute),
            ("mean_squared_error", of_squares),
        ] {
            assert!((number(column, name) - value).abs() <= 92.0 * f64::EPSILON * value);
        }
    }
    let r2 = |output: usize| number(&found["columns"][output], "r2");
    assert_eq!(number(&found, "mean_r2"), (r2(0) + r2(1)) / 2.0);
    assert!(
        (number(last, "mean_r2") - number(&found, "mean_r2")).abs() < 1e-9,
        "{last}"
    );
    // Losses are rounded to f32 row by row and in sum.
    assert!((number(&found, "loss") - squared).abs() <= 92.0 * f64::from(f32::EPSILON) * squared);

    let cause = folder
        .alone(&format!("predict {use_it} --out p.npy --probabilities"))
        .run();
    assert!(
        cause
            .assert_fails(2)
            .contains("--probabilities: expected a model for classification"),
        "{cause}"
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

/// Invalid command lines, the exit code, and what the message must name.
const WRONG: &[(&str, i32, &[&str])] = &[
    (
        "eval --checkpoint nowhere --data glyphs",
        74,
        &["cannot read nowhere"],
    ),
    (
        "eval --checkpoint . --data glyphs",
        65,
        &["expected the folder of a run or of a checkpoint"],
    ),
    (
        "eval --checkpoint lone.safetensors --data glyphs",
        2,
        &["--checkpoint lone.safetensors", "without state.json"],
    ),
    ("eval --data glyphs", 2, &["--checkpoint"]),
    ("eval --checkpoint OUT", 2, &["--data"]),
    (
        "eval --checkpoint OUT --data glyphs --batch-size 0",
        2,
        &["'0'", "--batch-size", "expected a whole number from 1"],
    ),
    (
        "eval --checkpoint OUT --data glyphs --threads 0",
        2,
        &["--threads 0: expected a whole number from 1"],
    ),
    (
        "eval --checkpoint OUT --data glyphs --timeout-s 0",
        2,
        &["--timeout-s 0: expected a number from 0.1"],
    ),
    (
        "eval --checkpoint OUT --data glyphs --device cuda",
        2,
        &["--device cuda: expected a device that can be used here"],
    ),
    (
        "eval --checkpoint OUT --data synthetic:classification,rows=64,features=8",
        65,
        &["expected 784 features a row", "got 8 ", "as the model"],
    ),
    (
        "eval --checkpoint OUT --data synthetic:regression,rows=64,features=784",
        65,
        &["regression", "10 classes"],
    ),
    (
        "eval --checkpoint OUT --data synthetic:classification,rows=64,features=784,classes=3",
        65,
        &["into 10 classes", "into 3 classes", "as the model"],
    ),
    ("predict --checkpoint OUT --data glyphs", 2, &["--out"]),
    (
        "predict --checkpoint OUT --data glyphs --out a.txt",
        2,
        &[
            "'a.txt'",
            "--out",
            "expected a name that ends in .csv or .npy",
        ],
    ),
    (
        "predict --checkpoint OUT --data glyphs --out a.npy --probabilities --logits",
        2,
        &["--probabilities or --logits", "a .npy holds one array"],
    ),
    (
        "predict --checkpoint OUT --data glyphs --out there.csv",
        2,
        &["--out there.csv", "--overwrite"],
    ),
    (
        "predict --checkpoint OUT --data glyphs --out folder.npy",
        2,
        &["--out folder.npy", "it is a folder"],
    ),
    (
        "predict --checkpoint OUT --data glyphs,held-out=3 --out no/where.csv",
        74,
        &["no/where.csv"],
    ),
];

#[test]
fn what_cannot_be_is_refused_with_its_reason_and_nothing_is_written() {
    let folder = trained(GLYPHS);
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    put("there.csv", b"mine");
    put(
        "lone.safetensors",
        &bytes(&folder, "out/checkpoints/step-00000016/model.safetensors"),
    );
    std::fs::create_dir(folder.path().join("folder.npy")).unwrap();
    let before = folder.tree();
    all_at_once(WRONG, |(words, code, parts)| {
        let ended = folder.alone(words).run();
        let cause = ended.assert_fails(*code);
        let missing: Vec<_> = parts
            .iter()
            .filter(|part| !cause.contains(**part) && !ended.stderr.contains(**part))
            .collect();
        assert!(missing.is_empty(), "{words}: {missing:?} is not in {ended}");
    });
    assert!(folder.tree() == before, "nothing has changed");
    folder
        .alone(&format!("predict {ROWS} --out there.csv --overwrite"))
        .run()
        .assert_well();
    assert_eq!(table(&folder, "there.csv").len(), 701);
}

#[test]
fn an_error_of_all_ranks_is_printed_once() {
    let folder = trained(GLYPHS);
    let said = |words: &str, code: i32, part: &str| {
        let ended: Ended = folder.together(words).run();
        assert!(ended.assert_fails(code).contains(part), "{ended}");
    };
    said(
        "predict --checkpoint OUT --data synthetic:regression,rows=64,features=8 --out a.npy",
        65,
        "784",
    );
    said(
        "predict --checkpoint nowhere --data glyphs --out a.npy",
        74,
        "nowhere",
    );
    std::fs::write(folder.path().join("a.npy"), "mine").unwrap();
    said(
        "predict --checkpoint OUT --data glyphs --out a.npy",
        2,
        "--overwrite",
    );
    assert!(
        Path::new(&folder.path().join("a.npy"))
            .metadata()
            .unwrap()
            .len()
            == 4
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

/// A Python that has torch and safetensors: the one that DDP_PYTHON names, else python3.
fn python_with_torch() -> Option<String> {
    let python = std::env::var("DDP_PYTHON").unwrap_or_else(|_| "python3".into());
    let tried = std::process::Command::new(&python)
        .args(["-c", "import torch, numpy, safetensors.torch"])
        .output();
    tried
        .is_ok_and(|tried| tried.status.success())
        .then_some(python)
}

#[test]
fn pytorch_loads_the_model_and_gives_the_same_logits() {
    let Some(python) = python_with_torch() else {
        ddp_slice::skip("no Python with torch and safetensors (DDP_PYTHON names one)");
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/peers/logits_torch.py");
    for flags in [
        "--activation relu",
        "--activation gelu --dropout 0.1",
        "--activation gelu-tanh --hidden 32,24",
        "--hidden none",
    ] {
        let words = if flags.contains("--hidden") {
            GLYPHS.replace("--hidden 16", "")
        } else {
            GLYPHS.to_string()
        };
        let folder = trained(&format!("{words} {flags}"));
        let rows = ddp::data::open(&"glyphs,held-out=100".parse::<DataSpec>().unwrap())
            .unwrap()
            .held_out;
        let [x, _] = read_rows(&*rows, &(0..100).collect::<Vec<_>>()).unwrap();
        x.save_npy(folder.path().join("rows.npy")).unwrap();
        let checkpoint = "OUT/checkpoints/step-00000016";
        let predict = format!(
            "predict --checkpoint {checkpoint} --data rows.npy --out logits.npy --logits --device cpu"
        );
        folder.alone(&predict).run().assert_well();
        let about = folder.alone(&format!("inspect {checkpoint} --json")).run();
        about.assert_well();
        std::fs::write(folder.path().join("about.json"), &about.stdout).unwrap();
        let mut command = std::process::Command::new(&python);
        command.arg(&script).args([
            "about.json",
            "out/checkpoints/step-00000016/model.safetensors",
            "rows.npy",
            "logits.npy",
        ]);
        let ended = command.current_dir(folder.path()).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(
            ended.status.success(),
            "{flags}: {said}{}",
            String::from_utf8_lossy(&ended.stderr)
        );
        println!("{flags}: {said}");
    }
}

/// `paste` beside predictions broke rows with line ends in quotes, and those that end in CRLF.
#[test]
fn kept_columns_stand_before_the_predictions_of_their_rows_on_any_number_of_ranks() {
    let folder = Folder::new("keep");
    let cells = |row: u32| format!("\"F\r\n{row}\",{},{}", row % 5, row % 2);
    let text: String = (0..40).map(|row| cells(row) + "\r\n").collect();
    let text = "id,x,label\r\n".to_string() + &text;
    std::fs::write(folder.path().join("t.csv"), text).unwrap();
    let train = "--data t.csv --drop id --hidden 4 --steps 1 --device cpu --out OUT";
    folder.alone(train).run().assert_well();
    let words = "predict --checkpoint OUT --data t.csv --batch-size 6 --device cpu --out";
    folder
        .alone(&format!("{words} plain.csv"))
        .run()
        .assert_well();
    let kept = |ranks: usize| {
        let words = format!("{words} {ranks}.csv --keep all");
        folder.ranks(ranks, &words).run().assert_well();
        String::from_utf8(bytes(&folder, &format!("{ranks}.csv"))).unwrap()
    };
    let plain = String::from_utf8(bytes(&folder, "plain.csv")).unwrap();
    let mut lines = plain.lines();
    let head = format!("id,x,label,{}\n", lines.next().unwrap());
    let rows = (0..40)
        .zip(lines)
        .map(|(row, line)| format!("{},{line}\n", cells(row)));
    let expected = head + &rows.collect::<String>();
    assert_eq!(kept(1), expected);
    assert_eq!(kept(3), expected);
}
