"""Formulas beside PyTorch, forward and backward, in turn: `cargo bench -p ddp-nn --bench formulas` and the same functions in
eager PyTorch and under torch.compile (which needs g++), one thread a core, medians.

    python tests/peers/formulas_speed.py [--threads 2] [--rounds 3] [--filter NAME] [--device cuda]     (with a Python that has torch)
"""
import argparse
import glob
import json
import os
import statistics
import subprocess
import time

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--filter", default="")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="on a GPU each case has sixteen times the rows")
parser.add_argument("--bench", default="", help="the built bench; the newest in target/ unless given")
arguments = parser.parse_args()
# Before torch: OpenMP binds this thread to one core, which the bench would inherit.
CORES = os.sched_getaffinity(0)
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(arguments.threads)
os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("OMP_PLACES", "cores")

import torch
from torch.nn import functional as F

torch.set_num_threads(arguments.threads)
torch.manual_seed(0)


def norm_formula(x, weight, bias):
    centred = x - x.mean(-1, True)
    return centred * ((centred * centred).mean(-1, True) + 1e-5).rsqrt() * weight + bias


def norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def eight(x):
    gate = (x * 1.5 + 0.25).sigmoid()
    return (gate * F.silu(x)).tanh() - x.abs()


def eight_light(x):
    y = ((x * 1.5 + 0.25).relu() - x) * x
    return (y.abs() + 1.0) * x


def conv(x, weight):
    return F.conv2d(x, weight, padding=1)


def group_norm(x, weight, bias):
    return F.group_norm(x, 8, weight, bias).relu()


CASES = {
    "layer norm built in 8192x768": (norm, [8192, 768], [[768], [768]]),
    "layer norm 8192x768": (norm_formula, [8192, 768], [[768], [768]]),
    "layer norm built in 512x256": (norm, [512, 256], [[256], [256]]),
    "layer norm 512x256": (norm_formula, [512, 256], [[256], [256]]),
    "eight 4096x1024": (eight, [4096, 1024], []),
    "eight light 4096x1024": (eight_light, [4096, 1024], []),
    "conv 64x16x28x28": (conv, [64, 16, 28, 28], [[16, 16, 3, 3]]),
    "conv 64x64x7x7": (conv, [64, 64, 7, 7], [[64, 64, 3, 3]]),
    "group norm 64x16x28x28": (group_norm, [64, 16, 28, 28], [[16], [16]]),
}


def microseconds(function, x, parameters, passes):
    times = []
    dy = None
    finish = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    for _ in range(passes):
        for leaf in (x, *parameters):
            leaf.grad = None
        finish()
        start = time.perf_counter()
        y = function(x, *parameters)
        if dy is None:
            dy = torch.randn_like(y)
        y.backward(dy)
        finish()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e6


def ours():
    built = arguments.bench or max(
        (path for path in glob.glob("target/release/deps/formulas-*") if "." not in path), key=os.path.getmtime)
    command = [built] + ([arguments.filter] if arguments.filter else [])
    env = dict(os.environ, DDP_THREADS=str(arguments.threads), DDP_BENCH_DEVICE=arguments.device)
    out = subprocess.run(command, env=env, preexec_fn=lambda: os.sched_setaffinity(0, CORES), capture_output=True, text=True, check=True)
    return {line["name"]: line for line in map(json.loads, out.stdout.splitlines())}


figures = {}
made = {}
for name, (function, shape, parameters) in CASES.items():
    if arguments.filter in name:
        if arguments.device == "cuda":
            shape = [16 * shape[0], *shape[1:]]
        x = (torch.rand(shape, device=arguments.device) * 4 - 2).requires_grad_()
        weights = [torch.ones(size, device=arguments.device, requires_grad=True) for size in parameters]
        made[name] = (x, weights, {"eager": function, "compile": torch.compile(function)})
for _ in range(arguments.rounds):
    of = ours()
    for name, line in of.items():
        figures.setdefault((name, "ddp"), []).append(line["microseconds"])
    for name, (x, weights, functions) in made.items():
        for system, function in functions.items():
            figures.setdefault((name, system), []).append(microseconds(function, x, weights, 41))
for (name, system), all_of in figures.items():
    print(json.dumps(dict(name=name, system=system, microseconds=round(statistics.median(all_of)), rounds=[round(it) for it in all_of])))
