//! `eval` and `predict` on tables and arrays: columns are found by name, prepared as in training.

use ddp_kernels::{Device, Tensor};

use crate::data::write;
use crate::made::npy;
use crate::support::job::Folder;
use crate::support::metrics_log::number;
use crate::using::{array, bytes, evaluated};

/// Flowers as a table with these columns, `count` rows from `first` on. The two sizes determine the
/// kind; one name needs quotes.
fn flowers(columns: &[&str], first: u32, rows: u32) -> String {
    let row = |number: u32| {
        let (length, width) = (number * 37 % 101, number * 53 % 97);
        let kind = if length + width < 70 {
            "small"
        } else if length > width {
            "\"long, thin\""
        } else {
            "wide"
        };
        let cell = |column: &&str| match *column {
            "length" => format!("{}.5", length),
            "width" => format!("{}.25", width),
            "kind" => kind.to_string(),
            other => format!("{other} of {number}"),
        };
        columns.iter().map(cell).collect::<Vec<_>>().join(",") + "\n"
    };
    columns.join(",") + "\n" + &(first..first + rows).map(row).collect::<String>()
}

#[test]
fn a_tables_columns_are_found_by_name_and_its_classes_keep_their_names() {
    let folder = Folder::new("using-table");
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    put("train.csv", &flowers(&["length", "width", "kind"], 0, 200));
    put("test.csv", &flowers(&["length", "width", "kind"], 200, 100));
    let words = "--data train.csv --labels kind --val-data test.csv --val-labels kind --normalize standard --hidden 8 --batch-size 16 --epochs 4 \
                 --lr 0.05 --out OUT --device cpu";
    folder.together(words).run().assert_well();
    let log = folder.metrics_log();
    let last = log
        .all("eval")
        .last()
        .map(|eval| (number(eval, "accuracy"), eval["step"].as_u64().unwrap()))
        .unwrap();
    let use_it = format!(
        "--checkpoint OUT/checkpoints/step-{:08} --device cpu",
        last.1
    );

    // The label's column is the one that was learned from, wherever it stands.
    put(
        "turned.csv",
        &flowers(&["kind", "note", "width", "length"], 200, 100),
    );
    let straight = evaluated(folder.alone(&format!("eval {use_it} --data test.csv --json")));
    assert_eq!(number(&straight, "accuracy"), last.0);
    let mut turned = evaluated(folder.alone(&format!("eval {use_it} --data turned.csv --json")));
    turned["data"] = straight["data"].clone();
    assert_eq!(turned, straight);
    let names: Vec<&str> = straight["classes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|class| class["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["long, thin", "small", "wide"]);

    // Also if it was not named in training: it was the last column then.
    let words = words
        .replace(" --labels kind", "")
        .replace("--val-labels kind", "")
        .replace("OUT", "OUT-default");
    folder.together(&words).run().assert_well();
    let use_default = use_it.replace("OUT", "OUT-default");
    let mut unnamed =
        evaluated(folder.alone(&format!("eval {use_default} --data turned.csv --json")));
    for same in ["data", "checkpoint"] {
        unnamed[same] = straight[same].clone();
    }
    assert_eq!(unnamed, straight);

    // No labels are needed, and columns of another order, or more of them, change nothing.
    put("new.csv", &flowers(&["width", "note", "length"], 200, 100));
    for data in ["test", "turned", "new"] {
        folder
            .alone(&format!(
                "predict {use_it} --data {data}.csv --out {data}-out.csv"
            ))
            .run()
            .assert_well();
        assert!(
            bytes(&folder, &format!("{data}-out.csv")) == bytes(&folder, "test-out.csv"),
            "{data}"
        );
    }
    let text = String::from_utf8(bytes(&folder, "test-out.csv")).unwrap();
    assert!(
        text.contains(",\"long, thin\",0.") && text.contains(",wide,0."),
        "{text}"
    );

    let refused = |command: &str, name: &str, text: &str, parts: &[&str]| {
        put(name, text);
        let ended = folder
            .together(&format!("{command} {use_it} --data {name}"))
            .run();
        let cause = ended.assert_fails(65);
        parts
            .iter()
            .for_each(|part| assert!(cause.contains(part), "{part}: {ended}"));
    };
    let unknown = flowers(&["length", "width", "kind"], 200, 5).replacen("wide", "round", 1);
    refused("eval", "unknown.csv", &unknown, &["unknown.csv", "round"]);
    folder
        .alone(&format!(
            "predict {use_it} --data unknown.csv --out unknown.npy"
        ))
        .run()
        .assert_well();
    refused(
        "predict --out a.npy",
        "lacks.csv",
        &flowers(&["length", "kind"], 200, 5),
        &["lacks.csv", "width"],
    );
    refused(
        "predict --out a.npy",
        "bad.csv",
        "length,width\n1,2\n3,wide\n",
        &["bad.csv", "wide", "width"],
    );
    refused(
        "eval",
        "labelless.csv",
        &flowers(&["length", "width"], 200, 5),
        &["labelless.csv", "kind"],
    );
}

