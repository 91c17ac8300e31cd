//! Texts become tokens; their tokenizer is copied into runs, checkpoints and exports, and a model
//! of another tokenizer is refused.

use std::fs;

use crate::support::job::{Folder, all_at_once};
use crate::using::evaluated;

const MODEL: &str = "--model gpt,layers=1,heads=2,width=16,context=16 --batch-size 8 --threads 1";
const TOKENIZER: &str = "tokenizer.json";

/// A folder with 60 documents, tokenized as `books` and `bytes`.
fn with_tokens(name: &str) -> Folder {
    let folder = Folder::new(name);
    let line = |number: usize| format!("{{\"text\": \"To be is to do, number {number}. \"}}\n");
    let lines: String = (0..60).map(line).collect();
    fs::write(folder.path().join("a.jsonl"), lines).unwrap();
    for flags in [
        "--train-bpe 270 --val-split 0.2 --out books",
        "--tokenizer bytes --out bytes",
    ] {
        let ended = folder.alone(&format!("tokenize a.jsonl {flags}")).run();
        ended.assert_well();
        assert!(ended.stdout.contains(" MB/s"), "{ended}");
    }
    folder
}

#[test]
fn a_tokenizer_goes_with_its_tokens_into_run_checkpoint_and_export() {
    let folder = with_tokens("tokenizer");
    let read = |path: &str| fs::read(folder.path().join(path).join(TOKENIZER)).unwrap();
    let train = format!("{MODEL} --data books --val-data books/val --schedule constant --out OUT");
    folder
        .alone(&format!("{train} --steps 3 --warmup-steps 1"))
        .run()
        .assert_well();
    let longer = format!("{train} --steps 6 --warmup-steps 1 --resume auto");
    folder.alone(&longer).run().assert_well();
    let tokenizer = read("books");
    for place in [
        "out",
        "out/checkpoints/step-00000003",
        "out/checkpoints/step-00000006",
    ] {
        assert!(read(place) == tokenizer, "{place}");
    }
    let held_out = folder.metrics_log().all("eval").last().unwrap()["loss"].as_f64();
    let found = evaluated(folder.alone("eval --checkpoint OUT --data books/val --json"));
    assert!(
        (found["loss"].as_f64().unwrap() - held_out.unwrap()).abs() < 1e-6,
        "{found}"
    );
    folder
        .alone("export --format hf --checkpoint OUT exported")
        .run()
        .assert_well();
    assert!(read("exported") == tokenizer);
    let about = |name: &str| fs::read_to_string(folder.path().join("exported").join(name)).unwrap();
    assert!(about("tokenizer_config.json").contains("\"eos_token\": \"<|endoftext|>\""));
    assert!(about("config.json").contains("\"eos_token_id\": 0"));
    // It continues from there, with tokens of the same tokenizer.
    let tuned = "--init-from exported --data books --steps 1 --batch-size 8 --out tuned";
    folder.alone(tuned).run().assert_well();
    for (flags, exit_code, part) in [
        (
            "eval --checkpoint OUT --data bytes",
            65,
            "expected tokens of the tokenizer of the model",
        ),
        (
            "--init-from OUT --data bytes --out refused",
            65,
            "expected a model with the tokenizer of --data",
        ),
        (
            "--init-from exported --data bytes --out refused",
            65,
            "expected a model with the tokenizer of --data",
        ),
    ] {
        let ended = folder.alone(flags).run();
        let text = ended.assert_fails(exit_code);
        assert!(text.contains(part), "{flags}: {text}");
    }
    // A checkpoint is damaged with its tokenizer.
    let path = folder
        .out()
        .join("checkpoints/step-00000006")
        .join(TOKENIZER);
    fs::write(path, "{}").unwrap();
    let ended = folder
        .alone("eval --checkpoint out/checkpoints/step-00000006 --data books")
        .run();
    ended.assert_fails(65);
}

#[test]
fn what_does_not_fit_a_tokenizer_is_refused_by_name() {
    let folder = with_tokens("tokenizer-refused");
    let copy = |from: &str, to: &str| {
        fs::create_dir_all(folder.path().join(to).parent().unwrap()).unwrap();
        fs::copy(folder.path().join(from), folder.path().join(to)).unwrap();
    };
    copy("books/tokens-000000.bin", "mixed/tokens-000000.bin");
    copy("bytes/tokenizer.json", "mixed/tokenizer.json");
    copy("books/tokens-000000.bin", "both/a.bin");
    copy("bytes/tokens-000000.bin", "both/b.bin");
    let train = |flags: &str| format!("{MODEL} {flags} --steps 1 --out OUT");
    let cases = [
        (
            train("--data books --vocab 100"),
            2,
            "--vocab 100: expected at least 270",
        ),
        (
            train("--data mixed"),
            65,
            "mixed/tokenizer.json: expected the tokenizer of mixed/",
        ),
        (train("--data both"), 65, "give files of one tokenizer"),
        (
            train("--data books --val-data bytes"),
            65,
            "the tokenizer of --data",
        ),
        (
            "tokenize a.jsonl --tokenizer bytes --out books".into(),
            2,
            "--out",
        ),
        (
            "tokenize a.jsonl --tokenizer bytes --end-token </s> --out x1".into(),
            2,
            "--tokenizer: expected a special token",
        ),
        (
            "tokenize a.jsonl --tokenizer a.jsonl --out x2".into(),
            65,
            "a.jsonl: expected a tokenizer.json",
        ),
        (
            "tokenize a.jsonl --tokenizer bytes --field body --out x3".into(),
            65,
            "line 1: expected a text in the field \"body\", got [text]; help: name one of these as --field",
        ),
        ("tokenize a.jsonl --out x4".into(), 2, "--tokenizer"),
        (
            "tokenize a.jsonl --train-bpe 256 --out x5".into(),
            2,
            "from 257",
        ),
        (
            "tokenize a.jsonl --tokenizer bytes --val-split 1 --out x6".into(),
            2,
            "less than 1",
        ),
        ("tokenize --tokenizer bytes --out x7".into(), 2, "<FILES>"),
    ];
    all_at_once(cases, |(words, exit_code, part)| {
        let ended = folder.alone(&words).run();
        assert_eq!(ended.exit_code(), Some(exit_code), "{words}: {ended}");
        assert!(ended.stderr.contains(part), "{words}: {ended}");
    });
    for number in 1..=7 {
        assert!(!folder.path().join(format!("x{number}")).exists());
    }
    // Shards can be trained on without it; the user is told.
    fs::remove_file(folder.path().join("mixed/tokenizer.json")).unwrap();
    let ended = folder.alone(&train("--data mixed")).run();
    ended.assert_well();
    assert!(
        ended.stderr.contains("no tokenizer.json beside the tokens"),
        "{ended}"
    );
}

#[cfg(feature = "mpi")]
#[test]
fn one_process_tokenizes() {
    let folder = Folder::new("tokenize-ranks");
    fs::write(folder.path().join("a.txt"), "text").unwrap();
    let ended = folder
        .each(&[(2, "tokenize a.txt --tokenizer bytes --out x")])
        .run();
    assert!(ended.stderr.contains("expected one process"), "{ended}");
    assert!(!folder.path().join("x").exists());
}
