//! `ddp-train verify`: a run that lost a rank and was resumed is as it claims, elsewhere and on
//! other ranks; whatever is changed in it, in its data or its program is found and named.

mod hostile;
mod models;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::job::{Ended, Folder, all_at_once};
use crate::support::metrics_log::MetricsLog;

/// A run in files: their names, with what is in them.
type Files = Vec<(PathBuf, Vec<u8>)>;

/// A run of two ranks, of which one was lost, that was resumed by three.
struct Made {
    files: Files,
    /// The heads of its log while it was trained: before the resume, and at the end.
    heads: [String; 2],
}

/// Checkpoints 3, 6 and 9 are removed before the end.
const WORDS: &str = "--data data.csv --labels y --plain --hidden 6 --batch-size 24 --log-every 1 \
                     --checkpoint-every 3 --keep 2 --same-bits 4 --zero 1 --schedule constant \
                     --warmup-steps 0 --threads 1 --out run";

fn made() -> &'static Made {
    static MADE: OnceLock<Made> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = Folder::new("verify");
        let row = |row: usize| format!("{},{},c{}\n", row % 5, row % 7, row % 2);
        let rows: String = (0..96).map(row).collect();
        fs::write(folder.path().join("data.csv"), format!("a,b,y\n{rows}")).unwrap();
        let lost = folder.started(2, &format!("{WORDS} --steps 8 --min-ranks 1"));
        let lost = lost.env("DDP_TEST_FAULT", "0:forward:5:kill").run();
        assert_eq!(lost.exit_code(), Some(0), "{lost}");
        let first = head(&folder, "");
        let resumed = format!("{WORDS} --steps 12 --resume auto");
        folder.started(3, &resumed).run().assert_well();
        let log = MetricsLog::read(&folder.path().join("run"));
        assert_eq!(log.all("ranks").len(), 1, "a rank was lost");
        assert_eq!(log.all("cut").len(), 1, "{log:?}");
        Made {
            heads: [first, head(&folder, "")],
            files: files(folder.path(), Path::new("")),
        }
    })
}

/// The files in `folder`, by their names below it. Links are not followed.
fn files(folder: &Path, below: &Path) -> Files {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder.join(below)).unwrap() {
        let entry = entry.unwrap();
        let name = below.join(entry.file_name());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files(folder, &name));
        } else if kind.is_symlink() {
            let target = fs::read_link(entry.path()).unwrap();
            found.push((name, target.to_str().unwrap().into()));
        } else if kind.is_file() {
            found.push((name, fs::read(entry.path()).unwrap()));
        }
    }
    found
}

/// A copy in another place.
fn copy(files: &Files) -> Folder {
    let folder = Folder::new("verify");
    for (name, bytes) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    folder
}

/// The head that `inspect` prints.
#[track_caller]
fn head(folder: &Folder, words: &str) -> String {
    let ended = folder.alone(&format!("inspect run --json {words}")).run();
    let value: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended}"));
    value["head"].as_str().unwrap().into()
}

/// Verifies `run` with these words: the exit code, what was printed, and the verdict as JSON, which
/// is written to `there` alone.
#[track_caller]
fn verified(folder: &Folder, ranks: usize, words: &str) -> (Option<i32>, String, Value) {
    _ = fs::remove_dir_all(folder.path().join("there"));
    let before = files(folder.path(), Path::new(""));
    let words = format!("verify run --out there {words}");
    let ended = match ranks {
        1 => folder.alone(&words).run(),
        ranks => folder.started(ranks, &words).run(),
    };
    let mut after = files(folder.path(), Path::new(""));
    let verdict = after
        .iter()
        .position(|it| it.0 == Path::new("there/verdict.json"));
    let verdict = verdict.map_or(Value::Null, |at| {
        serde_json::from_slice(&after.remove(at).1).unwrap()
    });
    // Converted copies of tables are beside them.
    after.retain(|it| !it.0.starts_with(".ddp-cache"));
    let before: Files = before
        .into_iter()
        .filter(|it| !it.0.starts_with(".ddp-cache"))
        .collect();
    assert!(
        sorted(before) == sorted(after),
        "it writes nothing else: {ended}"
    );
    (ended.exit_code(), text_of(&ended), verdict)
}

fn text_of(ended: &Ended) -> String {
    format!("{}{}", ended.stdout, ended.causes().concat())
}

fn sorted(mut files: Files) -> Files {
    files.sort();
    files
}

/// Replaces text in a file, which must have it once.
#[track_caller]
fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert_eq!(
        text.matches(from).count(),
        1,
        "{from} in {}",
        path.display()
    );
    fs::write(path, text.replace(from, to)).unwrap();
}

