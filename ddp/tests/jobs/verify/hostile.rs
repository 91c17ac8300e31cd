//! A run folder of a stranger who means harm: nothing is written, read or taken because it says so.

use std::os::unix::fs::symlink;

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
    let cases: [(&str, Value, i32); 12] = [
        ("out", "elsewhere".into(), 0),
        ("cache-dir", "elsewhere".into(), 0),
        ("tensorboard", true.into(), 0),
        ("trace", "1..2".into(), 0),
        ("threads", 100_000.into(), 0),
        ("timeout-s", 1e-9.into(), 0),
        ("data", "secret.csv".into(), 2),
        ("val-data", "secret.csv".into(), 2),
        ("init-from", "secret.csv".into(), 2),
        ("tokenizer", ".".into(), 2),
        (
            "data",
            "synthetic:classification,rows=1000000000000000000,features=4".into(),
            2,
        ),
        ("hidden", vec![16_777_216; 3].into(), 4),
    ];
    all_at_once(cases, |(name, value, expected)| {
        let folder = copy(plain());
        fs::write(folder.path().join("secret.csv"), "a,b\nsecret,words\n").unwrap();
        let run = folder.path().join("run");
        claim(&run, name, value);
        if name == "hidden" {
            // They are of another model.
            fs::remove_dir_all(run.join("checkpoints")).unwrap();
        }
        let (code, text, _) = verified(&folder, 1, "");
        // Checkpoints name the settings, too: they are then not those of the log.
        let is_refused = expected == 0 && code == Some(3) && text.contains("of another run");
        assert!(code == Some(expected) || is_refused, "{name}: {text}");
        assert!(!text.contains("words"), "{name}: {text}");
    });
}

#[test]
fn links_missing_files_and_absurd_logs_end_in_a_sentence() {
    type Change = fn(&Path);
    let cases: [(Change, &[i32], &str); 9] = [
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

fn append(run: &Path, line: &str) {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, format!("{text}{line}\n")).unwrap();
}
