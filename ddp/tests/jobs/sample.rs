//! `--sample`: a run writes texts that the model generates, and the trained model is bit-identical
//! to one without.

use std::fs;

use serde_json::Value;

use crate::support::job::{Folder, all_at_once};
use crate::support::metrics_log::model_bytes;

const TRAIN: &str = "--model gpt,layers=1,heads=2,width=16,context=16 --batch-size 8 --lr 0.01 \
                     --schedule constant --warmup-steps 0 --threads 1 --seed 5 --eval-every 3 \
                     --checkpoint-every 3 --out OUT";

fn with_text() -> Folder {
    let folder = Folder::new("sample");
    let text = "To be or not to be. ".repeat(60);
    fs::write(folder.path().join("t.txt"), text).unwrap();
    folder
}

/// Runs with these flags, one after the other in one folder.
fn trained(ranks: usize, runs: &[&str]) -> Folder {
    let folder = with_text();
    for flags in runs {
        let words = format!("{TRAIN} --data t.txt {flags}");
        let job = match ranks {
            1 => folder.alone(&words),
            _ => folder.together(&words),
        };
        job.run().assert_well();
    }
    folder
}

fn texts(folder: &Folder) -> Vec<Value> {
    folder
        .metrics_log()
        .all("sample")
        .into_iter()
        .cloned()
        .collect()
}

#[test]
fn a_run_writes_what_generate_would_and_trains_the_same_bits() {
    for (ranks, flags) in [(1, "--steps 6"), (2, "--steps 6 --zero 1 --val-split 0.2")] {
        let plain = trained(ranks, &[flags]);
        let folder = trained(ranks, &[&format!("{flags} --sample To<b>")]);
        let bytes = |folder: &Folder| model_bytes(&folder.out(), 6);
        assert!(bytes(&folder) == bytes(&plain), "{ranks} ranks");
        let (all, page) = (texts(&folder), folder.out().join("report.html"));
        let page = fs::read_to_string(page).unwrap();
        assert_eq!(all.len(), 2);
        for (event, step) in all.iter().zip([3, 6]) {
            assert_eq!(event["step"], step);
            assert_eq!(event["prompt"], "To<b>");
            let words = format!(
                "generate --checkpoint OUT/checkpoints/step-0000000{step} --prompt To<b> \
                 --max-tokens 64 --seed 5"
            );
            let made = folder.alone(&words).run();
            let text = made.stdout.strip_suffix('\n').unwrap();
            assert_eq!(event["text"], text, "{ranks} ranks, step {step}");
            let shown =
                format!("<h3>After step {step}</h3><p class=\"message\"><b>To&lt;b&gt;</b>");
            assert!(page.contains(&shown), "{page}");
        }
        assert!(texts(&plain).is_empty());
    }
}

#[test]
fn a_resumed_run_writes_the_same_texts_and_may_have_another_prompt() {
    let all = texts(&trained(1, &["--steps 6 --sample To"]));
    let resumed = [
        "--steps 3 --sample To",
        "--steps 6 --sample To --resume auto",
    ];
    assert_eq!(texts(&trained(1, &resumed)), all);
    let other = [
        "--steps 3 --sample To",
        "--steps 6 --sample not --resume auto",
    ];
    let other = texts(&trained(1, &other));
    assert_eq!(
        (&other[0], &other[1]["prompt"]),
        (&all[0], &Value::from("not"))
    );
}

#[test]
fn what_makes_no_text_is_refused_before_training() {
    let folder = with_text();
    fs::write(folder.path().join("t.bin"), [1, 0].repeat(200)).unwrap();
    let cases = [
        (
            "--data glyphs,rows=60 --out OUT --sample a".to_string(),
            "--sample: expected a model of the family gpt, got mlp",
        ),
        (
            format!("{TRAIN} --data tokens:t.bin,vocabulary=9 --sample a"),
            "--sample: expected tokens of bytes or with a tokenizer",
        ),
        (
            format!("{TRAIN} --data t.txt --sample {}", "a".repeat(17)),
            "--sample: prompt: expected at most 16 tokens, the model's context, got 17",
        ),
    ];
    all_at_once(cases, |(flags, part)| {
        let ended = folder.alone(&flags).run();
        assert_eq!(ended.exit_code(), Some(2), "{flags}: {ended}");
        assert!(ended.stderr.contains(part), "{flags}: {ended}");
    });
    assert!(!folder.out().exists());
}
