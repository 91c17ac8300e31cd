//! Wrong data and wrong models are never trained silently: the log says how data were read, a run
//! is not resumed on changed data, and ranks compare the contents of their files.

use std::fs;

use crate::support::job::Folder;

/// 1000 rows with a numeric target; `odd` is the row whose target differs.
fn table(odd: usize) -> String {
    let row = |row: usize| {
        let target = row as f64 / 16.0 + if row == odd { 0.5 } else { 0.25 };
        format!("{},{},{target}\n", row % 10, row as f64 / 100.0)
    };
    let rows: String = (0..1000).map(row).collect();
    format!("a,b,price\n{rows}")
}

const TRAIN: &str = "--hidden 4 --batch-size 100 --schedule constant --out OUT --data";

#[test]
fn a_run_says_what_it_understood_at_its_start_and_in_its_record() {
    let folder = Folder::new("understood");
    fs::write(folder.path().join("t.csv"), table(usize::MAX)).unwrap();
    let ended = folder.alone(&format!("{TRAIN} t.csv#a --steps 2")).run();
    ended.assert_well();
    let said = "t.csv#a: 1000 rows to train on, 0 held out, label column \"price\", regression of 1 number (0.25 to 62.6875), \
                1 feature: \"a\" (1 left out: \"b\")";
    assert!(ended.stderr.contains(said), "{ended}");
    assert_eq!(folder.metrics_log().start()["data"], said);
}

#[test]
fn data_that_changed_are_not_resumed_unless_that_is_asked_for() {
    let folder = Folder::new("changed");
    let file = folder.path().join("t.csv");
    fs::write(&file, table(usize::MAX)).unwrap();
    let train = |rest: &str| folder.alone(&format!("{TRAIN} t.csv {rest}")).run();
    train("--steps 5").assert_well();
    fs::write(&file, table(777)).unwrap();
    let ended = train("--steps 9 --resume auto");
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains("--data with other rows") && cause.contains("--override"),
        "{ended}"
    );
    // The same rows in a new file are the same data.
    fs::write(&file, table(usize::MAX)).unwrap();
    train("--steps 7 --resume auto").assert_well();
    fs::write(&file, table(777)).unwrap();
    train("--steps 9 --resume auto --override").assert_well();
}

#[test]
fn columns_with_other_names_are_not_resumed_unless_that_is_asked_for() {
    let folder = Folder::new("renamed");
    let file = folder.path().join("t.csv");
    let rows = table(usize::MAX);
    fs::write(&file, &rows).unwrap();
    let train = |rest: &str| folder.alone(&format!("{TRAIN} t.csv {rest}")).run();
    train("--steps 5").assert_well();
    for (header, named) in [
        (
            "b,a,price",
            "--data with feature 0 called \"b\" (was \"a\")",
        ),
        ("a,b,cost", "--labels \"cost\" (was \"price\")"),
    ] {
        fs::write(&file, rows.replace("a,b,price", header)).unwrap();
        let ended = train("--steps 9 --resume auto");
        assert!(ended.assert_fails(2).contains(named), "{ended}");
    }
    train("--steps 9 --resume auto --override").assert_well();
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_whose_files_differ_in_one_label_end_with_78() {
    let folder = Folder::new("differ");
    for (name, odd) in [
        ("first", usize::MAX),
        ("second", 777),
        ("third", usize::MAX),
    ] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("t.csv"), table(odd)).unwrap();
    }
    let words = format!("{TRAIN} t.csv --steps 2");
    let ended = folder.in_folders(&["first", "second"], &words).run();
    let cause = ended.assert_fails(78);
    assert!(
        cause.contains("the content of the labels of --data (t.csv"),
        "{ended}"
    );
    assert!(cause.contains("rank 1 has "), "{ended}");
    folder
        .in_folders(&["first", "third"], &words)
        .run()
        .assert_well();
    // Each host has its own part.
    fs::create_dir(folder.path().join("fourth")).unwrap();
    fs::write(folder.path().join("fourth/t-2.csv"), table(usize::MAX)).unwrap();
    let words = words.replace("t.csv", "t*.csv").replace("OUT", "OUT-2");
    let ended = folder.in_folders(&["first", "fourth"], &words).run();
    let cause = ended.assert_fails(78);
    let named = "the files of --data t*.csv: rank 1 has t-2.csv";
    assert!(cause.contains(named), "{ended}");
}

#[test]
fn init_from_refuses_a_flipped_exponent() {
    let folder = Folder::new("exponent");
    folder
        .alone("--data glyphs,rows=64,held-out=0 --hidden 4 --batch-size 32 --steps 1 --out OUT")
        .run()
        .assert_well();
    let model = folder.checkpoint(1).join("model.safetensors");
    let mut bytes = fs::read(model).unwrap();
    // The highest bit of an exponent, in the last value.
    let last = bytes.len() - 1;
    let weight = last - 4 * 10 - 4;
    bytes[weight] ^= 0x40;
    fs::write(folder.path().join("bad.safetensors"), bytes).unwrap();
    let words = "--data glyphs,rows=64,held-out=0 --hidden 4 --steps 1 --init-from bad.safetensors --out other";
    let ended = folder.alone(words).run();
    let cause = ended.assert_fails(65);
    assert!(
        cause.contains("bad.safetensors") && cause.contains("expected values up to 1e6"),
        "{ended}"
    );
    // A pipe would be waited for.
    let pipe = folder.path().join("pipe.safetensors");
    let made = std::process::Command::new("mkfifo").arg(pipe).status();
    assert!(made.is_ok_and(|made| made.success()));
    let ended = folder.alone(&words.replace("bad.", "pipe.")).run();
    let named = "--init-from pipe.safetensors: expected an ordinary file";
    let cause = ended.assert_fails(2);
    assert!(cause.contains(named), "{ended}");
}

#[test]
fn a_dry_run_states_the_size_of_a_large_model_without_making_it() {
    let folder = Folder::new("large");
    let words =
        "--data glyphs,rows=64,held-out=0 --hidden 40000,40000,40000 --steps 1 --dry-run --out OUT";
    let ended = folder.alone(words).run();
    let stdout = &ended.stdout;
    assert!(
        stdout.contains("the model of a rank: parameters 12.93 GB"),
        "{ended}"
    );
    assert!(stdout.contains("the model was not made"), "{ended}");
    // 11 layers of 12,000 × 12,000 and one of 784 × 12,000: 1.59 billion parameters.
    let hidden = ["12000"; 12].join(",");
    let words = words.replace("40000,40000,40000", &hidden);
    for (stage, parts) in [
        (
            0,
            "parameters 6.37 GB, rounded copies 3.19 GB, gradients 6.37 GB, moments 12.75 GB",
        ),
        (
            1,
            "parameters 3.19 GB, rounded copies 3.19 GB, gradients 6.37 GB, moments 6.37 GB",
        ),
        // Half of the gradients, and those that backward writes of two layers.
        (
            2,
            "parameters 3.19 GB, rounded copies 3.19 GB, gradients 4.34 GB, moments 6.37 GB",
        ),
    ] {
        let words = format!("{words} --zero {stage} --dtype bf16 --device cpu");
        let ended = folder.started(2, &words).run();
        assert!(ended.stdout.contains(parts), "{stage}: {ended}");
    }
}
