"""How far bf16 takes the losses of a run, ours and PyTorch's autocast. Exits 1 if the two are further apart than twice two runs of autocast.

    python tests/peers/bf16_losses.py target/release/ddp-train

It needs torch and transformers. A GPT-2 and a Llama of random weights are trained for 300 steps of AdamW with clipping, each batch all of the data, in
f32 and in bf16 by both. Two runs of autocast differ by the order of the rows, so by rounding alone. Prints the largest difference between means of 30 losses.
"""
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
from families import adamw
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
PROGRAM = os.path.abspath(sys.argv[1])
VOCABULARY, CONTEXT, ROWS, STEPS, MEAN_OF = 64, 64, 24, 300, 30
RATE, CLIP, DECAY = 1e-3, 1.0, 0.1
SIZES = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
MODELS = {
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(**SIZES, n_positions=CONTEXT, n_embd=96, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=3,
                                                  max_position_embeddings=CONTEXT, pad_token_id=None)),
}


def theirs(folder, windows, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = adamw(model, RATE, DECAY)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def ours(folder, tokens, dtype, out):
    words = ["train", "--init-from", folder, "--data", f"tokens:{tokens},vocabulary={VOCABULARY}", "--batch-size", ROWS, "--device", "cpu", "--threads", 2,
             "--progress", "never", "--lr", RATE, "--grad-clip", CLIP, "--weight-decay", DECAY, "--schedule", "constant", "--warmup-steps", 0,
             "--log-every", 1, "--steps", STEPS, "--dtype", dtype, "--out", out]
    subprocess.run([PROGRAM, *map(str, words)], check=True, capture_output=True)
    events = map(json.loads, open(os.path.join(out, "metrics.jsonl")))
    return np.array([event["loss"] for event in events if event["event"] == "step"])


def apart(a, b):
    a, b = (it.reshape(-1, MEAN_OF).mean(axis=1) for it in (a, b))
    return float(np.abs(a - b).max())


print("| model | losses in f32 | f32, ours from PyTorch's | bf16 from f32, ours | bf16 from f32, autocast | two runs of autocast | ours from autocast |")
print("|---|---|---|---|---|---|---|")
is_well = True
for name, make in MODELS.items():
    with tempfile.TemporaryDirectory() as folder:
        # Each token follows from the two before it, with some noise: something to learn.
        random = np.random.default_rng(1)
        tokens = list(random.integers(0, VOCABULARY, 2))
        for noise in random.random(ROWS * CONTEXT - 1):
            tokens.append((5 * tokens[-1] + tokens[-2] + 7 * (noise < 0.2)) % VOCABULARY)
        tokens = np.array(tokens, dtype=np.uint16)
        tokens.tofile(os.path.join(folder, "tokens.bin"))
        windows = torch.from_numpy(np.stack([tokens[row * CONTEXT:][:CONTEXT + 1] for row in range(ROWS)]).astype(np.int64))
        torch.manual_seed(2)
        make().save_pretrained(os.path.join(folder, "there"))
        there = os.path.join(folder, "there")
        f32, bf16 = (ours(there, os.path.join(folder, "tokens.bin"), dtype, os.path.join(folder, dtype)) for dtype in ("f32", "bf16"))
        their_f32, autocast, another = theirs(there, windows, "f32"), theirs(there, windows, "bf16"), theirs(there, windows.flip(0), "bf16")
    between, two = apart(bf16, autocast), apart(another, autocast)
    is_well &= between <= 2 * two
    print(f"| {name} | {f32[0]:.3f} to {f32[-1]:.3f} | {apart(f32, their_f32):.1e} | {apart(bf16, f32):.1e} | {apart(autocast, their_f32):.1e} | {two:.1e} | {between:.1e} |",
          flush=True)
sys.exit(0 if is_well else "ours are further from autocast than twice two runs of autocast from each other")
