//! Users' files: in any format, the same rows train the same model, on one rank and on
//! several. An error in them ends all ranks with 65 and is reported once, with the file and the
//! position in it.

mod changed;

use std::fs::{self, OpenOptions};
use std::io::Write;

use crate::made::{
    self, CLASSES, FEATURES, ROWS, classes, csv, f32_le, features, gz, i64_le, idx, npy, npz,
};
use crate::support::job::{Ended, Folder, Running, all_at_once};
use crate::support::metrics_log::model_bytes;

/// A run of 18 steps over the files.
pub(super) const TRAIN: &str =
    "--plain --hidden 8 --batch-size 10 --epochs 3 --log-every 1 --lr 0.01 --out OUT --data";

pub(super) fn number(class: usize) -> String {
    class.to_string()
}

pub(super) fn text(class: usize) -> String {
    CLASSES[class].to_string()
}

pub(super) fn write(folder: &Folder, name: &str, bytes: Vec<u8>) {
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().expect("it is in a folder")).unwrap();
    fs::write(path, bytes).unwrap();
}

/// Files by their names, with what is in them.
pub(super) type Files = Vec<(&'static str, Vec<u8>)>;

/// The same rows in files of every kind: the file, and the value of `--data`.
fn kinds() -> Vec<(&'static str, Files, &'static str)> {
    let all = 0..ROWS;
    let y = || npy("<i8", &[ROWS], &classes(all.clone(), i64_le));
    let x = |descr: &str, data: Vec<u8>| npy(descr, &[ROWS, FEATURES], &data);
    let x_f32 = || x("<f4", features(all.clone(), f32_le));
    let idx_x = || idx(&[ROWS, 2, 3], &features(all.clone(), |number| [number]));
    let idx_y = || idx(&[ROWS], &classes(all.clone(), |number| [number]));
    vec![
        (
            "npy f32",
            vec![("x.npy", x_f32()), ("y.npy", y())],
            "x.npy --labels y.npy",
        ),
        (
            "npy f64",
            vec![
                (
                    "x.npy",
                    x("<f8", features(all.clone(), |n| f64::from(n).to_le_bytes())),
                ),
                ("y.npy", y()),
            ],
            "x.npy --labels y.npy",
        ),
        (
            "npy i64",
            vec![
                ("x.npy", x("<i8", features(all.clone(), i64_le))),
                ("y.npy", y()),
            ],
            "x.npy --labels y.npy",
        ),
        (
            "npy i16 of the other byte order",
            vec![
                (
                    "x.npy",
                    x(">i2", features(all.clone(), |n| i16::from(n).to_be_bytes())),
                ),
                ("y.npy", y()),
            ],
            "x.npy --labels y.npy",
        ),
        (
            "npy u8, labels as f32",
            vec![
                ("x.npy", x("|u1", features(all.clone(), |n| [n]))),
                (
                    "y.npy",
                    npy("<f4", &[ROWS, 1], &classes(all.clone(), f32_le)),
                ),
            ],
            "x.npy --labels y.npy --task classification",
        ),
        (
            "npz",
            vec![("d.npz", npz(&[("x", x_f32()), ("y", y())], false))],
            "d.npz",
        ),
        (
            "npz, packed, by names",
            vec![(
                "d.npz",
                npz(&[("other", y()), ("in", x_f32()), ("out", y())], true),
            )],
            "d.npz#in --labels #out",
        ),
        ("csv", vec![("d.csv", csv(all.clone(), number))], "d.csv"),
        (
            "csv of texts, packed",
            vec![("d.csv.gz", gz(&csv(all.clone(), text)))],
            "d.csv.gz --labels kind",
        ),
        (
            "idx",
            vec![
                ("t-images-idx3-ubyte", idx_x()),
                ("t-labels-idx1-ubyte", idx_y()),
            ],
            "t-images-idx3-ubyte",
        ),
        (
            "idx, packed",
            vec![
                ("t-images-idx3-ubyte.gz", gz(&idx_x())),
                ("t-labels-idx1-ubyte.gz", gz(&idx_y())),
            ],
            "t-images-idx3-ubyte.gz",
        ),
        (
            "safetensors",
            vec![("d.safetensors", made::tensors(all.clone()))],
            "d.safetensors",
        ),
        (
            "shards in a folder",
            [0..13, 13..14, 14..ROWS]
                .into_iter()
                .zip([
                    "shards/a.safetensors",
                    "shards/b.safetensors",
                    "shards/c.safetensors",
                ])
                .map(|(rows, name)| (name, made::tensors(rows)))
                .collect(),
            "shards",
        ),
        (
            "shards by a pattern, whose labels are in one file",
            [0..30, 30..ROWS]
                .into_iter()
                .zip(["x-0.npy", "x-1.npy"])
                .map(|(rows, name)| {
                    (
                        name,
                        npy("<f4", &[rows.len(), FEATURES], &features(rows, f32_le)),
                    )
                })
                .chain([("y.npy", y())])
                .collect(),
            "x-*.npy --labels y.npy",
        ),
        (
            "shards of texts, of which none has all classes",
            vec![
                ("a.csv", csv(0..2, text)),
                ("b.csv", csv(2..3, text)),
                ("c.csv", csv(3..ROWS, text)),
            ],
            "*.csv",
        ),
    ]
}

#[test]
fn the_same_rows_in_files_of_every_kind_give_the_same_model() {
    let model = |name: &str, files: &[(&str, Vec<u8>)], data: &str| {
        let folder = Folder::new("kind");
        files
            .iter()
            .for_each(|(name, bytes)| write(&folder, name, bytes.clone()));
        folder.alone(&format!("{TRAIN} {data}")).run().assert_well();
        let losses = folder.metrics_log().losses();
        assert!(
            losses[losses.len() - 1] < losses[0] / 2.0,
            "{name}: it learns: {losses:?}"
        );
        model_bytes(&folder.out(), 18)
    };
    let kinds = kinds();
    let (name, files, data) = &kinds[0];
    let first = model(name, files, data);
    all_at_once(&kinds[1..], |(name, files, data)| {
        assert!(model(name, files, data) == first, "{name}")
    });
}

#[test]
fn a_table_is_converted_once_into_a_usable_data_file() {
    let folder = Folder::new("cache");
    write(&folder, "d.csv", csv(0..ROWS, text));
    let run = |data: &str, out: &str| {
        folder
            .alone(&format!("{TRAIN} {data} --cache-dir cache").replace("OUT", out))
            .run()
            .assert_well();
        model_bytes(&folder.path().join(out), 18)
    };
    let converted = || -> Vec<_> {
        folder
            .tree()
            .into_iter()
            .filter(|file| file.0.to_string_lossy().ends_with(".bin"))
            .map(|file| (file.0, file.2))
            .collect()
    };
    let first = run("d.csv", "one");
    let made = converted();
    assert!(
        made.len() == 1 && made[0].0.starts_with(folder.path().join("cache")),
        "{made:?}"
    );
    assert!(
        run("d.csv", "two") == first && converted() == made,
        "it is found again, and not made anew"
    );
    assert!(run(&made[0].0.display().to_string(), "three") == first);
}

#[test]
fn two_ranks_read_the_same_rows_as_one_from_files() {
    // Without updates a loss depends on its step's rows only. Outputs of the hidden layer are sums
    // of 7 terms below 255 each, those of the last layer of 9 terms below 7 · 255. Each term rounds
    // by u = 6e-8, and a loss moves at most twice as far as an output: two orders of adding differ
    // by at most 4 · 9 · 9 · 7 · 255 · u.
    let bound = 4.0 * 9.0 * 9.0 * 7.0 * 255.0 * f64::from(f32::EPSILON) / 2.0;
    let words = TRAIN.replace("--lr 0.01", "--lr 0");
    // How a kind of file is read does not depend on the ranks: a few of them.
    let kinds = ddp_testing::cases_of("kinds of files on two ranks", kinds(), 4);
    all_at_once(kinds, |(name, files, data)| {
        let folder = Folder::new("two");
        files
            .iter()
            .for_each(|(name, bytes)| write(&folder, name, bytes.clone()));
        let losses = |job: Ended, out: &str| {
            job.assert_well();
            crate::support::metrics_log::MetricsLog::read(&folder.path().join(out)).of_steps("loss")
        };
        let one = losses(
            folder
                .alone(&format!("{words} {data}").replace("OUT", "one"))
                .run(),
            "one",
        );
        let two = losses(
            folder
                .ranks(2, &format!("{words} {data}").replace("OUT", "two"))
                .run(),
            "two",
        );
        assert_eq!(one.len(), 18);
        assert!(
            one.windows(2)
                .any(|pair| (pair[0] - pair[1]).abs() > 4.0 * bound),
            "steps differ: {one:?}"
        );
        for (one, two) in one.iter().zip(&two) {
            assert!(
                (one - two).abs() <= bound,
                "{name}: {one} and {two}, {bound}"
            );
        }
    });
}

#[test]
fn numbers_are_learned_where_labels_are_numbers() {
    let folder = Folder::new("numbers");
    let (x, y) = (features(0..ROWS, f32_le), features(0..ROWS, f32_le));
    write(
        &folder,
        "d.npz",
        npz(
            &[
                ("x", npy("<f4", &[ROWS, FEATURES], &x)),
                ("y", npy("<f4", &[ROWS, FEATURES], &y)),
                ("count", npy("<i8", &[ROWS], &classes(0..ROWS, i64_le))),
            ],
            false,
        ),
    );
    for (flags, told) in [
        ("--normalize unit", "regression of 6 numbers"),
        (
            "--labels #count --task regression --normalize standard",
            "regression of 1 number",
        ),
    ] {
        let out = format!("out{}", told.len());
        folder
            .alone(&format!("{TRAIN} d.npz {flags}").replace("OUT", &out))
            .run()
            .assert_well();
        let log = crate::support::metrics_log::MetricsLog::read(&folder.path().join(out));
        let data = log.start()["data"].to_string();
        assert!(
            data.contains(told)
                && data.contains("d.npz: 60 rows to train on, 0 held out, label")
                && data.contains("6 features a row"),
            "{data}"
        );
    }
}

#[test]
fn rows_are_kept_for_evaluation_or_come_from_files_of_their_own() {
    for (flags, told, steps_per_epoch) in [
        ("--val-split 0.25", "45 rows to train on, 15 held out", 5),
        ("--val-data test.csv", "60 rows to train on, 9 held out", 6),
        ("--val-data x.npy --val-labels y.npy", "", 0),
        (
            "--val-split 0.25 --normalize standard --drop-last",
            "45 rows to train on, 15 held out",
            4,
        ),
    ] {
        let folder = Folder::new("held-out");
        write(&folder, "d.csv", csv(0..ROWS, text));
        // Nothing but cats: classes are those of the rows that are trained on.
        let cats: Vec<usize> = (0..ROWS)
            .filter(|index| made::row(*index).1 == 0)
            .take(9)
            .collect();
        let lines = cats
            .iter()
            .map(|&index| String::from_utf8(csv(index..index + 1, text)).unwrap());
        let test: String = lines
            .enumerate()
            .map(|(line, text)| {
                text.lines()
                    .skip(usize::from(line > 0))
                    .map(|line| format!("{line}\n"))
                    .collect::<String>()
            })
            .collect();
        write(&folder, "test.csv", test.into_bytes());
        let x = cats
            .iter()
            .flat_map(|&index| features(index..index + 1, f32_le))
            .collect::<Vec<u8>>();
        write(&folder, "x.npy", npy("<f4", &[9, FEATURES], &x));
        write(&folder, "y.npy", npy("<i8", &[9], &[0; 72]));
        let ended = folder.alone(&format!("{TRAIN} d.csv {flags}")).run();
        if flags.contains("x.npy") {
            let error = ended.assert_fails(65);
            assert!(
                error.contains("y.npy: expected texts as labels, such as"),
                "{ended}"
            );
            continue;
        }
        ended.assert_well();
        let log = folder.metrics_log();
        assert!(
            log.start()["data"].to_string().contains(told),
            "{}",
            log.start()
        );
        let evals: Vec<_> = log
            .all("eval")
            .iter()
            .map(|eval| eval["step"].as_u64().unwrap())
            .collect();
        assert_eq!(
            evals,
            [1, 2, 3].map(|epoch| epoch * steps_per_epoch),
            "{flags}"
        );
    }
}

#[test]
fn a_pattern_takes_no_hidden_files_and_a_column_is_meant_before_a_folder() {
    let folder = Folder::new("hidden");
    write(&folder, "d/a.csv", csv(0..ROWS, number));
    write(&folder, "d/.old.csv", csv(0..ROWS, number));
    write(&folder, "kind/what.txt", Vec::new());
    folder
        .alone(&format!("{TRAIN} d/*.csv --labels kind"))
        .run()
        .assert_well();
    let data = folder.metrics_log().start()["data"].to_string();
    assert!(
        data.contains("60 rows to train on") && data.contains("into 3 classes"),
        "{data}"
    );
}

#[test]
fn files_larger_than_the_memory_limit_are_trained_on() {
    let folder = Folder::new("large");
    // 120 MB that no disk has to hold: where nothing was written there are zeros.
    let rows: usize = 600_000;
    let sparse = |name: &str, header: Vec<u8>, data: u64| {
        let path = folder.path().join(name);
        fs::write(&path, &header).unwrap();
        OpenOptions::new()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(header.len() as u64 + data)
            .unwrap();
    };
    sparse(
        "x.npy",
        made::npy_header("|u1", &[rows, 200]),
        rows as u64 * 200,
    );
    sparse("y.npy", made::npy_header("<f4", &[rows]), rows as u64 * 4);
    let mut labels = OpenOptions::new()
        .append(true)
        .open(folder.path().join("y.npy"))
        .unwrap();
    labels
        .set_len(labels.metadata().unwrap().len() - 4)
        .unwrap();
    labels.write_all(&1.0f32.to_le_bytes()).unwrap();
    // A limit of half that size. Mapped files do not count.
    let limit = "ulimit -d 60000";
    let words = "--data x.npy --labels y.npy --val-split 0.0001 --hidden 8 --batch-size 64 --steps 20 --log-every 1 --out OUT";
    folder.in_shell(limit, words).run().assert_well();
    let log = folder.metrics_log();
    assert!(
        log.start()["data"]
            .to_string()
            .contains("599940 rows to train on, 60 held out"),
        "{}",
        log.start()
    );
    assert_eq!(log.of_steps("step").len(), 20);
    // The limit is one: the same in memory is refused.
    let words = words
        .replace(
            "x.npy --labels y.npy --val-split 0.0001",
            "synthetic:regression,features=40000",
        )
        .replace("--hidden 8", "--hidden 10000");
    let ended = folder.in_shell(limit, &words.replace("OUT", "OUT-2")).run();
    assert!(ended.exit_code() == Some(71), "{ended}");
}
