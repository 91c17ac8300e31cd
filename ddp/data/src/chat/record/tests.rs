mod templates;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use self::templates::*;
use super::*;
use crate::chat::template::ChatFormat;
use crate::text::Vocabulary;

/// In the style of Phi 3: the end of documents after the last message.
const PHI: &str = "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}";

fn format(template: &str) -> ChatFormat {
    let mut vocabulary = Vocabulary::bytes();
    let config = json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" }, "chat_template": template });
    let config = config.to_string().into_bytes();
    vocabulary.chat_files = BTreeMap::from([("tokenizer_config.json", config)]);
    ChatFormat::of(&vocabulary).unwrap()
}

/// The text of a record, with what is trained in ‹ ›.
fn shown(template: &str, record: &Value, loss_on: LossOn) -> Result<String, String> {
    let format = format(template);
    let written = write(&record.to_string(), format.template.as_ref(), loss_on)?;
    let mut text = written.text;
    for range in written.trained.iter().rev() {
        text.insert(range.end, '›');
        text.insert(range.start, '‹');
    }
    Ok(text)
}

fn chat(turns: &[(&str, &str)]) -> Value {
    let message = |(role, content): &(&str, &str)| json!({ "role": role, "content": content });
    json!({ "messages": turns.iter().map(message).collect::<Vec<_>>() })
}

fn two_turns() -> Value {
    chat(&[
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", " Why? "),
        ("assistant", "So."),
    ])
}

fn trained(template: &str, record: &Value) -> String {
    shown(template, record, LossOn::Assistant).unwrap()
}

#[test]
fn what_the_assistant_says_is_found_without_marks() {
    assert_eq!(
        trained(CHATML, &two_turns()),
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n‹Hello<|im_end|>\n›\
         <|im_start|>user\n Why? <|im_end|>\n<|im_start|>assistant\n‹So.<|im_end|>\n›"
    );
    assert_eq!(
        trained(MISTRAL, &two_turns()),
        "<s>[INST] Hi[/INST]‹ Hello</s>›[INST]  Why? [/INST]‹ So.</s>›"
    );
    assert_eq!(
        trained(PHI, &two_turns()),
        "<|user|>\nHi<|end|>\n<|assistant|>\n‹Hello<|end|>\n›<|user|>\n Why? <|end|>\n<|assistant|>\n‹So.<|end|>\n</s>›"
    );
    let header = |role| format!("<|start_header_id|>{role}<|end_header_id|>\n\n");
    let [system, user, assistant] = ["system", "user", "assistant"].map(header);
    assert_eq!(
        trained(LLAMA, &two_turns()),
        format!(
            "<s>{system}Today Date: 26 Jul 2024<|eot_id|>{user}Hi<|eot_id|>{assistant}‹Hello<|eot_id|>›\
             {user}Why?<|eot_id|>{assistant}‹So.<|eot_id|>›"
        )
    );
}

#[test]
fn what_a_template_marks_is_trained() {
    assert_eq!(
        trained(MARKED, &two_turns()),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n‹Hello<|im_end|>›\n<|im_start|>user\n Why? <|im_end|>\n\
         <|im_start|>assistant\n‹So.<|im_end|>›\n"
    );
    let all = shown(MARKED, &two_turns(), LossOn::All).unwrap();
    assert!(
        all.starts_with("‹<|im_start|>user") && all.ends_with("<|im_end|>\n›"),
        "{all}"
    );
}

#[test]
fn thoughts_of_earlier_answers_may_be_left_out() {
    let answer = "<think>\nHm.\n</think>\n\nHello";
    let record = chat(&[
        ("user", "Hi"),
        ("assistant", answer),
        ("user", "Why?"),
        ("assistant", "So."),
    ]);
    assert_eq!(
        trained(THINKING, &record),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n‹Hello<|im_end|>\n›<|im_start|>user\nWhy?<|im_end|>\n\
         <|im_start|>assistant\n‹<think>\n\n</think>\n\nSo.<|im_end|>\n›"
    );
    let record = chat(&[
        ("user", "Hi"),
        ("assistant", " \n Hello"),
        ("user", "Why?"),
        ("assistant", "So."),
    ]);
    assert!(
        trained(THINKING, &record).contains("assistant\n‹ \n Hello<|im_end|>\n›<|im_start|>user")
    );
    let mut one = chat(&[("user", "Hi"), ("assistant", answer)]);
    assert!(trained(THINKING, &one).ends_with("‹<think>\nHm.\n</think>\n\nHello<|im_end|>\n›"));
    // The template then begins answers with empty thoughts, which are part of the prompt.
    one["chat_template_kwargs"] = json!({ "enable_thinking": false });
    one["messages"][1]["content"] = json!("Hello");
    assert!(
        trained(THINKING, &one).ends_with("assistant\n<think>\n\n</think>\n\n‹Hello<|im_end|>\n›")
    );
}

