//! Transformers on texts, through the program.

use crate::support::job::{Folder, all_at_once};
use crate::support::metrics_log::MetricsLog;
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
    let held_out = "do be do be do. To be is to do, to do is to be, ".repeat(4);
    std::fs::write(folder.path().join("end.txt"), held_out).unwrap();
    let data = "--data book.txt --val-data end.txt";
    let flags = format!("{MODEL} {data} --epochs 6 --lr 0.01 --out OUT");
    folder.alone(&flags).run().assert_well();
    let log = folder.metrics_log();
    let losses = log
        .all("eval")
        .into_iter()
        .map(|eval| eval["loss"].as_f64().unwrap());
    // What `eval` uses.
    let held_out = losses.fold(f64::INFINITY, f64::min);
    // ln 256 = 5.5 at first. Most letters of the text follow from the few before them.
    assert!(held_out < 1.0, "{held_out}");
    let step = log.all("step")[0];
    let tokens = step["samples_per_s"].as_f64().unwrap() * 16.0;
    assert!(
        (step["tokens_per_s"].as_f64().unwrap() / tokens - 1.0).abs() < 1e-9,
        "{step}"
    );
    // 6·(12·32² + 256·32) of matrices, forward and backward, and 6·32·16 of attention.
    let flop = 6.0 * (12.0 * 1024.0 + 8192.0) + 6.0 * 512.0;
    let tflops = step["tflops"].as_f64().unwrap();
    assert!(
        (tflops / (tokens * flop / 1e12) - 1.0).abs() < 1e-9,
        "{step}"
    );
    let large_matmul = |step: &serde_json::Value| {
        ["tflops", "matmul_share"].map(|name| step[name].as_f64().unwrap())
    };
    let [first, last] = [step, log.all("step").last().unwrap()].map(large_matmul);
    let of_matmuls = first[0] / first[1];
    assert!(of_matmuls > 1e-4, "{step}");
    assert!(
        (last[0] / last[1] / of_matmuls - 1.0).abs() < 1e-9,
        "measured once: {last:?}"
    );
    for event in [step, log.all("eval").last().unwrap()] {
        let [loss, perplexity, bits] =
            ["loss", "perplexity", "bits_per_byte"].map(|name| event[name].as_f64().unwrap());
        assert!((perplexity - loss.exp()).abs() < 1e-9, "{event}");
        assert!(
            (bits * std::f64::consts::LN_2 - loss).abs() < 1e-9,
            "{event}"
        );
    }
    let found = evaluated(folder.alone("eval --checkpoint OUT --data end.txt --json"));
    let loss = found["loss"].as_f64().unwrap();
    // Batches of another size add the losses of the tokens in another order, in f32.
    let tokens = found["tokens"].as_f64().unwrap();
    let bound = tokens * 2f64.powi(-24) * held_out;
    assert!((loss - held_out).abs() <= bound, "{found}");
    let bits = found["bits_per_byte"].as_f64().unwrap();
    assert!(
        (bits * std::f64::consts::LN_2 - loss).abs() < 1e-6,
        "{found}"
    );
}

#[test]
fn the_smallest_preset_learns_within_a_few_steps() {
    let folder = with_text("gpt-tiny");
    let flags = "--model gpt-tiny,context=32 --data book.txt --batch-size 2 --steps 24 --lr 0.003";
    folder
        .alone(&format!("{flags} --threads 1 --out OUT"))
        .run()
        .assert_well();
    let losses = folder.metrics_log().losses();
    // ln 256 = 5.5 at first. It soon knows the 8 bytes of the text, ln 8 = 2.1.
    assert!(
        losses[0] > 5.0 && losses[losses.len() - 1] < 2.5,
        "{losses:?}"
    );
}

#[test]
fn padding_the_vocabulary_changes_neither_losses_nor_the_exported_model() {
    let folder = with_text("gpt-padding");
    let losses = [256, 300].map(|vocab| {
        let out = format!("out-{vocab}");
        let flags = format!("{MODEL} --vocab {vocab} --data book.txt --steps 6 --log-every 1");
        let ended = folder.alone(&format!("{flags} --out {out}")).run();
        ended.assert_well();
        let there = format!("there-{vocab}");
        let export = format!("export --format hf --checkpoint {out} {there}");
        folder.alone(&export).run().assert_well();
        let config = std::fs::read_to_string(folder.path().join(there).join("config.json"));
        assert!(config.unwrap().contains("\"vocab_size\": 256"));
        MetricsLog::read(&folder.path().join(out)).losses()
    });
    assert_eq!(losses[0].len(), 6);
    for (plain, padded) in losses[0].iter().zip(&losses[1]) {
        // Sums over the classes are cut at other places.
        assert!((plain - padded).abs() < 1e-5, "{losses:?}");
    }
}

