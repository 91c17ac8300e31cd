//! Conversations: trained alike on any number of ranks, packed or not, and from any checkpoint;
//! refused where nothing would be trained; and shown token by token.

mod refused;

use std::fs;

use serde_json::{Value, json};

use crate::support::job::{Folder, all_at_once};
use crate::support::metrics_log::number;
use crate::using::evaluated;

const MODEL: &str =
    "--model gpt,layers=1,heads=2,width=16,context=96,position=rope --device cpu --threads 1";

const TEMPLATE: &str = "{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}";

/// The tokenizer of the golden texts with tokens for chats.
fn tokenizer() -> Value {
    let golden = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/golden/tokenizer/tokenizer.json"
    );
    let mut json: Value = serde_json::from_str(&fs::read_to_string(golden).unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (id, content) in [(400, "<|im_start|>"), (401, "<|im_end|>")] {
        let mut token = added[0].clone();
        (token["id"], token["content"]) = (json!(id), json!(content));
        added.push(token);
    }
    json
}

/// A conversation of several questions, each with an answer of some words.
fn conversation(number: usize) -> Value {
    let message = |role: &str, count: usize| {
        let words = ["to be", "is", "of the", "über"]
            .iter()
            .cycle()
            .skip(number);
        let content: Vec<_> = words.take(count).copied().collect();
        json!({ "role": role, "content": content.join(" ") })
    };
    let turns = (0..=number % 3).flat_map(|turn| {
        [
            message("user", 1 + (number + turn) % 4),
            message("assistant", 1 + number % 5),
        ]
    });
    json!({ "messages": turns.collect::<Vec<_>>() })
}

fn lines(records: impl IntoIterator<Item = Value>) -> String {
    records
        .into_iter()
        .map(|record| format!("{record}\n"))
        .collect()
}

/// A folder with a tokenizer in `chat`, and conversations in `train.jsonl` and `val.jsonl`.
fn with_chats(name: &str) -> Folder {
    let folder = Folder::new(name);
    let write = |name: &str, text: String| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("chat/tokenizer.json", tokenizer().to_string());
    let config = json!({ "eos_token": "<|im_end|>", "chat_template": TEMPLATE });
    write("chat/tokenizer_config.json", config.to_string());
    write("train.jsonl", lines((0..40).map(conversation)));
    write("val.jsonl", lines((40..53).map(conversation)));
    folder
}

fn losses(folder: &Folder) -> (Vec<f64>, f64) {
    let log = folder.metrics_log();
    let held_out = number(log.all("eval").last().unwrap(), "loss");
    (log.of_steps("loss"), held_out)
}

fn model(folder: &Folder, step: u64) -> Vec<u8> {
    fs::read(folder.checkpoint(step).join("model.safetensors")).unwrap()
}

#[test]
fn conversations_are_trained_alike_on_any_number_of_ranks_and_after_a_resume() {
    let folder = with_chats("chats");
    let train = format!(
        "{MODEL} --tokenizer chat --data train.jsonl --val-data val.jsonl --batch-size 4 --schedule constant --warmup-steps 1 --log-every 1 \
         --same-bits 4"
    );
    let ended = folder.alone(&format!("{train} --steps 3 --out OUT")).run();
    ended.assert_well();
    assert!(ended.stderr.contains("40 conversations of"), "{ended}");
    // Tokens were made once.
    let is_copy = |name: &str| name.starts_with("train.jsonl-");
    let names = fs::read_dir(folder.path().join(".ddp-cache")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| is_copy(name)).count(), 1);
    let resumed = folder.ranks(2, &format!("{train} --steps 6 --out OUT --resume auto"));
    resumed.run().assert_well();
    let (of_run, held_out) = losses(&folder);
    let found = evaluated(folder.alone("eval --checkpoint OUT --data val.jsonl --json"));
    assert!(
        (number(&found, "loss") - held_out).abs() < 1e-6,
        "{found} {held_out}"
    );
    // What is trained of the conversations: each has a token of its own for each end.
    let tokens = found["tokens"].as_u64().unwrap();
    assert!(
        tokens > 100 && tokens < found["rows"].as_u64().unwrap() * 96 / 2,
        "{found}"
    );
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let of_folder = |path: std::path::PathBuf| fs::read(path.join(name)).unwrap();
        let own = of_folder(folder.path().join("chat"));
        assert!(
            of_folder(folder.out()) == own && of_folder(folder.checkpoint(6)) == own,
            "{name}"
        );
    }
    let resumed = model(&folder, 6);
    fs::rename(folder.out(), folder.path().join("before")).unwrap();
    folder
        .ranks(3, &format!("{train} --steps 6 --out OUT"))
        .run()
        .assert_well();
    assert!(model(&folder, 6) == resumed, "the bits of one run");
    assert_eq!(losses(&folder), (of_run, held_out));
}

