//! Settings from files and the environment, options that print instead of training, TensorBoard
//! files, and `doctor`.

mod completion;
mod dry_runs;

use std::fs;

use serde_json::Value;

use crate::support::job::{Folder, QUICK, all_at_once, program};
use crate::support::metrics_log::number;

/// A run that can be resumed with more steps.
const EXTENSIBLE: &str = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --schedule constant \
                          --warmup-steps 0 --log-every 1 --out OUT";

fn json_lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}")))
        .collect()
}

#[test]
fn settings_come_from_a_file_the_environment_and_flags_in_this_order() {
    let folder = Folder::new("layers");
    fs::write(
        folder.path().join("run.toml"),
        "batch-size = 16\nseed = 3\nlr = 0.5\n",
    )
    .unwrap();
    let words = format!("--config run.toml {QUICK} --lr 0.25");
    let job = folder
        .alone(&words)
        .env("DDP_SEED", "4")
        .env("DDP_LR", "0.125");
    job.run().assert_well();
    let start = folder.metrics_log().all("start")[0].clone();
    // Of QUICK's flags the batch size is one.
    assert_eq!(
        (&start["config"]["batch-size"], &start["config"]["seed"]),
        (&32.into(), &4.into())
    );
    assert_eq!(start["config"]["lr"], 0.25);
}

