//! What people type: help, the version, flags that are wrong, and folders that are taken.

use crate::support::job::{Ended, Folder, QUICK};

/// Invalid flags, and what the message must name: one of each kind that only the program finds. The
/// others are in src/cli/tests/refusals.rs.
const WRONG: &[(&str, &[&str])] = &[
    (
        "--batch-size x",
        &["'x'", "--batch-size", "expected a whole number"],
    ),
    ("--lr -1", &["--lr -1"]),
    ("--schedule step", &["'step'", "cosine"]),
    ("--data glyphs,rows=x", &["rows"]),
    (
        "--class-weights 1,2",
        &["--class-weights 1,2: expected 10 weights", "got 2"],
    ),
    (
        "--data synthetic:regression,rows=64 --label-smoothing 0.1",
        &["--label-smoothing 0.1", "classes"],
    ),
    ("--data glyphs,rows=8 --drop-last", &["--drop-last"]),
    (
        "--group 7.*:lr=1",
        &[
            "the group 7.*: expected a name or pattern",
            "0.weight, 0.bias, 2.weight",
        ],
    ),
    (
        "--optimizer muon --hidden none",
        &["--optimizer muon: expected a model with hidden layers"],
    ),
    ("--freeze 7", &["--freeze 7", "0.weight, 0.bias, 2.weight"]),
    (
        "--device cuda",
        &[
            "--device cuda: expected a device that can be used here, but",
            "--device cpu",
        ],
    ),
    (
        "--device cuda:9",
        &["--device cuda:9: expected a device that can be used here"],
    ),
    ("--graph on", &["--graph on: expected --device cuda"]),
    (
        "--devices-per-rank 2",
        &[
            "--devices-per-rank 2: expected --device cuda",
            "this run is on the CPU",
        ],
    ),
    (
        "--device cuda --devices-per-rank 2",
        &["--device cuda: expected a device that can be used here, but"],
    ),
    (
        "--data-on-device on",
        &["--data-on-device on: expected --device cuda"],
    ),
    ("bench mlp --device cuda", &["--device cuda: expected"]),
    ("bench mlp --graph on", &["--graph on: expected"]),
    ("--no-such-flag", &["--no-such-flag"]),
    ("tarin", &["'tarin'", "'train'"]),
    ("bench nothing", &["'nothing'", "ddp-train bench"]),
];

#[track_caller]
fn assert_wrong(ended: &Ended, named: &[&str]) {
    let cause = ended.assert_fails(2);
    assert!(
        !cause.contains("error:") && !ended.stderr.contains("ddp-train: ddp-train:"),
        "{ended}"
    );
    let missing: Vec<_> = named
        .iter()
        .filter(|part| !ended.stderr.contains(**part))
        .collect();
    assert!(missing.is_empty(), "{missing:?} is not in: {ended}");
}

#[test]
fn wrong_flags_end_with_2_and_are_named_once() {
    for (words, named) in WRONG {
        let folder = Folder::new("wrong");
        assert_wrong(&folder.alone(words).run(), named);
        assert!(folder.tree().is_empty(), "nothing was begun: {words}");
    }
}

#[test]
fn missing_hardware_is_refused_by_all_ranks_and_reported_once() {
    for (words, named) in [
        (
            "--device cuda",
            &["--device cuda: expected", "--device cpu"][..],
        ),
        (
            "--devices-per-rank 2",
            &["--devices-per-rank 2: expected --device cuda"],
        ),
    ] {
        let folder = Folder::new("absent");
        assert_wrong(&folder.together(words).run(), named);
        assert!(folder.tree().is_empty(), "nothing was begun: {words}");
    }
}

#[test]
fn a_named_gpu_serves_one_rank() {
    let folder = Folder::new("named");
    let ended = folder.ranks(2, "--device cuda:0").run();
    assert_wrong(
        &ended,
        &[
            "--device cuda:0: expected --device cuda for 2 ranks",
            "--share-gpus",
        ],
    );
    // With sharing it depends on whether there is such a GPU.
    let ended = folder.ranks(2, "--device cuda:0 --share-gpus").run();
    assert_wrong(
        &ended,
        &["--device cuda:0: expected GPUs that all 2 ranks can use, but on every rank: "],
    );
}

