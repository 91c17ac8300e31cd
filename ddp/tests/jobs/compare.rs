//! `ddp-train compare`: two runs with one different setting first differ where that setting first
//! matters.

mod logs;
mod replays;

use std::fs;

use serde_json::Value;

use crate::support::job::{Ended, Folder, all_at_once};

/// 40 steps of four batches an epoch.
const SMALL: &str = "--data synthetic:classification,rows=96,held-out=0,features=5,classes=3 \
                     --hidden 6 --batch-size 24 --steps 40 --log-every 1";

/// A run of this many ranks, and its fault.
type How<'a> = (usize, &'a str, &'a str);

/// Trains in the folder `name`.
fn train(folder: &Folder, name: &str, (ranks, words, fault): How<'_>) {
    let words = format!("{words} --out {name}");
    let job = match ranks {
        1 => folder.alone(&words),
        ranks => folder.started(ranks, &words),
    };
    let job = if fault.is_empty() {
        job
    } else {
        job.env("DDP_TEST_FAULT", fault)
    };
    job.run().assert_well();
}

fn compare(folder: &Folder) -> Ended {
    folder.alone("compare one two").run()
}

/// The comparison of `one` and `two` as JSON, whose exit code is checked.
#[track_caller]
fn compared(folder: &Folder) -> Value {
    let ended = folder.alone("compare one two --json").run();
    let value: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended}"));
    let code = if value["same"] == true { 0 } else { 1 };
    assert_eq!(ended.exit_code(), Some(code), "{ended}");
    assert_eq!(value["first"].is_null(), value["same"] == true, "{ended}");
    value
}

/// What the replay of `one` and `two` finds.
#[track_caller]
fn replayed(folder: &Folder) -> Vec<String> {
    let ended = folder.alone("compare one two --replay --json").run();
    let value: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended}"));
    assert_eq!(ended.exit_code(), Some(1), "{ended}");
    let lines = value["replay"].as_array().unwrap().iter();
    lines.map(|line| line.as_str().unwrap().into()).collect()
}

/// Why the replay of `one` and `two` is refused, which are compared all the same.
#[track_caller]
fn refusal(folder: &Folder, code: i32) -> String {
    let ended = folder.alone("compare one two --replay").run();
    assert_eq!(ended.exit_code(), Some(code), "{ended}");
    assert!(
        ended.stdout.contains("they first differ in the "),
        "{ended}"
    );
    ended.causes().concat()
}

/// Both runs, compared.
#[track_caller]
fn pair(first: How<'_>, second: How<'_>) -> (Folder, Value) {
    let folder = Folder::new("compare");
    train(&folder, "one", first);
    train(&folder, "two", second);
    let value = compared(&folder);
    (folder, value)
}

/// The names of what differs.
fn differing(value: &Value) -> Vec<&str> {
    let all = value["differences"].as_array().unwrap().iter();
    all.map(|it| it["name"].as_str().unwrap()).collect()
}

#[test]
fn runs_of_the_same_bits_are_the_same() {
    let cases = [
        ((1, SMALL, ""), (1, SMALL, "")),
        ((1, SMALL, ""), (1, &*format!("{SMALL} --threads 1"), "")),
        ((2, SMALL, ""), (2, &*format!("{SMALL} --zero 1"), "")),
        (
            (3, SMALL, ""),
            (3, &*format!("{SMALL} --zero 1 --bucket-mb 0.004"), ""),
        ),
        (
            (2, &*format!("{SMALL} --optimizer muon"), ""),
            (2, &*format!("{SMALL} --optimizer muon --zero 1"), ""),
        ),
    ];
    all_at_once(cases, |(first, second)| {
        let (folder, value) = pair(first, second);
        assert_eq!(
            (&value["same"], &value["steps"]),
            (&true.into(), &40.into()),
            "{value}"
        );
        assert_eq!(value["steps_with_digests"], 40);
        let ended = compare(&folder);
        ended.assert_well();
        assert!(ended.stdout.contains("the same in all 40 steps"), "{ended}");
    });
}