#[test]
fn tools_are_written_as_python_writes_json() {
    let mut record = two_turns();
    record["tools"] = json!([{ "type": "function", "b": [1, 2.5, true, null], "a": "é<" }]);
    let expected =
        "Tools:\n{\"type\": \"function\", \"b\": [1, 2.5, true, null], \"a\": \"é<\"}<|im_end|>";
    assert!(
        trained(CHATML, &record).contains(expected),
        "{}",
        trained(CHATML, &record)
    );
    // As a text, too.
    record["tools"] = json!(record["tools"].to_string());
    assert!(trained(CHATML, &record).contains(expected));
    let call = json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "add", "arguments": { "x": 1, "y": [] } } }] });
    let record = json!({ "messages": [{ "role": "user", "content": "Add" }, call] });
    let expected = "\n\n‹{\"name\": \"add\", \"parameters\": {\"x\": 1, \"y\": []}}<|eot_id|>›";
    assert!(
        trained(LLAMA, &record).ends_with(expected),
        "{}",
        trained(LLAMA, &record)
    );
}

#[test]
fn conversations_with_tools_may_have_a_template_of_their_own() {
    let mut vocabulary = Vocabulary::bytes();
    let named = |name: &str| json!({ "name": name, "template": format!("{name}: {{{{ messages[0].content }}}}") });
    let config = json!({ "chat_template": [named("default"), named("rag"), named("tool_use")] });
    vocabulary.chat_files =
        BTreeMap::from([("tokenizer_config.json", config.to_string().into_bytes())]);
    let mut record = chat(&[("user", "Hi")]);
    let text = |vocabulary: &Vocabulary, record: &Value| {
        let format = ChatFormat::of(vocabulary).unwrap();
        write(&record.to_string(), format.template.as_ref(), LossOn::All)
            .unwrap()
            .text
    };
    assert_eq!(text(&vocabulary, &record), "default: Hi");
    record["tools"] = json!([{ "name": "add" }]);
    assert_eq!(text(&vocabulary, &record), "tool_use: Hi");
    // A file of its own counts before all of them.
    vocabulary
        .chat_files
        .insert("chat_template.jinja", b"own: {{ tools[0].name }}".to_vec());
    assert_eq!(text(&vocabulary, &record), "own: add");
    vocabulary
        .chat_files
        .insert("chat_template.jinja", b"a\xff".to_vec());
    let refused = ChatFormat::of(&vocabulary).unwrap_err();
    assert!(refused.starts_with("chat_template.jinja: expected UTF-8"));
}

#[test]
fn prompts_are_completed() {
    let record = json!({ "prompt": [{ "role": "user", "content": "Hi" }], "completion": [{ "role": "assistant", "content": "Yo" }] });
    assert!(trained(CHATML, &record).ends_with("<|im_start|>assistant\n‹Yo<|im_end|>\n›"));
    assert!(trained(MARKED, &record).ends_with("<|im_start|>assistant\n‹Yo<|im_end|>\n›"));
    let record = json!({ "prompt": "1 + 1 =", "completion": " 2" });
    assert_eq!(trained(CHATML, &record), "1 + 1 =‹ 2›");
    assert_eq!(shown(CHATML, &record, LossOn::All).unwrap(), "‹1 + 1 = 2›");
    assert_eq!(trained(CHATML, &json!({ "text": "abc" })), "‹abc›");
}

/// Data sets that were joined have all fields of each.
#[test]
fn a_field_that_is_null_is_not_there() {
    let record = json!({ "messages": null, "prompt": null, "completion": null, "text": "a" });
    assert_eq!(shown(CHATML, &record, LossOn::All).unwrap(), "‹a›");
}