#[test]
fn flags_may_be_given_once() {
    let ended = Folder::new("twice").alone("--lr 1 --lr 2").run();
    assert_wrong(&ended, &["--lr", "multiple times"]);
}

#[test]
fn help_and_version_are_printed_once_and_end_well() {
    for (words, first, parts) in [
        (
            "--help",
            "Trains a model",
            &["--batch-size <ROWS>", "Exit codes: 0 done"][..],
        ),
        (
            "train -h",
            "Train; the default command",
            &["--batch-size <ROWS>"],
        ),
        ("bench mlp --help", "Training steps", &["--layers <WIDTHS>"]),
        (
            "--version",
            concat!("ddp-train ", env!("CARGO_PKG_VERSION"), "\n"),
            &[],
        ),
    ] {
        let folder = Folder::new("help");
        for ended in [folder.alone(words).run(), folder.together(words).run()] {
            ended.assert_well();
            assert!(
                ended.stdout.starts_with(first) && ended.stdout.matches(first).count() == 1,
                "{ended}"
            );
            assert!(
                parts
                    .iter()
                    .all(|part| ended.stdout.matches(part).count() == 1),
                "{ended}"
            );
            assert_eq!(ended.stderr, "", "{ended}");
        }
        assert!(folder.tree().is_empty());
    }
}

#[test]
fn what_cannot_be_printed_is_an_error() {
    for words in ["--help", "bench allreduce --seconds 0.05 --mb 0.01"] {
        let ended = Folder::new("full").in_shell("exec >/dev/full", words).run();
        assert!(
            ended.assert_fails(74).contains("standard output"),
            "{ended}"
        );
    }
}

#[test]
fn a_reader_of_help_that_is_gone_is_no_error() {
    let folder = Folder::new("gone");
    folder.alone(QUICK).run().assert_well();
    let texts = "a text\n".repeat(99);
    std::fs::write(folder.path().join("texts.txt"), texts).unwrap();
    for words in [
        "--help",
        "completions zsh",
        "inspect OUT",
        "inspect OUT --json",
        "watch OUT",
        "report OUT",
        "eval --checkpoint OUT --data glyphs,rows=256,held-out=64 --json",
        "--data glyphs,rows=256,held-out=64 --hidden 16 --steps 1 --out new --dry-run",
        "tokenize texts.txt --tokenizer bytes --out tokens",
    ] {
        let before = "rm -f pipe; mkfifo pipe; : <pipe & exec >pipe; wait";
        let ended = folder.in_shell(before, words).run();
        ended.assert_well();
        assert!(!ended.stderr.contains("pipe"), "{words}: {ended}");
    }
}

#[test]
fn a_result_is_complete_although_its_summary_cannot_be_printed() {
    let folder = Folder::new("full-summary");
    folder.alone(QUICK).run().assert_well();
    std::fs::write(folder.path().join("texts.txt"), "a text").unwrap();
    for (words, result) in [
        (
            "tokenize texts.txt --tokenizer bytes --out tokens",
            "tokens/tokens-000000.bin",
        ),
        ("report OUT --out page.html", "page.html"),
    ] {
        let ended = folder.in_shell("exec >/dev/full", words).run();
        ended.assert_well();
        assert!(folder.path().join(result).exists(), "{ended}");
        let warned = "its summary could not be printed: cannot write to standard output";
        assert!(ended.stderr.contains(warned), "{ended}");
    }
    let ended = folder.in_shell("exec >/dev/full", "inspect OUT").run();
    ended.assert_fails(74);
}

