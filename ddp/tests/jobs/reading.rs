//! Reading checkpoints: never a byte that was not written, on any host, and never half of a
//! checkpoint that a running training removes.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::job::{Ended, Folder, all_at_once};

/// 8 steps, saved after 4 and 8.
const RUN: &str = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 --steps 8 --log-every 1 --schedule constant --warmup-steps 0 \
                   --checkpoint-every 4 --eval-every 8 --threads 1 --device cpu --out OUT";

#[track_caller]
fn trained(name: &str) -> Folder {
    let folder = Folder::new(name);
    folder.alone(RUN).run().assert_well();
    folder
}

/// Changes three bytes of the last tensor in the file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let end = bytes.len();
    bytes[end - 9..end - 6]
        .iter_mut()
        .for_each(|byte| *byte ^= 0x15);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_run_never_begins_with_a_checkpoints_damaged_model() {
    let folder = trained("init");
    let checkpoint = folder.checkpoint(8);
    let model = checkpoint.join("model.safetensors");
    std::os::unix::fs::symlink(&model, folder.path().join("link.safetensors")).unwrap();
    fs::copy(&model, folder.path().join("copy.safetensors")).unwrap();
    let begin = |from: &str, out: &str| -> Ended {
        folder
            .together(&format!(
                "{} --init-from {from}",
                RUN.replace("--out OUT", &format!("--out {out}"))
            ))
            .run()
    };
    let names = [
        "OUT/checkpoints/step-00000008",
        "OUT/checkpoints/step-00000008/model.safetensors",
        "link.safetensors",
    ];
    all_at_once(names.into_iter().enumerate(), |(number, from)| {
        begin(from, &format!("good-{number}")).assert_well()
    });
    begin("copy.safetensors", "good-copy").assert_well();

    damage(&model);
    all_at_once(names.into_iter().enumerate(), |(number, from)| {
        let out = format!("bad-{number}");
        let ended = begin(from, &out);
        let cause = ended.assert_fails(65);
        assert!(
            cause.contains("model.safetensors was changed or damaged"),
            "{ended}"
        );
        assert!(
            !folder.path().join(out).exists(),
            "nothing was begun: {ended}"
        );
    });
    fs::remove_file(checkpoint.join("manifest.json")).unwrap();
    assert!(
        begin(names[0], "bad-3")
            .assert_fails(65)
            .contains("it lacks manifest.json")
    );
}

#[test]
fn override_resets_the_optimizer_and_keeps_saved_values() {
    let rows = "--data glyphs,rows=256,held-out=64 --device cpu --json";
    for (name, flags, part) in [
        (
            "sgd",
            "--optimizer sgd --lr 0.01",
            "it lacks 2.bias.momentum_buffer",
        ),
        ("freeze", "--freeze 0", "it has 0.bias.exp_avg"),
    ] {
        let folder = trained(name);
        let words = format!(
            "{} {flags} --resume auto",
            RUN.replace("--steps 8", "--steps 16")
        );
        assert!(
            folder
                .alone(&words)
                .run()
                .assert_fails(2)
                .contains("--override")
        );
        let ended = folder.together(&format!("{words} --override")).run();
        ended.assert_well();
        let resume = folder.metrics_log().all("resume")[0].clone();
        let overridden = resume["overridden"]
            .as_array()
            .unwrap()
            .last()
            .unwrap()
            .as_str()
            .unwrap();
        assert!(
            overridden.starts_with("optimizer state reset to zero") && overridden.contains(part),
            "{overridden}"
        );
        assert!(
            ended.stderr.contains("optimizer state reset to zero"),
            "{ended}"
        );
        // From here on it differs from the first run.
        let state = folder.checkpoint(16).join("state.json");
        let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
        assert_eq!(state["optimizer_since"], 8);
        let on = words.replace("--steps 16", "--steps 20");
        folder.alone(&on).run().assert_well();
        folder
            .alone(&format!(
                "eval --checkpoint OUT/checkpoints/step-00000020 {rows}"
            ))
            .run()
            .assert_well();
    }
}

