//! What `eval` and `predict` refuse, by name and before they write anything.

use super::*;

/// `ddp-train` listed the names of 110 settings.
#[test]
fn a_checkpoint_of_a_family_that_the_program_lacks_is_refused_by_its_name() {
    let folder = trained(GLYPHS);
    let checkpoint = folder.checkpoint(16);
    let whole = std::fs::read(checkpoint.join("state.json")).unwrap();
    forge(&checkpoint, &whole, "/config/model", &"mine".into());
    forge(
        &checkpoint,
        &std::fs::read(checkpoint.join("state.json")).unwrap(),
        "/config/knobs",
        &3.into(),
    );
    let eval = format!("eval --checkpoint {} --data glyphs", checkpoint.display());
    let ended = folder.alone(&eval).run();
    let cause = ended.assert_fails(65);
    let told = "got the unknown family \"mine\"; help: use the program that trained it";
    assert!(cause.contains(told), "{cause}");
}

#[test]
fn a_checkpoint_of_another_run_is_refused_by_every_command() {
    let model = "--model gpt,layers=1,heads=2,width=16,context=8 --data tokens:tokens.bin --batch-size 2 --threads 1 \
                 --warmup-steps 0 --schedule constant --steps";
    let folder = Folder::new("foreign");
    std::fs::write(folder.path().join("tokens.bin"), [1, 0, 2, 0].repeat(40)).unwrap();
    std::fs::write(folder.path().join("other.bin"), [1, 0, 3, 0].repeat(40)).unwrap();
    for words in [
        format!("{model} 2 --out OUT"),
        format!("{model} 4 --seed 7 --out seed"),
        format!("{} 4 --out data", model.replace("tokens.bin", "other.bin")),
    ] {
        folder.alone(&words).run().assert_well();
    }
    let named = "OUT/checkpoints/step-00000004";
    let copy = |from: &str| {
        let to = folder.out().join("checkpoints/step-00000004");
        _ = std::fs::remove_dir_all(&to);
        std::fs::create_dir(&to).unwrap();
        let from = folder.path().join(from).join("checkpoints/step-00000004");
        for file in std::fs::read_dir(from).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    };
    for (from, with) in [
        ("seed", "with --seed 7 (was 0)"),
        ("data", "with --data with other rows"),
    ] {
        copy(from);
        for words in [
            "eval --checkpoint OUT --data tokens:tokens.bin",
            &format!("predict --checkpoint {named} --data tokens:tokens.bin --out p.npy"),
            "generate --checkpoint OUT --tokenizer bytes --prompt a",
            "export --format hf --checkpoint OUT exported",
        ] {
            let ended = folder.alone(words).run();
            let cause = ended.assert_fails(65);
            let expected = format!("got one of another run, {with}; help: move it");
            assert!(cause.contains(&expected), "{words}: {ended}");
        }
    }
    // What a resume with --override changed is the run's own, as are more steps.
    copy("seed");
    let changed = format!("{model} 4 --resume {named} --override --out OUT");
    folder
        .alone(&format!("{changed} --seed 0"))
        .run()
        .assert_well();
    std::fs::remove_dir_all(folder.out().join("checkpoints/step-00000004")).unwrap();
    let more = format!("{model} 5 --resume auto --override --lr 0.5 --out OUT");
    folder.alone(&more).run().assert_well();
    let eval = "eval --checkpoint OUT --data tokens:tokens.bin";
    folder.alone(eval).run().assert_well();
}