#[test]
fn runs_part_where_what_differs_first_matters() {
    let with = |flags: &str| format!("{SMALL} {flags}");
    let (seed, eps, zero) = (with("--seed 1"), with("--eps 1e-6"), with("--zero 1"));
    type Case<'a> = (
        How<'a>,
        How<'a>,
        &'a str,
        Option<&'a str>,
        u64,
        &'a [&'a str],
    );
    let cases: [Case<'_>; 5] = [
        (
            (1, SMALL, ""),
            (1, &seed, ""),
            "initial weights",
            Some("0"),
            0,
            &["--seed"],
        ),
        (
            (1, SMALL, ""),
            (1, &eps, ""),
            "update",
            Some("0"),
            1,
            &["--eps"],
        ),
        // A flipped bit of the last layer's gradient: backward begins there.
        (
            (2, SMALL, ""),
            (2, SMALL, "1:reduction:37:flip"),
            "gradient",
            Some("2"),
            37,
            &[],
        ),
        (
            (2, &zero, ""),
            (2, &zero, "1:reduction:37:flip"),
            "gradient",
            Some("2"),
            37,
            &[],
        ),
        (
            (2, SMALL, ""),
            (2, &zero, "0:reduction:5:flip"),
            "gradient",
            Some("2"),
            5,
            &["--zero"],
        ),
    ];
    all_at_once(cases, |(first, second, thing, layer, step, differences)| {
        let (folder, value) = pair(first, second);
        let found = &value["first"];
        assert_eq!(found["thing"], thing, "{value}");
        assert_eq!(
            found["layer"],
            layer.map_or(Value::Null, Value::from),
            "{value}"
        );
        assert_eq!(found["step"], step, "{value}");
        assert_eq!(differing(&value), differences, "{value}");
        let ended = compare(&folder);
        assert_eq!(ended.exit_code(), Some(1), "{ended}");
        assert!(ended.stdout.contains("they first differ in"), "{ended}");
        assert_eq!(ended.causes().len(), 1, "{ended}");
    });
}

#[test]
fn other_ranks_part_by_rounding_and_nothing_before() {
    let (folder, value) = pair((2, SMALL, ""), (3, SMALL, ""));
    assert_eq!(differing(&value), ["ranks"], "{value}");
    let thing = value["first"]["thing"].as_str().unwrap();
    assert!(["loss", "gradient"].contains(&thing), "{value}");
    let told = "expected runs that cut batches into as many parts, got 2 in A and 3 in B";
    assert!(refusal(&folder, 2).contains(told));
}

#[test]
fn with_the_same_shards_other_ranks_are_the_same_and_a_flipped_bit_is_found() {
    let same_bits = format!("{SMALL} --same-bits 4");
    let (_, value) = pair(
        (1, &same_bits, ""),
        (3, &format!("{same_bits} --zero 1"), ""),
    );
    assert_eq!(value["same"], true, "{value}");
    assert!(differing(&value).contains(&"ranks"), "{value}");
    let (_, value) = pair((2, &same_bits, ""), (4, &same_bits, "3:reduction:37:flip"));
    let first = &value["first"];
    assert_eq!(
        (&first["thing"], &first["step"]),
        (&"gradient".into(), &37.into()),
        "{value}"
    );
}

#[test]
fn a_run_that_continued_with_other_libraries_says_so() {
    let folder = Folder::new("libraries");
    let words = SMALL.replace("--steps 40", "--schedule constant --warmup-steps 0");
    for (name, simd) in [("one", "avx512"), ("two", "plain")] {
        train(&folder, name, (1, &format!("{words} --steps 4"), ""));
        let words = format!("{words} --steps 8 --resume auto --out {name}");
        let job = folder.alone(&words).env("DDP_SIMD", simd);
        job.run().assert_well();
    }
    let value = compared(&folder);
    assert_eq!(differing(&value), ["resumed"], "{value}");
    let b = &value["differences"][0]["b"];
    assert_eq!(b, "after step 4 with simd baseline", "{value}");
}

#[test]
fn other_ranks_before_a_resume_are_named() {
    let words = SMALL.replace("--steps 40", "--schedule constant --warmup-steps 0");
    let folder = Folder::new("ranks");
    for (name, ranks) in [("one", 2), ("two", 3)] {
        train(&folder, name, (ranks, &format!("{words} --steps 4"), ""));
        let resumed = format!("{words} --steps 8 --resume auto");
        train(&folder, name, (2, &resumed, ""));
    }
    let value = compared(&folder);
    assert_eq!(differing(&value), ["ranks"], "{value}");
    assert_eq!(value["differences"][0]["b"], "3, 2 after step 4", "{value}");
}

/// Layers are paired by name, also where one model has more of them, or trains fewer.
#[test]
fn models_of_other_layers_part_in_a_layer_and_name_what_only_one_has() {
    let deeper = SMALL.replace("--hidden 6", "--hidden 6,6");
    let frozen = format!("{SMALL} --freeze 0");
    let cases = [
        (
            SMALL,
            &*deeper,
            "initial weights",
            "2",
            0,
            [&[][..], &["4"]],
        ),
        (&deeper, SMALL, "initial weights", "2", 0, [&["4"][..], &[]]),
        (SMALL, &*frozen, "gradient", "0", 1, [&["0"][..], &[]]),
        (&frozen, SMALL, "gradient", "0", 1, [&[][..], &["0"]]),
    ];
    all_at_once(cases, |(first, second, thing, layer, step, only)| {
        let (folder, value) = pair((1, first, ""), (1, second, ""));
        let found = &value["first"];
        assert_eq!(
            (&found["thing"], &found["layer"]),
            (&thing.into(), &layer.into()),
            "{value}"
        );
        assert_eq!(found["step"], step, "{value}");
        assert_eq!(
            [&found["only_in_a"], &found["only_in_b"]],
            only.map(Value::from).each_ref()
        );
        let ended = compare(&folder);
        for (layers, run) in only
            .iter()
            .zip(["A", "B"])
            .filter(|(only, _)| !only.is_empty())
        {
            let line = format!("layers only in {run}: {}", layers.join(", "));
            assert!(ended.stdout.contains(&line), "{ended}");
        }
        // Of the layers that both have, the last norms are compared.
        let distance = ended
            .stdout
            .lines()
            .find(|line| line.contains("norms of layers"));
        assert!(distance.unwrap().ends_with("apart"), "{ended}");
    });
}

