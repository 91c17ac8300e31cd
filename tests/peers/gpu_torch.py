"""PyTorch's side of kernels/benches/gpu and of `ddp-train bench mlp --device cuda`: the same cases, by the device's own clock.

python tests/peers/gpu_torch.py [PART…]     one JSON line a case: {"case", "value", "unit"}
python tests/peers/gpu_torch.py --check …   goes through all that needs no GPU, on small shapes on the CPU, and prints no figure

PART is gpt (GPT-2 124M, eager and compiled), attention (SDPA), operations, steps (of perceptrons, eager and as a CUDA graph) or compiled
(these steps, compiled, eagerly and as a graph); all by default.
"""
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

ROUNDS = 7
CHECK = "--check" in sys.argv[1:]
PARTS = [name for name in sys.argv[1:] if name != "--check"] or ["gpt", "attention", "operations", "steps", "compiled"]
DEVICE = "cpu" if CHECK else "cuda"

SMALL = [784, 1024, 1024, 10]
LARGE = [8192] * 9


def size(real, small):
    return small if CHECK else real


def say(case, value, unit):
    print(json.dumps({"case": case, "checked": True} if CHECK else {"case": case, "value": value, "unit": unit}), flush=True)


def seconds(count, body):
    """Seconds of `count` calls, the median of several takes after one that does not count."""
    takes = []
    for round_ in range(size(ROUNDS, 1) + 1):
        took = one_take(count, body)
        if round_ > 0:
            takes.append(took)
    return statistics.median(takes)


def one_take(count, body):
    if CHECK:
        start = time.perf_counter()
        for _ in range(count):
            body()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        body()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def matmuls():
    side = lambda real: (size(real, 32),) * 3
    cases = [
        ("addmm bf16 8192", side(8192), torch.bfloat16, False),
        ("addmm f16 8192", side(8192), torch.float16, False),
        ("addmm tf32 4096", side(4096), torch.float32, True),
        ("addmm f32 4096", side(4096), torch.float32, False),
        ("linear bf16 128x1024x784", (128, 1024, 784), torch.bfloat16, False),
    ]
    for case, (m, n, k), dtype, tf32 in cases:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        x, w = torch.randn(m, k, device=DEVICE, dtype=dtype), torch.randn(n, k, device=DEVICE, dtype=dtype)
        out = torch.empty(m, n, device=DEVICE, dtype=dtype)
        took = seconds(10, lambda: torch.mm(x, w.t(), out=out))
        say(case, 2 * m * n * k * 10 / took / 1e12, "TFLOP/s")