/// Flips a bit near the end of a file of a checkpoint, and gives manifest and log its new hashes.
fn forge(run: &Path, step: u64, file: &str) {
    let folder = run.join(format!("checkpoints/step-{step:08}"));
    let hash = |path: &Path| blake3::hash(&fs::read(path).unwrap()).to_hex().to_string();
    let (path, manifest) = (folder.join(file), folder.join("manifest.json"));
    let before = [&path, &manifest].map(|path| hash(path));
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.len() - 2;
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();
    edit(&manifest, &before[0], &hash(&path));
    edit(&run.join("metrics.jsonl"), &before[1], &hash(&manifest));
}

#[test]
fn a_run_with_a_loss_and_a_resume_is_as_claimed_elsewhere_on_one_rank_and_on_three() {
    let made = made();
    let [first, last] = &made.heads;
    all_at_once([(1, first), (3, first), (3, last)], |(ranks, published)| {
        let folder = copy(&made.files);
        let words = format!("--data data.csv --head {published}");
        let (code, text, verdict) = verified(&folder, ranks, &words);
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(verdict["verdict"], "as claimed", "{text}");
        assert_eq!(
            (&verdict["steps"], &verdict["steps_compared"]),
            (&12.into(), &12.into())
        );
        assert_eq!(verdict["intervals"].as_array().unwrap().len(), 2, "{text}");
        assert_eq!(
            verdict["published_head"]["before_line"].is_null(),
            published == last
        );
        let log = fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
        assert_eq!(
            verdict["head"],
            blake3::hash(log.as_bytes()).to_hex().as_str()
        );
        assert_eq!(verdict["head"], **last);
        let early = log.split_inclusive('\n').take(4).collect::<String>();
        let early = blake3::hash(early.as_bytes()).to_hex();
        assert_eq!(head(&folder, "--lines 4"), early.as_str());
    });
}

#[test]
fn what_is_changed_is_found_and_named() {
    let made = made();
    type Change = fn(&Path);
    let cases: [(&str, Change, i32, &[&str]); 12] = [
        (
            "",
            |run| {
                let path = run.join("checkpoints/step-00000012/model.safetensors");
                let mut bytes = fs::read(&path).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(path, bytes).unwrap();
            },
            3,
            &[
                "the checkpoint of step 12 is not that of the log",
                "model.safetensors was changed",
            ],
        ),
        (
            "--from 9",
            |run| forge(run, 12, "model.safetensors"),
            3,
            &[
                "the checkpoint of step 12 differs first in ",
                ".bias: 1 of ",
            ],
        ),
        (
            "--from 9",
            |run| forge(run, 12, "optimizer-00000-of-00003.safetensors"),
            3,
            &[
                "the checkpoint of step 12 differs first in exp_avg",
                ": 1 of ",
                " computed",
            ],
        ),
        (
            "--from 9",
            |run| forge(run, 9, "optimizer-00000-of-00003.safetensors"),
            3,
            &[
                "the first difference is in the update of layer",
                "of step 10",
            ],
        ),
        (
            "--from 9",
            |run| {
                let path = run.join("metrics.jsonl");
                let text = fs::read_to_string(&path).unwrap();
                let start = text.find("{\"event\":\"step\",\"step\":11,").unwrap();
                let (before, line) = text.split_at(start);
                let line = line.replacen("\"loss\":0.", "\"loss\":0.1", 1);
                fs::write(path, format!("{before}{line}")).unwrap();
            },
            3,
            &[
                "the first difference is in the loss of step 11 (forward)",
                "a line of the log",
            ],
        ),
        (
            "--from 9",
            |run| {
                edit(
                    &run.join("metrics.jsonl"),
                    "\"step\":5,\"epoch\":2,",
                    "\"step\":5,\"epoch\":3,",
                )
            },
            3,
            &["the log was changed: line ", "another head than it names"],
        ),
        // In the line of the resume.
        (
            "--from 9",
            |run| resumed(run, "\"lr\":0.001,", "\"lr\":0.002,"),
            3,
            &[
                "the first difference is in the update of layer 0 of step 10",
                "the learning rate: 0.001 in the log, and 0.002",
            ],
        ),
        (
            "",
            |run| edit(&run.with_file_name("data.csv"), "0,0,c1\n", "0,1,c1\n"),
            3,
            &["the training data have the BLAKE3 ", " in the log"],
        ),
        (
            "--from 9",
            |run| resumed(run, "\"program_blake3\":\"", "\"program_blake3\":\"0"),
            4,
            &["another build of ddp-train ", "--other-program"],
        ),
        (
            "--from 9 --other-program",
            |run| resumed(run, "\"program_blake3\":\"", "\"program_blake3\":\"0"),
            0,
            &["this is another build of the program", "as claimed: "],
        ),
        (
            "--head 00000000000000000000000000000000000000000000000000000000000000aa",
            |_| (),
            3,
            &["the log never had the published head"],
        ),
        (
            "--from 9",
            |run| {
                edit(
                    &run.join("checkpoints/step-00000012/manifest.json"),
                    "\"step\": 12",
                    "\"step\": 13",
                )
            },
            3,
            &["the checkpoint of step 12 is not that of the log"],
        ),
    ];
    all_at_once(cases, |(words, change, code, expected)| {
        let folder = copy(&made.files);
        change(&folder.path().join("run"));
        let (got, text, verdict) = verified(&folder, 1, &format!("--data data.csv {words}"));
        assert_eq!(got, Some(code), "{text}");
        for part in expected {
            assert!(text.contains(part), "{part}: {text}");
        }
        let names = [
            (0, "as claimed"),
            (3, "not as claimed"),
            (4, "cannot be told here"),
        ];
        let (_, name) = names.into_iter().find(|it| it.0 == code).unwrap();
        assert_eq!(verdict["verdict"], name, "{verdict}");
    });
}

