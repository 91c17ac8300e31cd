"""What PyTorch's autograd makes of formulas in f64: outputs, and the gradients of the input and of a parameter.

    python tests/peers/formulas_torch.py > ddp/tests/golden/formulas.json     (with a Python that has torch)

ddp/tests/training/golden_formulas.rs has the same formulas, as modules. Values are whole numbers over a power of two made from
their index, times a scale: small, some on kinks, and where functions are at their limits.
"""
import json

import torch
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
ROWS, SCALES = 3, [2.0, 16.0, 512.0]


def numbers(scale, stream, shape):
    count = torch.Size(shape).numel()
    index = torch.arange(1, count + 1)
    return (scale * ((index * index * 37 + index * 5 + stream * 101) % 211 - 105).double() / 256).reshape(shape)


def attention(x, w):
    q, k, v = (x * w).split([2, 2, 2], -1)
    scores = q @ k.transpose(-1, -2)
    mask = torch.arange(4)[:, None] < torch.arange(4)
    return scores.masked_fill(mask, -1e30).softmax(-1) @ v


# The name, the shape of a row, the shape of the parameter, the formula.
CASES = [
    ("add", [5], [5], lambda x, w: x + w),
    ("sub", [2, 5], [2, 1], lambda x, w: w - x),
    ("mul", [2, 5], [5], lambda x, w: x * w),
    ("div", [2, 5], [1], lambda x, w: x / w + w / (x * x + 1)),
    ("neg", [5], [1], lambda x, w: -x * w),
    ("abs", [71], [1], lambda x, w: x.abs() * w),
    ("exp", [71], [1], lambda x, w: x.exp() * w),
    ("log", [71], [1], lambda x, w: x.log() * w),
    ("sqrt", [71], [1], lambda x, w: x.abs().sqrt() * w),
    ("rsqrt", [71], [1], lambda x, w: (x * x + 1).rsqrt() * w),
    ("tanh", [71], [1], lambda x, w: x.tanh() * w),
    ("sigmoid", [71], [1], lambda x, w: x.sigmoid() * w),
    ("silu", [71], [1], lambda x, w: F.silu(x) * w),
    ("gelu", [71], [1], lambda x, w: F.gelu(x) * w),
    ("gelu_tanh", [71], [1], lambda x, w: F.gelu(x, approximate="tanh") * w),
    ("relu", [71], [1], lambda x, w: x.relu() * w),
    ("cube", [5], [5], lambda x, w: x**3 * w),
    ("power", [5], [5], lambda x, w: (x * x + 1) ** 1.25 * w),
    ("maximum", [71], [1], lambda x, w: torch.maximum(x, w * 0) + torch.minimum(x, w)),
    ("where", [6], [6], lambda x, w: torch.where(x < w, x * x, w * 2)),
    ("sum", [2, 3, 4], [4], lambda x, w: x.sum(1, True) * w + x.sum(3, True) + x.sum(2, True)),
    ("mean", [2, 3], [3], lambda x, w: (x - x.mean(-1, True)) * w + x.mean(1, True)),
    ("largest", [4, 3], [3], lambda x, w: x.amax(1, True) * w + x.amin(-1, True)),
    ("softmax", [4, 3], [3], lambda x, w: x.softmax(-1) * w + x.softmax(1)),
    ("log_softmax", [4, 3], [3], lambda x, w: x.log_softmax(-1) * w),
    ("matmul", [2, 4, 3], [1, 3, 5], lambda x, w: x @ w),
    ("matmul_both", [2, 4, 3], [2, 5, 3], lambda x, w: x @ w.transpose(-1, -2)),
    ("matrix", [3], [5, 3], lambda x, w: x @ w.T),
    ("permute", [2, 3, 4], [4, 2, 3], lambda x, w: (x.permute(0, 3, 1, 2) * w).reshape(ROWS, 24)),
    ("slices", [5], [2], lambda x, w: torch.cat([x[:, 1:3] * w, x[:, 2:5]], 1)),
    ("layer_norm", [2, 7], [7], lambda x, w: F.layer_norm(x, [7], w)),
    ("attention", [4, 6], [6], attention),
    ("every", [7], [4], lambda x, w: x[:, ::2] * w),
    ("windows", [8], [3], lambda x, w: x.unfold(1, 3, 2) * w),
    ("pad", [2, 3], [2, 6], lambda x, w: F.pad(x, [1, 2]) * w),
    ("conv1d", [4, 7], [6, 2, 3], lambda x, w: F.conv1d(x, w, stride=2, padding=1, groups=2)),
    ("conv2d", [2, 5, 6], [3, 2, 3, 3], lambda x, w: F.conv2d(x, w, padding=1)),
    ("conv2d_apart", [4, 5, 5], [4, 1, 3, 3], lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=4)),
    ("conv2d_patches", [3, 4, 4], [5, 3, 2, 2], lambda x, w: F.conv2d(x, w, stride=2)),
    ("max_pool2d", [2, 5, 6], [2, 3, 3], lambda x, w: F.max_pool2d(x + torch.arange(60).reshape(2, 5, 6) / 65536, 3, 2, 1) * w),
    ("avg_pool2d", [2, 4, 5], [2, 2, 2], lambda x, w: F.avg_pool2d(x, 2, 2) * w),
    ("group_norm", [4, 3, 2], [4], lambda x, w: F.group_norm(x, 2, w)),
]


def run(row, shape, formula, scale):
    x = numbers(scale, 1, [ROWS, *row]).requires_grad_()
    w = numbers(2.0, 2, shape).requires_grad_()
    y = formula(x, w)
    (y * numbers(2.0, 3, y.shape)).sum().backward()
    rounded = lambda values: [float(f"{value:.13g}") if value == value and abs(value) < float("inf") else str(value) for value in values.flatten().tolist()]
    return dict(y=rounded(y.detach()), dx=rounded(x.grad), dw=rounded(w.grad))


print("{")
lines = [f"{json.dumps(name)}: {json.dumps([run(row, shape, formula, scale) for scale in SCALES])}" for name, row, shape, formula in CASES]
print(",\n".join(lines) + "\n}")
