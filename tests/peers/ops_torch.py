"""The operations of `cargo bench -p ddp-kernels --bench ops` in PyTorch, pinned, medians: one JSON line each.

python tests/peers/ops_torch.py [--threads 2] [--filter NAME]
The names are those of our bench where the operation is the same, so that the two can be put side by side.
"""
import argparse, json, os, statistics, time

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--filter", default="")
arguments = parser.parse_args()
# One thread a core, as our bench pins them.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(arguments.threads)
os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("OMP_PLACES", "cores")

import torch
import torch.nn.functional as F

torch.set_num_threads(arguments.threads)
torch.manual_seed(0)


def seconds(body, rounds=9, round_s=0.02):
    body()
    start = time.perf_counter()
    body()
    repeats = max(1, int(round_s / max(time.perf_counter() - start, 1e-9)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            body()
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def report(name, body, flops=0, size=0):
    if arguments.filter in name:
        s = seconds(body)
        figure, unit = (flops / s / 1e9, "GFLOP/s") if flops else (size / s / 1e9, "GB/s")
        line = dict(system="pytorch", version=torch.__version__, threads=arguments.threads, name=name,
                    figure=round(figure, 2), unit=unit, microseconds=round(s * 1e6, 2))
        print(json.dumps(line), flush=True)


def matmuls():
    cases = [
        ("addmm 2048x2048x2048", 2048, 2048, 2048, False, False),
        ("addmm 2048x2048x2048, weight as kept", 2048, 2048, 2048, False, True),
        ("addmm 128x1024x784", 128, 1024, 784, False, False),
        ("addmm 128x1024x784, weight as kept", 128, 1024, 784, False, True),
        ("addmm 128x1024x1024, weight as kept", 128, 1024, 1024, False, True),
        ("addmm 128x10x1024, weight as kept", 128, 10, 1024, False, True),
        ("addmm 128x1024x1024 (dx)", 128, 1024, 1024, False, False),
        ("addmm 128x1024x10 (dx)", 128, 1024, 10, False, False),
        ("addmm 1024x784x128 (dw)", 1024, 784, 128, True, False),
        ("addmm 1024x1024x128 (dw)", 1024, 1024, 128, True, False),
        ("addmm 10x1024x128 (dw)", 10, 1024, 128, True, False),
        ("addmm 1024x1024x784, weight as kept", 1024, 1024, 784, False, True),
        ("addmm 1024x1024x1024 (dx)", 1024, 1024, 1024, False, False),
        ("addmm 1024x784x1024 (dw)", 1024, 784, 1024, True, False),
    ]
    for name, m, n, k, a_t, b_t in cases:
        a = torch.randn(k, m).t() if a_t else torch.randn(m, k)
        b = torch.randn(n, k).t() if b_t else torch.randn(k, n)
        out = torch.empty(m, n)
        report(name, lambda: torch.mm(a, b, out=out), flops=2 * m * n * k)


def elementwise():
    for count, label in ((16 << 20, "64 MiB"), (128 * 1024, "512 KiB")):
        a, b, out = torch.randn(count), torch.randn(count), torch.randn(count)
        half = a.bfloat16()
        dy = torch.randn(count)
        gelu = lambda kind: torch.ops.aten.gelu.out(a, approximate=kind, out=out)
        report(f"copy, {label}", lambda: out.copy_(a), size=8 * count)
        report(f"relu, {label}", lambda: torch.clamp(a, min=0, out=out), size=8 * count)
        report(f"relu in place, {label}", lambda: out.relu_(), size=8 * count)
        report(f"add, {label}", lambda: torch.add(a, b, out=out), size=12 * count)
        report(f"axpy, {label}", lambda: out.add_(a, alpha=1e-3), size=12 * count)
        report(f"gelu tanh, {label}", lambda: gelu("tanh"), size=8 * count)
        report(f"gelu erf, {label}", lambda: gelu("none"), size=8 * count)
        report(f"gelu erf backward, {label}",
               lambda: torch.ops.aten.gelu_backward.grad_input(dy, a, approximate="none", grad_input=out), size=12 * count)
        report(f"cast f32 to bf16, {label}", lambda: half.copy_(a), size=6 * count)
        report(f"cast bf16 to f32, {label}", lambda: out.copy_(half), size=6 * count)
        report(f"sum, {label}", lambda: a.sum(), size=4 * count)


def optimizers():
    count = 16 << 20
    value = torch.randn(count, requires_grad=True)
    value.grad = torch.randn(count)
    for name, optimizer, size in (
        ("adamw, 64 MiB", torch.optim.AdamW([value], lr=1e-6, weight_decay=0.01, fused=True), 28),
        ("sgd with momentum, 64 MiB", torch.optim.SGD([value], lr=1e-6, momentum=0.9, weight_decay=0.01, fused=True), 20),
    ):
        report(name, optimizer.step, size=size * count)
    report("gradient norm, 64 MiB", lambda: torch.linalg.vector_norm(value.grad), size=4 * count)


def losses():
    for rows, classes in ((128, 10), (1024, 10), (128, 1000), (64, 50257)):
        logits = torch.randn(rows, classes, requires_grad=True)
        targets = torch.randint(classes, (rows,))

        def step():
            logits.grad = None
            F.cross_entropy(logits, targets, reduction="sum").backward()

        report(f"cross-entropy with gradient {rows}x{classes}", step, size=8 * rows * classes)


matmuls()
elementwise()
optimizers()
losses()
