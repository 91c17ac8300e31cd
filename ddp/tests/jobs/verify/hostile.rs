//! A run folder of a stranger who means harm: nothing is written, read or taken because it says so.

use std::os::unix::fs::symlink;
use std::process::Command;

use super::*;

/// A run without a resume, so that its log can be changed and still be one that was not cut.
fn plain() -> &'static Files {
    static MADE: OnceLock<Files> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = Folder::new("verify-plain");
        let words = "--data synthetic:classification,rows=64,held-out=0,features=4,classes=3 \
                     --hidden 2 --batch-size 16 --steps 4 --checkpoint-every 2 --threads 1 --out run";
        folder.alone(words).run().assert_well();
        files(folder.path(), Path::new(""))
    })
}

/// What is changed in the settings of its first line.
fn claim(run: &Path, name: &str, value: Value) {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    let mut start: Value = serde_json::from_str(first).unwrap();
    start["config"][name] = value;
    fs::write(path, format!("{start}\n{rest}")).unwrap();
}

#[test]
fn settings_that_name_files_are_not_followed() {
    // The folder is compared before and after, and `secret` must not show up in any message.
    let cases: [(&str, Value, i32, &str); 12] = [
        (
            "out",
            "elsewhere".into(),
            0,
            "as claimed: 4 steps of 4 repeated",
        ),
        (
            "cache-dir",
            "elsewhere".into(),
            0,
            "as claimed: 4 steps of 4 repeated",
        ),
        (
            "tensorboard",
            true.into(),
            0,
            "as claimed: 4 steps of 4 repeated",
        ),
        (
            "trace",
            "1..2".into(),
            0,
            "as claimed: 4 steps of 4 repeated",
        ),
        (
            "threads",
            100_000.into(),
            0,
            "as claimed: 4 steps of 4 repeated",
        ),
        (
            "timeout-s",
            1e-9.into(),
            0,
            "as claimed: 4 steps of 4 repeated",
        ),
        (
            "data",
            "secret.csv".into(),
            2,
            "names 1 path, and nothing is read only because a log says so",
        ),
        (
            "val-data",
            "secret.csv".into(),
            2,
            "names 1 path, and nothing is read only because a log says so",
        ),
        (
            "init-from",
            "secret.csv".into(),
            2,
            "names 1 path, and nothing is read only because a log says so",
        ),
        (
            "tokenizer",
            ".".into(),
            2,
            "names 1 path, and nothing is read only because a log says so",
        ),
        (
            "data",
            "synthetic:classification,rows=1000000000000000000,features=4".into(),
            2,
            "rows",
        ),
        ("hidden", vec![16_777_216; 3].into(), 4, "memory"),
    ];
    all_at_once(cases, |(name, value, expected, part)| {
        let folder = copy(plain());
        fs::write(folder.path().join("secret.csv"), "a,b\nsecret,words\n").unwrap();
        let run = folder.path().join("run");
        claim(&run, name, value);
        // Checkpoints name the settings, too: they would be those of another run.
        fs::remove_dir_all(run.join("checkpoints")).unwrap();
        let (code, text, _) = verified(&folder, 1, "");
        assert_eq!(code, Some(expected), "{name}: {text}");
        assert!(text.contains(part), "{name}: {text}");
        assert!(!text.contains("words"), "{name}: {text}");
    });
}