#[test]
fn tensorboard_curves_continue_after_a_resume() {
    let folder = Folder::new("curves");
    let words = format!("{EXTENSIBLE} --tensorboard");
    folder
        .together(&format!("{words} --steps 8"))
        .run()
        .assert_well();
    folder
        .together(&format!("{words} --steps 12 --resume auto"))
        .run()
        .assert_well();
    let mut files: Vec<_> = fs::read_dir(folder.out().join("tensorboard"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    let bytes: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let points =
        |bytes: &[u8], tag: &[u8]| bytes.windows(tag.len()).filter(|part| *part == tag).count();
    let counts = |tag: &[u8]| {
        bytes
            .iter()
            .map(|bytes| points(bytes, tag))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (counts(b"train/loss"), counts(b"eval/accuracy")),
        (vec![8, 4], vec![1, 1])
    );
    assert_eq!(counts(b"train/accuracy"), [8, 4]);
}

#[test]
fn the_record_has_the_accuracy_in_training_and_on_held_out_rows() {
    let folder = Folder::new("accuracies");
    folder.alone(QUICK).run().assert_well();
    let log = folder.metrics_log();
    for accuracy in log.of_steps("accuracy") {
        // A whole number of 32 rows is right.
        assert!((0.0..=1.0).contains(&accuracy) && accuracy * 32.0 % 1.0 == 0.0);
    }
    assert_eq!(log.of_steps("accuracy").len(), 8);
    assert!(log.all("eval").iter().all(|eval| eval["accuracy"].is_f64()));
    let folder = Folder::new("no-accuracy");
    let words = QUICK.replace("glyphs", "synthetic:regression");
    folder.alone(&words).run().assert_well();
    let log = folder.metrics_log();
    assert!(
        log.all("step")
            .iter()
            .all(|step| step["accuracy"].is_null())
    );
}

#[test]
fn predictions_for_a_folder_that_is_missing_are_refused_before_anything_is_computed() {
    let folder = Folder::new("predictions");
    folder.alone(QUICK).run().assert_well();
    fs::write(folder.path().join("file"), "").unwrap();
    for (out, parts) in [
        (
            "nowhere/a.csv",
            ["cannot write nowhere/a.csv: ", "mkdir -p nowhere"],
        ),
        (
            "file/a.csv",
            ["cannot write file/a.csv: not a directory", "--out"],
        ),
    ] {
        let words = format!("predict --checkpoint OUT --data nothing.csv --out {out}");
        let ended = folder.alone(&words).run();
        let cause = ended.assert_fails(74);
        assert!(parts.iter().all(|part| cause.contains(part)), "{ended}");
    }
}

#[test]
fn doctor_passes_a_healthy_machine_alone_and_with_ranks() {
    let folder = Folder::new("doctor");
    for job in [
        folder.alone("doctor --json"),
        folder.together("doctor --json"),
    ] {
        let ended = job.run();
        assert_eq!(ended.exit_code(), Some(0), "{ended}");
        let lines = json_lines(&ended.stdout);
        let topics: Vec<&str> = lines
            .iter()
            .filter_map(|line| line["topic"].as_str())
            .collect();
        for topic in [
            "processor",
            "memory",
            "disk",
            "threads",
            "GPU",
            "GPU of rank",
        ] {
            assert!(topics.contains(&topic), "{topic} in {ended}");
        }
        assert_eq!(
            topics.contains(&"all-reduce"),
            lines.iter().any(|line| line["of"]
                .as_str()
                .is_some_and(|of| of.starts_with("rank 1")))
        );
        assert_eq!(lines.last().unwrap()["healthy"], true);
    }
    let quick = folder.alone("doctor --quick").run();
    assert!(
        quick.exit_code() == Some(0)
            && quick.stdout.contains("healthy:")
            && !quick.stdout.contains("MB/s"),
        "{quick}"
    );
}

#[test]
fn an_unwritable_disk_is_named_and_ends_with_69() {
    let folder = Folder::new("doctor-disk");
    // No file may grow at all.
    let ended = folder
        .in_shell("ulimit -f 0; trap '' XFSZ", "doctor --out .")
        .run();
    assert_eq!(ended.exit_code(), Some(69), "{ended}");
    let bad = ended
        .stdout
        .lines()
        .find(|line| line.contains("BAD"))
        .unwrap_or_else(|| panic!("{ended}"));
    assert!(
        bad.contains("cannot write 64 MiB") && ended.causes()[0].contains("1 bad"),
        "{ended}"
    );
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        0,
        "what was tried is gone"
    );
}

#[test]
fn every_command_refuses_an_invalid_timeout() {
    let folder = Folder::new("timeouts");
    for command in [
        "doctor --quick",
        "--steps 1 --out OUT",
        "bench addmm",
        "eval --checkpoint x --data glyphs",
    ] {
        for value in ["-1", "0", "nan", "inf", "1e30"] {
            let ended = folder
                .alone(&format!("{command} --timeout-s {value}"))
                .run();
            let cause = ended.assert_fails(2);
            assert!(
                cause.contains("--timeout-s") && cause.contains("from 0.1 to"),
                "{command} {value}: {ended}"
            );
        }
    }
    // What stands in the environment is the environment's mistake.
    let ended = folder
        .alone("doctor --quick")
        .env("DDP_TIMEOUT_S", "soon")
        .run();
    assert!(
        ended
            .assert_fails(2)
            .contains("DDP_TIMEOUT_S in the environment:"),
        "{ended}"
    );
}

#[test]
fn machines_settings_in_the_environment_count_for_every_command() {
    let folder = Folder::new("environment");
    folder
        .alone(&format!("{QUICK} --model mlp"))
        .run()
        .assert_well();
    assert_eq!(
        folder.metrics_log().all("start")[0]["config"]["model"],
        "mlp"
    );
    let ended = folder.alone(&format!("{QUICK} --model transformer")).run();
    assert!(ended.assert_fails(2).contains("--model"), "{ended}");
    let eval = "eval --checkpoint out --data glyphs,rows=256,held-out=64";
    folder
        .alone(eval)
        .env("DDP_DEVICE", "cpu")
        .env("DDP_THREADS", "1")
        .run()
        .assert_well();
    let ended = folder.alone(eval).env("DDP_THREADS", "0").run();
    assert!(
        ended
            .assert_fails(2)
            .contains("DDP_THREADS in the environment: --threads 0: expected"),
        "{ended}"
    );
    // Ranks are started by flags: such a variable would be ignored, and is not.
    let ended = folder.alone(eval).env("DDP_RANKS", "2").run();
    let cause = ended.assert_fails(2);
    let said =
        "DDP_RANKS in the environment: only flags start ranks; help: write --ranks 2, or unset";
    assert!(cause.contains(said), "{ended}");
    let started = folder.started(2, eval).env("DDP_RANKS", "3").run();
    started.assert_well();
    let ended = folder.alone(eval).env("DDP_DEVICE", "gpu").run();
    assert!(
        ended
            .assert_fails(2)
            .contains("DDP_DEVICE in the environment: --device 'gpu': unknown device"),
        "{ended}"
    );
    folder
        .alone(&format!("{eval} --device cpu"))
        .env("DDP_DEVICE", "gpu")
        .run()
        .assert_well();
}

#[test]
fn settings_of_any_content_are_printed_and_read_back() {
    let folder = Folder::new("printed");
    let odd = "one\ntwo = 3 # \"'\u{1b}[31m";
    let first = folder
        .alone("--print-config --data rows.csv")
        .env("DDP_LABELS", odd)
        .run();
    assert!(!first.stdout.contains('\u{1b}'), "{first}");
    fs::write(folder.path().join("run.toml"), &first.stdout).unwrap();
    let again = folder.alone("--config run.toml --print-config").run();
    let without_origins = |text: &str| {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines
            .map(|line| line.rsplit_once("  # ").unwrap().0.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        without_origins(&again.stdout),
        without_origins(&first.stdout)
    );
    // A variable names the file as well, and asks for no training.
    let again = folder
        .alone("")
        .env("DDP_CONFIG", "run.toml")
        .env("DDP_PRINT_CONFIG", "true")
        .run();
    assert_eq!(
        without_origins(&again.stdout),
        without_origins(&first.stdout)
    );
    let ended = folder.alone(QUICK).env("DDP_DRY_RUN", "true").run();
    assert!(
        ended.exit_code() == Some(0) && ended.stdout.contains("nothing was trained"),
        "{ended}"
    );
    assert!(!folder.out().exists());
}

#[test]
fn a_report_replaces_nothing_but_a_report() {
    let folder = Folder::new("report-out");
    folder.alone(QUICK).run().assert_well();
    let table = folder.path().join("table.csv");
    fs::write(&table, "a,b\n1,2\n").unwrap();
    let ended = folder.alone("report OUT --out table.csv").run();
    let told = "--out table.csv: expected a new file or a page of this command";
    assert!(
        ended.exit_code() == Some(2) && ended.stderr.contains(told),
        "{ended}"
    );
    assert_eq!(fs::read(&table).unwrap(), b"a,b\n1,2\n");
    for _ in 0..2 {
        folder
            .alone("report OUT --out page.html")
            .run()
            .assert_well();
    }
}

#[test]
fn names_in_data_do_not_drive_the_terminal() {
    let folder = Folder::new("names");
    // Labels have one line; names of columns may have several.
    let forged = "sly\u{1b}[2J\rddp-train: all is well\u{202e}\u{9b}";
    let rows: String = (0..64)
        .map(|row| format!("{row},{},\"{}\"\n", row % 7, ["plain", forged][row % 2]))
        .collect();
    fs::write(
        folder.path().join("rows.csv"),
        format!("a,\"b\u{1b}[31m\nddp-train: well\",kind\n{rows}"),
    )
    .unwrap();
    let train = "--data rows.csv --labels kind --hidden 4 --epochs 1 --batch-size 16 --progress always --out OUT";
    let commands = [
        (train, 0),
        ("inspect out", 0),
        ("inspect out/checkpoints/step-00000004", 0),
        ("eval --checkpoint out --data rows.csv", 0),
        (
            "predict --checkpoint out --data rows.csv --out answers.csv",
            0,
        ),
        ("--data rows.csv --labels nowhere --dry-run --out other", 65),
        (
            "--data rows.csv --labels a --task classification --val-split 0.5 --normalize standard --dry-run --out other",
            -1,
        ),
        ("eval --checkpoint out --data rows.csv --labels b", -1),
    ];
    for (words, code) in commands {
        let ended = folder.alone(words).run();
        if code >= 0 {
            assert_eq!(ended.exit_code(), Some(code), "{ended}");
        }
        // The bar of a run may draw; a name may not.
        let text = format!("{}{}", ended.stdout, ended.stderr);
        for part in [
            "\u{1b}[2J",
            "\u{1b}[31m",
            "\u{202e}",
            "\u{9b}",
            "\rddp-train: all is well",
            "\nddp-train: well",
        ] {
            assert!(!text.contains(part), "{part:?} in {words}: {ended}");
        }
    }
    let ended = folder.alone("eval --checkpoint out --data rows.csv").run();
    assert!(
        ended
            .stdout
            .contains("sly\\u{1b}[2J\\rddp-train: all is well\\u{202e}\\u{9b}"),
        "{ended}"
    );
}

#[test]
fn a_view_that_a_signal_ends_leaves_the_terminal_as_it_was() {
    let folder = Folder::new("view");
    folder.alone(QUICK).run().assert_well();
    all_at_once(["TERM", "INT"], |signal| {
        let view = format!("{} watch {}", program(), folder.out().display());
        let shell = format!("timeout --foreground -k 20 -s {signal} 3 {view}; stty -a");
        let mut script = std::process::Command::new("script");
        script
            .args(["-qec", &shell, "/dev/null"])
            .env("TERM", "xterm");
        let ended = script.output().expect("Linux has script");
        let text = String::from_utf8_lossy(&ended.stdout);
        for part in ["\u{1b}[H\u{1b}[J", "step 8 of 8", " icanon"] {
            assert!(text.contains(part), "{part:?} after {signal}: {text}");
        }
    });
}

#[test]
fn predict_refuses_to_overwrite_its_input() {
    let folder = Folder::new("own-input");
    let rows: String = (0..64)
        .map(|row| format!("{row},{},{}\n", row % 7, row % 2))
        .collect();
    let rows = format!("a,b,kind\n{rows}");
    let file = folder.path().join("rows.csv");
    fs::write(&file, &rows).unwrap();
    std::os::unix::fs::symlink(&file, folder.path().join("link.csv")).unwrap();
    folder
        .alone("--data rows.csv --labels kind --hidden 4 --epochs 1 --out OUT")
        .run()
        .assert_well();
    for (data, out) in [
        ("rows.csv", "rows.csv"),
        ("rows.csv", "./out/../rows.csv"),
        ("*.csv", "rows.csv"),
        ("rows.csv", "link.csv"),
    ] {
        let ended = folder
            .alone(&format!(
                "predict --checkpoint out --data {data} --out {out} --overwrite"
            ))
            .run();
        assert!(
            ended.assert_fails(2).contains("which --data reads"),
            "{data} {out}: {ended}"
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), rows);
    }
}