#[test]
fn records_that_cannot_be_learned_from_are_refused() {
    let refused =
        |template: &str, record: &Value| shown(template, record, LossOn::Assistant).unwrap_err();
    // The system message comes with the last question: parts are no beginnings of the whole.
    let system = [
        ("system", "S"),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Why?"),
        ("assistant", "So."),
    ];
    let error = refused(MISTRAL, &chat(&system));
    let expected = "message 3: expected the chat template to write the same text up to it as for the whole conversation, \
                    got \"S\\n\\nHi[/INST]\" in place of \"Hi[/INST] Hello</s>[INST]\"";
    assert!(
        error.starts_with(expected) && error.contains("--loss-on all") || error.contains("loss-on"),
        "{error}"
    );
    let without_answers = "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}\
                           {% if add_generation_prompt %}assistant:{% endif %}";
    let error = refused(without_answers, &chat(&[("user", "a"), ("assistant", "b")]));
    let expected =
        "message 2: expected the chat template to write it, got a text that ends before it";
    assert!(error.starts_with(expected), "{error}");
    let error = refused(MISTRAL, &chat(&[("user", "a"), ("user", "b")]));
    assert!(
        error.starts_with("the chat template (chat_template.jinja, else tokenizer_config.json), line 10: After the optional system message"),
        "{error}"
    );
    let error = refused(CHATML, &json!({ "instruction": "a", "output": "b" }));
    assert!(
        error.contains("got the fields [instruction, output]; help: rename the fields; of a table"),
        "{error}"
    );
    // Of another type they changed nothing, in silence.
    let mut other = two_turns();
    other["tools"] = json!({ "name": "add" });
    assert!(refused(CHATML, &other).starts_with("tools: expected a list, got {"));
    let mut other = two_turns();
    other["chat_template_kwargs"] = json!("{\"enable_thinking\": false}");
    assert!(refused(CHATML, &other).starts_with("chat_template_kwargs: expected an object, got"));
    let pair = json!({ "prompt": "a", "chosen": "b", "rejected": "c" });
    assert!(refused(CHATML, &pair).ends_with("TRL; to learn what was chosen, name it completion"));
    let error = refused(CHATML, &json!({ "messages": ["Hi"] }));
    assert!(
        error.starts_with("message 1: expected an object with a role, got \"Hi\""),
        "{error}"
    );
    for content in [json!(null), json!("")] {
        let mut other = two_turns();
        other["messages"][1]["content"] = content.clone();
        other["messages"][1]["tool_calls"] = json!([]);
        let is_refused = shown(CHATML, &other, LossOn::All)
            .is_err_and(|error| error.starts_with("message 2: expected content, tool_calls or"));
        assert_eq!(is_refused, content.is_null());
    }
    let error = write("{\"messages\": [{\"role\": \"user\"}]}", None, LossOn::All).unwrap_err();
    assert!(
        error.contains("got messages and a tokenizer without"),
        "{error}"
    );
}

