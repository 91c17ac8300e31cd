"""Muon in PyTorch: the values in ddp/nn/src/optim/muon/tests.rs.

    python muon.py

`torch.optim.Muon` iterates in bf16. Here it iterates in f64, with its own function otherwise, and
takes the three steps of the test `three_steps_are_pytorch_s`, with gradients as they are and with
some so small that their norm is below PyTorch's ε. It does so again with all arithmetic in f32, as
ours is, and exits 1 if f32 is further from f64 than F32_OFF_MAX, the bound of that test.
"""

import inspect

import torch
from torch.optim import _muon

ROWS, COLUMNS = 7, 3
SCALES = [1, 2**-26]
# How PyTorch's versions convert the gradient.
CONVERSIONS = ["grad.bfloat16()", "grad.to(torch.bfloat16)"]
# As in the test.
F32_OFF_MAX = 1.5e-6


def gradient(step):
    def element(row, column):
        drawn = (row * 7919 + column * 104729 + row * column * 31) % 127 / 64 - 1
        return drawn + step * ((row + column) % 3) / 64

    return torch.tensor([[element(r, c) for c in range(COLUMNS)] for r in range(ROWS)], dtype=torch.float64)


def iterate_in_the_type_of_gradients():
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    found = [conversion for conversion in CONVERSIONS if conversion in source]
    is_known = len(found) == 1 and source.count("bfloat16") == 1
    assert is_known, f"PyTorch {torch.__version__} converts otherwise: {source}"
    exec(source.replace(found[0], "grad.clone()"), vars(_muon))


def three_steps(scale, dtype):
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.5, momentum=0.75, nesterov=True)
    for step in range(1, 4):
        weight.grad = (gradient(step) * scale).to(dtype)
        optimizer.step()
    return weight.detach().double()


def main():
    iterate_in_the_type_of_gradients()
    for scale in SCALES:
        weight = three_steps(scale, torch.float64)
        off = (three_steps(scale, torch.float32) - weight).abs().max().item()
        print(f"gradients times {scale}: f32 is off by {off:.1e} at most")
        for row in (0, 3, 6):
            print([round(value, 7) for value in weight[row].tolist()])
        if off > F32_OFF_MAX:
            raise SystemExit(f"expected at most {F32_OFF_MAX}")


if __name__ == "__main__":
    main()
