"""What PyTorch makes of small models in f64: output, loss, gradients, and the weights after three steps of an optimizer.

    python tests/peers/layers_torch.py > ddp/tests/golden/layers.json     (with a Python that has torch)

ddp/tests/training/golden_layers.rs builds the same models. Weights, inputs and targets are whole numbers over a power of two made
from their index, so that no file need hold them.
"""
import json

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
ROWS, INPUTS, OUTPUTS, STEPS = 7, 4, 3, 3
RATES = [0.05, 0.02, 0.03]


def numbers(stream, shape):
    """Between -105/256 and 105/256, exact in f32."""
    count = torch.Size(shape).numel()
    index = torch.arange(1, count + 1)
    return (((index * index * 37 + index * 5 + stream * 101) % 211 - 105).double() / 256).reshape(shape)


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def mlp(activation):
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 3))


def tied():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), Residual(second, nn.GELU()), nn.Linear(4, 3))


WEIGHTS = torch.tensor([0.5, 2.0, 1.25])
SMOOTH = dict(label_smoothing=0.125)
CASES = {
    "relu_adamw": dict(net=lambda: mlp(nn.ReLU), optimizer="adamw", decay=0.1),
    "gelu_momentum_clipped": dict(net=lambda: mlp(nn.GELU), optimizer="sgd", momentum=0.9, decay=0.01, clip=0.0625),
    "gelu_tanh_nesterov_smoothed_weighted": dict(
        net=lambda: mlp(lambda: nn.GELU(approximate="tanh")), optimizer="sgd", momentum=0.9, nesterov=True, decay=0.01,
        loss=nn.CrossEntropyLoss(weight=WEIGHTS, **SMOOTH), ignore=True),
    "gelu_adamw_smoothed_clipped": dict(
        net=lambda: mlp(nn.GELU), optimizer="adamw", decay=0.0, clip=0.25, loss=nn.CrossEntropyLoss(**SMOOTH)),
    "tied_residual_squared_error": dict(net=tied, optimizer="adamw", decay=0.1, loss=nn.MSELoss()),
}


def run(case):
    net = case["net"]()
    with torch.no_grad():
        for stream, parameter in enumerate(net.parameters()):
            parameter.copy_(2 * numbers(stream, parameter.shape))
    loss_of = case.get("loss", nn.CrossEntropyLoss())
    groups = [
        dict(params=[p for p in net.parameters() if p.dim() >= 2], weight_decay=case["decay"]),
        dict(params=[p for p in net.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    if case["optimizer"] == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1.0)
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=case["momentum"], nesterov=case.get("nesterov", False))
    result = {"losses": []}
    for step in range(STEPS):
        x = 4 * numbers(100 + step, [ROWS, INPUTS])
        if isinstance(loss_of, nn.MSELoss):
            targets = numbers(200 + step, [ROWS, OUTPUTS])
        else:
            targets = (torch.arange(ROWS) * 5 + step) % OUTPUTS
            if case.get("ignore"):
                targets[step::4] = -100
        y = net(x)
        loss = loss_of(y, targets)
        optimizer.zero_grad()
        loss.backward()
        result["losses"].append(loss.item())
        if step == 0:
            result["output"] = y.flatten().tolist()
            result["gradients"] = {name: p.grad.flatten().tolist() for name, p in net.named_parameters()}
        if "clip" in case:
            norm = nn.utils.clip_grad_norm_(net.parameters(), case["clip"]).item()
            if step == 0:
                result["norm"] = norm
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    result["values"] = {name: p.flatten().tolist() for name, p in net.named_parameters()}
    return result


everything = {"torch": torch.__version__, **{name: run(case) for name, case in CASES.items()}}


def pretty(value, indent=""):
    """JSON with a list of numbers on one line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = indent + " "
    return "{\n" + ",\n".join(f"{inner}{json.dumps(k)}: {pretty(v, inner)}" for k, v in value.items()) + f"\n{indent}}}"


print(pretty(everything))
