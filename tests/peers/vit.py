"""What PyTorch makes of small transformers over patches in f64: output, loss and gradients.

    python tests/peers/vit.py > ddp/tests/golden/vit.json     (with a Python that has torch)

ddp/tests/training/golden_vit.rs builds the same models and makes the same numbers. Here a convolution cuts the patches, and the
class token is a parameter beside the positions. In ddp that token is a patch of zeros: its value is the bias and the first position.
"""
import json

import torch
from torch import nn
from torch.nn import functional

torch.set_default_dtype(torch.float64)
IMAGES, CHANNELS, HEIGHT, WIDTH, PATCH, COLUMNS, HEADS, LAYERS, MLP, CLASSES = 3, 3, 4, 6, 2, 4, 2, 2, 6, 3


def numbers(stream, shape):
    """Between -105/256 and 105/256, exact in f32."""
    count = torch.Size(shape).numel()
    index = torch.arange(1, count + 1)
    return (((index * index * 37 + index * 5 + stream * 101) % 211 - 105).double() / 256).reshape(shape)


class Vit(nn.Module):
    def __init__(self, has_class):
        super().__init__()
        tokens = HEIGHT // PATCH * (WIDTH // PATCH)
        self.has_class = has_class
        self.patches = nn.Conv2d(CHANNELS, COLUMNS, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.zeros(COLUMNS))
        self.positions = nn.Parameter(torch.zeros(tokens, COLUMNS))
        block = lambda: nn.TransformerEncoderLayer(
            COLUMNS, HEADS, MLP, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList([block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(COLUMNS)
        self.head = nn.Linear(COLUMNS, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        if self.has_class:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.has_class else x.mean(1))

    def named(self):
        """The parameters by ddp's names, in ddp's order, without the embedding's."""
        for index, block in enumerate(self.blocks):
            for part, norm, layers in [
                ("attention", block.norm1, [("mix.qkv", block.self_attn), ("mix.out", block.self_attn.out_proj)]),
                ("mlp", block.norm2, [("up", block.linear1), ("down", block.linear2)])]:
                name = f"blocks.{index}.{part}"
                yield f"{name}.norm.weight", norm.weight
                yield f"{name}.norm.bias", norm.bias
                for layer_name, layer in layers:
                    attention = layer is block.self_attn
                    yield f"{name}.{layer_name}.weight", layer.in_proj_weight if attention else layer.weight
                    yield f"{name}.{layer_name}.bias", layer.in_proj_bias if attention else layer.bias
        for name, layer in [("norm", self.norm), ("head", self.head)]:
            yield f"{name}.weight", layer.weight
            yield f"{name}.bias", layer.bias


def run(has_class):
    net = Vit(has_class)
    net.train()
    first = 1 if has_class else 0
    with torch.no_grad():
        net.patches.weight.copy_(2 * numbers(0, net.patches.weight.shape))
        net.patches.bias.copy_(2 * numbers(1, [COLUMNS]))
        positions = 2 * numbers(2, [first + len(net.positions), COLUMNS])
        net.positions.copy_(positions[first:])
        if has_class:
            net.class_token.copy_(net.patches.bias + positions[0])
        for stream, (_, parameter) in enumerate(net.named(), 3):
            parameter.copy_(2 * numbers(stream, parameter.shape))
    x = 4 * numbers(100, [IMAGES, CHANNELS, HEIGHT, WIDTH])
    y = net(x)
    loss = functional.cross_entropy(y, torch.arange(IMAGES) * 5 % CLASSES)
    loss.backward()
    bias, positions = net.patches.bias.grad, net.positions.grad
    if has_class:
        bias, positions = bias + net.class_token.grad, torch.cat([net.class_token.grad[None], positions])
    gradients = {"embedding.patches.weight": net.patches.weight.grad, "embedding.patches.bias": bias,
                 "embedding.positions.weight": positions}
    gradients.update((name, parameter.grad) for name, parameter in net.named())
    return {"loss": loss.item(), "output": y.flatten().tolist(),
            "gradients": {name: gradient.flatten().tolist() for name, gradient in gradients.items()}}


print(json.dumps({"torch": torch.__version__, "mean": run(False), "class": run(True)}, indent=None).replace('], "', '],\n"'))
