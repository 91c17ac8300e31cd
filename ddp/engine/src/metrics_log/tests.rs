//! Claims about the metrics log.

use std::fs::{self, OpenOptions};

use ddp_kernels::files::testing::Scratch;
use ddp_kernels::transfer::Ledger;
use serde_json::json;

use serde_json::Value;

use super::*;
use crate::digest::LayerDigest;
use crate::tasks::BestBy;

#[test]
fn a_log_that_is_cut_replaced_or_removed_while_it_is_written_is_an_error() {
    let scratch = Scratch::new();
    let path = scratch.path().join(EVENTS_FILE);
    let mut log = MetricsLog::create(scratch.path(), SETTINGS).unwrap();
    log.write(&LogEvent::Step(step(1, 0.5))).unwrap();
    log.check_present().unwrap();
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    let problem = |log: &MetricsLog| log.check_present().unwrap_err().to_string();
    assert!(problem(&log).contains("it was cut while this run was writing it"));
    let written = log.write(&LogEvent::Step(step(2, 0.5)));
    assert!(written.unwrap_err().to_string().contains("it was cut"));
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    fs::copy(&path, scratch.path().join("copy")).unwrap();
    fs::rename(scratch.path().join("copy"), &path).unwrap();
    assert!(problem(&log).contains("it was replaced"));
    fs::remove_file(&path).unwrap();
    assert!(problem(&log).contains("No such file"));
}

/// A settings' file.
const SETTINGS: &str = "steps = 3\n";

fn lines(out: &Path) -> Vec<Value> {
    let text = fs::read_to_string(out.join(EVENTS_FILE)).unwrap();
    assert!(text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}

fn step(step: u64, loss: f64) -> StepEvent {
    let (samples_per_s, step_ms, data_ms, save_ms) = (1000.0, 1.5, 0.25, 0.0);
    StepEvent {
        step,
        epoch: 0,
        loss,
        accuracy: Some(0.5),
        figures: BTreeMap::new(),
        lr: 0.001,
        grad_norm: Some(2.5),
        samples_per_s,
        tokens_per_s: None,
        tflops: None,
        matmul_share: None,
        step_ms,
        data_ms,
        reduce_ms: Some(0.125),
        save_ms,
        device_peak_mb: None,
        digests: None,
    }
}

#[test]
fn a_run_is_its_events_in_order() {
    let scratch = Scratch::new();
    let out = scratch.path().join("a/b");
    let mut log = MetricsLog::create(&out, SETTINGS).unwrap();
    let config = json!({ "hidden": [256, 128] });
    let start = StartEvent {
        time_unix_s: 1.5,
        config: config.as_object().unwrap().clone(),
        changed: None,
        versions: BTreeMap::from([("ddp-train".into(), "0.2.0".into())]),
        devices: vec!["cpu".into()],
        world: StartWorld {
            ranks: 1,
            hosts: 1,
            threads: 2,
            transport: "alone".into(),
            overlap: false,
            buckets: 2,
            bits_may_differ: Vec::new(),
        },
        data: "digits".into(),
        fingerprint: "glyphs 00".into(),
        held_out_fingerprint: "glyphs 01".into(),
        blake3: Contents::default(),
        parameters: Some(7),
        steps: Some(3),
        steps_per_epoch: 10,
        out_of_fold: None,
        initial_weights: vec![LayerDigest("0".into(), "ab".into(), 1.0, 0.5)],
        job: None,
    };
    let eval = EvalEvent {
        step: 1,
        loss: 2.0,
        accuracy: Some(0.5),
        best_by: BestBy::Auc,
        figures: BTreeMap::from([("perplexity", 7.5)]),
        largest_class: None,
        columns: Vec::new(),
    };
    let step = LogEvent::Step(step(1, 2.25));
    for event in [LogEvent::Start(start), step, LogEvent::Eval(eval)] {
        log.write(&event).unwrap();
    }
    let end = EndEvent {
        time_unix_s: 2.5,
        outcome: RunOutcome::Done,
        reason: "done",
        exit_code: 0,
        steps: 3,
        samples: 384,
        seconds: 1.0,
        samples_per_s: 384.0,
        tokens_per_s: None,
        loss: Some(2.25),
        eval_loss: Some(2.0),
        accuracy: Some(0.5),
        peak_mb: None,
        device_peak_mb: None,
        transfers: Ledger::new().to_json(),
    };
    log.end(end).unwrap();
    let lines = lines(&out);
    let events: Vec<_> = lines
        .iter()
        .map(|line| line["event"].as_str().unwrap())
        .collect();
    assert_eq!(events, ["start", "step", "eval", "end"]);
    assert_eq!(lines[0]["config"]["hidden"], json!([256, 128]));
    let weights = json!([["0", "ab", 1.0, 0.5]]);
    assert_eq!(lines[0]["initial_weights"], weights);
    assert_eq!(
        (
            &lines[0]["versions"]["ddp-train"],
            &lines[0]["world"]["ranks"]
        ),
        (&json!("0.2.0"), &json!(1))
    );
    let expected = r#"{"event":"step","step":1,"epoch":0,"loss":2.25,"accuracy":0.5,"lr":0.001,"grad_norm":2.5,"samples_per_s":1000.0,"step_ms":1.5,"data_ms":0.25,"reduce_ms":0.125,"save_ms":0.0}"#;
    assert_eq!(
        fs::read_to_string(out.join(EVENTS_FILE))
            .unwrap()
            .lines()
            .nth(1),
        Some(expected)
    );
    assert_eq!(
        lines[2],
        json!({ "event": "eval", "step": 1, "loss": 2.0, "accuracy": 0.5, "best_by": "auc", "perplexity": 7.5 })
    );
    assert_eq!(
        (
            &lines[3]["samples"],
            &lines[3]["transfers"]["crossed"]["count"]
        ),
        (&json!(384), &json!(0))
    );
    assert_eq!(fs::read_to_string(out.join(CONFIG_FILE)).unwrap(), SETTINGS);
}

#[test]
fn nan_is_written_as_null() {
    let scratch = Scratch::new();
    let mut log = MetricsLog::create(scratch.path(), SETTINGS).unwrap();
    for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let event = StepEvent {
            grad_norm: None,
            ..step(1, loss)
        };
        log.write(&LogEvent::Step(event)).unwrap();
    }
    for line in lines(scratch.path()) {
        assert_eq!(
            (&line["loss"], &line["grad_norm"]),
            (&Value::Null, &Value::Null)
        );
    }
}

