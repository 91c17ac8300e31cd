//! Reports made from the metrics logs of runs, and from forged ones.

mod page;
mod several;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::make;
use crate::error::Result;
use crate::files::testing::Scratch;
use crate::metrics_log::{EVENTS_FILE, REPORT_FILE};

fn start() -> Value {
    json!({
        "event": "start", "config": {"model": "mlp", "lr": 0.5, "warmup-steps": 3, "batch-size": 128, "out": "runs/two"},
        "versions": {"ddp-train": "0.6.0"}, "devices": ["cpu on a, 1 threads", "cpu on b, 1 threads"],
        "world": {"ranks": 2, "hosts": 2, "threads": 1, "transport": "MPI", "overlap": true, "buckets": 1},
        "data": "rows of a file", "fingerprint": "f00", "parameters": 1234567, "steps": 20, "steps_per_epoch": 10,
    })
}

fn step(number: u64) -> Value {
    json!({
        "event": "step", "step": number, "epoch": 1, "loss": 2.0 / number as f64, "lr": 0.001, "grad_norm": 1.5,
        "samples_per_s": 1000.0, "step_ms": 10.0, "data_ms": 1.0, "reduce_ms": 0.5, "save_ms": 0.0,
    })
}

fn end(reason: &str, exit_code: u8) -> Value {
    json!({"event": "end", "reason": reason, "exit_code": exit_code, "steps": 20, "samples": 2560, "seconds": 61.0, "samples_per_s": 990.0,
           "loss": 0.1, "eval_loss": 0.25, "accuracy": 0.975, "peak_mb": 34.5})
}

/// The report of a metrics log with these lines.
#[track_caller]
fn report(lines: &[Value]) -> String {
    let scratch = Scratch::new();
    write(
        scratch.path(),
        &lines
            .iter()
            .map(|line| format!("{line}\n"))
            .collect::<String>(),
    );
    let page = fs::read_to_string(make(scratch.path()).unwrap()).unwrap();
    without_breaks(&page)
}

/// A page without the places where its lines may break.
fn without_breaks(page: &str) -> String {
    page.replace("<wbr>", "")
}

fn write(folder: &Path, log: &str) {
    fs::write(folder.join(EVENTS_FILE), log).unwrap();
}

/// Whether these texts stand in the page, in this order.
#[track_caller]
fn assert_in_order(page: &str, texts: &[&str]) {
    let mut rest = page;
    for text in texts {
        let (_, after) = rest
            .split_once(text)
            .unwrap_or_else(|| panic!("{text:?} is not in its place in: {rest}"));
        rest = after;
    }
}

