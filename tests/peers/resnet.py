"""What PyTorch makes of a few steps of examples/resnet.rs in f64: the losses.

    python tests/peers/resnet.py > ddp/tests/golden/resnet.json     (with a Python that has torch)

ddp/tests/training/golden_resnet.rs trains the example's own model from the same numbers. With --time, the seconds of a step in f32
instead: `python tests/peers/resnet.py --time BLOCKS CHANNELS BATCH`.
"""
import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

STEPS, ROWS, RATE = 5, 4, 0.05


def numbers(scale, stream, count):
    index = torch.arange(1, count + 1)
    return scale * ((index * index * 37 + index * 5 + stream * 101) % 211 - 105).double() / 256


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride, groups):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(groups, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(groups, outputs)
        self.skip = None if stride == 1 and inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(nn.Module):
    def __init__(self, inputs, blocks, channels, groups, classes):
        super().__init__()
        self.stem = nn.Conv2d(inputs, channels, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(groups, channels)
        stages = []
        for stage in range(3):
            for block in range(blocks):
                before = channels << max(0, stage - (block == 0))
                stages.append(Block(before, channels << stage, 2 if stage > 0 and block == 0 else 1, groups))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels << 2, classes)

    def forward(self, x):
        return self.head(self.stages(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


def losses():
    torch.set_default_dtype(torch.float64)
    model = ResNet(2, 1, 4, 2, 3)
    for stream, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(numbers(1.0, stream, parameter.numel()).reshape(parameter.shape))
    x, y = numbers(2.0, 99, ROWS * 2 * 6 * 6).reshape(ROWS, 2, 6, 6), torch.arange(ROWS) % 3
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return found


def seconds(blocks, channels, batch):
    model = ResNet(1, blocks, channels, 8, 10)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
    times = []
    for _ in range(12):
        start = time.monotonic()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.monotonic() - start)
    return sorted(times[2:])[5]


if sys.argv[1:2] == ["--time"]:
    print(f"{seconds(*map(int, sys.argv[2:])):.4f} s a step")
else:
    print(json.dumps({"losses": losses()}))