#[test]
fn a_folder_that_holds_a_run_is_refused_with_one_that_does_not() {
    let scratch = Scratch::new();
    let out = scratch.path().join("out");
    MetricsLog::create(&out, SETTINGS)
        .unwrap()
        .write(&LogEvent::Step(step(1, 1.0)))
        .unwrap();
    fs::create_dir(scratch.path().join("out-2")).unwrap();
    for out in [out.clone(), scratch.path().join("out/")] {
        let error = MetricsLog::create(&out, SETTINGS).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        let free = scratch.path().join("out-3");
        assert!(
            text.contains("holds a run") && text.contains(&format!("`out` {},", free.display())),
            "{text}"
        );
    }
    assert_eq!(lines(&out).len(), 1, "the run that was there is whole");
    let other = scratch.path().join("only-checkpoints");
    fs::create_dir_all(other.join("checkpoints")).unwrap();
    assert_eq!(
        MetricsLog::create(&other, SETTINGS)
            .unwrap_err()
            .exit_code(),
        2
    );
}

#[test]
fn a_run_that_failed_before_it_began_does_not_block_the_folder() {
    let scratch = Scratch::new();
    drop(MetricsLog::create(scratch.path(), SETTINGS).unwrap());
    let mut again = MetricsLog::create(scratch.path(), "seed = 7\n").unwrap();
    assert!(
        fs::read_to_string(scratch.path().join(CONFIG_FILE))
            .unwrap()
            .contains("seed = 7")
    );
    let error = MetricsLog::create(scratch.path(), SETTINGS).unwrap_err();
    assert!(
        error.to_string().contains("a run is writing in it"),
        "one that begins now does: {error}"
    );
    again.write(&LogEvent::Step(step(1, 1.0))).unwrap();
    assert_eq!(lines(scratch.path()).len(), 1);
}

#[test]
fn a_foreign_config_file_is_left_alone() {
    let scratch = Scratch::new();
    fs::write(scratch.path().join(CONFIG_FILE), "mine = 1\n").unwrap();
    for _ in 0..2 {
        let error = MetricsLog::create(scratch.path(), SETTINGS).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains("config.toml that no run wrote"),
            "{error}"
        );
    }
    assert_eq!(
        fs::read_to_string(scratch.path().join(CONFIG_FILE)).unwrap(),
        "mine = 1\n"
    );
}

#[test]
fn a_disk_that_is_full_is_an_error_of_its_own_that_names_the_file() {
    let full = OpenOptions::new().append(true).open("/dev/full");
    let Ok(file) = full else {
        return ddp_testing::skip("no /dev/full");
    };
    let mut log = MetricsLog {
        file,
        path: "out/metrics.jsonl".into(),
        length: 0,
        written: LastSteps::default(),
    };
    let error = log.write(&LogEvent::Step(step(1, 1.0))).unwrap_err();
    assert_eq!(error.exit_code(), 74);
    let text = error.to_string();
    assert!(
        text.contains("cannot write out/metrics.jsonl") && text.contains("space left"),
        "{text}"
    );
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let scratch = Scratch::new();
    let file = scratch.path().join("file");
    fs::write(&file, "").unwrap();
    let error = MetricsLog::create(&file.join("out"), SETTINGS).unwrap_err();
    assert_eq!(error.exit_code(), 74);
    assert!(error.to_string().contains("file/out"), "{error}");
}
