//! Conversations that are refused, or warned of.

use super::*;

/// What fills the memory or never ends, as far as steps do not bound it.
#[test]
fn templates_that_need_too_much_are_refused() {
    let folder = with_chats("chats-bombs");
    let repeated = "['x' * 1000000] * 90000";
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let doubled = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let [memory, text] = [
        "expected to need at most 256 MiB",
        "expected a text of at most",
    ];
    let cases = [
        (format!("{{{{ ({repeated})|join }}}}"), memory),
        (format!("{{{{ ''.join({repeated}) }}}}"), memory),
        (doubled.into(), "ran out of fuel"),
        ("{{ (['x' * 100000] * 50)|join }}".into(), text),
        (format!("{nested}x"), "the chat template"),
    ];
    let lines = fs::read_to_string(folder.path().join("train.jsonl")).unwrap();
    let line = lines.lines().next().unwrap();
    fs::write(folder.path().join("one.jsonl"), line).unwrap();
    // One after the other: each fills some memory.
    for (number, (template, told)) in cases.into_iter().enumerate() {
        let (name, chat) = (format!("chat-{number}"), folder.path().join("chat"));
        let bomb = folder.path().join(&name);
        fs::create_dir(&bomb).unwrap();
        fs::copy(chat.join("tokenizer.json"), bomb.join("tokenizer.json")).unwrap();
        fs::write(bomb.join("chat_template.jinja"), template).unwrap();
        let words = format!("show-tokens one.jsonl --tokenizer {name} --context 96");
        // Beyond 5 GB the system refuses memory, which would end the program with 71.
        let ended = folder.in_shell("ulimit -d 5000000", &words).run();
        let cause = ended.assert_fails(65);
        assert!(cause.contains(told), "{name}: {ended}");
    }
}

#[test]
fn conversations_that_teach_nothing_are_refused_by_line() {
    let folder = with_chats("chats-refused");
    let write = |name: &str, records: &[Value]| {
        fs::write(folder.path().join(name), lines(records.iter().cloned())).unwrap();
    };
    let silent = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
    write("silent.jsonl", &[conversation(1), silent]);
    let long = json!({ "messages": [{ "role": "user", "content": "x".repeat(200) }, { "role": "assistant", "content": "y" }] });
    write("long.jsonl", &[long]);
    write(
        "others.jsonl",
        &[json!({ "instruction": "a", "output": "b" })],
    );
    fs::write(folder.path().join("empty.jsonl"), "\n").unwrap();
    fs::create_dir(folder.path().join("plain")).unwrap();
    fs::write(
        folder.path().join("plain/tokenizer.json"),
        tokenizer().to_string(),
    )
    .unwrap();
    let train = |flags: &str| format!("{MODEL} {flags} --steps 1 --out OUT");
    let cases = [
        (
            train("--tokenizer chat --data silent.jsonl"),
            65,
            "silent.jsonl, line 2: expected a token to train on, got none of",
        ),
        (
            train("--tokenizer chat --data silent.jsonl"),
            65,
            "no message is the assistant's",
        ),
        (
            train("--tokenizer chat --data long.jsonl"),
            65,
            "long.jsonl, line 1: expected a token to train on among the first 96",
        ),
        (
            train("--tokenizer chat --data others.jsonl"),
            65,
            "got the fields [instruction, output]",
        ),
        (
            train("--tokenizer chat --data empty.jsonl"),
            65,
            "expected conversations, got none",
        ),
        (
            train("--tokenizer plain --data train.jsonl"),
            65,
            "line 1: expected text, or a tokenizer with a chat template",
        ),
        (
            train("--data train.jsonl"),
            2,
            "expected a tokenizer, which turns conversations into tokens",
        ),
        (
            train("--tokenizer no --data train.jsonl"),
            74,
            "cannot read no: ",
        ),
        (
            train("--tokenizer chat --data train.jsonl --vocab 401"),
            65,
            "train.jsonl, line 1: expected tokens below 401",
        ),
        (
            train("--tokenizer chat --data train.jsonl --position learned --packing on"),
            2,
            "expected rotary positions",
        ),
    ];
    all_at_once(cases, |(words, exit_code, part)| {
        let ended = folder.alone(&words).run();
        assert_eq!(ended.exit_code(), Some(exit_code), "{words}: {ended}");
        assert!(ended.stderr.contains(part), "{words}: {ended}");
    });
    assert!(!folder.out().exists());
    // Longer ones are cut, and counted.
    let ended = folder
        .alone(&train("--tokenizer chat --data train.jsonl --context 48"))
        .run();
    ended.assert_well();
    assert!(
        ended
            .stderr
            .contains("are longer than the context of 48 tokens and are cut at the end"),
        "{ended}"
    );
}

#[test]
fn a_token_across_the_beginning_of_an_answer_is_warned_of() {
    let folder = with_chats("chats-across");
    let show = "show-tokens some.jsonl --tokenizer chat --context 96";
    for (prompt, completion, is_warned_of) in [("is ", "of", true), ("is", " of", false)] {
        let records = [
            conversation(1),
            json!({ "prompt": prompt, "completion": completion }),
        ];
        fs::write(folder.path().join("some.jsonl"), lines(records)).unwrap();
        // From the cache, too.
        for _ in 0..2 {
            let ended = folder.alone(show).run();
            ended.assert_well();
            let warned = ended
                .stderr
                .contains("in 1 of 2 conversations a trained token begins");
            assert_eq!(warned, is_warned_of, "{prompt}: {ended}");
        }
    }
}
