//! Checkpoints and runs of earlier versions.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::reading::forge;
use crate::resuming::saved;
use crate::support::job::Folder;
use crate::support::metrics_log::number;
use crate::using::trained;

/// `tests/golden/checkpoint-0.5` was written by ddp-train 0.5.0.
#[test]
fn a_checkpoint_of_version_0_5_is_resumed_and_used() {
    let folder = Folder::new("older-version");
    let checkpoint = folder.checkpoint(4);
    std::fs::create_dir_all(&checkpoint).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/checkpoint-0.5");
    for entry in std::fs::read_dir(golden).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), checkpoint.join(entry.file_name())).unwrap();
    }
    let data = "--data glyphs,rows=64,held-out=16";
    let eval = folder.alone(&format!("eval --checkpoint OUT {data}")).run();
    eval.assert_well();
    let flags = "--hidden 1 --batch-size 16 --schedule constant --warmup-steps 0 --out OUT";
    let ended = folder
        .alone(&format!(
            "{data} {flags} --steps 6 --resume auto --device cpu"
        ))
        .run();
    ended.assert_well();
    assert_eq!(saved(&folder), [4, 6], "{ended}");
}

/// Each folder `tests/golden/run-V` is a run that version V has written (CONTRIBUTING.md).
#[test]
fn runs_of_earlier_versions_are_used_and_resumed() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
    let entries = std::fs::read_dir(golden)
        .unwrap()
        .map(|it| it.unwrap().path());
    let is_run = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("run-")
    };
    let runs: Vec<PathBuf> = entries.filter(is_run).collect();
    assert!(!runs.is_empty());
    for run in runs {
        let folder = Folder::new("earlier");
        copy_all(&run, &folder.out());
        let config = std::fs::read_to_string(run.join("config.toml")).unwrap();
        let data = config.lines().find_map(|line| line.strip_prefix("data = "));
        let data = data.unwrap().trim_matches('"');
        let eval = folder
            .alone(&format!("eval --checkpoint out --data {data} --json"))
            .run();
        eval.assert_well();
        let found: Value = serde_json::from_str(&eval.stdout).unwrap();
        let log = folder.metrics_log();
        let last = *log.all("eval").last().unwrap();
        for figure in ["loss", "accuracy"] {
            let [found, last] = [number(&found, figure), number(last, figure)];
            assert_eq!(
                found.to_bits(),
                last.to_bits(),
                "{}: {figure}",
                run.display()
            );
        }
        let steps = number(log.end().unwrap(), "steps") as u64;
        for words in [
            "inspect out",
            "report out",
            &format!("resume out --steps {}", steps + 2),
        ] {
            folder.alone(words).run().assert_well();
        }
        assert_eq!(saved(&folder).last(), Some(&(steps + 2)));
    }
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_all(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// It was refused with a list of all settings.
#[test]
fn a_checkpoint_with_a_setting_of_another_version_says_which_and_what_to_do() {
    let folder =
        trained("--data glyphs,rows=64,held-out=16 --hidden 1 --batch-size 16 --steps 2 --out OUT");
    let checkpoint = folder.checkpoint(2);
    let whole = || std::fs::read(checkpoint.join("state.json")).unwrap();
    forge(&checkpoint, &whole(), "/config/products", &"first".into());
    let manifest = std::fs::read_to_string(checkpoint.join("manifest.json")).unwrap();
    let program = format!("\"program\": \"ddp-train {}\"", env!("CARGO_PKG_VERSION"));
    assert!(manifest.contains(&program), "{manifest}");
    forge(&checkpoint, &whole(), "/program", &"ddp-train 0.7.0".into());
    for words in [
        "eval --checkpoint OUT --data glyphs,rows=64,held-out=16",
        "resume out --steps 4",
    ] {
        let ended = folder.alone(words).run();
        let told = "ddp-train 0.7.0 wrote it, with the setting \"products\", which this program does not know; help: \
                    use that program, or start a new run from its model.safetensors (--init-from)";
        assert!(ended.assert_fails(65).contains(told), "{ended}");
    }
}