#[test]
fn links_missing_files_and_absurd_logs_end_in_a_sentence() {
    type Change = fn(&Path);
    let cases: [(Change, &[i32], &str); 14] = [
        (
            |run| {
                fs::remove_file(run.join("metrics.jsonl")).unwrap();
                symlink("/dev/zero", run.join("metrics.jsonl")).unwrap();
            },
            &[4],
            "symbolic link",
        ),
        (
            |run| {
                fs::rename(run.join("checkpoints"), run.with_file_name("elsewhere")).unwrap();
                symlink("../elsewhere", run.join("checkpoints")).unwrap();
            },
            &[4],
            "symbolic link",
        ),
        (
            |run| {
                let model = run.join("checkpoints/step-00000004/model.safetensors");
                fs::remove_file(&model).unwrap();
                symlink("/dev/zero", model).unwrap();
            },
            &[4],
            "symbolic link",
        ),
        (
            |run| fs::remove_file(run.join("metrics.jsonl")).unwrap(),
            &[74],
            "metrics.jsonl",
        ),
        (
            |run| fs::remove_file(run.join("checkpoints/step-00000004/state.json")).unwrap(),
            &[3],
            "it lacks state.json",
        ),
        // All that was kept is gone: the seed and the log are left.
        (
            |run| fs::remove_dir_all(run.join("checkpoints")).unwrap(),
            &[0],
            "as claimed",
        ),
        (
            |run| append(run, "{\"event\":\"step\",\"step\":18446744073709551615}"),
            &[4],
            "expected at most",
        ),
        (
            |run| {
                append(
                    run,
                    "{\"event\":\"cut\",\"lines\":18446744073709551615,\"head\":\"\",\"removed\":18446744073709551615}",
                )
            },
            &[3],
            "they do not follow it",
        ),
        (|run| append(run, "nonsense"), &[4], "is not an event"),
        // No process writes into a pipe.
        (
            |run| pipe(&run.join("metrics.jsonl")),
            &[74],
            "a pipe (FIFO)",
        ),
        (
            |run| pipe(&run.join("checkpoints/step-00000004/model.safetensors")),
            &[3],
            "model.safetensors is not a file",
        ),
        (
            |run| append(run, &"\n".repeat(5 << 20)),
            &[4],
            "expected at most 4194304 lines",
        ),
        (
            |run| {
                let line = |at: usize| format!("{{\"event\":\"eval\",\"step\":1,\"n{at}\":1}}\n");
                append(run, (0..100_000).map(line).collect::<String>().trim_end());
            },
            &[0],
            "as claimed",
        ),
        (
            |run| {
                change_lines(run, |line| {
                    if line["event"] == "step" {
                        line.as_object_mut().unwrap().remove("digests");
                    }
                })
            },
            &[4],
            "the log has no digests of step ",
        ),
    ];
    all_at_once(cases, |(change, codes, expected)| {
        let folder = copy(plain());
        change(&folder.path().join("run"));
        let (code, text, _) = verified(&folder, 1, "");
        assert!(
            codes.contains(&code.unwrap_or(-1)),
            "{expected}: {code:?} {text}"
        );
        assert!(text.contains(expected), "{expected}: {text}");
    });
}

pub(super) fn append(run: &Path, line: &str) {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, format!("{text}{line}\n")).unwrap();
}

fn pipe(path: &Path) {
    fs::remove_file(path).unwrap();
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

fn change_lines(run: &Path, change: impl Fn(&mut Value)) {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let changed = text.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        change(&mut line);
        format!("{line}\n")
    });
    fs::write(path, changed.collect::<String>()).unwrap();
}

/// The log of another run, or of other settings or data, does not pass by a published head.
#[test]
fn what_follows_a_published_head_is_not_claimed_by_it() {
    type Forge = fn(&str) -> String;
    let cases: [(Forge, i32, &str); 5] = [
        (
            |log| {
                let removed = log.lines().enumerate().map(|(at, line)| {
                    format!(
                        "{{\"event\":\"removed\",\"line\":{},\"was\":{line}}}\n",
                        at + 1
                    )
                });
                let (lines, head) = (log.lines().count(), blake3::hash(log.as_bytes()).to_hex());
                let cut = format!(
                    "{{\"event\":\"cut\",\"lines\":{lines},\"head\":\"{head}\",\"removed\":{lines}}}\n"
                );
                format!("{cut}{}{log}", removed.collect::<String>())
            },
            3,
            "the first line, with the settings, never is",
        ),
        (
            |log| format!("{log}{log}"),
            3,
            "is a start, which only line 1 is",
        ),
        (|log| later(log, "lr", 0.5.into()), 4, "lr 0.5 (was "),
        (
            |log| later(log, "data_blake3", "00".into()),
            4,
            "changes the training data; help: give a head that was published after it",
        ),
        // It is as it was.
        (|log| later(log, "time_unix_s", 1.into()), 0, "as claimed: "),
    ];
    let log = plain()
        .iter()
        .find(|it| it.0 == Path::new("run/metrics.jsonl"));
    let log = str::from_utf8(&log.unwrap().1).unwrap();
    let published = blake3::hash(log.as_bytes()).to_hex();
    all_at_once(cases, |(forge, expected, part)| {
        let folder = copy(plain());
        fs::write(folder.path().join("run/metrics.jsonl"), forge(log)).unwrap();
        let (code, text, _) = verified(&folder, 1, &format!("--head {published}"));
        assert_eq!(code, Some(expected), "{part}: {text}");
        assert!(text.contains(part), "{part}: {text}");
    });
}

/// The log with a resume after step 0 that changes this, a setting or a field of its line.
fn later(log: &str, name: &str, value: Value) -> String {
    let mut resume: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    resume["event"] = "resume".into();
    resume["step"] = 0.into();
    let fields = resume["config"].as_object_mut().unwrap();
    if fields.contains_key(name) {
        fields.insert(name.into(), value);
    } else {
        resume[name] = value;
    }
    format!("{log}{resume}\n")
}
