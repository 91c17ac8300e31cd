"""Do numpy and safetensors compute the logits of a saved model? tests/checks/checkpoints starts it: PROGRAM.

A sum of k products and a bias, in any order, is off by at most (k + 1) u of the sum of its terms' magnitudes (u = 2^-24). An activation
passes a difference on at most 1.13 times (GELU's steepest slope) and adds at most 8 u of its argument's magnitude. Both are carried
through the layers in f64; numpy's own f64 arithmetic is exact beside them. x/√(1 + (x/3)²), which a perceptron beside a linear path
sees, takes 6 roundings.
"""

import json
import math
import os
import subprocess
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file

PROGRAM = os.path.abspath(sys.argv[1])
U = 2.0**-24
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu-tanh": lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
TRAIN = "--data x.npy --labels y.npy --batch-size 32 --epochs 4 --threads 1 --progress never --device cpu --out out"
MODELS = ["--hidden 16 --activation relu", "--hidden 16 --activation gelu --dropout 0.1", "--hidden 32,24 --activation gelu-tanh", "--hidden none",
          "--hidden 32,24 --linear-path true", "--hidden none --linear-path true"]


def run(words):
    ended = subprocess.run([PROGRAM, *words.split()], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode:
        sys.exit(f"ddp-train {words}: exit code {ended.returncode}\n{ended.stderr}")
    return ended.stdout


def logits(model, tensors, x):
    """The logits, and how far those of another right implementation may be apart."""
    inputs, linear, apart = x, tensors.pop("linear.weight", None), np.zeros_like(x)
    if linear is not None:
        linear, x = linear.astype(np.float64), x / np.sqrt(1 + (x / 3) ** 2)
        apart = 6 * U * np.abs(x)
    names = sorted((name for name in tensors if name.endswith(".weight")), key=lambda name: int(name.split(".")[0]))
    for name in names:
        weight, bias = (tensors[each].astype(np.float64) for each in (name, name.replace("weight", "bias")))
        terms = np.abs(x) @ np.abs(weight).T + np.abs(bias)
        apart = apart @ np.abs(weight).T + (weight.shape[1] + 1) * U * terms
        x = x @ weight.T + bias
        if name != names[-1]:
            apart = 1.13 * apart + 8 * U * np.abs(x)
            x = ACTIVATIONS[model["activation"]](x)
    if linear is not None:
        x = x + inputs @ linear.T
        apart = apart + linear.shape[1] * U * np.abs(inputs) @ np.abs(linear).T + U * np.abs(x)
    return x, apart


def check(flags):
    run(f"{TRAIN} {flags}")
    checkpoint = "out/checkpoints/" + max(name for name in os.listdir("out/checkpoints") if name.startswith("step-"))
    run(f"predict --checkpoint {checkpoint} --data x.npy --out logits.npy --logits --device cpu")
    model = json.loads(run(f"inspect {checkpoint} --json"))["model"]
    ours, x = np.load("logits.npy"), np.load("x.npy").astype(np.float64)
    theirs, bound = logits(model, load_file(f"{checkpoint}/model.safetensors"), x)
    worst = (np.abs(ours - theirs) / bound).max()
    print(f"    {flags}: {ours.shape} logits, {worst:.2g} of the bound")
    return ours.shape == theirs.shape and worst <= 1


def main():
    generator = np.random.default_rng(1)
    well = True
    for flags in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            x = generator.standard_normal((256, 20)).astype(np.float32)
            x[:, 2] *= 10
            np.save("x.npy", x)
            np.save("y.npy", (x[:, 0] > 0).astype(np.uint8) + (x[:, 1] > 0).astype(np.uint8))
            well &= check(flags)
            os.chdir("/")
    sys.exit(not well)


main()
