//! OUT/metrics.jsonl as documented: which events, in which order, with which fields.

use std::sync::OnceLock;

use ddp::models::ModelSpec;
use ddp::models::mlp::MlpSpec;

use crate::support::job::Folder;
use crate::support::metrics_log::{MetricsLog, fields, number};

const RANKS: usize = 2;

/// A run's metrics log, of `steps` steps of 32 rows.
fn log_of(flags: &str) -> MetricsLog {
    let folder = Folder::new("events");
    let data = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --out OUT";
    let ended = folder.together(&format!("{data} {flags}")).run();
    ended.assert_well();
    folder.metrics_log()
}

/// Of a run that several tests look at.
fn two_epochs() -> &'static MetricsLog {
    static LOG: OnceLock<MetricsLog> = OnceLock::new();
    LOG.get_or_init(|| log_of("--epochs 2 --log-every 1 --seed 7 --threads 1"))
}

/// The events after the start, as `step 1`, without checkpoints: those enter the metrics log when
/// they are durable, which may be some steps later.
fn order(log: &MetricsLog) -> Vec<String> {
    let name = |event: &serde_json::Value| match event["event"].as_str() {
        Some(name @ ("step" | "eval")) => format!("{name} {}", event["step"]),
        name => name.unwrap_or("none").to_string(),
    };
    log.0[1..]
        .iter()
        .filter(|event| event["event"] != "checkpoint")
        .map(name)
        .collect()
}

#[test]
fn each_checkpoint_is_on_record_once_and_in_its_folder() {
    let folder = Folder::new("events");
    let words = "--data glyphs,rows=256,held-out=0 --hidden 16 --batch-size 32 --steps 10 --checkpoint-every 3 --keep 9 --out OUT";
    folder.together(words).run().assert_well();
    let log = folder.metrics_log();
    let steps: Vec<f64> = log
        .all("checkpoint")
        .into_iter()
        .map(|event| number(event, "step"))
        .collect();
    assert_eq!(steps, [3.0, 6.0, 9.0, 10.0]);
    for event in log.all("checkpoint") {
        assert_eq!(fields(event).join(" "), "event step folder manifest_blake3");
        let of_event = folder.out().join(event["folder"].as_str().unwrap());
        let manifest = std::fs::read(of_event.join("manifest.json")).unwrap();
        let manifest = blake3::hash(&manifest).to_hex();
        assert_eq!(event["manifest_blake3"], manifest.as_str(), "{event}");
    }
}

#[test]
fn steps_and_evaluations_come_as_often_as_asked_for_and_at_the_end() {
    let order_of = |flags: &str| order(&log_of(flags)).join(", ");
    assert_eq!(
        order_of("--steps 10 --log-every 3 --eval-every 4"),
        "step 1, step 3, eval 4, step 6, eval 8, step 9, step 10, eval 10, confusion, placement, end"
    );
    // By default every tenth step is logged, and an evaluation for each epoch of 8 steps.
    assert_eq!(
        order_of("--steps 20"),
        "step 1, eval 8, step 10, eval 16, step 20, eval 20, confusion, placement, end"
    );
    assert_eq!(
        order_of("--epochs 2 --log-every 100 --eval-every 0"),
        "step 1, step 16, eval 16, confusion, placement, end"
    );
    assert_eq!(
        order_of("--epochs 2"),
        "step 1, eval 8, step 10, step 16, eval 16, confusion, placement, end"
    );
    assert_eq!(
        order_of("--steps 1"),
        "step 1, eval 1, confusion, placement, end"
    );
    assert_eq!(order_of("--steps 0"), "eval 0, confusion, placement, end");
}

