"""Muon in PyTorch: the values in ddp/nn/src/optim/muon/tests.rs.

    python muon.py

`torch.optim.Muon` iterates in bf16. Here it iterates in f64, with its own function otherwise, and
takes the three steps of the test `three_steps_are_pytorch_s`, with gradients as they are and with
some so small that their norm is below PyTorch's ε.
"""

import inspect

import torch
from torch.optim import _muon

ROWS, COLUMNS = 7, 3
SCALES = [1, 2**-26]


def gradient(step):
    def element(row, column):
        drawn = (row * 7919 + column * 104729 + row * column * 31) % 127 / 64 - 1
        return drawn + step * ((row + column) % 3) / 64

    return torch.tensor([[element(r, c) for c in range(COLUMNS)] for r in range(ROWS)], dtype=torch.float64)


def main():
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count("torch.bfloat16") == 1
    exec(source.replace("torch.bfloat16", "torch.float64"), vars(_muon))
    for scale in SCALES:
        weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
        optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.5, momentum=0.75, nesterov=True)
        for step in range(1, 4):
            weight.grad = gradient(step) * scale
            optimizer.step()
        print(f"gradients times {scale}")
        for row in (0, 3, 6):
            print([round(value, 7) for value in weight[row].tolist()])


if __name__ == "__main__":
    main()