/// A second run in the first one's folder is refused, names a free folder, and changes nothing.
fn a_second_run_is_refused(second: impl Fn(&Folder) -> Ended) {
    let folder = Folder::new("taken");
    folder.alone(QUICK).run().assert_well();
    for free in ["out-2", "out-3"] {
        let before = folder.tree();
        let ended = second(&folder);
        let cause = ended.assert_fails(2);
        let named = format!("as in --out {}, or", folder.path().join(free).display());
        assert!(
            cause.contains("it holds a run already") && cause.contains(&named),
            "{ended}"
        );
        assert_eq!(folder.tree(), before, "{ended}");
        std::fs::create_dir(folder.path().join(free)).unwrap();
    }
}

#[test]
fn a_folder_with_a_run_is_left_as_it_is() {
    a_second_run_is_refused(|folder| folder.alone(&format!("{QUICK} --seed 1")).run());
}

#[test]
fn a_folder_with_a_model_alone_is_left_as_it_is() {
    let folder = Folder::new("model");
    folder.alone(QUICK).run().assert_well();
    std::fs::remove_file(folder.out().join("metrics.jsonl")).unwrap();
    let before = folder.tree();
    assert!(
        folder
            .alone(QUICK)
            .run()
            .assert_fails(2)
            .contains("it holds a run already")
    );
    assert_eq!(folder.tree(), before);
}

#[test]
fn foreign_settings_are_left_unchanged() {
    let folder = Folder::new("settings");
    std::fs::create_dir(folder.out()).unwrap();
    std::fs::write(folder.out().join("config.toml"), "theirs = true\n").unwrap();
    let ended = folder.alone(QUICK).run();
    assert!(ended.assert_fails(2).contains("config.toml"), "{ended}");
    assert_eq!(
        std::fs::read(folder.out().join("config.toml")).unwrap(),
        b"theirs = true\n"
    );
}

#[test]
fn a_run_that_failed_before_it_began_does_not_take_the_folder() {
    let folder = Folder::new("again");
    folder
        .alone(&format!("{QUICK} --class-weights 1,2"))
        .run()
        .assert_fails(2);
    folder.alone(QUICK).run().assert_well();
}

mod of_ranks {
    use super::*;
    use crate::support::job::all_at_once;

    #[test]
    fn wrong_flags_are_named_once_by_all_ranks_together() {
        // What is found while reading, while checking, and over the data.
        all_at_once(
            [
                "--batch-size x",
                "--lr -1",
                "--class-weights 1,2",
                "--freeze 7",
            ],
            |words| {
                let named = WRONG
                    .iter()
                    .find(|(wrong, _)| *wrong == words)
                    .expect("it is one of them")
                    .1;
                let folder = Folder::new("wrong");
                assert_wrong(&folder.ranks(3, words).run(), named);
                assert!(folder.tree().is_empty(), "nothing was begun: {words}");
            },
        );
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn one_rank_with_wrong_flags_ends_all() {
        let folder = Folder::new("one");
        let ended = folder
            .each(&[(1, QUICK), (1, &format!("{QUICK} --lr fast"))])
            .run();
        assert_wrong(&ended, &["ddp-train: rank 1 on ", "'fast'"]);
        assert!(folder.tree().is_empty());
    }

    #[cfg(feature = "mpi")]
    #[test]
    fn ranks_with_different_commands_are_told_so() {
        let dry_run = format!("{QUICK} --dry-run");
        let print = "print a text, as for --help or --print-config";
        all_at_once(
            [
                (QUICK, "--help", ["train", print]),
                ("--print-config", QUICK, [print, "train"]),
                (QUICK, &dry_run, ["train", "--dry-run"]),
            ],
            |(first, second, [ours, theirs])| {
                let folder = Folder::new("commands");
                let ended = folder.each(&[(1, first), (1, second)]).run();
                let named = format!(
                    "ranks disagree on the command: rank 1 has {theirs}, rank 0 has {ours}"
                );
                assert!(ended.assert_fails(78).contains(&named), "{ended}");
                assert!(folder.tree().is_empty(), "{ended}");
            },
        );
    }

    #[test]
    fn a_folder_with_a_run_is_refused_once() {
        a_second_run_is_refused(|folder| folder.ranks(2, QUICK).run());
    }
}
