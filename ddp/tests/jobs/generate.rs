//! Generated texts: equal to those of transformers, the same for any number of threads; unsuitable
//! input is refused.

use std::fs;

use serde_json::{Value, json};

use crate::hugging_face::{Tensors, write};
use crate::support::job::{Folder, all_at_once};

/// Names and shapes of two small models of 128 tokens. tests/peers/generating.py makes them, too.
fn tensors(architecture: &str) -> Vec<(String, Vec<usize>)> {
    let (width, tokens) = (32, 128);
    let mut list: Vec<(String, Vec<usize>)> = Vec::new();
    let mut add = |name: &str, shape: &[usize]| list.push((name.to_string(), shape.to_vec()));
    if architecture == "GPT2LMHeadModel" {
        add("transformer.wte.weight", &[tokens, width]);
        add("transformer.wpe.weight", &[32, width]);
        let linear = [
            ("attn.c_attn", 32, 96),
            ("attn.c_proj", 32, 32),
            ("mlp.c_fc", 32, 128),
            ("mlp.c_proj", 128, 32),
        ];
        for layer in 0..2 {
            let at = |name: &str, what: &str| format!("transformer.h.{layer}.{name}.{what}");
            for norm in ["ln_1", "ln_2"] {
                add(&at(norm, "weight"), &[width]);
                add(&at(norm, "bias"), &[width]);
            }
            for (name, inputs, outputs) in linear {
                add(&at(name, "weight"), &[inputs, outputs]);
                add(&at(name, "bias"), &[outputs]);
            }
        }
        add("transformer.ln_f.weight", &[width]);
        add("transformer.ln_f.bias", &[width]);
    } else {
        add("lm_head.weight", &[tokens, width]);
        add("model.embed_tokens.weight", &[tokens, width]);
        add("model.norm.weight", &[width]);
        let linear = [
            ("self_attn.q_proj", 32, 32),
            ("self_attn.k_proj", 32, 16),
            ("self_attn.v_proj", 32, 16),
            ("self_attn.o_proj", 32, 32),
            ("mlp.gate_proj", 32, 48),
            ("mlp.up_proj", 32, 48),
            ("mlp.down_proj", 48, 32),
        ];
        for layer in 0..2 {
            let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                add(&at(norm), &[width]);
            }
            for (name, inputs, outputs) in linear {
                add(&at(name), &[outputs, inputs]);
            }
        }
    }
    list.sort();
    list
}

/// The tensors with the values that tests/peers/generating.py gives them, too.
fn filled(architecture: &str, first: u64) -> Tensors {
    let mut numbers = first..;
    let mut next = || {
        let hash = ((numbers.next().unwrap() * 2_654_435_761) % (1 << 32)) >> 16;
        hash as f32 / 65536.0 - 0.5
    };
    let fill = |(name, shape): (String, Vec<usize>)| {
        let is_norm = name.contains("ln_") || name.contains("norm");
        let added = f32::from(is_norm && name.ends_with("weight"));
        let scale = if name.contains("wpe") { 4.0 } else { 1.0 };
        let count = shape.iter().product();
        let values = (0..count).map(|_| (next() + added) * scale).collect();
        (name, (shape, values))
    };
    tensors(architecture).into_iter().map(fill).collect()
}

/// A folder with both models, `gpt2` and `llama`. Their tokens are bytes below 128.
fn with_models(name: &str) -> Folder {
    let folder = Folder::new(name);
    let gpt2 = json!({
        "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32,
        "vocab_size": 128, "attn_pdrop": 0.1
    });
    write(&folder, "gpt2", &gpt2, &filled("GPT2LMHeadModel", 300_009));
    let llama = json!({
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32, "vocab_size": 128
    });
    write(
        &folder,
        "llama",
        &llama,
        &filled("LlamaForCausalLM", 200_006),
    );
    folder
}

/// The text that `generate` prints with these flags, and what it logs.
fn generated(folder: &Folder, flags: &str) -> (String, String) {
    let ended = folder.alone(&format!("generate {flags}")).run();
    ended.assert_well();
    let text = ended.stdout.strip_suffix('\n').unwrap().to_string();
    (text, ended.stderr)
}

