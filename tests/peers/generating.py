"""Does ddp-train generate the greedy text of transformers, from the same weights? Exits 1 if not. With --speed also compares tokens/s at GPT-2's size.

    python tests/peers/generating.py target/release/ddp-train [--speed]

It needs torch and transformers. Weights follow from a formula that ddp/tests/jobs/generate.rs repeats, and the texts printed here are its golden ones.
A token is a byte, and there are 128 of them, so every text is ASCII.
"""
import os
import re
import subprocess
import sys
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

PROGRAM = os.path.abspath(sys.argv[1])
PROMPT, TOKENS, CONTEXT, THREADS = "To,be", 24, 32, 2
torch.set_num_threads(THREADS)


def gpt2(**changes):
    settings = dict(vocab_size=128, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                    bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))


def llama(**changes):
    settings = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def fill(model, first):
    """Element i of all tensors, in the order of their names, is a hash of first + i in [-1/2, 1/2), which f32 holds exactly; plus 1 for the weights of
    norms, and times 4 for positions. With these first numbers the texts have many different tokens."""
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    for name in sorted(state):
        if name == "lm_head.weight" and tied:
            continue
        tensor = state[name]
        index = torch.arange(first, first + tensor.numel(), dtype=torch.int64)
        values = ((index * 2654435761) % 2**32 // 2**16).float() / 65536 - 0.5
        if name.endswith("weight") and ("ln_" in name or "norm" in name):
            values += 1
        tensor.copy_((values * 4 if "wpe" in name else values).reshape(tensor.shape))
        first += tensor.numel()
    return model.eval()


def theirs(model, prompt, tokens):
    """The greedy text, the seconds for it, and the smallest distance between the two largest logits."""
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        began = time.perf_counter()
        made = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
        seconds = time.perf_counter() - began
    top = torch.stack(made.logits).topk(2).values
    return made.sequences[0, ids.shape[1]:].tolist(), seconds, (top[..., 0] - top[..., 1]).min().item()


def ours(folder, prompt, tokens):
    words = [PROGRAM, "generate", "--checkpoint", folder, "--tokenizer", "bytes", "--prompt", prompt, "--temperature", "0",
             "--max-tokens", str(tokens), "--threads", str(THREADS)]
    done = subprocess.run(words, capture_output=True)
    if done.returncode != 0:
        sys.exit(done.stderr.decode())
    rates = re.findall(r"([\d.,]+) tokens/s", done.stderr.decode())
    return done.stdout[:-1], [float(rate.replace(",", "")) for rate in rates]


def main():
    differ = False
    with tempfile.TemporaryDirectory() as folder:
        for name, model in {"GPT-2": gpt2(), "Llama": llama(), "Llama, tied": llama(tie_word_embeddings=True),
                            "GPT-2, untied": gpt2(tie_word_embeddings=False, activation_function="gelu")}.items():
            path = os.path.join(folder, name)
            fill(model, 300009 if name.startswith("GPT-2") else 200006).save_pretrained(path)
            expected, _, margin = theirs(model, PROMPT, TOKENS)
            got, _ = ours(path, PROMPT, TOKENS)
            same = got == bytes(expected)
            differ |= not same
            print(f"{name}: {'the same' if same else 'DIFFERS'}, two largest logits at least {margin:.3g} apart: {bytes(expected)}")
        if "--speed" in sys.argv:
            big = dict(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12)
            model, path, prompt = gpt2(**big).eval(), os.path.join(folder, "big"), "To be or not to be. " * 12
            model.save_pretrained(path)
            for turn in range(3):
                _, seconds, _ = theirs(model, prompt, 1)
                _, whole, _ = theirs(model, prompt, 65)
                _, rates = ours(path, prompt, 65)
                print(f"GPT-2 124M, {THREADS} threads: transformers prompt {len(prompt) / seconds:.0f} tokens/s, text {64 / (whole - seconds):.1f}; "
                      f"ours prompt {rates[0]:.0f}, text {rates[-1]:.1f}")
    sys.exit(differ)


if __name__ == "__main__":
    main()