#[test]
fn a_successful_run_is_summarised_in_reading_order() {
    let mut lines = vec![start()];
    lines.extend((1..=20).map(step));
    lines.push(json!({"event": "checkpoint", "step": 10}));
    lines.push(json!({"event": "resume", "step": 10, "from": "step-00000010", "ranks": 3, "devices": ["cpu on a", "cpu on a", "cpu on b"], "overridden": ["--lr 0.5 (was 0.1)"]}));
    lines.push(json!({"event": "ranks", "time_unix_s": 1.0, "step": 15, "generation": 2, "ranks": 2, "lost": [{"rank": 1, "why": "killed by signal 9"}],
                      "joined": [], "seconds": 0.1}));
    lines.push(json!({"event": "eval", "step": 20, "loss": 0.25, "accuracy": 0.975}));
    lines.push(json!({"event": "confusion", "step": 20, "names": ["cat", "dog"], "rows": [30, 10], "predicted": [29, 11], "right": [29, 10],
                      "counts": [[29, 1], [0, 10]], "mistakes": [[0, 1, 1]]}));
    let moved = json!({"between ranks": {"count": 2.0, "bytes": 4096.0}});
    let rank = |number: u64| json!({"rank": number, "devices": ["cpu"], "rows": 1280, "passes": 20, "per_step": moved, "phases": {}});
    lines.push(json!({"event": "placement", "steps": 20, "simulated": false, "ranks": [rank(0), rank(1)], "differences": [], "hints": []}));
    lines.push(end("done", 0));
    let page = report(&lines);
    let order = [
        "<title>two: done · ddp-train</title>",
        "<h1>two</h1>",
        "✓</span> done",
        "97.50 %",
        "on 40 held-out rows; the largest class has 75.00 % of them",
        "Balanced accuracy",
        "98.33 %",
        "0.2500",
        "lowest 0.2500, after step 20",
        "0.1000",
        "of the last logged step",
        "990.0",
        "3 × cpu",
        "34.5 MB",
        "1 min 01 s",
        "2,560 samples",
        "1,234,567",
        "<th scope=\"row\" data-h=\"curve\">Loss, training</th><td class=\"n\" data-h=\"first\">2.000</td>",
        "<h2 id=\"classes-title\">",
        "cat",
        "96.7",
        "98.3",
        "<h2 id=\"transfers-title\">",
        "4.0 KiB",
        "no differences between ranks",
        "<h2 id=\"settings-title\">",
        ">lr<",
        "0.5",
        "1 setting at the default",
        "<h2 id=\"versions-title\">",
        "0.6.0",
        "\"title\":\"Loss\"",
        "\"title\":\"Accuracy\"",
        "\"title\":\"Throughput\"",
        "\"title\":\"Learning rate\"",
        "\"title\":\"Gradient norm\"",
        "\"title\":\"Time of a step\"",
    ];
    assert_in_order(&page, &order);
    assert!(page.contains("resumed after step 10 on 3 ranks, with --lr 0.5 (was 0.1)"));
    assert!(page.contains("lost rank 1 (killed by signal 9): 2 ranks continue after step 15"));
    assert!(page.contains(r#""title":"Ranks""#));
    let ranks = r#""x":[0,10,10,15,15,20],"y":[2.0,2.0,3.0,3.0,2.0,2.0]"#;
    assert!(page.contains(ranks), "{page}");
    assert!(!page.contains("imulated"), "these are real");
}

/// Both were those of the first start.
#[test]
fn settings_and_steps_are_those_since_the_last_resume() {
    let resume = json!({"event": "resume", "step": 20, "config": {"lr": 0.375, "out": "runs/two"}, "steps": 30});
    let page = report(&[start(), step(20), resume, step(30)]);
    assert!(
        page.contains("0.375") && !page.contains("30 of 20"),
        "{page}"
    );
}

/// The page described the last step, under a green "done", while `eval` and `predict` use the best.
#[test]
fn a_page_says_that_the_best_step_is_used_and_the_loss_has_risen_since() {
    let confusion = json!({"event": "confusion", "step": 20, "names": ["cat", "dog"], "rows": [30, 10], "predicted": [29, 11],
                           "right": [29, 10], "counts": [[29, 1], [0, 10]], "mistakes": [[0, 1, 1]]});
    let eval = |step: u64, loss: f64, accuracy: f64| json!({"event": "eval", "step": step, "loss": loss, "accuracy": accuracy});
    let saved = |step: u64| json!({"event": "checkpoint", "step": step});
    let lines = [
        start(),
        step(20),
        eval(10, 0.125, 0.985),
        saved(10),
        eval(20, 0.25, 0.975),
        confusion,
        saved(20),
        end("done", 0),
    ];
    let scratch = Scratch::new();
    write(
        scratch.path(),
        &lines.map(|line| format!("{line}\n")).concat(),
    );
    let page = || fs::read_to_string(make(scratch.path()).unwrap()).unwrap();
    let order = [
        "✓</span> done",
        "The held-out loss has risen since step 10 (loss 0.1250, accuracy 98.50%), whose checkpoint eval and predict use.",
        "Figures and matrix are of step 20.",
        "97.50 %",
        "lowest 0.1250, after step 10",
        "After step 20: 39 of 40",
    ];
    assert_in_order(&page(), &order);
    // By another figure than the loss, which falls.
    let by_accuracy = |step: u64, loss: f64, accuracy: f64| {
        let mut line = eval(step, loss, accuracy);
        line["best_by"] = json!("accuracy");
        line
    };
    let falling = [
        start(),
        step(20),
        by_accuracy(10, 0.25, 0.985),
        saved(10),
        by_accuracy(20, 0.125, 0.975),
        saved(20),
        end("done", 0),
    ];
    let order = [
        "The best evaluation is that after step 10 (loss 0.2500, accuracy 98.50%), whose checkpoint eval and predict use.",
        "Figures and matrix are of step 20.",
        "the best model has accuracy 98.50%, after step 10",
    ];
    assert_in_order(&report(&falling), &order);
    // Without its checkpoint the best is not used.
    let mut lines: Vec<String> = lines_of(scratch.path());
    lines.retain(|line| !line.contains("\"checkpoint\",\"step\":10"));
    write(scratch.path(), &(lines.join("\n") + "\n"));
    assert!(!page().contains("eval and predict use"));
}

fn lines_of(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join(EVENTS_FILE)).unwrap();
    text.lines().map(String::from).collect()
}

/// The page of a transformer spoke of samples, that of numbers of a loss without units.
#[test]
fn results_are_in_the_units_of_what_is_learned() {
    let tokens = |number: u64| {
        let mut line = step(number);
        (line["tokens_per_s"], line["matmul_share"]) = (json!(64_000.0), json!(0.4125));
        line
    };
    let mut last = end("done", 0);
    (last["tokens_per_s"], last["accuracy"]) = (json!(63_000.0), Value::Null);
    let eval = json!({"event": "eval", "step": 2, "loss": 0.25, "accuracy": null, "perplexity": 1.284, "bits_per_byte": 0.3607});
    let page = report(&[start(), tokens(1), tokens(2), eval, last.clone()]);
    let order = [
        "Perplexity</dt><dd>1.284",
        "Bits per byte</dt><dd>0.3607",
        "Tokens a second</dt><dd>63,000",
        "Speed of a step</dt><dd>41.25 %",
        "Throughput, tokens a second",
        "of a large matmul",
    ];
    assert_in_order(&page, &order);
    assert!(!page.contains("amples a second"), "{page}");
    let column = |name: &str, r2: f64| json!({"name": name, "rmse": 12.5, "mae": 9.0, "r2": r2});
    let eval = json!({"event": "eval", "step": 2, "loss": 0.25, "accuracy": null, "mean_r2": 0.5,
                      "columns": [column("rent", 0.875), column("<area>", 0.125)]});
    let page = report(&[start(), step(2), eval, end("done", 0)]);
    let order = [
        "Mean R²</dt><dd>0.5000",
        "R², held out, mean",
        "<h2 id=\"columns-title\">",
        "rent",
        "12.50",
        "0.8750",
        "&lt;area&gt;",
        "0.1250",
    ];
    assert_in_order(&page, &order);
    let eval = json!({"event": "eval", "step": 2, "loss": 0.25, "accuracy": null, "rmse": 12.5, "r2": 0.5});
    let page = report(&[start(), step(2), eval]);
    assert_in_order(&page, &["RMSE</dt><dd>12.50", "R²</dt><dd>0.5000"]);
}

#[test]
fn a_default_that_follows_from_other_settings_is_said() {
    let mut start = start();
    start["config"]["eval-every"] = json!(7);
    start["config"]["hidden"] = json!([7]);
    start["config"]["gone"] = json!(1);
    let page = report(&[start]);
    for row in [
        "eval-every</th><td data-h=\"value\"><code>7</code></td><td data-h=\"default\">an epoch; for tables a fiftieth of the run</td>",
        "hidden</th><td data-h=\"value\"><code>7</code></td><td data-h=\"default\"><code>256,128</code></td>",
        "gone</th><td data-h=\"value\"><code>1</code></td><td data-h=\"default\">not a setting of this version</td>",
    ] {
        assert!(page.contains(row), "{row}: {page}");
    }
}

#[test]
fn how_a_run_ended_is_said() {
    let cases = [
        (vec![end("done", 0)], "✓</span> done"),
        (
            vec![end("stopped early after step 20", 0)],
            "✓</span> done</p><p class=\"message\">stopped early after step 20<",
        ),
        (
            vec![json!({"event": "end", "outcome": "early", "reason": "enough", "exit_code": 0})],
            "✓</span> done</p><p class=\"message\">enough<",
        ),
        (
            vec![end("stopped by SIGTERM after step 20", 75)],
            "stopped by SIGTERM after step 20 (exit code 75)",
        ),
        (
            vec![end("the loss is not finite", 76)],
            "✕</span> failed</p><p class=\"message\">the loss is not finite (exit code 76)",
        ),
        (vec![], "The metrics log ends after step 20"),
        (
            vec![end("stopped", 75), json!({"event": "resume", "step": 20})],
            "The metrics log ends after step 20",
        ),
        (
            vec![
                end("stopped", 75),
                json!({"event": "resume", "step": 20}),
                step(21),
                end("done", 0),
            ],
            "since it was resumed after step 20",
        ),
    ];
    for (last, text) in cases {
        let page = report(&[vec![start(), step(20)], last].concat());
        assert!(page.contains(text), "{text}: {page}");
    }
}

#[test]
fn what_is_missing_is_left_out() {
    let page = report(&[start()]);
    assert!(
        page.contains("No step was logged") && !page.contains("<figure"),
        "{page}"
    );
    let page = report(&[start(), step(1)]);
    let has = |page: &str, title: &str| page.contains(&format!("\"title\":\"{title}\""));
    assert!(has(&page, "Loss") && !has(&page, "Accuracy"), "{page}");
    let mut nothing = step(2);
    for name in [
        "loss",
        "grad_norm",
        "samples_per_s",
        "step_ms",
        "data_ms",
        "reduce_ms",
        "save_ms",
    ] {
        nothing[name] = Value::Null;
    }
    let page = report(&[start(), step(1), nothing.clone(), step(3)]);
    let expected = format!("\"x\":[1,2,3],\"y\":[2.0,null,{}]", 2.0 / 3.0);
    assert!(page.contains(&expected), "{page}");
    let page = report(&[start(), nothing]);
    assert!(
        has(&page, "Learning rate") && !has(&page, "Throughput"),
        "{page}"
    );
    assert!(!page.contains(">NaN"), "{page}");
}

#[test]
fn a_simulated_run_says_so_loudly_and_has_no_rates() {
    let placement = json!({"event": "placement", "steps": 1, "simulated": true, "ranks": [], "differences": [], "hints": []});
    let page = report(&[start(), step(1), placement, end("done", 0)]);
    assert!(
        page.contains("<strong>On simulated GPUs.</strong>") && !page.contains("1 min 01 s"),
        "{page}"
    );
}

#[test]
fn lines_that_are_no_events_are_counted() {
    let scratch = Scratch::new();
    let lines = format!(
        "{}\nnot json\n\n{}\n{{\"event\":\"step\",\"step\":-1}}\n{{\"event\":\"new kind\"}}\n{{\"event\":\"st",
        start(),
        step(1)
    );
    write(scratch.path(), &lines);
    let page = fs::read_to_string(make(scratch.path()).unwrap()).unwrap();
    assert!(
        page.contains("3 lines of the metrics log could not be read"),
        "{page}"
    );
}

#[test]
fn without_a_log_there_is_no_report() {
    let scratch = Scratch::new();
    let failed = |code: u8, word: &str| {
        let error = make(scratch.path()).unwrap_err();
        assert_eq!(error.exit_code(), code, "{error}");
        assert!(
            error.to_string().contains(word) && error.to_string().contains(EVENTS_FILE),
            "{error}"
        );
        assert!(!scratch.path().join(REPORT_FILE).exists());
    };
    failed(74, "give the folder of a run");
    write(scratch.path(), "");
    failed(65, "give the folder of a run that has begun");
    write(scratch.path(), &format!("{}\nrubbish\n", step(1)));
    failed(65, "1 lines that are not events");
    fs::remove_file(scratch.path().join(EVENTS_FILE)).unwrap();
    fs::create_dir(scratch.path().join(EVENTS_FILE)).unwrap();
    failed(65, "expected a plain file");
}
