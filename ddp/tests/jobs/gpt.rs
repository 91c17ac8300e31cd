//! Transformers on texts, through the program.

use crate::support::job::{Folder, all_at_once};
use crate::using::evaluated;

const MODEL: &str = "--model gpt,layers=1,heads=2,width=32,context=16 --batch-size 8 --threads 1";

fn with_text(name: &str) -> Folder {
    let folder = Folder::new(name);
    let text = "To be is to do, to do is to be, do be do be do. ".repeat(40);
    std::fs::write(folder.path().join("book.txt"), text).unwrap();
    folder
}

#[test]
fn a_transformer_learns_a_text_and_eval_computes_its_loss() {
    let folder = with_text("gpt");
    let flags = format!("{MODEL} --data book.txt --val-split 0.1 --epochs 6 --lr 0.01 --out OUT");
    folder.alone(&flags).run().assert_well();
    let record = folder.record();
    let held_out = record.all("eval").last().unwrap()["loss"].as_f64().unwrap();
    // ln 256 = 5.5 at first. Most letters of the text follow from the few before them.
    assert!(held_out < 1.0, "{held_out}");
    let step = record.all("step")[0];
    let tokens = step["samples_per_s"].as_f64().unwrap() * 16.0;
    assert!(
        (step["tokens_per_s"].as_f64().unwrap() / tokens - 1.0).abs() < 1e-9,
        "{step}"
    );
    let found = evaluated(folder.alone("eval --checkpoint OUT --data book.txt --json"));
    let loss = found["loss"].as_f64().unwrap();
    assert!((loss - held_out).abs() < 0.3, "{found}");
    let bits = found["bits_per_byte"].as_f64().unwrap();
    assert!(
        (bits * std::f64::consts::LN_2 - loss).abs() < 1e-6,
        "{found}"
    );
}

#[test]
fn models_that_do_not_fit_are_refused_by_name() {
    let folder = with_text("gpt-refused");
    let cases = [
        ("--model gpt,heads=3", 2, "--heads 3"),
        ("--model gpt,depth=3", 2, "no setting \"depth\""),
        ("--model gpt2,width=many", 2, "width=many"),
        ("--model gtp", 2, "expected one of mlp, gpt, gpt-tiny"),
        ("--model gpt,vocab=100", 2, "--vocab 100"),
        ("--model gpt,context=4096", 65, "book.txt"),
        ("--model gpt --heads 3", 2, "--heads 3"),
        ("--model gpt --hidden 3", 2, "requires --model mlp"),
    ];
    all_at_once(cases, |(flags, exit_code, part)| {
        let ended = folder
            .alone(&format!("{flags} --data book.txt --out OUT"))
            .run();
        let text = ended.assert_fails(exit_code);
        assert!(text.contains(part), "{flags}: {text}");
    });
}
