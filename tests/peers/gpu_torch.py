"""PyTorch's side of kernels/benches/gpu and of `ddp-train bench mlp --device cuda`: the same cases, by the device's own clock.

python tests/peers/gpu_torch.py             one JSON line a case: {"case", "value", "unit"}
"""
import json
import statistics

import torch
from torch import nn

ROUNDS = 7


def say(case, value, unit):
    print(json.dumps({"case": case, "value": value, "unit": unit}), flush=True)


def seconds(count, body):
    """Seconds of `count` calls, the median of several takes after one that does not count."""
    takes = []
    for round_ in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            body()
        end.record()
        end.synchronize()
        if round_ > 0:
            takes.append(start.elapsed_time(end) / 1e3)
    return statistics.median(takes)


def products():
    cases = [
        ("addmm bf16 8192", (8192, 8192, 8192), torch.bfloat16, False),
        ("addmm f16 8192", (8192, 8192, 8192), torch.float16, False),
        ("addmm tf32 4096", (4096, 4096, 4096), torch.float32, True),
        ("addmm f32 4096", (4096, 4096, 4096), torch.float32, False),
        ("linear bf16 128x1024x784", (128, 1024, 784), torch.bfloat16, False),
    ]
    for case, (m, n, k), dtype, tf32 in cases:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        took = seconds(10, lambda: torch.mm(x, w.t(), out=out))
        say(case, 2 * m * n * k * 10 / took / 1e12, "TFLOP/s")


def memory_bound():
    count, calls = 256 << 20, 5
    x, y = torch.randn(count, device="cuda"), torch.randn(count, device="cuda")
    gb = lambda each: each * count * calls / 1e9
    say("copy", gb(8) / seconds(calls, lambda: x.copy_(y)), "GB/s")
    say("relu f32", gb(8) / seconds(calls, lambda: torch.clamp(y, min=0, out=x)), "GB/s")
    say("gelu f32", gb(8) / seconds(calls, lambda: torch.ops.aten.gelu.out(y, approximate="tanh", out=x)), "GB/s")
    say("add f32", gb(12) / seconds(calls, lambda: torch.add(x, y, out=x)), "GB/s")
    del x, y
    count = 124 << 20
    parameter = nn.Parameter(torch.randn(count, device="cuda"))
    parameter.grad = torch.randn(count, device="cuda")
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01, fused=True)
    say("adamw", 28 * count * calls / 1e9 / seconds(calls, optimizer.step), "GB/s")
    grads = parameter.grad
    say("grad norm", 4 * count * calls / 1e9 / seconds(calls, lambda: torch.linalg.vector_norm(grads)), "GB/s")


def launches():
    x = torch.randn(256, device="cuda")

    def many():
        for _ in range(1000):
            x.mul_(1.0)

    say("launch, eager", seconds(1, many) * 1e6 / 1000, "us")
    graph = torch.cuda.CUDAGraph()
    many()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        many()
    say("launch, in a graph", seconds(1, graph.replay) * 1e6 / 1000, "us")


def uploads():
    count = 64 << 20
    there = torch.zeros(count, device="cuda")
    for case, host in (("upload, pinned", torch.zeros(count).pin_memory()), ("upload, pageable", torch.zeros(count))):
        say(case, 4 * count / 1e9 / seconds(1, lambda: there.copy_(host, non_blocking=True)), "GB/s")


def mlp(how, sizes, batch):
    """Microseconds of a training step: forward, backward, fused AdamW; float32 as PyTorch has it by default (no TF32)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    blocks = []
    for index, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        blocks += [nn.Linear(inputs, outputs)] + ([nn.ReLU()] if index + 2 < len(sizes) else [])
    net = nn.Sequential(*blocks).cuda()
    model = torch.compile(net, mode="max-autotune-no-cudagraphs") if how == "compiled" else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=True, capturable=how == "graph")
    loss_of = nn.CrossEntropyLoss()
    x, y = torch.randn(batch, sizes[0], device="cuda"), torch.randint(0, sizes[-1], (batch,), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=how != "graph")
        loss_of(model(x), y).backward()
        optimizer.step()

    for _ in range(10):
        step()
    run = step
    if how == "graph":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    say(f"mlp {batch} {how}", seconds(100, run) * 1e6 / 100, "us")


if __name__ == "__main__":
    print(json.dumps({"case": "device", "name": torch.cuda.get_device_name(0), "torch": torch.__version__}))
    products()
    memory_bound()
    launches()
    uploads()
    for batch in (128, 1024):
        for how in ("eager", "compiled", "graph"):
            mlp(how, [784, 1024, 1024, 10], batch)