#[test]
fn classes_keep_all_digits_of_their_names() {
    let folder = Folder::new("long-names");
    // As f64 they are the same number.
    let ids = [9007199254740992, 9007199254740993];
    let rows = (0..40).map(|row| format!("{},{}\n", row % 2, ids[row % 2]));
    let text = "x,id\n".to_string() + &rows.collect::<String>();
    write(&folder, "t.csv", text.into_bytes());
    let words = "--data t.csv --hidden 8 --batch-size 8 --epochs 20 --lr 0.05 --out OUT";
    folder.alone(words).run().assert_well();
    let use_it = "--checkpoint OUT --data t.csv";
    let found = evaluated(folder.alone(&format!("eval {use_it} --json")));
    assert_eq!(found["right"], 40);
    let names = [0, 1].map(|class| found["classes"][class]["name"].clone());
    assert_eq!(names, ids.map(|id| id.to_string()));
    for name in ["p.npy", "p.csv"] {
        let words = format!("predict {use_it} --out {name}");
        folder.alone(&words).run().assert_well();
    }
    let predicted = array(&folder, "p.npy").to_vec::<i64>().unwrap();
    assert_eq!(predicted, ids.repeat(20));
    let text = String::from_utf8(bytes(&folder, "p.csv")).unwrap();
    assert!(text.contains("\n1,9007199254740993,0."), "{text}");
}

#[test]
fn arrays_are_normalised_as_in_training() {
    let folder = Folder::new("using-arrays");
    let put = |name: &str, tensor: Tensor| tensor.save_npy(folder.path().join(name)).unwrap();
    for (name, first, rows) in [("train", 0u32, 96usize), ("test", 96, 40)] {
        let pixel = |at: usize| (((first as usize * 16 + at) * 7919) % 251) as u8;
        let pixels: Vec<u8> = (0..rows * 16).map(pixel).collect();
        let classes: Vec<i64> = pixels
            .chunks(16)
            .map(|row| i64::from(row[0] > 120) + i64::from(row[5] > 160))
            .collect();
        put(
            &format!("{name}-x.npy"),
            Tensor::from_slice(&pixels, &[rows, 4, 4], Device::Cpu).unwrap(),
        );
        put(
            &format!("{name}-y.npy"),
            Tensor::from_slice(&classes, &[rows], Device::Cpu).unwrap(),
        );
    }
    for normalize in ["unit", "standard"] {
        let words = format!(
            "--data train-x.npy --labels train-y.npy --val-data test-x.npy --val-labels test-y.npy --normalize {normalize} --hidden 8 \
             --batch-size 16 --epochs 2 --out OUT{normalize} --device cpu"
        );
        folder.alone(&words).run().assert_well();
        let log = crate::support::metrics_log::MetricsLog::read(
            &folder.path().join(format!("out{normalize}")),
        );
        let last = *log.all("eval").last().unwrap();
        let use_it = format!(
            "--checkpoint OUT{normalize}/checkpoints/step-00000012 --data test-x.npy --device cpu"
        );
        let found = evaluated(folder.alone(&format!("eval {use_it} --labels test-y.npy --json")));
        assert_eq!(
            number(&found, "loss").to_bits(),
            number(last, "loss").to_bits(),
            "{normalize}"
        );
        folder
            .alone(&format!("predict {use_it} --out {normalize}.npy"))
            .run()
            .assert_well();
        let ours = array(&folder, &format!("{normalize}.npy"))
            .to_vec::<i64>()
            .unwrap();
        let right = ours
            .iter()
            .zip(array(&folder, "test-y.npy").to_vec::<i64>().unwrap())
            .filter(|(a, b)| **a == *b)
            .count();
        assert_eq!(found["right"], right);
    }
}