#[test]
fn every_event_has_exactly_its_fields() {
    let log = two_epochs();
    let start = "event time_unix_s config changed versions devices world data fingerprint held_out_fingerprint data_blake3 held_out_blake3 program_blake3 parameters steps steps_per_epoch initial_weights";
    let step = "event step epoch loss accuracy lr grad_norm samples_per_s step_ms data_ms reduce_ms save_ms digests";
    let end = "event time_unix_s outcome reason exit_code steps samples seconds samples_per_s loss eval_loss accuracy peak_mb device_peak_mb transfers";
    for event in &log.0 {
        let expected = match event["event"].as_str().unwrap() {
            "start" => start,
            "step" => step,
            "eval" => "event step loss accuracy",
            "confusion" => "event step names rows predicted right counts mistakes",
            "checkpoint" => "event step folder manifest_blake3",
            "placement" => "event steps simulated ranks differences hints",
            _ => end,
        };
        assert_eq!(fields(event).join(" "), expected, "{event}");
    }
    for (step, number_of) in log.all("step").into_iter().zip(1u64..) {
        assert_eq!(
            (step["step"].as_u64(), step["epoch"].as_u64()),
            (Some(number_of), Some(number_of.div_ceil(8)))
        );
        for field in ["loss", "grad_norm", "samples_per_s", "step_ms"] {
            assert!(number(step, field) > 0.0, "{step}");
        }
    }
    for eval in log.all("eval") {
        assert!((0.0..=1.0).contains(&number(eval, "accuracy")), "{eval}");
        // Of 64 held-out rows.
        assert_eq!((number(eval, "accuracy") * 64.0).fract(), 0.0, "{eval}");
    }
}

#[test]
fn the_start_says_what_runs_where() {
    let log = two_epochs();
    let start = log.start();
    assert_eq!(
        (&start["config"]["seed"], &start["config"]["batch-size"]),
        (&7.into(), &32.into())
    );
    let program = concat!("ddp-train ", env!("CARGO_PKG_VERSION"));
    assert_eq!(start["versions"]["program"], program);
    assert_eq!(
        (&start["world"]["ranks"], &start["world"]["hosts"]),
        (&RANKS.into(), &1.into())
    );
    let devices = start["devices"].as_array().unwrap();
    assert_eq!(devices.len(), RANKS);
    assert!(
        devices
            .iter()
            .all(|device| device.as_str().unwrap().starts_with("cpu on ")),
        "{start}"
    );
    // 784 · 16 + 16 + 16 · 10 + 10
    assert_eq!(
        (
            &start["parameters"],
            &start["steps"],
            &start["steps_per_epoch"]
        ),
        (&12_730.into(), &16.into(), &8.into())
    );
}

#[test]
fn the_end_sums_up_what_came_before() {
    let log = two_epochs();
    let end = log.end().expect("the run came to its end");
    assert_eq!(
        (&end["outcome"], &end["reason"], &end["exit_code"]),
        (&"done".into(), &"done".into(), &0.into())
    );
    assert_eq!((&end["steps"], &end["samples"]), (&16.into(), &512.into()));
    assert_eq!(end["loss"], log.all("step").last().unwrap()["loss"]);
    let eval = log.all("eval").pop().unwrap();
    assert_eq!(
        (&end["eval_loss"], &end["accuracy"]),
        (&eval["loss"], &eval["accuracy"])
    );
    assert!(
        number(end, "seconds") > 0.0 && number(end, "peak_mb") > 1.0,
        "{end}"
    );
    assert!(end["device_peak_mb"].is_null(), "{end}");
    // Nothing crosses between devices where there is one.
    assert_eq!(end["transfers"]["crossed"]["count"], 0, "{end}");
    assert!(number(end, "time_unix_s") >= number(log.start(), "time_unix_s"));
}

#[test]
fn without_held_out_rows_nothing_is_evaluated() {
    let folder = Folder::new("none-held-out");
    folder
        .alone("--data glyphs,rows=64,held-out=0 --hidden 16 --steps 2 --out OUT")
        .run()
        .assert_well();
    let log = folder.metrics_log();
    assert_eq!(order(&log).join(", "), "step 1, step 2, placement, end");
    assert!(log.end().unwrap()["eval_loss"].is_null());
}

#[test]
fn the_settings_beside_it_give_the_same_run_again() {
    let folder = Folder::new("settings");
    folder
        .alone("--data glyphs,rows=64,held-out=8 --hidden 16,8 --steps 3 --lr 0.01 --out OUT")
        .run()
        .assert_well();
    let text = std::fs::read_to_string(folder.out().join("config.toml")).unwrap();
    let config = ddp::config::Config::from_toml(&text).unwrap();
    let model = ModelSpec::from(MlpSpec {
        hidden: vec![16, 8],
        linear_path: Some(false),
        ..MlpSpec::default()
    });
    assert_eq!(config.model, model);
    assert_eq!((config.peak_lr(), config.out), (0.01, folder.out()));
}