/// A model may write what drives a terminal.
#[test]
fn control_characters_are_escaped_on_a_terminal() {
    let folder = with_models("terminal");
    let words = "generate --checkpoint gpt2 --tokenizer bytes --prompt To,be --temperature 0 --max-tokens 6";
    let has_script = std::process::Command::new("script")
        .arg("--version")
        .output();
    if has_script.is_err() {
        return ddp_testing::skip("script, which gives a program a terminal, is not there");
    }
    let ended = folder
        .in_shell(r#"exec script -qec "$*" /dev/null"#, words)
        .run();
    ended.assert_well();
    let text = &ended.stdout;
    assert!(text.contains(r"\u{7}\u{2}.\u{7}"), "{ended}");
    assert!(!text.contains(['\x07', '\x02']), "{ended}");
}

#[test]
fn the_most_probable_tokens_are_those_of_transformers_for_any_number_of_threads() {
    let folder = with_models("greedy");
    // As tests/peers/generating.py prints them, with transformers 5.23.
    let golden = [
        (
            "gpt2",
            "\x07\x02.\x07\x07Fi\x0f\x02\x07\x07.\x07FFi\x0f\x07\x07\x07z\x02FF",
        ),
        ("llama", "\x0f\x08D4z\"z\"z\"z\"z5*\"z*\"z4z*\""),
    ];
    let most_probable = "--tokenizer bytes --prompt To,be --temperature 0";
    all_at_once(golden, |(name, expected)| {
        for threads in [1, 2] {
            let flags =
                format!("--checkpoint {name} {most_probable} --max-tokens 24 --threads {threads}");
            let (text, log) = generated(&folder, &flags);
            assert_eq!(text, expected, "{name}");
            assert!(
                log.contains("prompt 5 tokens") && log.contains("end: the limit of tokens"),
                "{log}"
            );
        }
    });
    // The context is 32 tokens, and the last token that is made is not read again.
    let flags = format!("--checkpoint gpt2 {most_probable} --max-tokens 99");
    let (text, log) = generated(&folder, &flags);
    assert_eq!(text.len(), 32 - 5 + 1);
    assert!(
        log.contains("the model's context, 32 tokens, is full"),
        "{log}"
    );
    let (text, log) = generated(&folder, &format!("{flags} --stop Fi"));
    assert_eq!(text, "\x07\x02.\x07\x07");
    assert!(log.contains("the text to stop at"), "{log}");
}

#[test]
fn a_seed_gives_the_same_text_for_any_number_of_threads_and_another_seed_another() {
    let folder = with_models("seeds");
    fs::write(folder.path().join("p.txt"), "\u{feff}To be\n\nor not\r\n").unwrap();
    let sampled = |flags: &str| {
        let flags = format!("--checkpoint llama --tokenizer bytes --prompts p.txt {flags}");
        generated(&folder, &flags).0
    };
    let text = sampled("--threads 1");
    assert_eq!(sampled("--threads 2"), text);
    assert_ne!(sampled("--threads 2 --seed 2"), text);
    assert_ne!(sampled("--top-p 0.5"), text);
    let greedy = sampled("--temperature 0");
    assert_ne!(greedy, text);
    assert_eq!(sampled("--top-k 1 --temperature 9"), greedy);
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        [&lines[0]["prompt"], &lines[1]["prompt"]],
        ["To be", "or not"]
    );
    assert_eq!(lines[0]["tokens"], 32 - 5 + 1);
}

#[test]
fn what_cannot_be_continued_is_refused_by_name() {
    let folder = with_models("refused");
    for (name, bytes) in [
        ("empty.txt", &b" \n\n"[..]),
        ("latin.txt", b"a\nb\xe9\n"),
        ("long.txt", &[b'a'; 33]),
    ] {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder.alone("--steps 0 --out mlp").run().assert_well();
    let bytes = "--checkpoint gpt2 --tokenizer bytes";
    let long = "a".repeat(33);
    let cases = [
        (format!("{bytes} --prompt {long}"), 2, "at most 32 tokens"),
        (
            format!("{bytes} --prompts long.txt"),
            65,
            "long.txt, line 1: prompt: expected at most 32",
        ),
        (
            format!("{bytes} --prompt é"),
            2,
            "expected tokens below 128, as the model has, got 195",
        ),
        (
            format!("{bytes} --prompts empty.txt"),
            65,
            "expected a prompt a line, got none",
        ),
        (
            format!("{bytes} --prompts latin.txt"),
            65,
            "latin.txt, line 2: expected UTF-8, got other bytes at byte 3",
        ),
        (format!("{bytes} --prompts none.txt"), 74, "none.txt"),
        (
            "--checkpoint gpt2 --prompt a".into(),
            2,
            "a model with a tokenizer",
        ),
        (
            "--checkpoint mlp --prompt a".into(),
            2,
            "a model of the family gpt, got mlp",
        ),
        ("--checkpoint gpt2".into(), 2, "--prompt <TEXT>"),
        (
            format!("{bytes} --prompt a --temperature nan"),
            2,
            "--temperature",
        ),
        (
            format!("{bytes} --prompt a --temperature -1"),
            2,
            "--temperature",
        ),
        (
            format!("{bytes} --prompt a --top-p 0"),
            2,
            "expected a number above 0, up to 1",
        ),
        (format!("{bytes} --prompt a --top-k 0"), 2, "--top-k"),
        (
            format!("{bytes} --prompt a --max-tokens 0"),
            2,
            "--max-tokens",
        ),
    ];
    all_at_once(cases, |(flags, exit_code, part)| {
        let ended = folder.alone(&format!("generate {flags}")).run();
        assert_eq!(ended.exit_code(), Some(exit_code), "{flags}: {ended}");
        assert!(ended.stderr.contains(part), "{flags}: {ended}");
    });
}

#[test]
fn a_run_continues_text_in_whole_characters_and_an_empty_prompt_begins_a_document() {
    let folder = Folder::new("characters");
    fs::write(folder.path().join("t.txt"), "😀é".repeat(200)).unwrap();
    let train = "--model gpt,layers=1,heads=2,width=16,context=16 --batch-size 8 --threads 1 --steps 60 --lr 1e-2";
    folder
        .alone(&format!("{train} --data t.txt --out run"))
        .run()
        .assert_well();
    let flags = "--checkpoint run --temperature 0 --max-tokens";
    let (text, log) = generated(&folder, &format!("{flags} 6 --prompt é"));
    assert_eq!(text, "😀é");
    assert!(log.contains("after step 60"), "{log}");
    assert_eq!(
        generated(&folder, &format!("{flags} 3 --prompt é")).0,
        "\u{fffd}"
    );
    #[cfg(feature = "tokenizers")]
    {
        folder
            .alone("tokenize t.txt --tokenizer bytes --out tokens")
            .run()
            .assert_well();
        folder
            .alone(&format!("{train} --data tokens --out other"))
            .run()
            .assert_well();
        let ended = folder
            .alone("generate --checkpoint other --max-tokens 6 --prompt=")
            .run();
        ended.assert_well();
        assert!(ended.stderr.contains("prompt 1 token,"), "{ended}");
    }
}