/// Batches differ in length, which must not depend on the ranks.
#[test]
fn rows_of_their_own_are_trained_alike_on_any_number_of_ranks_and_after_a_resume() {
    let folder = with_chats("chats-unpacked");
    let train = |kind: &str| {
        format!(
            "{MODEL} {kind} --tokenizer chat --data train.jsonl --val-data val.jsonl --packing off --batch-size 4 --micro-batch 1 \
             --log-every 1 --same-bits 4"
        )
    };
    for kind in ["--position rope", "--position learned --zero 1"] {
        let train = train(kind);
        let run = |ranks: usize, flags: &str| {
            folder
                .ranks(ranks, &format!("{train} {flags} --out OUT"))
                .run()
                .assert_well();
        };
        run(1, "--epochs 2");
        let (expected, of_run) = (model(&folder, 20), losses(&folder));
        fs::remove_dir_all(folder.out()).unwrap();
        run(2, "--epochs 2 --checkpoint-every 7");
        // As if it had ended after step 14.
        fs::remove_dir_all(folder.checkpoint(20)).unwrap();
        run(3, "--epochs 2 --resume auto");
        assert!(
            model(&folder, 20) == expected,
            "{kind}: the bits of one run"
        );
        assert_eq!(losses(&folder).1, of_run.1);
        fs::remove_dir_all(folder.out()).unwrap();
    }
}

/// Also where ranks have different numbers of trained tokens, which `--same-bits` hides.
#[test]
fn the_loss_is_the_mean_over_the_trained_tokens_of_all_ranks_packed_or_not() {
    let folder = with_chats("chats-mean");
    // Without learning every step has the loss of the first model.
    let run = |ranks: usize, flags: &str| {
        let train = format!(
            "{MODEL} --tokenizer chat --data train.jsonl --val-data val.jsonl --lr 0 --steps 1 --warmup-steps 0 {flags} --out OUT"
        );
        folder.ranks(ranks, &train).run().assert_well();
        let found = losses(&folder);
        fs::remove_dir_all(folder.out()).unwrap();
        found
    };
    let all = "--batch-size 40";
    // A step on a CPU adds its losses in f32, 256 tokens at a time: 40 rows of 96 tokens are 15
    // such parts, and no other run has more, or micro-batches and ranks. Each addition rounds by
    // 2^-24 of the sum at most, in both of the runs that are compared. Held-out losses are f64.
    let rounding = 30.0 * 2f64.powi(-24);
    let (expected, held_out) = run(1, &format!("--packing off {all}"));
    for (ranks, flags) in [
        (3, "--packing off"),
        (1, "--packing on"),
        (3, "--packing on --micro-batch 1"),
    ] {
        let (steps, of_val) = run(ranks, &format!("{flags} {all}"));
        assert!(
            (steps[0] / expected[0] - 1.0).abs() <= rounding,
            "{flags}: {steps:?} {expected:?}"
        );
        assert!(
            (of_val - held_out).abs() < 1e-6,
            "{flags}: {of_val} {held_out}"
        );
    }
    let (all_tokens, _) = run(1, &format!("--packing on --loss-on all {all}"));
    assert!(
        (all_tokens[0] - expected[0]).abs() > 1e-4,
        "{all_tokens:?} {expected:?}"
    );
}

#[test]
fn each_token_is_shown_with_what_it_is_for() {
    let folder = with_chats("chats-shown");
    let record = json!({ "messages": [{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "To be" }] });
    let text = json!({ "text": "is" });
    fs::write(folder.path().join("two.jsonl"), lines([record, text])).unwrap();
    let show = "show-tokens two.jsonl --tokenizer chat --context 64";
    let ended = folder.alone(&format!("{show} --packing on --json")).run();
    ended.assert_well();
    let tokens: Vec<Value> = ended
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(tokens.len(), 64);
    let of_document = |document: u64, only_trained: bool| -> String {
        let tokens = tokens.iter().filter(|one| one["document"] == document);
        let tokens = tokens.filter(|one| !only_trained || one["trained"] == true);
        tokens.map(|one| one["text"].as_str().unwrap()).collect()
    };
    assert_eq!(
        of_document(0, false),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nTo be<|im_end|>\n"
    );
    assert_eq!(of_document(0, true), "To be<|im_end|>\n");
    // The second is a text, whose first token nothing predicts.
    assert_eq!(
        (of_document(1, false), of_document(1, true)),
        ("is<|im_end|>".into(), "s<|im_end|>".into())
    );
    assert_eq!(of_document(2, false), "", "padding is no document");
    assert!(tokens.last().unwrap()["document"].is_null());
    let first = tokens.iter().find(|one| one["document"] == 1).unwrap();
    assert_eq!(first["position"], 0);
    assert_eq!(
        first["index"],
        tokens.iter().filter(|one| one["document"] == 0).count()
    );
    // For people, rows of one conversation.
    let ended = folder
        .alone(&format!("{show} --packing off --rows 2"))
        .run();
    ended.assert_well();
    for part in [
        "|<|im_end|>|\\n›\nrow 0: ",
        "row 1, document 0: 3 tokens, 2 trained\n",
        "i|‹s|<|im_end|>›\nrow 1: 61 tokens of padding\n",
    ] {
        assert!(ended.stdout.contains(part), "{part}: {ended}");
    }
}