/// Invalid command lines, the exit code, and what the message must name.
const WRONG: &[(&str, i32, &[&str])] = &[
    (
        "eval --checkpoint nowhere --data glyphs",
        74,
        &["cannot read nowhere"],
    ),
    (
        "eval --checkpoint . --data glyphs",
        65,
        &["expected the folder of a run or of a checkpoint"],
    ),
    (
        "eval --checkpoint lone.safetensors --data glyphs",
        2,
        &["--checkpoint lone.safetensors", "without state.json"],
    ),
    ("eval --data glyphs", 2, &["--checkpoint"]),
    ("eval --checkpoint OUT", 2, &["--data"]),
    (
        "eval --checkpoint OUT --data glyphs --batch-size 0",
        2,
        &["'0'", "--batch-size", "expected a whole number from 1"],
    ),
    (
        "eval --checkpoint OUT --data glyphs --threads 0",
        2,
        &["--threads 0: expected a whole number from 1"],
    ),
    (
        "eval --checkpoint OUT --data glyphs --timeout-s 0",
        2,
        &["--timeout-s 0: expected a number from 0.1"],
    ),
    (
        "eval --checkpoint OUT --data glyphs --device cuda",
        2,
        &["--device cuda: expected a device that can be used here"],
    ),
    (
        "eval --checkpoint OUT --data synthetic:classification,rows=64,features=8",
        65,
        &["expected 784 features a row", "got 8 ", "as the model"],
    ),
    (
        "eval --checkpoint OUT --data synthetic:regression,rows=64,features=784",
        65,
        &["regression", "10 classes"],
    ),
    (
        "eval --checkpoint OUT --data synthetic:classification,rows=64,features=784,classes=3",
        65,
        &["into 10 classes", "into 3 classes", "as the model"],
    ),
    ("predict --checkpoint OUT --data glyphs", 2, &["--out"]),
    (
        "predict --checkpoint OUT --data glyphs --out a.txt",
        2,
        &[
            "'a.txt'",
            "--out",
            "expected a name that ends in .csv or .npy",
        ],
    ),
    (
        "predict --checkpoint OUT --data glyphs --out a.npy --probabilities --logits",
        2,
        &["--probabilities or --logits", "a .npy holds one array"],
    ),
    (
        "predict --checkpoint OUT --data glyphs --out there.csv",
        2,
        &["--out there.csv", "--overwrite"],
    ),
    (
        "predict --checkpoint OUT --data glyphs --out folder.npy",
        2,
        &["--out folder.npy", "it is a folder"],
    ),
    (
        "predict --checkpoint OUT --data glyphs,held-out=3 --out no/where.csv",
        74,
        &["no/where.csv"],
    ),
];

#[test]
fn what_cannot_be_is_refused_with_its_reason_and_nothing_is_written() {
    let folder = trained(GLYPHS);
    let put = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    put("there.csv", b"mine");
    put(
        "lone.safetensors",
        &bytes(&folder, "out/checkpoints/step-00000016/model.safetensors"),
    );
    std::fs::create_dir(folder.path().join("folder.npy")).unwrap();
    let before = folder.tree();
    all_at_once(WRONG, |(words, code, parts)| {
        let ended = folder.alone(words).run();
        let cause = ended.assert_fails(*code);
        let missing: Vec<_> = parts
            .iter()
            .filter(|part| !cause.contains(**part) && !ended.stderr.contains(**part))
            .collect();
        assert!(missing.is_empty(), "{words}: {missing:?} is not in {ended}");
    });
    assert!(folder.tree() == before, "nothing has changed");
    folder
        .alone(&format!("predict {ROWS} --out there.csv --overwrite"))
        .run()
        .assert_well();
    assert_eq!(table(&folder, "there.csv").len(), 701);
}

#[test]
fn an_error_of_all_ranks_is_printed_once() {
    let folder = trained(GLYPHS);
    let said = |words: &str, code: i32, part: &str| {
        let ended: Ended = folder.together(words).run();
        assert!(ended.assert_fails(code).contains(part), "{ended}");
    };
    said(
        "predict --checkpoint OUT --data synthetic:regression,rows=64,features=8 --out a.npy",
        65,
        "784",
    );
    said(
        "predict --checkpoint nowhere --data glyphs --out a.npy",
        74,
        "nowhere",
    );
    std::fs::write(folder.path().join("a.npy"), "mine").unwrap();
    said(
        "predict --checkpoint OUT --data glyphs --out a.npy",
        2,
        "--overwrite",
    );
    assert!(
        Path::new(&folder.path().join("a.npy"))
            .metadata()
            .unwrap()
            .len()
            == 4
    );
}
