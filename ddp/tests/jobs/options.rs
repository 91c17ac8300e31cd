//! Each flag of training, from the command line to its effect on the metrics log and the model.

use crate::support::job::Folder;
use crate::support::metrics_log::{MetricsLog, model, model_bytes};

/// 8 steps of 32 rows an epoch.
const GLYPHS: &str = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --log-every 1 --eval-every 0 --out OUT";

/// A run with these flags, on two ranks where there is MPI.
#[track_caller]
fn run(flags: &str) -> (Folder, MetricsLog) {
    let folder = Folder::new("options");
    folder
        .together(&format!("{GLYPHS} {flags}"))
        .run()
        .assert_well();
    let log = folder.metrics_log();
    assert!(log.losses().iter().all(|loss| loss.is_finite()));
    (folder, log)
}

#[test]
fn a_short_last_batch_is_kept_unless_it_is_to_be_dropped() {
    let rows = |flags: &str| {
        let folder = Folder::new("drop-last");
        let words =
            "--data glyphs,rows=100,held-out=0 --hidden 16 --batch-size 32 --epochs 2 --out OUT";
        folder
            .together(&format!("{words} {flags}"))
            .run()
            .assert_well();
        let end = folder.metrics_log().end().unwrap().clone();
        (
            end["steps"].as_u64().unwrap(),
            end["samples"].as_u64().unwrap(),
        )
    };
    assert_eq!(
        (rows(""), rows("--drop-last"), rows("--drop-last=false")),
        ((8, 200), (6, 192), (8, 200))
    );
}

/// One step of plain gradient descent with this rate.
const ONE_STEP: &str = "--steps 1 --optimizer sgd --momentum 0 --weight-decay 0 --schedule constant --warmup-steps 0 --lr 0.125";

#[test]
fn clipping_bounds_the_step_and_not_the_norm_on_record() {
    let (start, _) = run("--steps 0");
    let (free, free_record) = run(ONE_STEP);
    let (clipped, clipped_record) = run(&format!("{ONE_STEP} --grad-clip 0.0625"));
    let norm = free_record.of_steps("grad_norm")[0];
    assert!(norm > 0.5, "there is something to clip: {norm}");
    assert_eq!(clipped_record.of_steps("grad_norm"), [norm]);
    let start = model(&start.out(), 0);
    // How far the step went, and how long the vector of all values is.
    let length = |folder: &Folder| {
        let (mut step, mut values) = (0.0, 0.0);
        for (name, (_, after)) in model(&folder.out(), 1) {
            for (after, before) in after
                .iter()
                .zip(&start[&name].1)
                .map(|(a, b)| (f64::from(*a), f64::from(*b)))
            {
                step += (after - before).powi(2);
                values += after.powi(2);
            }
        }
        (step.sqrt(), values.sqrt())
    };
    let unit = f64::from(f32::EPSILON) / 2.0;
    for (folder, expected) in [(&free, 0.125 * norm), (&clipped, 0.125 * 0.0625)] {
        let (step, values) = length(folder);
        // The new values are rounded once each. The norm is the root of a sum of 12,730 squares,
        // added one after the other at worst, plus 1e-6 when clipping; scale and rate are three
        // more roundings.
        let bound = unit * values + expected * (unit * (12_730.0 / 2.0 + 8.0) + 1e-6 / norm);
        assert!(
            (step - expected).abs() <= bound,
            "{step} is not {expected} within {bound}"
        );
    }
}

#[test]
fn frozen_parameters_are_saved_as_they_began() {
    let start = model(&run("--steps 0").0.out(), 0);
    let trained = model(&run("--epochs 1 --freeze 0.weight,2").0.out(), 8);
    let changed: Vec<&str> = start
        .keys()
        .filter(|name| trained[*name] != start[*name])
        .map(String::as_str)
        .collect();
    assert_eq!(changed, ["0.bias"]);
}

#[test]
fn what_is_for_gpus_changes_nothing_on_the_cpu() {
    let flags = "--share-gpus --devices-per-rank 1 --dtype f32 --data-on-device off --graph off";
    let (plain, asked) = (run("--epochs 1").0, run(&format!("--epochs 1 {flags}")).0);
    assert!(model_bytes(&asked.out(), 8) == model_bytes(&plain.out(), 8));
    let settings = std::fs::read_to_string(asked.out().join("config.toml")).unwrap();
    for line in [
        "share-gpus = true",
        "devices-per-rank = 1",
        "dtype = \"f32\"",
        "data-on-device = \"off\"",
        "zero = 0",
    ] {
        assert!(
            settings.lines().any(|setting| setting == line),
            "{line} in {settings}"
        );
    }
}

#[test]
fn dropout_without_hidden_layers_is_named_as_ignored() {
    let folder = Folder::new("dropout");
    let ignored = |dropout: &str, out: &str| {
        let words = format!(
            "--data glyphs,rows=64 --hidden none --dropout {dropout} --steps 1 --out {out}"
        );
        let ended = folder.alone(&words).run();
        ended.assert_well();
        let told = format!("--dropout {dropout} changes nothing: no layer is hidden");
        ended.stderr.contains(&told)
    };
    assert!(ignored("0.3", "some") && !ignored("0", "none"));
}

#[test]
fn a_nan_loss_ends_the_run_naming_step_rank_and_rows() {
    for (ranks, dtype) in [(1, "f32"), (2, "f32"), (2, "bf16")] {
        let folder = Folder::new("nonfinite");
        let glyphs = GLYPHS.replace("--log-every 1", "--log-every 3");
        let words = format!("{glyphs} --epochs 1 --lr 1e30 --optimizer sgd --warmup-steps 0");
        let words = format!("{words} --dtype {dtype}");
        let ended = if ranks == 1 {
            folder.alone(&words).run()
        } else {
            folder.together(&words).run()
        };
        let cause = ended.assert_fails(76);
        assert!(
            cause.contains("step 2: the loss or its gradient is not finite: rank 0, rows "),
            "{ended}"
        );
        assert!(
            cause.contains(", first NaN or +∞: forward of layer "),
            "{ended}"
        );
        let named_ranks = cause.matches(", rows ").count();
        assert_eq!(named_ranks, ranks, "{ended}");
        assert!(
            cause.contains("nothing was saved") && cause.contains("--lr"),
            "{ended}"
        );
        assert!(!folder.out().join("checkpoints").exists());
        let log = folder.metrics_log();
        assert_eq!(
            log.of_steps("step"),
            [1.0],
            "what came of step 3 is the end"
        );
        if let Some(end) = log.end() {
            assert!(
                end["outcome"] == "failed"
                    && end["exit_code"] == 76
                    && end["reason"].as_str().unwrap().contains("step 2"),
                "{end}"
            );
        }
    }
}

#[test]
fn a_held_out_loss_that_is_not_finite_is_warned_of() {
    let folder = Folder::new("nonfinite-held-out");
    for (name, last) in [("train.csv", "1.5"), ("held-out.csv", "1e30")] {
        let rows: String = (0..20).map(|row| format!("{row},{}\n", row % 3)).collect();
        std::fs::write(folder.path().join(name), format!("x,y\n{rows}7,{last}\n")).unwrap();
    }
    let words = "--data train.csv --val-data held-out.csv --task regression --labels y \
                 --hidden 8 --batch-size 7 --steps 3 --eval-every 2 --out OUT";
    let ended = folder.alone(words).run();
    ended.assert_well();
    let warning = "step 2: the held-out loss is not finite, and this evaluation is not compared";
    assert_eq!(ended.stderr.matches(warning).count(), 1, "{ended}");
}
