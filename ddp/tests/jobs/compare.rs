//! `ddp-train compare`: two runs with one different setting first differ where that setting first
//! matters.

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

/// `compare one two`, after `change` of B's log.
fn changed_log(folder: &Folder, change: impl Fn(&str) -> String) -> Ended {
    let log = folder.path().join("two/metrics.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, change(&text)).unwrap();
    let ended = compare(folder);
    fs::write(&log, text).unwrap();
    ended
}

#[test]
fn a_log_that_is_cut_damaged_or_lost_is_not_called_the_same_for_nothing() {
    // A checkpoint's line would come between any two steps.
    let flags = "--schedule constant --warmup-steps 0 --checkpoint-every 0";
    let words = SMALL.replace("--steps 40", flags);
    let whole = format!("{words} --steps 12");
    let (folder, _) = pair((1, &whole, ""), (1, &whole, ""));
    let cut = changed_log(&folder, |text| {
        let lines: Vec<_> = text.lines().take(6).collect();
        lines.join("\n") + "\n"
    });
    cut.assert_well();
    for expected in [
        "the same in all 5 steps that both logged",
        "7 steps that only A logged: not compared",
    ] {
        assert!(cut.stdout.contains(expected), "{cut}");
    }
    let damaged = changed_log(&folder, |text| {
        text.replacen(
            "}}\n{\"event\":\"step\",\"step\":8,",
            "}\n{\"event\":\"step\",\"step\":8,",
            1,
        )
    });
    let text = damaged.assert_fails(65);
    assert!(
        text.contains("line 8 of metrics.jsonl is not an event"),
        "{text}"
    );
    // A step that is JSON, and no step.
    let odd = changed_log(&folder, |text| {
        text.replacen("\"loss\":", "\"loss\":\"x\",\"was\":", 1)
    });
    let text = odd.assert_fails(65);
    assert!(
        text.contains("line 2 of metrics.jsonl is no step: "),
        "{text}"
    );
    // Written by another program, with spaces.
    let spaced = changed_log(&folder, |text| {
        text.replace("\"event\":\"step\"", "\"event\": \"step\"")
    });
    spaced.assert_well();
    assert!(
        spaced.stdout.contains("the same in all 12 steps"),
        "{spaced}"
    );
    // Without its log a run that is resumed does not know its initial weights.
    for (name, steps) in [("one", 16), ("two", 16)] {
        if name == "two" {
            fs::remove_file(folder.path().join("two/metrics.jsonl")).unwrap();
        }
        let words = format!("{words} --steps {steps} --resume auto");
        train(&folder, name, (1, &words, ""));
    }
    let value = compared(&folder);
    assert_eq!(value["same"], true, "{value}");
    assert_eq!(value["steps"], 4, "{value}");
    assert_eq!(value["steps_only_in_a"], 12, "{value}");
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
    let words = "--labels y --hidden 6 --batch-size 8 --steps 4 --log-every 1";
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

/// Of runs that log each tenth step, with a checkpoint at each twentieth.
#[test]
fn a_replay_finds_the_step_and_the_operation_and_what_no_run_computes_again() {
    let words = SMALL.replace(
        "--log-every 1",
        "--log-every 10 --checkpoint-every 20 --keep 9",
    );
    let with = |flags: &str| format!("{words} {flags}");
    let flipped = |words: &str| (with(words), with(words), "0:reduction:37:flip");
    let differs =
        |step: u64, what: &str| format!("0: the first difference is in step {step}: {what}");
    let same = || "20: all outputs have the same bits".to_string();
    let (narrow, deep) = (
        words.replace("size 24", "size 23"),
        words.replace("--hidden 6", "--hidden 6,6"),
    );
    let cases = [
        (
            1,
            (with(""), narrow, ""),
            differs(1, "inputs of micro-batch 0: its shape is "),
        ),
        (
            1,
            (with(""), with("--eps 1e-6"), ""),
            differs(1, "updated value of 0.weight: "),
        ),
        (1, (with(""), deep, ""), differs(1, "value of ")),
        (2, flipped(""), same()),
        (3, (with(""), with(""), "1:reduction:37:flip"), same()),
        (3, flipped("--same-bits 4 --zero 1 --micro-batch 2"), same()),
    ];
    all_at_once(cases, |(ranks, (first, second, fault), expected)| {
        let (folder, _) = pair((ranks, &first, ""), (ranks, &second, fault));
        let found = replayed(&folder);
        let expected = format!("replayed after step {expected}");
        assert!(found[0].starts_with(&expected), "{found:?}");
        // What a fault of the machine changed is not computed again.
        let unlike = "the replay of B does not match its log in the ";
        let is_unlike = |line: &String| line.starts_with(unlike) && line.contains(" of step 40: ");
        let is_unlike = found.len() == 2 && is_unlike(&found[1]);
        assert!(is_unlike != fault.is_empty(), "{found:?}");
        assert!(is_unlike || found.len() == 1, "{found:?}");
    });
}

#[test]
fn a_replay_refuses_what_it_cannot_repeat() {
    let folder = Folder::new("replay");
    let rows: String = (0..96)
        .map(|row| format!("{},{},c{}\n", row % 5, row % 7, row % 2))
        .collect();
    fs::write(folder.path().join("data.csv"), format!("a,b,y\n{rows}")).unwrap();
    let words = "--data data.csv --labels y --hidden 6 --batch-size 24 --steps 2 --log-every 1";
    train(&folder, "one", (1, words, ""));
    train(&folder, "two", (1, &format!("{words} --seed 1"), ""));
    let refused = |code: i32, expected: &str| {
        let text = refusal(&folder, code);
        assert!(text.contains(expected), "{text}");
    };
    let data = folder.path().join("data.csv");
    fs::write(&data, format!("a,b,y\n{}", rows.replace("4,", "5,"))).unwrap();
    let found = replayed(&folder);
    for (line, run) in found[1..].iter().zip(["A", "B"]) {
        let unlike = format!("the replay of {run} does not match its log in the loss of step 1: ");
        assert!(line.starts_with(&unlike) && found.len() == 3, "{found:?}");
    }
    // A damaged checkpoint, or one of another run, is not used: the replay begins with the seed.
    let saved = |name: &str| folder.path().join(name).join("checkpoints");
    fs::rename(saved("one"), saved("one").with_extension("own")).unwrap();
    fs::rename(saved("two"), saved("one")).unwrap();
    assert!(replayed(&folder)[0].starts_with("replayed after step 0: "));
    fs::remove_file(&data).unwrap();
    refused(74, "data.csv");
    let log = folder.path().join("one/metrics.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(
        &log,
        text.replacen("\"program\":\"ddp-train ", "\"program\":\"ddp-train 0.", 1),
    )
    .unwrap();
    refused(2, "compare --replay one: expected a run of this program");
}

/// Repeating it with the settings and ranks of its start would compute something else.
#[test]
fn a_replay_refuses_a_run_that_changed_on_the_way() {
    let words = SMALL.replace("--steps 40", "--schedule constant --warmup-steps 0");
    // The ranks and flags with which B is resumed after step 4, flags of A, and what is said.
    let cases = [
        (
            1,
            "--override --lr 0.01",
            "",
            Err(
                "--replay two: expected a run that did not change before step 5, got --lr 0.01 (was ",
            ),
        ),
        (
            3,
            "",
            "--checkpoint-every 12",
            Err("got 3 ranks after step 4"),
        ),
        (
            3,
            "",
            "",
            Err("cut batches into as many parts, got 1 in A and 3 in B"),
        ),
        (
            3,
            "--same-bits 4",
            "--same-bits 4 --seed 1",
            Ok("in step 1: value of 0.weight: "),
        ),
    ];
    all_at_once(cases, |(ranks, flags, of_a, expected)| {
        let folder = Folder::new("changed");
        train(
            &folder,
            "one",
            (1, &format!("{words} --steps 12 {of_a}"), ""),
        );
        let begun = flags.replace("--override --lr 0.01", "");
        train(
            &folder,
            "two",
            (1, &format!("{words} --steps 4 {begun}"), ""),
        );
        let resumed = format!("{words} --steps 12 --resume auto {flags}");
        train(&folder, "two", (ranks, &resumed, ""));
        match expected {
            Err(expected) => {
                let text = refusal(&folder, 2);
                assert!(text.contains(expected), "{text}");
            }
            Ok(expected) => {
                let found = replayed(&folder);
                assert!(found[0].contains(expected) && found.len() == 1, "{found:?}");
            }
        }
    });
}

#[test]
fn another_seed_names_the_other_batch_too_and_how_far_runs_are_apart() {
    let (folder, value) = pair((1, SMALL, ""), (1, &format!("{SMALL} --seed 1"), ""));
    assert_eq!(value["first"]["thing"], "initial weights", "{value}");
    assert_eq!(value["first"]["batch_too"], 1, "{value}");
    let apart = &value["apart"];
    assert_eq!(apart["step"], 40, "{value}");
    assert!(apart["loss"].as_f64().unwrap() > 0.0, "{value}");
    assert!(apart["norms"].as_f64().unwrap() > 0.0, "{value}");
    let ended = compare(&folder);
    assert!(
        ended.stdout.contains("the batch of step 1 differs too"),
        "{ended}"
    );
    let (_, value) = pair((1, SMALL, ""), (1, SMALL, ""));
    assert_eq!(value["apart"], Value::Null, "{value}");
}

/// Down to what no layer computes, and to the norm within a residual.
#[test]
fn a_replay_names_the_clip_and_the_norm_of_a_residual() {
    let gpt = "--data text.txt --val-split 0 --batch-size 4 --steps 2 --log-every 1 \
               --model gpt,context=8,layers=1,width=16,heads=2";
    let cases = [
        (
            SMALL.replace("--steps 40", "--steps 2"),
            ["--grad-clip 0.05", "--grad-clip 0.1"],
            "step 1: scale and norm of all gradients: 1 of 2 rows, from row 0 on: ",
        ),
        (
            gpt.into(),
            [",norm-epsilon=1e-5", ",norm-epsilon=1e-2"],
            "step 1: forward of layer blocks.0.attention.norm (norm) (micro-batch 0): ",
        ),
    ];
    all_at_once(cases, |(words, flags, expected)| {
        let folder = Folder::new("operations");
        let text = "the quick brown fox jumps over the lazy dog. ";
        fs::write(folder.path().join("text.txt"), text.repeat(20)).unwrap();
        for (name, flags) in ["one", "two"].into_iter().zip(flags) {
            let space = if flags.starts_with(',') { "" } else { " " };
            train(&folder, name, (1, &format!("{words}{space}{flags}"), ""));
        }
        let found = replayed(&folder);
        assert!(found[0].contains(expected), "{found:?}");
        assert_eq!(found.len(), 1, "{found:?}");
    });
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
fn logs_of_older_versions_are_compared_by_their_losses() {
    let folder = Folder::new("older");
    for (name, flags) in [("one", ""), ("two", "--seed 1")] {
        train(&folder, name, (1, &format!("{SMALL} {flags}"), ""));
        let path = folder.path().join(name).join("metrics.jsonl");
        let older = |line: &str| {
            let mut event: Value = serde_json::from_str(line).unwrap();
            let fields = event.as_object_mut().unwrap();
            fields.remove("digests");
            fields.remove("initial_weights");
            let kind = fields.remove("event").unwrap();
            let rest = event.to_string().split_off(1);
            format!("{{\"event\":{kind},{rest}\n")
        };
        let log = fs::read_to_string(&path).unwrap();
        fs::write(&path, log.lines().map(older).collect::<String>()).unwrap();
    }
    let value = compared(&folder);
    assert_eq!(
        (&value["first"]["thing"], &value["first"]["step"]),
        (&"loss".into(), &1.into()),
        "{value}"
    );
    assert_eq!(value["steps_with_digests"], 0, "{value}");
    let ended = compare(&folder);
    assert!(ended.stdout.contains("only losses are compared"), "{ended}");
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
