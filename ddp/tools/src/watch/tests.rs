//! The view of metrics logs that grow, are truncated or are damaged.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use super::*;
use crate::files::testing::Scratch;
use crate::metrics_log::EVENTS_FILE;

fn start() -> Value {
    json!({"event": "start", "config": {}, "devices": ["cuda:0 NVIDIA H200 on a", "cuda:0 NVIDIA H200 on b"],
           "world": {"ranks": 2}, "data": "d", "steps": 40})
}

fn step(number: u64) -> Value {
    json!({"event": "step", "step": number, "loss": 4.0 / number as f64, "accuracy": 0.5, "lr": 0.001, "samples_per_s": 1234.5,
           "step_ms": 10.0, "data_ms": 1.0, "save_ms": 0.0, "device_peak_mb": 2048.0})
}

fn add(folder: &Path, lines: &[Value]) {
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join(EVENTS_FILE))
        .unwrap();
    for line in lines {
        writeln!(file, "{line}").unwrap();
    }
}

/// The view as text.
fn text(followed: &Followed) -> String {
    summary::lines(followed).join("\n")
}

#[test]
fn the_view_shows_curves_rates_ranks_memory_and_events_and_follows_the_log() {
    let scratch = Scratch::new();
    add(scratch.path(), &[start(), step(1), step(2)]);
    let mut followed = open(scratch.path()).unwrap();
    let text = self::text(&followed);
    for part in [
        "no end yet",
        "step 2 of 40",
        "about 0.38 s left",
        "Loss, training  4.000 █▁ 2.000",
        "Accuracy, training  0.5000 ▁▁ 0.5000",
        "1,234",
        "Ranks: 2",
        "2 × NVIDIA H200",
        "2.05 GB",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let eval = json!({"event": "eval", "step": 20, "loss": 0.25, "accuracy": 0.875});
    let end =
        json!({"event": "end", "reason": "done", "exit_code": 0, "steps": 40, "seconds": 1.0});
    add(
        scratch.path(),
        &[
            step(20),
            eval,
            json!({"event": "checkpoint", "step": 20}),
            step(40),
            end,
        ],
    );
    followed.refresh();
    let text = self::text(&followed);
    for part in [
        ": done",
        "step 40 of 40",
        "step 20: held-out loss 0.25",
        "accuracy 87.50%",
        "step 20: checkpoint saved",
        "step 40: done",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_log_that_a_resumed_run_has_cut_is_read_again() {
    let scratch = Scratch::new();
    add(scratch.path(), &[start(), step(1), step(2), step(3)]);
    let mut followed = open(scratch.path()).unwrap();
    fs::remove_file(scratch.path().join(EVENTS_FILE)).unwrap();
    let resume = json!({"event": "resume", "step": 1, "ranks": 3});
    add(
        scratch.path(),
        &[start(), step(1), resume, step(2), step(3), step(4), step(5)],
    );
    followed.refresh();
    assert_eq!(followed.run.steps.steps, [1, 2, 3, 4, 5]);
    assert!(
        summary::lines(&followed)
            .join("\n")
            .contains("step 1: resumed on 3 ranks")
    );
}

#[test]
fn ranks_that_were_lost_and_came_are_listed_and_counted() {
    let scratch = Scratch::new();
    let change = |step: u64, ranks: u64, lost: Value, joined: Value| json!({"event": "ranks", "time_unix_s": 1.0, "step": step, "generation": 2, "ranks": ranks, "lost": lost, "joined": joined, "seconds": 0.1});
    let lost = json!([{"rank": 1, "why": "killed by signal 9"}]);
    // Of a job with --min-ranks 2 it said that one rank continues, and the job ended.
    let mut few = change(4, 1, lost.clone(), json!([]));
    few["min_ranks"] = json!(2);
    let lines = [
        start(),
        step(1),
        change(1, 1, lost, json!([])),
        step(2),
        change(2, 2, json!([]), json!([1])),
        step(3),
        change(3, 3, json!([]), json!([2])),
        step(4),
        few,
    ];
    add(scratch.path(), &lines);
    let text = summary::lines(&open(scratch.path()).unwrap()).join("\n");
    for part in [
        "step 1: lost rank 1 (killed by signal 9): 1 rank continues",
        "step 2: rank 1 joined: 2 ranks continue",
        "step 4: lost rank 1 (killed by signal 9): 1 of at least 2 ranks left",
        "Ranks: 1 ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn half_a_line_is_read_when_it_is_whole() {
    let scratch = Scratch::new();
    add(scratch.path(), &[start()]);
    let mut followed = open(scratch.path()).unwrap();
    let line = format!("{}\n", step(7));
    for part in [&line[..20], &line[20..]] {
        let mut file = OpenOptions::new()
            .append(true)
            .open(scratch.path().join(EVENTS_FILE))
            .unwrap();
        assert!(followed.run.steps.steps.is_empty());
        file.write_all(part.as_bytes()).unwrap();
        followed.refresh();
    }
    assert_eq!(followed.run.steps.steps.len(), 1);
    assert!(followed.run.bad_lines.is_empty());
}

#[test]
fn every_size_of_a_screen_can_be_drawn() {
    let scratch = Scratch::new();
    add(scratch.path(), &[start(), step(1)]);
    let followed = open(scratch.path()).unwrap();
    for (rows, columns) in [(0, 0), (1, 1), (3, 10), (60, 20), (4, 200), (24, 80)] {
        let text = screen(&followed, (rows, columns));
        let lines = text.strip_prefix("\x1b[H\x1b[J").unwrap().lines();
        assert!(lines.clone().count() <= usize::from(rows.max(1)), "{text}");
        assert!(
            lines
                .into_iter()
                .all(|line| line.chars().count() <= usize::from(columns))
        );
    }
    assert!(screen(&followed, (24, 80)).contains("step 1 of 40"));
}

#[test]
fn the_figures_of_a_transformer_and_its_last_sample_are_shown() {
    let scratch = Scratch::new();
    let mut line = step(20);
    (line["tokens_per_s"], line["matmul_share"]) = (json!(316_000.0), json!(0.41));
    line["accuracy"] = Value::Null;
    let eval = json!({"event": "eval", "step": 20, "loss": 0.25, "accuracy": null, "perplexity": 1.284, "bits_per_byte": 0.3607});
    let text =
        json!({"event": "sample", "step": 20, "prompt": "Once upon ", "text": "a time\nthere was"});
    let mut first = step(1);
    first["accuracy"] = Value::Null;
    add(scratch.path(), &[start(), first, line, eval, text]);
    let followed = open(scratch.path()).unwrap();
    let text = self::text(&followed);
    for part in [
        "Held-out loss: 0.2500",
        "Perplexity: 1.284",
        "Bits per byte: 0.3607",
        "Tokens a second: 316,000",
        "Speed of a step: 41.00 % (of a large matmul's speed)",
        "Step: 10.00 ms",
        "Loss, held out  0.2500",
        "step 20: held-out loss 0.2500, perplexity",
        "sample: Once upon a time\\nthere was",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("Samples a second"), "{text}");
}

#[test]
fn texts_of_the_log_cannot_control_the_terminal() {
    let scratch = Scratch::new();
    let end = json!({"event": "end", "reason": "a\u{1b}[2Jb", "exit_code": 70});
    add(scratch.path(), &[start(), step(1), end]);
    let followed = open(scratch.path()).unwrap();
    let lines = summary::lines(&followed).join("\n");
    assert!(
        lines.contains("exit code 70") && !lines.contains('\u{1b}'),
        "{lines:?}"
    );
}

#[test]
fn a_folder_without_a_run_is_refused_and_so_is_a_damaged_one() {
    let scratch = Scratch::new();
    let code = || open(scratch.path()).err().map(|error| error.exit_code());
    assert_eq!(code(), Some(2));
    fs::write(scratch.path().join(EVENTS_FILE), "rubbish\n").unwrap();
    assert_eq!(code(), Some(65));
    add(scratch.path(), &[start()]);
    assert_eq!(code(), None);
}

#[test]
fn a_damaged_log_is_shown_or_refused() {
    let eval = json!({"event": "eval", "step": 20, "loss": 0.25, "accuracy": 0.875});
    let end =
        json!({"event": "end", "reason": "done", "exit_code": 0, "steps": 40, "seconds": 1.0});
    let lines = [
        start(),
        step(1),
        step(2),
        eval,
        json!({"event": "checkpoint", "step": 20}),
        end,
    ];
    let log: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let scratch = Scratch::new();
    for seed in ddp_testing::cases("damaged logs", 50_000, 500) {
        let damaged = ddp_testing::mutated(log.as_bytes(), seed);
        fs::write(scratch.path().join(EVENTS_FILE), damaged).unwrap();
        match open(scratch.path()) {
            Ok(followed) => assert!(!text(&followed).contains('\u{1b}'), "case {seed}"),
            Err(error) => assert_eq!(error.exit_code(), 65, "case {seed}: {error}"),
        }
    }
}