/// From conversations to a model, to adapters beside it, to a folder with both: each reads what the
/// one before wrote, the chat template too.
#[test]
fn a_model_s_folder_keeps_its_chat_template_on_the_way_to_adapters_and_back() {
    let folder = with_chats("chats-adapted");
    let run = |words: &str| {
        let ended = folder.alone(words).run();
        ended.assert_well();
        ended.stdout
    };
    let steps = "--data train.jsonl --device cpu --threads 1 --batch-size 4 --steps 3";
    let llama = "--model gpt,layers=1,heads=2,width=16,context=96,position=rope,norm=rms,mlp=swiglu,bias=false";
    run(&format!("{steps} {llama} --tokenizer chat --out OUT"));
    run("export --format hf --checkpoint out base");
    let lora = "--lora rank=2,alpha=4,on=all-linear";
    run(&format!("{steps} --init-from base {lora} --out out2"));
    run("export --format hf --checkpoint out2 --merge merged");
    let read = |name: &str| fs::read(folder.path().join(name)).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let [first, last] = ["chat", "merged"].map(|of| read(&format!("{of}/{name}")));
        assert_eq!(first, last, "{name}");
    }
    let shown = ["--tokenizer chat --context 96", "--init-from merged"]
        .map(|from| run(&format!("show-tokens val.jsonl {from} --packing on --json")));
    assert_eq!(shown[0], shown[1]);
    assert!(shown[0].contains("\"trained\":true"));
}

#[test]
fn a_chat_writes_what_the_template_and_generate_would() {
    let folder = with_chats("chats-spoken");
    let words = format!(
        "{MODEL} --data train.jsonl --tokenizer chat --batch-size 4 --steps 3 --threads 1 --sample über --out OUT"
    );
    folder
        .alone(&words.replacen("--threads 1 ", "", 1))
        .run()
        .assert_well();
    // Answers may have several lines.
    let said = |messages: &str, words: &str| -> String {
        fs::write(folder.path().join("messages.txt"), messages).unwrap();
        let ended = folder.in_shell("exec <messages.txt", words).run();
        ended.assert_well();
        ended.stdout.clone()
    };
    let how = "--temperature 0 --max-tokens 5";
    let of_template = |text: &str| {
        fs::write(folder.path().join("prompt.txt"), text).unwrap();
        let words = format!("generate --checkpoint out {how} --prompt");
        // A shell takes line breaks from the end of what a command prints.
        let before = "text=\"$(cat prompt.txt; printf x)\"; set -- \"$@\" \"${text%x}\"";
        let ended = folder.in_shell(before, &words).run();
        ended.assert_well();
        ended.stdout.strip_suffix('\n').unwrap().to_string()
    };
    let user = |text: &str| format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    let first = of_template(&user("to be"));
    let both = format!("{}{first}<|im_end|>\n{}", user("to be"), user("of the"));
    let (second, third) = (of_template(&both), of_template(&user("of the")));
    assert_eq!(
        said("to be\nof the\n\nof the\n", &format!("chat out {how}")),
        format!("{first}\n{second}\n{third}\n")
    );
    let expected = format!("<|im_start|>system\nis<|im_end|>\n{}", user("to be"));
    assert_eq!(
        said("to be\n", &format!("chat out {how} --system is")),
        of_template(&expected) + "\n"
    );
    // As in training.
    let how = "--temperature 0.8 --max-tokens 64 --seed 0";
    let answer = said("über\n", &format!("chat out {how}"));
    let log = folder.metrics_log();
    let sample = log.all("sample").last().unwrap()["text"].as_str();
    assert_eq!(sample, answer.strip_suffix('\n'));
    let bytes = "--model gpt,layers=1,heads=2,width=16,context=96 --data train.txt --device cpu --steps 1 --out bytes";
    fs::write(folder.path().join("train.txt"), "is ".repeat(400)).unwrap();
    folder.alone(bytes).run().assert_well();
    let ended = folder.alone("chat bytes").run();
    let cause = ended.assert_fails(2);
    assert!(cause.contains("there is generate"), "{cause}");
    // Of another tokenizer: it was exit code 70.
    let train =
        "--model llama-tiny,context=32 --tokenizer chat --data train.jsonl --steps 0 --out llama";
    folder.alone(train).run().assert_well();
    let export = "export --format hf --checkpoint llama hf";
    folder.alone(export).run().assert_well();
    let mut tokenizer = tokenizer();
    let added = tokenizer["added_tokens"].as_array_mut().unwrap();
    let mut token = added[0].clone();
    (token["id"], token["content"]) = (json!(402), json!("<|beyond|>"));
    added.push(token);
    let file = folder.path().join("hf/tokenizer.json");
    fs::write(file, tokenizer.to_string()).unwrap();
    let words = "chat hf --system <|beyond|>";
    let ended = folder.in_shell("exec <messages.txt", words).run();
    let cause = ended.assert_fails(2);
    assert!(cause.contains("as the model has, got 402"), "{cause}");
}

