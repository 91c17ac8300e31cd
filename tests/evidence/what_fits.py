#!/usr/bin/env python3
"""Prints the table of docs/fine-tuning.md: what fits on which GPUs, and with which flags, by what
`ddp-train --dry-run` plans. It needs no GPU (launch/with-simulated-gpus) and makes no model.

usage: tests/evidence/what_fits.py [--bytes] PROGRAM

--bytes  prints the parts of each plan instead
"""

import array
import itertools
import json
import os
import subprocess
import sys
import tempfile

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 500000.0}
# As in the config.json of each, as far as it decides about memory.
MODELS = {
    "Qwen3 0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "Llama 3.2 1B": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Llama 3.2 3B": LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Llama 3 8B": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}
GPUS, SIZES_GB = [1, 2, 4, 8], [24, 40, 80]
COMMON = "--dtype bf16 --recompute block --micro-batch 1 --steps 1 --device cuda --dry-run --out out"
# The first that fits is shown. One rank has nothing to divide.
WAYS = ["", "--zero 1", "--zero 2", "--lora rank=16"]
# A GPU that is sold with 40 GB has nearly 40 GiB. Its allocator loses some.
SHARE = 0.95 * 2**30 / 1e9


def plan(folder, ranks, way):
    """The parts that a dry run plans for a rank, in GB, and their sum."""
    vocabulary = json.load(open(f"{folder}/model/config.json"))["vocab_size"]
    command = [WITH_GPUS, str(ranks), PROGRAM, "--ranks", str(ranks), "--init-from", "model"]
    command += ["--data", f"tokens:t.bin,type=u32,vocabulary={vocabulary}", "--batch-size", str(4 * ranks)]
    ran = subprocess.run(command + (COMMON + " " + way).split(), cwd=folder, capture_output=True, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("planned GPU memory")]
    if not lines:
        sys.exit(f"{' '.join(command)} {way}\n{ran.stdout}{ran.stderr}")
    parts = lines[0].split(": ", 1)[1].replace(";", ",").split(", ")
    found = {}
    for part in parts:
        name, number, unit = part.rsplit(" ", 2)
        found[name.removesuffix(" about")] = float(number) / (1 if unit == "GB" else 1000)
    return found


def main():
    print("| model | GPUs | " + " | ".join(f"{size} GB" for size in SIZES_GB) + " |")
    print("|---" * (2 + len(SIZES_GB)) + "|")
    for name, config in MODELS.items():
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(f"{folder}/model")
            config = {"max_position_embeddings": 2048, **config}
            json.dump(config, open(f"{folder}/model/config.json", "w"))
            # More than 65,536 kinds of tokens take 4 bytes each.
            array.array("I", (number % 1000 for number in range(2049 * 64))).tofile(open(f"{folder}/t.bin", "wb"))
            for ranks in GPUS:
                ways = [way for way in WAYS if ranks > 1 or "zero" not in way]
                plans = {way: plan(folder, ranks, way) for way in ways}
                if BYTES:
                    for way, parts in plans.items():
                        parts = ", ".join(f"{part} {size:.2f}" for part, size in parts.items())
                        print(f"{name}, {ranks} GPUs, {way or 'all weights'}: {parts}")
                    continue
                row = []
                for size in SIZES_GB:
                    fits = [way for way in ways if plans[way]["together"] <= SHARE * size]
                    row.append((fits[0], plans[fits[0]]["together"]) if fits else (None, 0))
                rows.append((ranks, row))
        # Numbers of GPUs with the same flags share a line, with the most that one needs.
        for _, same in itertools.groupby(rows, lambda row: [way for way, _ in row[1]]):
            counts, same = zip(*same)
            most = [(of[0][0], max(size for _, size in of)) for of in zip(*same)]
            names = {None: "–", "": "all weights"}
            cells = [names.get(way, f"`{way}`") + (f": {size:.1f}" if size else "") for way, size in most]
            count = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
            print(f"| {name} | {count} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    BYTES = "--bytes" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--bytes"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    PROGRAM = os.path.abspath(arguments[0])
    WITH_GPUS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../launch/with-simulated-gpus")
    main()
