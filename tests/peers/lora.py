"""Does ddp-train train, read and write LoRA adapters as PEFT does? Exits 1 if not, and prints a table of how far they are apart.

    python tests/peers/lora.py target/release/ddp-train [--write]

It needs torch, transformers, peft and mpirun. Models are made on the spot, the first from a formula, whose losses --write keeps in
tests/golden/lora.json for ddp/tests/jobs/lora.rs. For each: the losses of 20 steps of AdamW from the adapters that PEFT made, where every batch is all
of the data; the logits of PEFT with the adapters that ddp-train exported, and of transformers with the merged model, against the loss of eval.
"""
import json
import os
import subprocess
import sys
import tempfile

import families
import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from families import MODELS as FAMILIES, gpt2, llama

PROGRAM = os.path.abspath(sys.argv[1])
GOLDEN = os.path.join(os.path.dirname(__file__), "../golden/lora.json")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
VOCABULARY, CONTEXT, ROWS, STEPS, RATE = 61, 16, 24, 20, 5e-3
LOGITS_APART_MAX, LOSSES_APART_MAX = 1e-5, 1e-4
HOW = {
    "1 rank": (1, []),
    "3 ranks": (3, []),
    "3 ranks, ZeRO-1": (3, ["--zero", "1"]),
    "3 ranks, same bits": (3, ["--same-bits", "3"]),
    "recomputed": (1, ["--recompute", "block"]),
}


def by_formula(count, first):
    """As `formula` of ddp/tests/jobs/lora.rs."""
    return (((np.arange(first, first + count) * 37 + 11) % 101 - 50) / 250).astype(np.float32)


def fill(model, wanted):
    first = 0
    for name, values in sorted(model.named_parameters()):
        if wanted(name):
            part = by_formula(values.numel(), first)
            values.data.copy_(torch.from_numpy(part + (1 if "norm" in name else 0)).reshape(values.shape))
            first += values.numel()


# Trained in one way.
OTHERS = ["Qwen2", "Qwen3", "Mistral", "SmolLM3", "OLMo2", "Phi-3", "Gemma 2", "Gemma 3"]
# A model, settings of PEFT, and whether its weights come from the formula.
MODELS = {
    "Llama by formula, all-linear": (llama, dict(r=4, lora_alpha=8, target_modules="all-linear"), True),
    "Llama, q_proj and v_proj, rsLoRA": (llama, dict(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], use_rslora=True), False),
    "Llama, MLPs": (llama, dict(r=4, lora_alpha=4, target_modules=["gate_proj", "up_proj", "down_proj"]), False),
    "GPT-2, all-linear": (gpt2, dict(r=4, lora_alpha=8, target_modules="all-linear"), False),
    **{name: (families.MODELS[name][0], dict(r=4, lora_alpha=8, target_modules="all-linear"), False) for name in ["Qwen3", "Phi-3", "Gemma 3"]},
    "Llama in bf16 on disk": (lambda: llama().to(torch.bfloat16), dict(r=4, lora_alpha=8, target_modules="all-linear"), False),
    **{name: (FAMILIES[name][0], dict(r=4, lora_alpha=8, target_modules="all-linear"), False) for name in OTHERS},
}


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
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, windows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def our_losses(folder):
    events = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
    return np.array([event["loss"] for event in events if event["event"] == "step"])


def check(name, make, settings, is_by_formula, folder):
    """The rows of the table, and whether all is well."""
    at = lambda name: os.path.join(folder, name)
    tokens = ((np.arange(ROWS * CONTEXT + 1) ** 2 * 7 + 3) % VOCABULARY).astype(np.uint16)
    tokens.tofile(at("tokens.bin"))
    windows = torch.from_numpy(np.stack([tokens[row * CONTEXT:][:CONTEXT + 1] for row in range(ROWS)]).astype(np.int64))
    torch.manual_seed(2)
    model = make()
    if is_by_formula:
        fill(model, lambda name: True)
    model.save_pretrained(at("base"))
    base = lambda: AutoModelForCausalLM.from_pretrained(at("base"), dtype=torch.float32)
    model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", **settings)).train()
    if is_by_formula:
        fill(model, lambda name: ".lora_A." in name)
    model.save_pretrained(at("adapter"))
    data = ["--data", f"tokens:{at('tokens.bin')},vocabulary={VOCABULARY}"]
    train = ["train", "--init-from", at("base"), "--lora", f"from={at('adapter')}", *data, "--batch-size", str(ROWS), "--device", "cpu", "--threads", "1",
             "--progress", "never", "--lr", str(RATE), "--weight-decay", "0.1", "--schedule", "constant", "--warmup-steps", "0", "--log-every", "1"]
    losses = their_losses(model, windows)
    if is_by_formula and "--write" in sys.argv:
        json.dump({"losses": [round(loss, 6) for loss in losses.tolist()]}, open(GOLDEN, "w"), indent=1)
    rows, is_well = [], True

    def add(what, apart, most):
        nonlocal is_well
        rows.append(f"| {name} | {what} | {apart:.1e} |")
        is_well &= bool(apart <= most)

    for how, (ranks, more) in list(HOW.items())[: 1 if name in OTHERS else None]:
        run([*train, *more, "--steps", str(STEPS), "--out", at(how)], ranks)
        ours = our_losses(at(how))
        assert len(ours) == STEPS
        add(f"{STEPS} losses, {losses[0]:.3f} to {losses[-1]:.3f}, {how}", np.abs(ours - losses).max(), LOSSES_APART_MAX)
    out = at("1 rank")
    ours = json.loads(run(["eval", "--checkpoint", out, *data, "--device", "cpu", "--json"]).splitlines()[-1])["loss"]
    run(["export", "--format", "hf", "--checkpoint", out, at("exported")])
    run(["export", "--format", "hf", "--checkpoint", out, "--merge", at("merged")])
    with torch.no_grad():
        loaded, merged = PeftModel.from_pretrained(base(), at("exported")).eval(), AutoModelForCausalLM.from_pretrained(at("merged")).eval()
        add("loss of the exported adapter in PEFT", abs(loss_of(loaded.double(), windows).item() - ours), 1e-6)
        [first, second] = [it(windows[:, :-1]).logits for it in (loaded.float(), merged)]
        add("logits of the merged model", (first - second).abs().max().item(), LOGITS_APART_MAX)
        bytes_of = lambda folder: open(os.path.join(folder, "adapter_model.safetensors"), "rb").read()
        again = at("again")
        run(["train", "--init-from", at("base"), "--lora", f"from={at('exported')}", *data, "--device", "cpu", "--steps", "0", "--out", again])
        run(["export", "--format", "hf", "--checkpoint", again, at("exported again")])
        add("adapters read and written again", float(bytes_of(at("exported")) != bytes_of(at("exported again"))), 0)
    return rows, is_well


print("| model | what | largest difference |\n|---|---|---|")
all_well = True
for name, (make, settings, is_by_formula) in MODELS.items():
    with tempfile.TemporaryDirectory() as folder:
        rows, is_well = check(name, make, settings, is_by_formula, folder)
        print("\n".join(rows), flush=True)
        all_well &= is_well
sys.exit(0 if all_well else f"expected at most {LOSSES_APART_MAX} for losses in training, {LOGITS_APART_MAX} for logits")