#[test]
fn one_changed_label_shows_in_the_step_that_reads_its_row() {
    let folder = Folder::new("label");
    let words = "--labels y --plain --hidden 6 --batch-size 8 --steps 4 --log-every 1";
    for (name, changed) in [("one", usize::MAX), ("two", 5)] {
        let row = |row: usize| {
            let label = (row + usize::from(row == changed)) % 2;
            format!("{},{},c{label}\n", row % 5, row * 7 % 11)
        };
        let rows: String = (0..32).map(row).collect();
        fs::write(
            folder.path().join(format!("{name}.csv")),
            format!("a,b,y\n{rows}"),
        )
        .unwrap();
        let job = folder.alone(&format!("--data {name}.csv {words} --out {name}"));
        job.env(
            "DDP_TEST_ROWS",
            folder.path().join("rows").to_str().unwrap(),
        )
        .run()
        .assert_well();
    }
    let rows = fs::read_to_string(folder.path().join("rows-0")).unwrap();
    let reads = |line: &&str| line.split([':', ' ']).skip(1).any(|row| row == "5");
    let line = rows.lines().find(reads).unwrap();
    let step: u64 = line.split(':').next().unwrap().parse().unwrap();
    let value = compared(&folder);
    let first = &value["first"];
    assert_eq!(
        (&first["thing"], &first["step"]),
        (&"loss".into(), &step.into()),
        "{value}"
    );
    assert_eq!(
        differing(&value),
        ["--data", "content of the data"],
        "{value}"
    );
    let found = replayed(&folder);
    let expected = format!("is in step {step}: targets (micro-batch 0): 1 of 8 rows, from row ");
    assert!(
        found[0].contains(&expected) && found.len() == 1,
        "{found:?}"
    );
}

#[test]
fn one_changed_initial_weight_shows_before_the_first_step() {
    let folder = Folder::new("weight");
    train(&folder, "base", (1, SMALL, ""));
    let model = folder
        .path()
        .join("base/checkpoints/step-00000040/model.safetensors");
    let mut bytes = fs::read(model).unwrap();
    fs::write(folder.path().join("one.safetensors"), &bytes).unwrap();
    // The lowest bit of the last value.
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    fs::write(folder.path().join("two.safetensors"), &bytes).unwrap();
    for name in ["one", "two"] {
        train(
            &folder,
            name,
            (1, &format!("{SMALL} --init-from {name}.safetensors"), ""),
        );
    }
    let value = compared(&folder);
    let first = &value["first"];
    assert_eq!(
        (&first["thing"], &first["step"]),
        (&"initial weights".into(), &0.into()),
        "{value}"
    );
    assert_eq!(first["layers"], 1, "{value}");
    let found = replayed(&folder);
    let layer = first["layer"].as_str().unwrap();
    let expected = format!("0: the first difference is in step 1: value of {layer}.");
    assert!(
        found[0].contains(&expected) && found.len() == 1,
        "{found:?}"
    );
}

#[test]
fn between_logged_steps_the_last_that_was_the_same_is_named() {
    let words = SMALL.replace("--log-every 1", "--log-every 10");
    let (folder, value) = pair((2, &words, ""), (2, &words, "0:reduction:37:flip"));
    let first = &value["first"];
    assert_eq!(
        (&first["step"], &first["same_until"]),
        (&40.into(), &30.into()),
        "{value}"
    );
    let ended = compare(&folder);
    assert!(ended.stdout.contains("step 30 is the same"), "{ended}");
}

#[test]
fn wrong_use_says_what_to_give() {
    let folder = Folder::new("wrong");
    folder.alone("compare one").run().assert_fails(2);
    assert!(
        folder
            .alone("compare one two")
            .run()
            .assert_fails(74)
            .contains("metrics.jsonl")
    );
    train(
        &folder,
        "one",
        (1, &SMALL.replace("--steps 40", "--steps 0"), ""),
    );
    train(
        &folder,
        "two",
        (1, &SMALL.replace("--steps 40", "--steps 0"), ""),
    );
    assert!(
        folder
            .alone("compare one two")
            .run()
            .assert_fails(2)
            .contains("a step that both runs logged")
    );
}

#[test]
fn a_page_of_two_runs_shows_how_far_they_are_apart() {
    let (folder, _) = pair((2, SMALL, ""), (3, SMALL, ""));
    folder
        .alone("report one two --out both.html")
        .run()
        .assert_well();
    let page = fs::read_to_string(folder.path().join("both.html")).unwrap();
    for title in ["Loss: distance", "Weights: distance"] {
        assert!(page.contains(title), "{title}");
    }
}
