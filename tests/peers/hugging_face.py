"""Does ddp-train import, train and export models as transformers has them? Exits 1 if not, and prints a table of how far they are apart.

    python tests/peers/hugging_face.py target/release/ddp-train [PART OF A NAME]     DEVICE=cuda: on the first GPU, with one rank

It needs torch, transformers and mpirun. Random models are made on the spot, all or those whose name has that part. For each: the logits and the loss
of the imported model; the losses of 20 steps of AdamW with clipping, where every batch is all of the data, so that the order of rows does not matter;
all weights, and the logits of what transformers loads of the export; and a text that both generate.
"""
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
from families import CONTEXT, MODELS, VOCABULARY, adamw
from transformers import AutoModelForCausalLM

PROGRAM = os.path.abspath(sys.argv[1])
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
ROWS, STEPS = 24, 20
PROMPT = "3141"
DEVICE = os.environ.get("DEVICE", "cpu")
THREADS = ["--threads", "1"] if DEVICE == "cpu" else []
PART = sys.argv[2] if len(sys.argv) > 2 else ""
RATE, CLIP, DECAY = 1e-3, 1.0, 0.1
LOGITS_APART_MAX, EVAL_APART_MAX, TRAINED_APART_MAX = 1e-5, 1e-6, 1e-4
HOW = {
    "1 rank": (1, []),
    "3 ranks": (3, []),
    "3 ranks, ZeRO-1": (3, ["--zero", "1"]),
    "3 ranks, accumulated": (3, ["--micro-batch", "3"]),
}
if DEVICE == "cuda":
    HOW = {"1 rank": HOW["1 rank"], "1 rank, accumulated": (1, ["--micro-batch", "6"])}


def run(words, ranks=1):
    launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(launch + [PROGRAM, *words], env={**os.environ, **ROOT}, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def loss_of(model, windows):
    logits = model(windows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def their_losses(model, windows):
    optimizer = adamw(model, RATE, DECAY)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, windows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def our_losses(folder):
    events = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
    return np.array([event["loss"] for event in events if event["event"] == "step"])


def weights_apart(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max((ours[name].double() - theirs[name].double()).abs().max().item() if ours[name].shape == theirs[name].shape
               else (ours[name] - theirs[name][: len(ours[name])]).abs().max().item() for name in ours)


def check(name, make, saving, flags, folder):
    """The rows of the table, and whether all is well."""
    at = lambda name: os.path.join(folder, name)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, ROWS * CONTEXT + 1).astype(np.uint16)
    tokens.tofile(at("tokens.bin"))
    windows = torch.from_numpy(np.stack([tokens[row * CONTEXT:][:CONTEXT + 1] for row in range(ROWS)]).astype(np.int64))
    torch.manual_seed(2)
    make().save_pretrained(at("there"), **saving)
    model = AutoModelForCausalLM.from_pretrained(at("there"), dtype=torch.float32).train()
    data = ["--data", f"tokens:{at('tokens.bin')},vocabulary={VOCABULARY}"]
    train = ["train", "--init-from", at("there"), *flags, *data, "--batch-size", str(ROWS), "--device", DEVICE, *THREADS, "--progress", "never",
             "--lr", str(RATE), "--grad-clip", str(CLIP), "--weight-decay", str(DECAY), "--schedule", "constant", "--warmup-steps", "0", "--log-every", "1"]

    run([*train, "--steps", "0", "--out", at("imported")])
    ours = json.loads(run(["eval", "--checkpoint", at("imported"), *data, "--device", DEVICE, "--json"]).splitlines()[-1])["loss"]
    theirs = loss_of(model.double(), windows).item()
    apart = abs(ours - theirs)
    rows, is_well = [f"| {name} | loss of the import | {apart:.1e} |"], apart <= EVAL_APART_MAX
    run(["export", "--format", "hf", "--checkpoint", at("imported"), at("exported")])
    exported = AutoModelForCausalLM.from_pretrained(at("exported"))
    apart = weights_apart(exported, model)
    rows.append(f"| {name} | weights, exported unchanged | {apart} |")
    # Gemma's norms are 1 + w, which is rounded here.
    is_well &= apart <= (2**-24 if name.startswith("Gemma") else 0)
    with torch.no_grad():
        apart = (exported.double()(windows[:, :-1]).logits - model.double()(windows[:, :-1]).logits).abs().max().item()
    rows.append(f"| {name} | logits of the export, {type(exported).__name__} | {apart:.1e} |")
    is_well &= apart <= LOGITS_APART_MAX
    expected = model.eval().generate(torch.tensor([list(PROMPT.encode())]), max_new_tokens=CONTEXT - len(PROMPT), do_sample=False, pad_token_id=0)
    words = ["generate", "--checkpoint", at("exported"), "--tokenizer", "bytes", "--prompt", PROMPT, "--temperature", "0",
             "--max-tokens", str(CONTEXT - len(PROMPT)), *THREADS]
    text = subprocess.run([PROGRAM, *words], capture_output=True, check=True).stdout[:-1]
    is_same = text == bytes(expected[0, len(PROMPT):].tolist())
    rows.append(f"| {name} | greedy text | {'the same' if is_same else 'DIFFERS'} |")
    is_well &= is_same
    model.train()

    losses = their_losses(model.float(), windows)
    for how, (ranks, more) in HOW.items():
        out = at(how)
        run([*train, *more, "--steps", str(STEPS), "--out", out], ranks)
        apart = np.abs(our_losses(out) - losses).max()
        rows.append(f"| {name} | {STEPS} losses, {losses[0]:.3f} to {losses[-1]:.3f}, {how} | {apart:.1e} |")
        is_well &= len(our_losses(out)) == STEPS and apart <= TRAINED_APART_MAX
    return rows, is_well


print("| model | what | largest difference |\n|---|---|---|")
all_well = True
for name, (make, saving, flags) in MODELS.items():
    if PART.lower() not in name.lower():
        continue
    with tempfile.TemporaryDirectory() as folder:
        rows, is_well = check(name, make, saving, flags, folder)
        print("\n".join(rows), flush=True)
        all_well &= is_well
sys.exit(0 if all_well else f"expected at most {LOGITS_APART_MAX} for logits, {EVAL_APART_MAX} for losses of imports, 0 for exports, {TRAINED_APART_MAX} for losses in training")