def attention():
    """Causal SDPA in bf16, both directions; of the pairs of tokens that are not masked, as ours."""
    for batch, heads, time_, head_size in ((32, 12, 1024, 64), (4, 32, 4096, 128)):
        case, calls = f"{batch}x{heads}x{time_}x{head_size}", size(10, 1)
        batch, heads, time_ = (batch, heads, time_) if not CHECK else (1, 2, 32)
        make = lambda: torch.randn(batch, heads, time_, head_size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        q, k, v = make(), make(), make()
        run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        tflop = 2 * batch * heads * time_ * time_ * head_size * calls / 2e12
        say(f"attention forward {case}", 2 * tflop / seconds(calls, run), "TFLOP/s")
        out = run()
        dout = torch.randn_like(out)
        backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        say(f"attention backward {case}", 5 * tflop / seconds(calls, backward), "TFLOP/s")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        apart = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = apart.permute(2, 0, 3, 1, 4)
        x = x + self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.between(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2 with learned positions and tied weights; returns the mean loss."""

    def __init__(self, layers, heads, width, vocabulary, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks, self.last = nn.ModuleList(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.last(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt():
    """Milliseconds of a step of GPT-2 124M at batch 32 in bf16: autocast, SDPA, clipping, fused AdamW."""
    batch, context, vocabulary = size((32, 1024, 50304), (2, 16, 64))
    inputs, targets = (torch.randint(0, vocabulary, (batch, context), device=DEVICE) for _ in range(2))
    for how in ("eager", "compiled"):
        net = Gpt(*size((12, 12, 768), (1, 2, 16)), vocabulary, context).to(DEVICE)
        run = torch.compile(net) if how == "compiled" and not CHECK else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, fused=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = run(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

        for _ in range(size(4, 1)):
            step()
        say(f"gpt2 124M batch 32 bf16 {how}", seconds(size(5, 1), step) * 1e3 / size(5, 1), "ms")
        if not CHECK:
            say(f"gpt2 124M batch 32 bf16 {how} memory", torch.cuda.max_memory_reserved() / 1e6, "MB")
            del run, optimizer, net
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def memory_bound():
    count, calls = size(256 << 20, 4096), 5
    x, y = torch.randn(count, device=DEVICE), torch.randn(count, device=DEVICE)
    gb = lambda each: each * count * calls / 1e9
    say("copy", gb(8) / seconds(calls, lambda: x.copy_(y)), "GB/s")
    say("relu f32", gb(8) / seconds(calls, lambda: torch.clamp(y, min=0, out=x)), "GB/s")
    say("gelu f32", gb(8) / seconds(calls, lambda: torch.ops.aten.gelu.out(y, approximate="tanh", out=x)), "GB/s")
    say("axpy f32", gb(12) / seconds(calls, lambda: torch.add(x, y, out=x)), "GB/s")
    del x, y
    count = size(124 << 20, 4096)
    parameter = nn.Parameter(torch.randn(count, device=DEVICE))
    parameter.grad = torch.randn(count, device=DEVICE)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)
    say("adamw", 28 * count * calls / 1e9 / seconds(calls, optimizer.step), "GB/s")
    grads = parameter.grad
    say("grad norm", 4 * count * calls / 1e9 / seconds(calls, lambda: torch.linalg.vector_norm(grads)), "GB/s")


def launches():
    x = torch.randn(256, device=DEVICE)

    def many():
        for _ in range(1000):
            x.mul_(1.0)

    say("launch, eager", seconds(1, many) * 1e6 / 1000, "us")
    if CHECK:
        return
    graph = torch.cuda.CUDAGraph()
    many()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        many()
    say("launch, in a graph", seconds(1, graph.replay) * 1e6 / 1000, "us")


def uploads():
    if CHECK:
        return
    count = 64 << 20
    there = torch.zeros(count, device="cuda")
    for case, host in (("upload, pinned", torch.zeros(count).pin_memory()), ("upload, pageable", torch.zeros(count))):
        say(case, 4 * count / 1e9 / seconds(1, lambda: there.copy_(host, non_blocking=True)), "GB/s")


def perceptron(sizes):
    blocks = []
    for index, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        blocks += [nn.Linear(inputs, outputs)] + ([nn.ReLU()] if index + 2 < len(sizes) else [])
    return nn.Sequential(*blocks).to(DEVICE)


class TrainingStep:
    """Forward, backward and fused AdamW. f32 is PyTorch's by default (no TF32); bf16 is autocast over f32 values, as ours is.

    Each backward writes gradients where there are none: adding to zeros would cost a pass over all of them, in a graph too."""

    def __init__(self, sizes, batch, dtype, is_compiled, is_graph):
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        self.net = perceptron(sizes)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, weight_decay=0.01, fused=True, capturable=is_graph and not CHECK)
        self.x = torch.randn(batch, sizes[0], device=DEVICE)
        self.y = torch.randint(0, sizes[-1], (batch,), device=DEVICE)
        self.dtype, self.is_graph = dtype, is_graph
        loss_of = nn.CrossEntropyLoss()
        self.forward = lambda: loss_of(self.net(self.x), self.y)
        if is_compiled and not CHECK:
            torch.compiler.reset()  # or the ninth model would run eagerly
            # Large matmuls are the library's in every mode, and autotuning them takes minutes.
            mode = "default" if max(sizes) > 1024 else "max-autotune-no-cudagraphs"
            self.forward = torch.compile(self.forward, mode=mode)

    def loss(self):
        # In a graph, cached casts would keep the first step's values.
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=self.dtype == "bf16", cache_enabled=not self.is_graph):
            return self.forward()

    def run(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()

    def captured(self):
        """The step as a graph, as PyTorch's manual has it: some on another stream, then captured with no gradients, so that backward
        writes them into the graph's own memory, in each replay the same."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss().backward()
            self.optimizer.step()
        self.assert_gradients_are_of_one_step(graph.replay)
        return graph

    def assert_gradients_are_of_one_step(self, run):
        """Compares the gradients of a step after another one with those of the same values, made anew."""
        parameters = list(self.net.parameters())
        run()
        before = [parameter.detach().clone() for parameter in parameters]
        run()
        got = [parameter.grad.clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, value in zip(parameters, before):
                parameter.copy_(value)
        for one, expected in zip(got, torch.autograd.grad(self.loss(), parameters)):
            away = (one - expected).norm() / expected.norm().clamp(min=1e-12)
            assert away < 0.05, f"gradients are {away:.3g} of their norm away from those of one step"


def step_time(name, how, sizes, batch, dtype, calls):
    """Says microseconds of a step and of the optimizer alone, and MB of the device that were ever taken."""
    if not CHECK:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    is_graph = "graph" in how
    step = TrainingStep(sizes, batch, dtype, "compiled" in how, is_graph)
    for _ in range(size(10, 2)):
        step.run()
    if CHECK:
        step.assert_gradients_are_of_one_step(step.run)
    run = step.captured().replay if is_graph and not CHECK else step.run
    run()
    case = f"mlp {name} {dtype} {how}"
    say(case, seconds(calls, run) * 1e6 / calls, "us")
    if not CHECK:
        say(f"{case} memory", torch.cuda.max_memory_reserved() / 1e6, "MB")
    if how == "eager":
        say(f"mlp {name} {dtype} adamw", seconds(calls, step.optimizer.step) * 1e6 / calls, "us")


def step_times(hows):
    """The most telling cases first: there may not be time for all."""
    large = ("large", size(LARGE, [16] * 9), 8192, "bf16", 10)
    small = [(f"small {batch}", SMALL, batch, dtype, 50) for dtype in ("f32", "bf16", "tf32") for batch in (128, 1024, 8192)]
    for name, sizes, batch, dtype, calls in [small[0], large] + small[1:]:
        for how in hows:
            step_time(name, how, sizes, size(batch, 4), dtype, size(calls, 2))


if __name__ == "__main__":
    name = "the CPU" if CHECK else torch.cuda.get_device_name(0)
    print(json.dumps({"case": "device", "name": name, "torch": torch.__version__}))
    if "gpt" in PARTS:
        gpt()
    if "attention" in PARTS:
        attention()
    if "operations" in PARTS:
        matmuls()
        memory_bound()
        launches()
        uploads()
    for part, hows in (("steps", ("eager", "graph")), ("compiled", ("compiled", "compiled graph"))):
        if part in PARTS:
            step_times(hows)
