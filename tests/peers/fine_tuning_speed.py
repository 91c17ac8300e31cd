"""Tokens a second of fine-tuning a small Qwen3 on two threads: ddp-train and PEFT or transformers, in turn.

    python tests/peers/fine_tuning_speed.py target/release/ddp-train     (with a Python that has torch, transformers and peft)
"""
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROWS, CONTEXT, VOCABULARY, STEPS = 4, 512, 8192, 9


def median(values):
    """Of the steps after the first two."""
    return sorted(values[2:])[len(values[2:]) // 2]


def ours(program, is_lora, dtype):
    flags = f"--init-from base --data tokens:t.bin,vocabulary={VOCABULARY} --context {CONTEXT} --val-split 0 --batch-size {ROWS}"
    flags += f" --steps {STEPS} --log-every 1 --device cpu --threads 2 --dtype {dtype} --out {dtype}-{is_lora}"
    flags += " --lora rank=16,alpha=32" * is_lora
    subprocess.run([program, *flags.split()], check=True, capture_output=True)
    with open(f"{dtype}-{is_lora}/metrics.jsonl", encoding="utf-8") as log:
        steps = [event["step_ms"] / 1000 for event in map(json.loads, log) if event["event"] == "step"]
    return ROWS * CONTEXT / median(steps)


def theirs(is_lora, dtype):
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    if is_lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    tokens, steps = torch.randint(0, VOCABULARY, (ROWS, CONTEXT)), []
    for _ in range(STEPS):
        start = time.monotonic()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.monotonic() - start)
    return ROWS * CONTEXT / median(steps)


program = os.path.abspath(sys.argv[1])
torch.set_num_threads(2)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    config = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None, **sizes)
    Qwen3ForCausalLM(config).save_pretrained("base")
    torch.randint(0, VOCABULARY, (64 * CONTEXT + 1,), dtype=torch.int32).to(torch.uint16).numpy().tofile("t.bin")
    for is_lora, dtype in [(True, "f32"), (True, "bf16"), (False, "f32")]:
        a, b = ours(program, is_lora, dtype), theirs(is_lora, dtype)
        print(f"{'LoRA' if is_lora else 'all weights'} {dtype}: {a:,.0f} and {b:,.0f} tokens/s, {a / b:.2f} times")
