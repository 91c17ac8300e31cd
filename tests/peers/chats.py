"""Does ddp-train make the tokens of conversations, and train those, that transformers does? Exits 1 if not, and prints a table.

    python tests/peers/chats.py target/release/ddp-train              # small templates of the usual kinds
    python tests/peers/chats.py target/release/ddp-train TEMPLATES    # and those of this folder, *.jinja: trl has some in chat_templates

It needs the packages tokenizers and transformers. A template with {% generation %} is compared with return_assistant_tokens_mask,
others with the difference of prefixes, as trl takes it. Where prefixes differ, ddp-train must refuse the conversation, or the
template leaves out earlier thoughts, and what is trained is compared with the text of the turn. The loss of a small Llama on all
conversations must be that of transformers, in packed rows and in others.
"""
import datetime
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

PROGRAM, FOLDERS = sys.argv[1], sys.argv[2:]
WORDS = "the of and to is it's For 12 3456 naïve Straße 東京 Привет 😀 foo(x) {y}; “q” \n \n\n    \t".split(" ")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>", "<|user|>", "<|assistant|>",
           "<start_of_turn>", "<end_of_turn>", "<bos>", "[INST]", "[/INST]", "<think>", "</think>"]
BODY = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
SMALL = {
    "chatml": "{% for message in messages %}" + BODY + "{% endfor %}" + ASK,
    "chatml, marked": "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
                      "{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}" + BODY + "{% endif %}{% endfor %}" + ASK,
    "trimmed": "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message.role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
               "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}",
    "inst": "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{{ ' ' + message.content.strip() + eos_token }}{% else %}"
            "{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}{% endfor %}",
}