#[test]
fn missing_numbers_of_arrays_are_counted() {
    for how in ["mean", "zero"] {
        let folder = Folder::new("missing-arrays");
        let number = |n: usize| if n % 10 == 3 { f32::NAN } else { n as f32 };
        let x: Vec<u8> = (0..80).flat_map(|n| number(n).to_le_bytes()).collect();
        let y: Vec<u8> = (0..40).flat_map(|n| (n % 2_i64).to_le_bytes()).collect();
        write(&folder, "x.npy", npy("<f4", &[40, 2], &x));
        write(&folder, "y.npy", npy("<i8", &[40], &y));
        let train = format!(
            "--data x.npy --labels y.npy --val-data x.npy --val-labels y.npy --missing {how} --steps 2 --out OUT"
        );
        let filled = "which are filled in";
        let trained = format!("x.npy: 8 missing numbers in the rows that are trained on, {filled}");
        let others = format!("x.npy: 8 missing numbers, {filled}");
        for (words, told) in [
            (train.as_str(), [1, 1]),
            ("eval --checkpoint OUT --data x.npy --labels y.npy", [0, 1]),
            ("predict --checkpoint OUT --data x.npy --out p.csv", [0, 1]),
        ] {
            let ended = folder.together(words).run();
            assert_eq!(ended.exit_code(), Some(0), "{ended}");
            let found = [&trained, &others].map(|told| ended.stderr.matches(told.as_str()).count());
            assert_eq!(found, told, "{ended}");
        }
    }
}

#[test]
fn classes_without_held_out_rows_and_too_few_evaluations_are_warned_of() {
    let folder = Folder::new("no-figure");
    let rows = |classes: usize| {
        let row = |at: usize| format!("{},{}\n", at % 5, ["a", "b", "c"][at % classes]);
        format!("x,kind\n{}", (0..30).map(row).collect::<String>()).into_bytes()
    };
    write(&folder, "t.csv", rows(3));
    write(&folder, "v.csv", rows(2));
    let words = "--data t.csv --val-data v.csv --hidden none --batch-size 8 --steps 4 --threads 1";
    let run = |more: &str| folder.alone(&format!("{words} {more}")).run();
    let ended = run("--eval-every 2 --stop-after 1 --out OUT");
    ended.assert_well();
    let told = [
        "the held-out rows lack 1 of 3 classes",
        "--stop-after 1: expected at least 3 evaluations, got 2",
    ];
    for told in told {
        assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    }
    write(&folder, "v.csv", rows(3));
    let ended = run("--eval-every 1 --stop-after 1 --out other");
    ended.assert_well();
    assert!(
        !told.iter().any(|told| ended.stderr.contains(told)),
        "{ended}"
    );
}

#[test]
fn missing_numbers_of_arrays_whose_columns_have_names_are_counted() {
    let folder = Folder::new("missing-named");
    let table = (0..40).map(|row| match row % 10 {
        3 => format!("{row},,{}\n", row % 2),
        _ => format!("{row},{},{}\n", row * 7 % 9, row % 2),
    });
    let table = "a,b,y\n".to_string() + &table.collect::<String>();
    write(&folder, "t.csv", table.into_bytes());
    let words = "--data t.csv --missing zero --cache-dir cache --dry-run";
    let ended = folder.alone(words).run();
    let told = "t.csv: missing cells, which are filled in: \"b\" 4";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    assert!(!ended.stderr.contains("missing numbers"), "{ended}");
    // What it was converted into is a file of arrays.
    let entries = std::fs::read_dir(folder.path().join("cache")).unwrap();
    let mut made = entries.map(|entry| entry.unwrap().path().join("data.bin"));
    let made = made.find(|path| path.exists()).unwrap();
    std::fs::copy(made, folder.path().join("t.bin")).unwrap();
    let ended = folder.alone("--data t.bin --missing zero --dry-run").run();
    let told = "t.bin: 4 missing numbers in the rows that are trained on, which are filled in";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
}