#[test]
fn a_run_in_training_can_be_evaluated_although_it_removes_what_it_has_saved() {
    let folder = Folder::new("beside");
    // Longer than all the rest takes.
    let words = "--data glyphs,rows=64,held-out=16 --hidden 16 --batch-size 16 --steps 1000000 --log-every 1000 --schedule constant \
                 --warmup-steps 0 --checkpoint-every 1 --keep 1 --eval-every 1000000 --threads 1 --device cpu --out OUT";
    let mut training = folder.alone(words).start();
    training.wait_for(r#"{"event":"checkpoint""#);
    let (out, rows) = (
        folder.out(),
        "--data glyphs,rows=64,held-out=16 --device cpu --threads 1",
    );
    let out = out.display();
    all_at_once(0..4, |reader| {
        let folder = Folder::new("reader");
        for number in 0..5 {
            let ended = match reader {
                0 => folder.together(&format!("eval --checkpoint {out} {rows} --json")),
                1 => folder.alone(&format!(
                    "predict --checkpoint {out}/checkpoints {rows} --out {number}.csv"
                )),
                2 => folder.alone(&format!("inspect {out} --json")),
                _ => folder.alone(&format!("eval --checkpoint {out} {rows} --json")),
            };
            let ended = ended.run();
            ended.assert_well();
            assert!(
                !ended.stderr.contains("skipped the checkpoint")
                    && !ended.stdout.contains(r#""is_whole":false"#),
                "{ended}"
            );
        }
    });
    assert!(training.goes_on(), "or nothing is tested");
    training.signal_rank(0, "TERM");
    let ended = training.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
}

/// Writes a state with `value` in the place of what is at `path`, and a manifest that fits it.
pub(super) fn forge(checkpoint: &Path, whole: &[u8], path: &str, value: &Value) {
    let mut state: Value = serde_json::from_slice(whole).unwrap();
    let written_by = state["program"].to_string();
    match state.pointer_mut(path) {
        Some(place) => *place = value.clone(),
        // Settings that are not set are left out.
        None => {
            let (parent, key) = path.rsplit_once('/').unwrap();
            state.pointer_mut(parent).unwrap()[key] = value.clone();
        }
    }
    let bytes = serde_json::to_vec_pretty(&state).unwrap();
    fs::write(checkpoint.join("state.json"), &bytes).unwrap();
    let text = fs::read_to_string(checkpoint.join("manifest.json")).unwrap();
    let mut manifest: Value = serde_json::from_str(&text).unwrap();
    let entries = manifest["files"].as_array_mut().unwrap();
    let entry = entries
        .iter_mut()
        .find(|entry| entry["name"] == "state.json")
        .unwrap();
    let (old_bytes, old_hash) = (
        entry["bytes"].to_string(),
        entry["blake3"].as_str().unwrap().to_string(),
    );
    let hash = blake3::hash(&bytes).to_hex().to_string();
    let forged = text.replace(&old_hash, &hash);
    // The manifest says it, too.
    let forged = forged.replace(&written_by, &state["program"].to_string());
    let place = forged.find(&hash).unwrap();
    let start = forged[..place]
        .rfind(&format!("\"bytes\": {old_bytes}"))
        .unwrap();
    let forged = forged[..start].to_string()
        + &forged[start..].replacen(&old_bytes, &bytes.len().to_string(), 1);
    fs::write(checkpoint.join("manifest.json"), forged).unwrap();
}

#[test]
fn a_forged_state_is_refused_or_used_and_never_a_panic() {
    let folder = trained("forged");
    let checkpoint = folder.checkpoint(8);
    let whole = fs::read(checkpoint.join("state.json")).unwrap();
    let names: Vec<String> = (0..10).map(|class| class.to_string()).collect();
    // By eval, predict, inspect and a resumed run: what no model can have is always refused, what
    // does not fit the model or the data where it is used.
    const ALWAYS: [i32; 4] = [65; 4];
    const BY_USE: [i32; 4] = [65, 65, 0, 0];
    const NEVER: [i32; 4] = [0; 4];
    let forgeries = [
        (
            "/task",
            json!({ "classification": { "classes": 10, "names": [] } }),
            ALWAYS,
        ),
        (
            "/task",
            json!({ "classification": { "classes": 9, "names": names[..9] } }),
            BY_USE,
        ),
        (
            "/task",
            json!({ "classification": { "classes": 10, "names": vec!["a"; 10] } }),
            BY_USE,
        ),
        ("/task", json!({ "regression": { "outputs": 10 } }), BY_USE),
        (
            "/task",
            json!({ "regression": { "outputs": 1 << 24 } }),
            BY_USE,
        ),
        ("/row_shape", json!([]), BY_USE),
        ("/row_shape", json!([1, 784]), BY_USE),
        ("/row_shape", json!(vec![1; 784]), BY_USE),
        ("/row_shape", json!([784, 1]), BY_USE),
        (
            "/normalization",
            json!({ "shift": [0.0], "scale": [0.0] }),
            BY_USE,
        ),
        (
            "/normalization",
            json!({ "shift": [3e38], "scale": [-3e38] }),
            BY_USE,
        ),
        (
            "/normalization",
            json!({ "shift": [], "scale": [] }),
            ALWAYS,
        ),
        (
            "/normalization",
            json!({ "shift": vec![0.0; 784], "scale": [1.0] }),
            ALWAYS,
        ),
        ("/columns", json!(vec!["a"; 784]), NEVER),
        ("/config/hidden", json!([]), BY_USE),
        ("/config/hidden", json!([0]), ALWAYS),
        ("/config/hidden", json!([1u64 << 40, 1u64 << 40]), ALWAYS),
        ("/config/dropout", json!(2.0), ALWAYS),
        ("/config/class-weights", json!([1.0]), ALWAYS),
        ("/config/class-weights", json!(vec![0.0; 10]), ALWAYS),
        ("/config/missing", json!(7), ALWAYS),
        ("/config/grad-clip", json!("far"), ALWAYS),
        ("/config/label-smoothing", json!(7.0), ALWAYS),
        ("/config/labels", json!("\u{0}#"), NEVER),
        ("/config/freeze", json!(["nothing"]), [65, 65, 0, 2]),
        ("/config/batch-size", json!(u64::MAX), ALWAYS),
        ("/config/dtype", json!("f64"), ALWAYS),
        ("/config/dtype", json!("bf16"), BY_USE),
        ("/position/in_epoch", json!(1u64 << 53), NEVER),
        ("/position/batch", json!(1u64 << 53), NEVER),
        ("/schedule/steps", json!(0), NEVER),
        (
            "/best",
            json!({ "step": 0, "loss": -1.0, "accuracy": 7.0 }),
            NEVER,
        ),
        ("/world/devices", json!([""]), NEVER),
        ("/program", json!("\u{1b}[31m"), NEVER),
    ];
    for (path, value, codes) in forgeries {
        forge(&checkpoint, &whole, path, &value);
        let rows = "--data glyphs,rows=16,held-out=8 --device cpu --threads 1";
        let resumed = RUN.replace("--steps 8", "--steps 9");
        let words = [
            format!("eval --checkpoint OUT/checkpoints/step-00000008 {rows}"),
            format!(
                "predict --checkpoint OUT/checkpoints/step-00000008 {rows} --out forged.csv --overwrite"
            ),
            "inspect OUT/checkpoints/step-00000008".to_string(),
            format!("{resumed} --resume auto --override --dry-run"),
        ];
        all_at_once(words.into_iter().zip(codes), |(words, code)| {
            let ended = folder.alone(&words).run();
            assert_eq!(
                ended.exit_code(),
                Some(code),
                "{path} = {value}: {words}: {ended}"
            );
        });
    }
}

/// Versions up to 0.6 reached the lowest rate one step later.
#[test]
fn a_run_of_a_version_with_another_schedule_resumes_by_override_alone() {
    let folder = Folder::new("schedule");
    let words = RUN.replace("constant", "cosine");
    folder.alone(&words).run().assert_well();
    let checkpoint = folder.checkpoint(4);
    let whole = fs::read(checkpoint.join("state.json")).unwrap();
    let resume = format!("{words} --resume OUT/checkpoints/step-00000004");
    folder
        .alone(&format!("{resume} --dry-run"))
        .run()
        .assert_well();
    // Step 5 of 8 by the old formula.
    let old = 0.001 * 0.5 * (1.0 + (std::f64::consts::PI * 0.5).cos());
    forge(&checkpoint, &whole, "/schedule/learning_rate", &json!(old));
    let ended = folder.alone(&resume).run();
    let cause = ended.assert_fails(2);
    let parts = [
        "--schedule cosine: step 5 has the learning rate",
        "(was 0.0005",
        "--override",
    ];
    assert!(parts.iter().all(|part| cause.contains(part)), "{ended}");
    folder
        .alone(&format!("{resume} --override"))
        .run()
        .assert_well();
}

#[cfg(feature = "mpi")]
#[test]
fn hosts_with_identical_copies_resume_and_evaluate() {
    let folder = Folder::new("hosts");
    let words = RUN.replace("--out OUT", "--out run --zero 0");
    let hosts = ["north", "south"];
    let [north, south] = hosts.map(|host| folder.path().join(host).join("run"));
    folder.on_hosts(&hosts, &words).run().assert_well();
    let on = format!("{} --resume auto", words.replace("--steps 8", "--steps 12"));
    let rows = "--data glyphs,rows=64,held-out=16 --device cpu";
    let eval = format!("eval --checkpoint run/checkpoints/step-00000004 {rows} --json");
    let resume = format!("{on} --dry-run");
    let refused = |code: i32, parts: &[&str]| {
        for words in [&resume, &eval] {
            let ended = folder.on_hosts(&hosts, words).run();
            let cause = ended.assert_fails(code);
            parts
                .iter()
                .for_each(|part| assert!(cause.contains(part), "{part}: {ended}"));
        }
    };
    let copy = || {
        for step in ["step-00000004", "step-00000008"] {
            let (from, to) = (
                north.join("checkpoints").join(step),
                south.join("checkpoints").join(step),
            );
            _ = fs::remove_dir_all(&to);
            fs::create_dir_all(&to).unwrap();
            let names = fs::read_dir(&from)
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            names.for_each(|name| _ = fs::copy(from.join(&name), to.join(&name)).unwrap());
        }
    };
    let shared = "shared by all hosts, or copied to every host";
    assert!(!south.exists(), "rank 0 alone has saved");
    refused(74, &["cannot read run/checkpoints/step-0000000", shared]);
    copy();
    folder.on_hosts(&hosts, &eval).run().assert_well();
    folder.on_hosts(&hosts, &resume).run().assert_well();

    // One byte differs on one host: in the moments, which no loss shows, and in the model.
    for name in ["optimizer.safetensors", "model.safetensors"] {
        for step in ["step-00000004", "step-00000008"] {
            damage(&south.join("checkpoints").join(step).join(name));
        }
        refused(65, &[name, "south", shared]);
        copy();
    }
    // Another run's, whole in itself.
    let seed = RUN.replace("--out OUT", &format!("--seed 7 --out {}", south.display()));
    fs::remove_dir_all(&south).unwrap();
    folder.alone(&seed).run().assert_well();
    refused(
        78,
        &[
            "ranks disagree on the manifest of run/checkpoints/step-0000000",
            shared,
        ],
    );
    copy();
    folder.on_hosts(&hosts, &on).run().assert_well();
}
