"""Does a model that ddp-train saved give the same logits in PyTorch? Exits 1 if not, and prints how far they are apart.

    ddp-train inspect CHECKPOINT --json > about.json
    ddp-train predict --checkpoint CHECKPOINT --data rows.npy --out logits.npy --logits
    python tests/peers/logits_torch.py about.json CHECKPOINT/model.safetensors rows.npy logits.npy

The module is what `inspect` prints, its values are read by safetensors.torch. rows.npy is f32 [rows, inputs] and the model has no normalization.

What must hold, number by number: a sum of k products and a bias, in any order, is off by at most (k + 1) u of the sum of its terms' magnitudes
(u = 2^-24, and k u << 1), on either side; an activation passes a difference on at most 1.13 times (GELU's steepest slope; ReLU's is 1) and adds at
most 8 u of its argument's magnitude (its own rounding, some units in the last place). Both are carried through the layers in f64. What a perceptron
beside a linear path sees, x/√(1 + (x/3)²), takes 6 roundings.
"""
import collections  # for the module's text
import json
import sys

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

U = 2.0**-24
ABOUT, MODEL, ROWS, LOGITS = sys.argv[1:]


def bounds(net, x):
    """How far each logit of two right implementations may be apart."""
    apart = torch.zeros_like(x, dtype=torch.float64)
    inputs, linear = x.double(), getattr(net.double(), "linear", None)
    x = inputs
    if linear is not None:
        x = x / (1 + (x / 3) ** 2).sqrt()
        apart = 2 * 6 * U * x.abs()
    for layer in net if linear is None else net[:-1]:
        if isinstance(layer, nn.Linear):
            weight, bias = layer.weight.abs(), layer.bias.abs()
            terms = x.abs() @ weight.T + bias
            apart = apart @ weight.T + 2 * (layer.in_features + 1) * U * terms
        elif not isinstance(layer, nn.Dropout):
            apart = 1.13 * apart + 2 * 8 * U * x.abs()
        x = layer(x)
    if linear is not None:
        x = x + linear(inputs)
        apart = apart + 2 * U * (linear.in_features * inputs.abs() @ linear.weight.abs().T + x.abs())
    return apart


about = json.load(open(ABOUT))["model"]
net = eval(about["torch"])
net.load_state_dict(load_file(MODEL), strict=True)
net.eval()
rows, ours = torch.from_numpy(np.load(ROWS)), torch.from_numpy(np.load(LOGITS))
with torch.no_grad():
    theirs = net(rows)
    bound = bounds(net, rows)
apart = (ours.double() - theirs.double()).abs()
worst = (apart / bound).max().item()
print(f"PyTorch {torch.__version__}: {tuple(ours.shape)} logits, at most {apart.max().item():.3g} apart, {worst:.3g} of the bound; "
      f"{int((ours.argmax(1) == theirs.argmax(1)).sum())} of {len(ours)} classes the same")
sys.exit(0 if ours.shape == theirs.shape and worst <= 1 else 1)
