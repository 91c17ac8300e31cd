"""Tokens a second of fine-tuning a Qwen3: ddp-train and PEFT or transformers, in turn; on a GPU also the memory it takes.

    python tests/peers/fine_tuning_speed.py target/release/ddp-train [cpu|cuda]     (with a Python that has torch, transformers and peft)

On two threads of a CPU a small model; on a GPU one of Qwen3-0.6B's sizes with random weights.
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

DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"
ON_GPU = DEVICE == "cuda"
ROWS, CONTEXT, VOCABULARY, STEPS = (8, 1024, 151936, 17) if ON_GPU else (4, 512, 8192, 9)
SIZES = (1024, 3072, 28, 16, 8, 128) if ON_GPU else (512, 1536, 8, 8, 4, 64)
TYPE = "u32" if ON_GPU else "u16"
CASES = [(True, "bf16"), (False, "bf16")] if ON_GPU else [(True, "f32"), (True, "bf16"), (False, "f32")]


def median(values):
    """Of the steps after the first third, which compile and capture."""
    values = sorted(values[len(values) // 3:])
    return values[len(values) // 2]


def ours(program, is_lora, dtype):
    """Tokens a second and GB."""
    flags = f"--init-from base --data tokens:t.bin,vocabulary={VOCABULARY},type={TYPE} --context {CONTEXT} --val-split 0 --batch-size {ROWS}"
    flags += f" --steps {STEPS} --log-every 1 --device {DEVICE} --dtype {dtype} --out {dtype}-{is_lora}"
    flags += " --lora rank=16,alpha=32" * is_lora + " --threads 2" * (not ON_GPU)
    subprocess.run([program, *flags.split()], check=True, stdout=sys.stderr)
    with open(f"{dtype}-{is_lora}/metrics.jsonl", encoding="utf-8") as log:
        events = [json.loads(line) for line in log]
    steps = [event["step_ms"] / 1000 for event in events if event["event"] == "step"]
    print(*(event for event in events if event["event"] in ("end", "memory")), file=sys.stderr)
    return ROWS * CONTEXT / median(steps)


def theirs(is_lora, dtype):
    """Tokens a second."""
    # As trl does: frozen weights in bf16, trained ones in f32 with autocast.
    kept = torch.bfloat16 if ON_GPU and is_lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained("base", dtype=kept).to(DEVICE).train()
    if is_lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=ON_GPU)
    tokens, steps = torch.randint(0, VOCABULARY, (ROWS, CONTEXT), device=DEVICE), []
    for _ in range(STEPS):
        start = time.monotonic()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ON_GPU:
            torch.cuda.synchronize()
        steps.append(time.monotonic() - start)
    if ON_GPU:
        print(f"theirs: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", file=sys.stderr)
        del model, optimizer, loss
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return ROWS * CONTEXT / median(steps)


program = os.path.abspath(sys.argv[1])
torch.set_num_threads(16 if ON_GPU else 2)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
                         **dict(zip(names, SIZES)))
    Qwen3ForCausalLM(config).to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained("base")
    # Tokens above 65,535 need u32.
    torch.randint(0, VOCABULARY, (200 * CONTEXT + 1,), dtype=torch.int32).to(torch.int32 if ON_GPU else torch.uint16).numpy().tofile("t.bin")
    for is_lora, dtype in CASES:
        a, b = ours(program, is_lora, dtype), theirs(is_lora, dtype)
        print(f"{'LoRA' if is_lora else 'all weights'} {dtype}: {a:,.0f} and {b:,.0f} tokens/s, {a / b:.2f} times", flush=True)