#[test]
fn a_loss_that_is_not_finite_names_each_sequence_once() {
    let folder = with_text("gpt-diverges");
    let flags =
        "--data book.txt --steps 9 --lr 1e30 --optimizer sgd --grad-clip 0 --warmup-steps 0";
    let ended = folder.alone(&format!("{MODEL} {flags} --out OUT"));
    let text = ended.run();
    let text = text.assert_fails(76);
    let (_, rows) = text.split_once("rank 0, rows ").expect(text);
    let rows = &rows[..rows.find(". The model").expect(text)];
    assert_eq!(rows.matches(" at position ").count(), 8, "{text}");
    assert_eq!(rows.matches(" later ones").count(), 8, "{text}");
}

#[test]
fn models_that_do_not_fit_are_refused_by_name() {
    let folder = with_text("gpt-refused");
    let cases = [
        ("--model gpt,heads=3", 2, "--heads 3"),
        ("--model gpt,depth=3", 2, "no setting \"depth\""),
        ("--model gpt,layers=2,layers=3", 2, "layers: expected once"),
        ("--model gpt2,width=many", 2, "width=many"),
        ("--model gtp", 2, "expected one of mlp, gpt, vit, gpt-tiny"),
        ("--model gpt,vocab=100", 2, "--vocab 100"),
        ("--model gpt,context=4096", 65, "book.txt"),
        ("--model gpt --heads 3", 2, "--heads 3"),
        ("--model gpt --hidden 3", 2, "requires --model mlp"),
        ("--model mlp", 2, "help: choose a --model of tokens"),
        ("--model gpt --data glyphs", 2, "help: give tokens"),
        (
            "--model gpt --data notes",
            65,
            "a text to learn from to .txt",
        ),
        (
            "--model gpt,context=4 --data book.txt --val-data none.txt",
            65,
            "none.txt: it is empty",
        ),
        (
            "--model gpt,context=4 --data book.txt --val-data lost.txt",
            74,
            "cannot open lost.txt",
        ),
    ];
    std::fs::write(folder.path().join("notes"), "a text").unwrap();
    std::fs::write(folder.path().join("none.txt"), "").unwrap();
    all_at_once(cases, |(flags, exit_code, part)| {
        let data = if flags.contains("--data") {
            ""
        } else {
            " --data book.txt"
        };
        let ended = folder.alone(&format!("{flags}{data} --out OUT")).run();
        let text = ended.assert_fails(exit_code);
        assert!(text.contains(part), "{flags}: {text}");
    });
}

#[test]
fn a_model_starts_from_one_that_saw_more_tokens() {
    let folder = with_text("gpt-shorter");
    let flags = format!("{MODEL} --data book.txt --steps 1 --out seen");
    folder.alone(&flags).run().assert_well();
    let start = "--init-from seen --data book.txt --steps 0";
    let shorter = format!("{start} --context 5 --out shorter");
    folder.alone(&shorter).run().assert_well();
    let longer = format!("{start} --context 17 --out longer");
    folder.alone(&longer).run().assert_fails(2);
    let values = |out: &str, step: usize| {
        let file = format!("{out}/checkpoints/step-{step:08}/model.safetensors");
        crate::hugging_face::read_tensors(&folder.path().join(file))
            .remove("embedding.positions.weight")
            .unwrap()
    };
    let [(_, long), (shape, short)] = [values("seen", 1), values("shorter", 0)];
    assert_eq!(shape, [5, 32]);
    assert!(short == long[..5 * 32]);
    let predict = folder.alone("predict --checkpoint seen --data book.txt --out rows.csv");
    let ended = predict.run();
    let text = ended.assert_fails(2);
    assert!(
        text.contains("predict: expected a model with one answer"),
        "{text}"
    );
}

#[test]
fn a_text_for_a_model_of_many_tokens_is_warned_of() {
    let folder = with_text("bytes");
    let stderr = |vocab: u32| {
        let flags = format!("{MODEL} --vocab {vocab} --data book.txt --steps 0 --out {vocab}");
        let ended = folder.alone(&flags).run();
        ended.assert_well();
        ended.stderr
    };
    let warning = "each byte is a token, but the model has 1024 tokens";
    assert!(stderr(1024).contains(warning));
    assert!(!stderr(384).contains("each byte is a token"));
}
