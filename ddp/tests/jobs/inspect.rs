//! `ddp-train inspect`: what it reports of a run, a checkpoint and a model file, and that it names
//! damage. Of data `--dry-run` says whether they can be trained on.

use serde_json::{Value, json};

use crate::support::job::{Ended, Folder, QUICK};

/// The JSON that `inspect` prints, and how it ended.
#[track_caller]
fn seen(folder: &Folder, words: &str) -> (Value, Ended) {
    let ended = folder.alone(&format!("inspect {words} --json")).run();
    let json =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended}"));
    (json, ended)
}

/// What it prints for people, of something sound.
#[track_caller]
fn told(folder: &Folder, words: &str) -> String {
    let ended = folder.alone(&format!("inspect {words}")).run();
    ended.assert_well();
    ended.stdout
}

#[track_caller]
fn assert_has(text: &str, parts: &[&str]) {
    parts
        .iter()
        .for_each(|part| assert!(text.contains(part), "{part} is not in {text}"));
}

/// The name of the last checkpoint of `QUICK`, within the folder of the run.
const LAST: &str = "checkpoints/step-00000008";

#[test]
fn a_checkpoint_tells_what_it_is_and_how_to_build_it() {
    let folder = Folder::new("inspect");
    folder
        .together(&format!(
            "{QUICK} --activation gelu-tanh --dropout 0.25 --device cpu"
        ))
        .run()
        .assert_well();
    let (json, ended) = seen(&folder, &format!("OUT/{LAST}"));
    ended.assert_well();
    assert_eq!(
        (
            &json["kind"],
            &json["is_whole"],
            &json["step"],
            &json["samples"]
        ),
        (&"checkpoint".into(), &true.into(), &8.into(), &256.into())
    );
    let model = &json["model"];
    assert_eq!(
        (
            &model["inputs"],
            &model["hidden"],
            &model["outputs"],
            &model["activation"],
            &model["dropout"]
        ),
        (
            &784.into(),
            &json!([16]),
            &10.into(),
            &"gelu-tanh".into(),
            &0.25.into()
        )
    );
    assert_eq!(
        model["torch"],
        "nn.Sequential(nn.Linear(784, 16), nn.Sequential(nn.GELU(approximate=\"tanh\"), nn.Dropout(0.25)), nn.Linear(16, 10))"
    );
    assert_eq!(
        model["tensors"][0],
        json!({ "name": "0.weight", "shape": [16, 784], "dtype": "F32" })
    );
    assert_eq!(model["parameters"], 784 * 16 + 16 + 16 * 10 + 10);
    let log = folder.metrics_log();
    assert_eq!(
        json["last"]["loss"],
        log.all("eval").last().unwrap()["loss"]
    );
    let names: Vec<&str> = json["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| file["name"].as_str().unwrap())
        .collect();
    for name in ["manifest.json", "model.safetensors", "state.json"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let text = told(&folder, &format!("OUT/{LAST}"));
    assert_has(
        &text,
        &[
            "intact, every checksum is right",
            "8 of 8, 256 rows",
            "0.weight  [16, 784]  f32  12544",
            "adamw",
            "glyphs,rows=256",
        ],
    );
    assert_has(
        &text,
        &[
            "classification into 10 classes: 0, 1, 2",
            "evaluation  loss ",
            "nn.Linear(784, 16)",
            "model.safetensors",
        ],
    );
}

#[test]
fn what_was_not_trained_is_named() {
    let folder = Folder::new("inspect-frozen");
    let words = format!("{QUICK} --freeze 0 --optimizer sgd --nesterov --device cpu");
    folder.alone(&words).run().assert_well();
    let text = told(&folder, &format!("OUT/{LAST}"));
    assert_has(
        &text,
        &[
            "0.weight, 0.bias: 12560 parameters were not trained",
            "sgd (momentum 0.9, nesterov true)",
        ],
    );
    assert_has(&told(&folder, "OUT"), &["\nfrozen      0\n"]);
    let (json, _) = seen(&folder, &format!("OUT/{LAST}"));
    assert_eq!(json["model"]["frozen"], json!(["0.weight", "0.bias"]));
}

#[test]
fn every_file_of_a_damaged_checkpoint_is_named() {
    let folder = Folder::new("inspect-damage");
    folder
        .alone(&format!("{QUICK} --device cpu"))
        .run()
        .assert_well();
    let checkpoint = folder.out().join(LAST);
    let names: Vec<_> = std::fs::read_dir(&checkpoint)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert!(names.len() >= 4, "{names:?}");
    for path in names {
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[0] ^= 1;
        for damaged in [&flipped[..], &whole[..whole.len() - 1], &[]] {
            std::fs::write(&path, damaged).unwrap();
            let ended = folder.alone(&format!("inspect OUT/{LAST}")).run();
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(ended.assert_fails(65).contains(name), "{name}: {ended}");
        }
        // Of a run it is one checkpoint, said beside the others.
        let (json, ended) = seen(&folder, "OUT");
        assert_eq!(ended.exit_code(), Some(65), "{ended}");
        assert!(
            json["checkpoints"]
                .as_array()
                .unwrap()
                .iter()
                .any(|one| one["is_whole"] == false),
            "{json}"
        );
        std::fs::write(&path, &whole).unwrap();
    }
    seen(&folder, &format!("OUT/{LAST}")).1.assert_well();
}

#[test]
fn a_run_tells_how_it_ended_and_what_it_kept() {
    let folder = Folder::new("inspect-run");
    folder
        .together(&format!("{QUICK} --eval-every 4 --device cpu"))
        .run()
        .assert_well();
    let (json, ended) = seen(&folder, "OUT");
    ended.assert_well();
    assert_eq!(
        (
            &json["kind"],
            &json["end"]["reason"],
            &json["last_step"]["step"]
        ),
        (&"run".into(), &"done".into(), &8.into())
    );
    assert_eq!(
        json["checkpoints"].as_array().unwrap().last().unwrap()["step"],
        8
    );
    assert_has(
        &told(&folder, "OUT"),
        &[
            "run ",
            "8 of 8, epoch 1: loss ",
            "done (exit code 0)",
            "step-00000008",
            "intact",
            "evaluation  loss",
        ],
    );

    // A kill may leave an incomplete last line; a bad line in the middle is damage.
    let path = folder.out().join("metrics.jsonl");
    let log = std::fs::read_to_string(&path).unwrap();
    let end = log.trim_end().rfind('\n').unwrap();
    std::fs::write(&path, &log[..end + 10]).unwrap();
    assert_has(
        &told(&folder, "OUT"),
        &[
            "no: it is still running, or was killed",
            "ddp-train resume continues it",
        ],
    );
    std::fs::write(&path, log.replacen("{\"event\":\"step\"", "{event", 1)).unwrap();
    let (json, ended) = seen(&folder, "OUT");
    assert_eq!(
        (ended.exit_code(), ended.causes().len()),
        (Some(65), 1),
        "{ended}"
    );
    assert_eq!(json["bad_lines"][0]["line"], 2);
}

#[test]
fn lost_ranks_and_resumes_are_listed_and_a_run_without_held_out_rows_says_so() {
    let folder = Folder::new("inspect-lost");
    let words = "--data glyphs,rows=256,held-out=0 --hidden 16 --batch-size 32 --out OUT";
    let lost = folder.started(3, &format!("{words} --epochs 1 --min-ranks 2"));
    let ended = lost.env("DDP_TEST_FAULT", "1:forward:3:kill").run();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let none =
        "no rows were held out, so all figures are of rows that were trained on (--val-split";
    assert!(ended.stderr.contains(none), "{ended}");
    let more = format!("{words} --epochs 2 --resume auto --override");
    folder.alone(&more).run().assert_well();
    assert_has(
        &told(&folder, "OUT"),
        &[
            "lost rank 1 (killed by signal 9): 2 ranks continue after step 2",
            "resumed after step 8 on 1 rank",
        ],
    );
}

#[test]
fn a_record_that_is_a_pipe_or_a_device_is_refused_at_once() {
    let folder = Folder::new("pipe");
    folder.alone(QUICK).run().assert_well();
    // Beside OUT, whose metrics log the tests themselves read.
    std::fs::rename(folder.out(), folder.path().join("odd")).unwrap();
    for make in ["mkfifo", "ln -s /dev/zero"] {
        let before = format!("rm odd/metrics.jsonl; {make} odd/metrics.jsonl");
        for (words, exit_code) in [
            ("inspect odd", 65),
            ("watch odd", 65),
            ("report odd", 65),
            (
                "eval --checkpoint odd --data glyphs,rows=256,held-out=64",
                65,
            ),
            ("resume odd", 65),
        ] {
            let ended = folder.in_shell(&before, words).run();
            let cause = ended.assert_fails(exit_code);
            assert!(cause.contains("plain file"), "{words}: {ended}");
        }
    }
}

#[test]
fn a_model_file_shows_its_tensors() {
    let folder = Folder::new("inspect-model");
    folder
        .alone(&format!("{QUICK} --device cpu"))
        .run()
        .assert_well();
    let bytes = std::fs::read(folder.out().join(LAST).join("model.safetensors")).unwrap();
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    put("alone.safetensors", &bytes);
    put("model.safetensors", &bytes[..bytes.len() - 4]);
    put("rows.csv", b"x,y\n1,2\n");
    let (json, _) = seen(&folder, "alone.safetensors");
    assert_eq!(
        (&json["kind"], &json["elements"]),
        (&"model".into(), &12_730.into())
    );
    assert_has(
        &told(&folder, "alone.safetensors"),
        &[
            "0.weight  [16, 784]  f32  12544",
            "also shows the configuration",
        ],
    );
    let ended = folder.alone("inspect model.safetensors").run();
    assert!(ended.assert_fails(65).contains("cut short"), "{ended}");
    let ended = folder.alone("inspect rows.csv").run();
    assert_has(ended.assert_fails(2), &["a dry run with --data rows.csv"]);
}

#[test]
fn a_flat_file_whose_checksum_is_wrong_is_named() {
    let folder = Folder::new("inspect-flat");
    std::fs::write(folder.path().join("a.csv"), "x,y\n1,2\n3,4\n5,6\n").unwrap();
    folder
        .alone("--data a.csv --labels y --plain --cache-dir cache --out OUT --dry-run")
        .run()
        .assert_well();
    let entry = std::fs::read_dir(folder.path().join("cache"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let kept = entry
        .flat_map(|entry| std::fs::read_dir(entry).unwrap())
        .map(|file| file.unwrap().path());
    let kept = kept
        .into_iter()
        .find(|path| path.extension().is_some_and(|ending| ending == "bin"))
        .unwrap();
    let mut bytes = std::fs::read(kept).unwrap();
    let path = folder.path().join("features.bin");
    std::fs::write(&path, &bytes).unwrap();
    let tried = || {
        folder
            .alone("--data features.bin --out OUT --dry-run")
            .run()
    };
    tried().assert_well();
    bytes[64] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let ended = tried();
    assert!(ended.assert_fails(65).contains("it is damaged"), "{ended}");
}

#[test]
fn tokens_are_counted_and_checked_before_training() {
    let folder = Folder::new("tokens");
    let tokens = (0..67u16).map(|index| index * index % 97);
    let header = [20240520u32, 1, 67].map(u32::to_le_bytes);
    let mut bytes = header.as_flattened().to_vec();
    bytes.resize(1024, 0);
    bytes.extend(tokens.flat_map(u16::to_le_bytes));
    std::fs::write(folder.path().join("train.bin"), bytes).unwrap();
    let refused = |code, words: &str, part: &str| {
        let ended = folder.alone(words).run();
        let cause = ended.assert_fails(code);
        assert_has(cause, &[part]);
    };
    let outside = "train.bin, token 7: expected a token below 40, the option vocabulary, got 49";
    let train = "--epochs 1 --out OUT --data";
    refused(
        65,
        &format!("{train} tokens:train.bin,context=4,vocabulary=40"),
        outside,
    );
    refused(
        2,
        &format!("{train} train.bin"),
        "--data train.bin: expected a context",
    );
    let mlp = format!("{train} tokens:train.bin,context=4");
    refused(2, &mlp, "model mlp: expected inputs of f32, got i64 [4]");
}