/// Its generation prompt has text that conversations lack, and a user writes what begins thoughts.
#[test]
fn only_what_opens_an_answer_may_begin_a_thought() {
    let template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}\
                    {% if add_generation_prompt %}[assistant]go:{% endif %}";
    let record = chat(&[("user", "what does <think> mean"), ("assistant", "YES")]);
    let error = shown(template, &record, LossOn::Assistant).unwrap_err();
    assert!(
        error.contains("message 2: expected the chat template"),
        "{error}"
    );
    // Thoughts after the last question are written, and later left out, of several messages.
    let template = "{% set ns = namespace(u=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
                    {% set ns.u = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '[' + m.role + ']' }}\
                    {% if m.reasoning_content and loop.index0 > ns.u %}<think>{{ m.reasoning_content }}</think>{% endif %}\
                    {{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    let record = json!({ "messages": [
        { "role": "user", "content": "cat" },
        { "role": "assistant", "reasoning_content": "R", "content": "CALL" },
        { "role": "tool", "content": "secret" },
        { "role": "assistant", "content": "ONE" },
        { "role": "user", "content": "dog" },
        { "role": "assistant", "content": "TWO" },
    ] });
    let error = shown(template, &record, LossOn::Assistant).unwrap_err();
    assert!(
        error.contains("message 4: expected the chat template"),
        "{error}"
    );
}

#[test]
fn the_end_of_an_answer_without_its_thought_is_trained() {
    let template = "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% elif loop.last %}A:{{ m.content }}\
                    {{ eos_token }}{% else %}A:{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}\
                    {% if add_generation_prompt %}A:{% endif %}";
    let record = chat(&[
        ("user", "a"),
        ("assistant", "<think>t</think>ONE"),
        ("user", "b"),
        ("assistant", "<think>t</think>TWO"),
    ]);
    let end = format(template).end.unwrap();
    let expected = format!("U:aA:‹ONE{end}›U:bA:‹<think>t</think>TWO{end}›");
    assert_eq!(trained(template, &record), expected);
}

/// Expected: what transformers 5.24 writes.
#[test]
fn thoughts_have_the_names_that_transformers_gives_them() {
    let template =
        "{% for m in messages %}{% for key in m %}{{ key }}={{ m[key] }} {% endfor %}{% endfor %}";
    for (given, expected) in [
        (
            json!({ "reasoning_content": "R" }),
            "thinking=R role=assistant reasoning_content=R ",
        ),
        (
            json!({ "thinking": "T", "reasoning": "R" }),
            "thinking=T role=assistant reasoning=R reasoning_content=T ",
        ),
        (
            json!({ "reasoning_content": "R", "thinking": "T" }),
            "thinking=T role=assistant reasoning_content=R ",
        ),
    ] {
        let mut message = json!({ "role": "assistant" });
        let given = given.as_object().unwrap().clone();
        message.as_object_mut().unwrap().extend(given);
        let text = shown(template, &json!({ "messages": [message] }), LossOn::All);
        assert_eq!(text.unwrap(), format!("‹{expected}›"));
    }
}

#[test]
fn messages_are_those_of_transformers() {
    let template = "{% for m in messages %}[{% for key in m %}{{ key }},{% endfor %}]{{ m.reasoning_content }}{% endfor %}";
    let record = json!({ "messages": [{ "role": "assistant", "content": null, "thinking": "T" }] });
    let text = shown(template, &record, LossOn::All).unwrap();
    assert!(
        text.contains("reasoning_content,") && text.contains("]T"),
        "{text}"
    );
    assert!(
        !text.contains("[content") && !text.contains(",content,"),
        "{text}"
    );
    let marks = chat(&[("user", "a\u{fdd0}b"), ("assistant", "YES")]);
    let error = shown(MARKED, &marks, LossOn::Assistant).unwrap_err();
    assert!(error.contains("U+FDD0"), "{error}");
    assert!(
        shown(CHATML, &marks, LossOn::Assistant)
            .unwrap()
            .contains("a\u{fdd0}b")
    );
}

/// Later answers are written with the first one and the messages before them.
#[test]
fn answers_of_long_conversations_are_those_found_by_writing_all_of_it() {
    let thought = "<think>\nHm.\n</think>\n\nHello";
    let turns = [
        ("user", "Hi"),
        ("assistant", thought),
        ("user", " Why? "),
        ("assistant", "So."),
    ];
    let record = chat(&turns.repeat(80));
    for template in [CHATML, LLAMA, MISTRAL, THINKING, PHI] {
        let format = format(template);
        let (template, messages) = (format.template.unwrap(), &record["messages"]);
        let messages = messages.as_array().unwrap();
        let turns = Turns {
            template: &template,
            messages,
            conversation: template.conversation(messages, &Map::new()),
        };
        let written = turns.write(None, LossOn::Assistant).unwrap();
        assert_eq!(written.trained.len(), 160);
        for (index, range) in written.trained.into_iter().enumerate() {
            assert_eq!(turns.answer(2 * index + 1, ALL, &written.text), Ok(range));
        }
    }
    // Not all of it is written again for each answer.
    let of_parts = "{%- if messages|length > 100 and messages|length < 320 %}{{ raise_exception('long') }}{% endif %}";
    let of_parts = format!("{of_parts}{CHATML}");
    assert_eq!(trained(&of_parts, &record), trained(CHATML, &record));
    // A count that differs in parts is found by writing all of it.
    let counted = "{% for m in messages %}{{ loop.index ~ m.role ~ ':' ~ m.content }}{% endfor %}\
                   {% if add_generation_prompt %}{{ (messages|length + 1) ~ 'assistant:' }}{% endif %}";
    assert!(trained(counted, &record).ends_with("319user: Why? 320assistant:‹So.›"));
}

#[test]
fn conversations_of_too_many_messages_are_refused_unless_the_template_marks_answers() {
    let turns = [("user", "a"), ("assistant", "b")].repeat(5001);
    let error = shown(CHATML, &chat(&turns), LossOn::Assistant).unwrap_err();
    assert!(
        error.contains("at most 10000 messages, got 10002"),
        "{error}"
    );
    assert_eq!(trained(MARKED, &chat(&turns)).matches('‹').count(), 5001);
}

#[test]
fn damaged_records_are_written_or_refused() {
    let call = json!({"function": {"name": "f", "arguments": {"x": 1}}});
    let message = json!({"role": "assistant", "content": [{"type": "text", "text": "So."}], "tool_calls": [call]});
    let records = [
        two_turns(),
        json!({"messages": [{"role": "user", "content": "Hi"}, message], "tools": [{"type": "function"}]}),
        json!({"prompt": "a", "completion": "b"}),
        json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
    ];
    let formats = [format(CHATML), format(PHI)];
    for seed in ddp_testing::cases("damaged records", 50_000, 500) {
        let record = records[seed % records.len()].to_string();
        let damaged = ddp_testing::mutated(record.as_bytes(), seed);
        let damaged = String::from_utf8_lossy(&damaged);
        let template = formats[seed % 2].template.as_ref();
        // A text or an error, and its ranges are within it.
        if let Ok(written) = write(&damaged, template, LossOn::Assistant) {
            let is_within = |range: &std::ops::Range<usize>| range.end <= written.text.len();
            assert!(written.trained.iter().all(is_within), "{damaged}");
        }
    }
}