#[test]
fn tokens_are_kept_when_only_the_settings_of_generation_change() {
    let folder = with_chats("chats-kept");
    let show = "show-tokens train.jsonl --tokenizer chat --context 96";
    let cache = folder.path().join(".ddp-cache");
    // Notes about files, which begin with a dot, come once a file is two seconds old.
    let is_copy = |name: &str| !name.starts_with('.');
    let copies = || {
        let all = fs::read_dir(&cache).unwrap();
        let names = all.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| is_copy(name)).count()
    };
    folder.alone(show).run().assert_well();
    let before = copies();
    fs::write(
        folder.path().join("chat/generation_config.json"),
        "{\"eos_token_id\": 7}",
    )
    .unwrap();
    folder.alone(show).run().assert_well();
    assert_eq!(copies(), before);
    fs::write(
        folder.path().join("chat/chat_template.jinja"),
        format!("{{# changed #}}{TEMPLATE}"),
    )
    .unwrap();
    folder.alone(show).run().assert_well();
    assert!(copies() > before);
}

#[test]
fn prompts_of_held_out_conversations_are_answered_at_each_evaluation() {
    let folder = with_chats("chats-answered");
    let words = format!(
        "{MODEL} --data train.jsonl --val-data val.jsonl --tokenizer chat --batch-size 4 --steps 4 --eval-every 2 --threads 1 \
         --sample-held-out 2 --out OUT"
    );
    let ended = folder
        .ranks(2, &words.replacen("--threads 1 ", "", 1))
        .run();
    ended.assert_well();
    let log = folder.metrics_log();
    let samples = log.all("sample");
    let steps: Vec<_> = samples
        .iter()
        .map(|it| it["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [2, 4]);
    let last = samples.last().unwrap();
    assert_eq!(last["more"].as_array().unwrap().len(), 1);
    let conversations: Vec<Value> = (40..53).map(conversation).collect();
    let report = fs::read_to_string(folder.out().join("report.html")).unwrap();
    for one in [last, &last["more"][0]] {
        // The prompt and answer of one of the held-out conversations, as decoded without marks.
        let [prompt, expected] = ["prompt", "expected"].map(|name| one[name].as_str().unwrap());
        let is_of = |record: &&Value| {
            let content = |at: usize| record["messages"][at]["content"].as_str().unwrap();
            prompt == format!("user\n{}\nassistant\n", content(0)) && expected.trim() == content(1)
        };
        assert!(conversations.iter().any(|it| is_of(&it)), "{one}");
        assert!(report.contains(expected.trim()), "{one}");
    }
    let first = last["text"].as_str().unwrap();
    // As a chat answers it.
    let question = last["prompt"].as_str().unwrap();
    let question = question
        .strip_prefix("user\n")
        .unwrap()
        .strip_suffix("\nassistant\n")
        .unwrap();
    fs::write(folder.path().join("messages.txt"), format!("{question}\n")).unwrap();
    let chat = "chat out/checkpoints/step-00000004 --temperature 0.8 --max-tokens 64 --seed 0";
    let ended = folder.in_shell("exec <messages.txt", chat).run();
    assert_eq!(ended.stdout.strip_suffix('\n'), Some(first), "{ended}");
    let ended = folder
        .alone(&format!(
            "{MODEL} --data train.jsonl --tokenizer chat --sample-held-out 2 --steps 1 --out other"
        ))
        .run();
    let text = ended.assert_fails(2);
    assert!(
        text.contains("--sample-held-out: expected held-out conversations"),
        "{text}"
    );
}