class Date(datetime.datetime):
    """The date that ddp-train tells templates."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


chat_template_utils.datetime = Date


def say(chosen, most):
    return "".join(chosen.choice(WORDS) + chosen.choice([" "] * 9 + ["\n", "", "  "]) for _ in range(chosen.randint(1, most)))


def tokenizer(folder, kind, template):
    model = Tokenizer(models.BPE(byte_fallback=kind != "bytes"))
    if kind == "bytes":
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        model.post_processor = processors.ByteLevel(trim_offsets=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        # As Gemma's: spaces become ▁, unknown characters bytes.
        model.normalizer = normalizers.Replace(" ", "▁")
        model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = sorted(set("▁\n" + "".join(chr(code) for code in range(33, 127))))
    special = SPECIAL + ([f"<0x{byte:02X}>" for byte in range(256)] if kind != "bytes" else [])
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[AddedToken(one, special=True) for one in SPECIAL], initial_alphabet=alphabet, show_progress=False)
    chosen = random.Random(0)
    model.train_from_iterator([say(chosen, 40) for _ in range(300)], trainer)
    if kind != "bytes":
        state = json.loads(model.to_str())
        for one in special[len(SPECIAL):]:
            state["model"]["vocab"][one] = len(state["model"]["vocab"])
        model = Tokenizer.from_str(json.dumps(state))
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>", eos_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def conversations(thinks, count=30):
    chosen = random.Random(3)
    for number in range(count):
        messages = [{"role": "system", "content": say(chosen, 6)}] if number % 3 == 1 else []
        for _ in range(chosen.randint(1, 3)):
            answer = say(chosen, 12)
            thought = f"<think>\n{say(chosen, 5)}\n</think>\n\n" if thinks and chosen.random() < 0.5 else ""
            messages += [{"role": "user", "content": say(chosen, 8)}, {"role": "assistant", "content": thought + answer}]
        yield messages


def ids_of(fast, messages, answers=False):
    return fast.apply_chat_template(messages, tokenize=True, add_generation_prompt=answers, return_dict=True)["input_ids"]


def expected(fast, messages, is_marked):
    """Tokens, and which of them are trained; None for these if prefixes differ."""
    if is_marked:
        found = fast.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], found["assistant_masks"]
    whole = ids_of(fast, messages)
    mask = [0] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = ids_of(fast, messages[:index], True), ids_of(fast, messages[:index + 1])
            if whole[:len(start)] != start or whole[:len(end)] != end:
                return whole, None
            mask[len(start):len(end)] = [1] * (len(end) - len(start))
    return whole, mask


def shown(folder, messages):
    """What ddp-train makes of a conversation: tokens and which are trained, or its error."""
    path = os.path.join(folder, "chat.jsonl")
    with open(path, "w") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    words = ["show-tokens", path, "--tokenizer", folder, "--context", "4096", "--packing", "off", "--json", "--cache-dir", os.path.join(folder, "cache")]
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True)
    if done.returncode != 0:
        return None, f"{done.returncode}: {done.stderr.strip()}"
    tokens = [json.loads(line) for line in done.stdout.splitlines()]
    return [one["token"] for one in tokens], [int(one["trained"]) for one in tokens]


def compare(name, template, kind):
    counts = {"equal": 0, "refused by both": 0, "prefixes differ": 0, "refused": 0, "differ": 0}
    is_marked = re.search(r"{%-?\s*generation", template) is not None
    with tempfile.TemporaryDirectory() as folder:
        fast = tokenizer(folder, kind, template)
        for messages in conversations("think" in template):
            tokens, trained = shown(folder, messages)
            try:
                whole, mask = expected(fast, messages, is_marked)
            except Exception as error:
                whole, mask = None, str(error)
            if whole is None:
                kind_of = "refused by both" if tokens is None and trained.startswith("65") else "differ"
            elif tokens is None:
                # Also if transformers marks nothing, which it does not say.
                kind_of = "refused" if trained.startswith("65") and (mask is None or not any(mask[1:])) else "differ"
            elif mask is None:
                answers = [m["content"].split("</think>")[-1].strip() for m in messages if m["role"] == "assistant"]
                text = fast.decode([token for token, is_trained in zip(tokens, trained) if is_trained])
                left_out = all(answer in text for answer in answers) and tokens[:len(whole)] == whole
                kind_of = "prefixes differ" if left_out else "differ"
            else:
                mask = [0] + list(mask[1:])
                kind_of = "equal" if tokens[:len(whole)] == whole and trained[:len(whole)] == mask and not any(trained[len(whole):]) else "differ"
            counts[kind_of] += 1
            if kind_of == "refused" and counts[kind_of] == 1:
                print(f"  {name}: {trained}")
            if kind_of == "differ" and counts["differ"] == 1:
                print(f"  {name}: {messages}\n  expected {whole} {mask}\n  got {tokens} {trained}")
    print(f"{name:32} {kind:6} " + ", ".join(f"{what} {count}" for what, count in counts.items() if count), flush=True)
    return counts["differ"] == 0


def loss_of(folder, words):
    """That of the first step of ddp-train, which learns nothing."""
    out = os.path.join(folder, "out" + words.replace(" ", ""))
    words = f"--data {folder}/chats.jsonl --init-from {folder} --batch-size 100 --steps 1 --warmup-steps 0 --lr 0 --device cpu {words} --out {out}"
    subprocess.run([PROGRAM, *words.split()], check=True, capture_output=True)
    events = [json.loads(line) for line in open(os.path.join(out, "metrics.jsonl"))]
    return next(event["loss"] for event in events if event["event"] == "step")


def compare_loss():
    with tempfile.TemporaryDirectory() as folder:
        fast = tokenizer(folder, "bytes", SMALL["chatml, marked"])
        torch.manual_seed(1)
        config = LlamaConfig(vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                             max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        total, count = 0.0, 0
        with open(os.path.join(folder, "chats.jsonl"), "w") as file:
            for messages in conversations(False):
                file.write(json.dumps({"messages": messages}) + "\n")
                tokens, mask = expected(fast, messages, True)
                labels = torch.tensor([token if is_trained else -100 for token, is_trained in zip(tokens[1:], mask[1:])])
                with torch.no_grad():
                    logits = model(torch.tensor([tokens])).logits[0, :-1]
                total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                count += sum(mask[1:])
        apart = {words: abs(loss_of(folder, words) - total / count) for words in ["--packing off", "--packing on", "--packing on --ranks 3"]}
    print(f"loss of {count} tokens {total / count:.6f}; apart: " + ", ".join(f"{words} {one:.1e}" for words, one in apart.items()))
    return max(apart.values()) < 1e-5


def main():
    templates = dict(SMALL)
    for folder in FOLDERS:
        templates.update((path.stem, path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.jinja")))
    results = [compare(name, template, kind) for name, template in templates.items() for kind in ["bytes", "spaces"]]
    sys.exit(0 if compare_loss() and all(results) else 1)


main()