/// Changes the line of the resume.
fn resumed(run: &Path, from: &str, to: &str) {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let start = text.find("{\"event\":\"resume\"").unwrap();
    let (before, line) = text.split_at(start);
    fs::write(path, format!("{before}{}", line.replacen(from, to, 1))).unwrap();
}

/// Which are there follows from `--keep`; which are drawn, from the seed.
#[test]
fn intervals_are_drawn_by_a_public_seed_or_chosen_by_steps() {
    let folder = copy(&made().files);
    let intervals = |words: &str| {
        let (code, text, verdict) = verified(&folder, 1, &format!("--data data.csv {words}"));
        assert_eq!(code, Some(0), "{text}");
        let all = verdict["intervals"].as_array().unwrap().iter();
        let ends = all.map(|it| [&it["from"], &it["to"]].map(|step| step.as_u64().unwrap()));
        Vec::from_iter(ends)
    };
    assert_eq!(intervals("--from 10"), [[9, 12]]);
    assert_eq!(intervals("--from 1 --to 5"), [[0, 5]]);
    let drawn = intervals("--intervals 1 --seed public");
    assert!(drawn.len() == 1 && drawn == intervals("--intervals 1 --seed public"));
    assert_eq!(intervals("--intervals 9 --seed public"), intervals("--all"));
    // Who knows the text cannot choose what is drawn by adding lines.
    let (_, _, verdict) = verified(&folder, 1, "--data data.csv --from 10");
    let head = verdict["head"].as_str().unwrap();
    let draw = |seed: &str| intervals(&format!("--head {head} --intervals 1 --seed {seed}"));
    let before = ["a", "b", "c", "d"].map(draw);
    hostile::append(
        &folder.path().join("run"),
        "{\"event\":\"sample\",\"step\":12,\"texts\":[]}",
    );
    assert_eq!(["a", "b", "c", "d"].map(draw), before);
    let refused = folder.alone("verify run --intervals 1").run();
    let cause = refused.assert_fails(2);
    assert!(cause.contains("expected --seed with it"), "{cause}");
    let words = format!("--data data.csv --intervals 1 --seed public --head {head}");
    let drawn = intervals(&format!("--intervals 1 --seed public --head {head}"));
    let (code, text, verdict) = verified(&folder, 2, &words);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(verdict["seed"], "public");
    assert!(text.contains("drawn by 'public'"), "{text}");
    let here = &verdict["intervals"][0];
    assert_eq!(
        drawn,
        [[&here["from"], &here["to"]].map(|it| it.as_u64().unwrap())]
    );
}

/// A draw leaves out what cannot be repeated, and says so.
#[test]
fn a_draw_says_how_many_steps_it_could_not_draw() {
    let folder = copy(&made().files);
    // The interval that the resume is in, then has two settings.
    let run = folder.path().join("run");
    resumed(
        &run,
        "\"overridden\":[",
        "\"overridden\":[\"--lr 0.01 (was 0.001)\"",
    );
    let words = "--data data.csv --intervals 9 --seed public";
    let (code, text, verdict) = verified(&folder, 1, words);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(verdict["steps_of_run"], 12, "{text}");
    let cannot = verdict["steps_that_cannot_be_repeated"].as_u64().unwrap();
    assert!(
        cannot > 0 && verdict["steps"].as_u64().unwrap() + cannot == 12,
        "{text}"
    );
    let last = format!("; {cannot} of the 12 cannot be repeated here");
    assert!(text.contains(&last), "{last}: {text}");
}

#[test]
fn a_log_that_cannot_be_read_is_told_in_a_verdict_on_all_ranks() {
    let folder = copy(&made().files);
    let log = folder.path().join("run/metrics.jsonl");
    fs::write(&log, "nonsense\n").unwrap();
    let (code, text, verdict) = verified(&folder, 2, "");
    assert_eq!(code, Some(4), "{text}");
    assert_eq!(verdict["verdict"], "cannot be told here", "{text}");
    let why = verdict["why"][0].as_str().unwrap();
    assert!(
        why.contains("that are not events") && text.contains(why),
        "{text}"
    );
    fs::remove_file(&log).unwrap();
    let (code, text, verdict) = verified(&folder, 2, "");
    assert_eq!((code, verdict), (Some(74), Value::Null), "{text}");
}
