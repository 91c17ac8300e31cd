"""The losses of 60 steps in PyTorch, for ddp/tests/training/golden_losses.rs: AdamW and SGD, with clipping, smoothing, class weights, GELU, regression.

    python tests/peers/golden_torch.py > tests/golden/losses.json

Weights and rows come from splitmix64 by their index, so that the Rust side makes the same ones without any file.
"""
import json, sys

import numpy as np
import torch
from torch import nn

MASK = (1 << 64) - 1


def uniform(stream, count):
    """`count` numbers in [-1, 1): 24 bits of splitmix64, exact in f32."""
    z = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
         + np.uint64((stream * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & MASK))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)


SIZES, BATCH, ROWS, STEPS = [20, 32, 16, 5], 50, 400, 60

CASES = {
    "adamw": dict(optimizer="adamw", lr=3e-3, weight_decay=0.01),
    "adamw_clipped_smoothed": dict(optimizer="adamw", lr=3e-3, weight_decay=0.1, clip=0.2, smoothing=0.1),
    "adamw_weighted_gelu": dict(optimizer="adamw", lr=3e-3, weight_decay=0.0, activation="gelu",
                                class_weights=[1.0, 0.5, 2.0, 1.5, 0.25]),
    "sgd": dict(optimizer="sgd", lr=0.5, momentum=0.0, weight_decay=0.0),
    "sgd_momentum_clipped": dict(optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=1e-3, clip=0.3),
    "adamw_regression_tanh": dict(optimizer="adamw", lr=3e-3, weight_decay=0.01, activation="gelu-tanh", regression=True),
}


def losses(case):
    blocks = []
    for i, (m, n) in enumerate(zip(SIZES, SIZES[1:])):
        linear = nn.Linear(m, n)
        with torch.no_grad():
            bound = np.float32(1 / np.sqrt(m))
            linear.weight.copy_(torch.from_numpy(uniform(10 + 2 * i, m * n).reshape(n, m) * bound))
            linear.bias.copy_(torch.from_numpy(uniform(11 + 2 * i, n) * bound))
        blocks.append(linear)
        if i + 2 < len(SIZES):
            kind = case.get("activation", "relu")
            blocks.append(nn.ReLU() if kind == "relu" else nn.GELU(approximate="tanh" if kind == "gelu-tanh" else "none"))
    net = nn.Sequential(*blocks)
    x = torch.from_numpy(uniform(1, ROWS * SIZES[0]).reshape(ROWS, SIZES[0]))
    if case.get("regression"):
        # Something to learn: five features, halved, in the opposite order.
        y = 0.5 * x[:, : SIZES[-1]].flip(1)
        loss_fn = nn.MSELoss()
    else:
        # Something to learn: which of five features is largest.
        y = x[:, : SIZES[-1]].argmax(dim=1)
        weights = case.get("class_weights")
        loss_fn = nn.CrossEntropyLoss(weight=None if weights is None else torch.tensor(weights),
                                      label_smoothing=case.get("smoothing", 0.0))
    groups = [dict(params=[p for p in net.parameters() if p.dim() > 1], weight_decay=case["weight_decay"]),
              dict(params=[p for p in net.parameters() if p.dim() < 2], weight_decay=0.0)]
    if case["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=case["lr"])
    else:
        optimizer = torch.optim.SGD(groups, lr=case["lr"], momentum=case["momentum"])
    out = []
    for step in range(STEPS):
        rows = [(step * BATCH + i) % ROWS for i in range(BATCH)]
        optimizer.zero_grad()
        loss = loss_fn(net(x[rows]), y[rows])
        loss.backward()
        if case.get("clip"):
            nn.utils.clip_grad_norm_(net.parameters(), case["clip"])
        optimizer.step()
        out.append(round(loss.item(), 7))
    return out


json.dump(dict(torch=torch.__version__, sizes=SIZES, batch=BATCH, rows=ROWS,
               cases={name: dict(case, losses=losses(case)) for name, case in CASES.items()}), sys.stdout, indent=1)
print()
