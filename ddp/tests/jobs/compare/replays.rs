//! `ddp-train compare --replay`: the first operation whose results differ.

use super::*;

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
    let words =
        "--data data.csv --labels y --plain --hidden 6 --batch-size 24 --steps 2 --log-every 1";
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