#[test]
fn a_class_that_only_held_out_rows_have_is_warned_of() {
    let folder = Folder::new("held-out-class");
    let rows = (0..20).map(|row| {
        format!(
            "{row},{}\n",
            if row == 7 {
                "rare"
            } else {
                ["a", "b"][row % 2]
            }
        )
    });
    write(
        &folder,
        "t.csv",
        format!("x,kind\n{}", rows.collect::<String>()).into_bytes(),
    );
    let is_warned = |seed: usize| {
        let words = format!("--data t.csv --val-split 0.5 --seed {seed} --dry-run");
        let ended = folder.alone(&words).run();
        ended.assert_well();
        let told = "only held-out rows have these classes, which the model cannot learn: \"rare\"";
        ended.stderr.contains(told)
    };
    let warned = (0..8).filter(|&seed| is_warned(seed)).count();
    assert!(0 < warned && warned < 8, "{warned} of 8 splits");
}

#[test]
fn a_table_that_is_trained_on_and_evaluated_on_is_warned_of() {
    let folder = Folder::new("val-same");
    let rows: String = (0..20).map(|row| format!("{row},{}\n", row % 2)).collect();
    for name in ["s-0.csv", "s-1.csv", "other.csv"] {
        write(&folder, name, format!("x,y\n{rows}").into_bytes());
    }
    for (val, count) in [("./s-0.csv", 1), ("other.csv", 0)] {
        let words = format!("--data s-*.csv --val-data {val} --dry-run");
        let ended = folder.alone(&words).run();
        ended.assert_well();
        let told = "s-0.csv#features is also trained on: it says nothing about new rows";
        assert_eq!(ended.stderr.matches(told).count(), count, "{ended}");
    }
}

#[test]
fn labels_without_a_difference_are_warned_of() {
    let folder = Folder::new("odd-labels");
    let rows: String = (0..20).map(|row| format!("{row},{row}.5,3\n")).collect();
    write(&folder, "same.csv", format!("x,p,q\n{rows}").into_bytes());
    let words = "--data same.csv --labels p,q --dry-run";
    let ended = folder.alone(words).run();
    ended.assert_well();
    let told = "the same number in all rows that were looked at, in column 1 (counted from 0)";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
}

#[test]
fn labels_that_f32_hardly_tells_apart_are_warned_of() {
    let folder = Folder::new("rounded-labels");
    let x: Vec<u8> = (0..40).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let time = |row: u32| 1.7e9 + 50.0 * f64::from(row);
    let y: Vec<u8> = (0..40).flat_map(|row| time(row).to_le_bytes()).collect();
    write(&folder, "x.npy", npy("<f4", &[40, 1], &x));
    write(&folder, "y.npy", npy("<f8", &[40], &y));
    let ended = folder.alone("--data x.npy --labels y.npy --dry-run").run();
    ended.assert_well();
    let told = "--labels y.npy: f32 rounds nearly all differences between the numbers of column 0 (counted from 0)";
    assert!(ended.stderr.contains(told), "{ended}");
}

#[test]
fn features_that_say_nothing_are_hardly_learned_or_are_identifiers_are_named_once() {
    let folder = Folder::new("constant");
    let rows = (0..40).map(|row| format!("{row},7,{row}e-6,{}\n", row % 2));
    let table = "a,same,tiny,y\n".to_string() + &rows.collect::<String>();
    write(&folder, "t.csv", table.into_bytes());
    for (how, is_standard) in [("standard", true), ("unit", false)] {
        let words = format!("--data t.csv --normalize {how} --dry-run");
        let ended = folder.together(&words).run();
        ended.assert_well();
        let constant =
            "features that are the same in all rows that are trained on, and say nothing: \"same\"";
        let tiny = "features that vary much less than a, or little beside their mean: models learn less \
                    from them: tiny; help: set --normalize to standard";
        let counted = "features of whole numbers that never repeat, as identifiers do; help: if they are identifiers, \
                       leave them out: --drop a";
        for (told, is_told) in [(constant, true), (tiny, !is_standard), (counted, true)] {
            let count = ended.stderr.matches(told).count();
            assert_eq!(count, usize::from(is_told), "{told}\n{ended}");
        }
    }
}
