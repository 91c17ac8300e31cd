"""What PyTorch makes of a few steps of examples/nanogpt.rs in f64: the losses.

    python tests/peers/nanogpt.py > ddp/tests/golden/nanogpt.json     (with a Python that has torch)

ddp/tests/training/golden_nanogpt.rs trains the example's own model from the same numbers. The modules are those of
https://github.com/karpathy/nanoGPT.
"""
import json

import torch
from torch import nn
from torch.nn import functional as F

STEPS, ROWS, RATE = 5, 4, 0.2
BLOCKS, HEADS, WIDTH, CONTEXT, VOCABULARY = 2, 2, 8, 6, 11


def numbers(scale, stream, count):
    index = torch.arange(1, count + 1)
    return scale * ((index * index * 37 + index * 5 + stream * 101) % 211 - 105).double() / 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        heads = [it.view(rows, tokens, HEADS, -1).transpose(1, 2) for it in self.c_attn(self.ln_1(x)).split(WIDTH, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return F.linear(self.ln_f(self.h(x)), self.wte.weight)


def losses():
    torch.set_default_dtype(torch.float64)
    model = NanoGpt()
    for stream, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(numbers(1.0, stream, parameter.numel()).reshape(parameter.shape))
    index = torch.arange(ROWS * CONTEXT)
    tokens, targets = ((index * index + stream) % VOCABULARY for stream in (0, 3))
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = F.cross_entropy(model(tokens.view(ROWS, CONTEXT)).view(-1, VOCABULARY), targets)
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return found


print(json.dumps({"losses": losses()}))
