"""The nodes of a training step of GPT-2 in bf16 on one GPU, with the bytes and multiply-adds of each, the least time that they can
take there, and the time to expect. A plan, not a measurement. The least time of a kernel of ours is the longest of three, all from its
machine code as launch/check-kernels wrote it down: its instructions, its tensor-core instructions, and its bytes at the rate that its
loads in flight allow; that of cuBLASLt's matmuls follows from their multiply-adds or bytes. The time to expect supposes what an H200
made of such kernels.

launch/check-kernels && python3 tests/evidence/gpt2_plan.py      GPT-2 124M, 64 sequences of 1,024 tokens, on an H100
python3 tests/evidence/gpt2_plan.py --gpu h200
python3 tests/evidence/gpt2_plan.py --check FILE                 compares nodes, bytes and blocks with what
    ddp-train bench gpt --model gpt,layers=2,heads=2,width=64,vocab=512,context=64 --batch 17 \\
      --dtype bf16 --explain >FILE
printed, on a GPU or a simulated one.
"""
import argparse
import collections
import json
import os

# TFLOP/s of cuBLASLt on random data at 4096³ (of the H200: 772 measured), TB/s of a copy (4.19), multiprocessors, GHz under that load.
Gpu = collections.namedtuple("Gpu", "tflops tbs multiprocessors ghz")
GPUS = {"h100": Gpu(772, 3.0, 132, 1.755), "h200": Gpu(772, 4.19, 132, 1.755)}
# Assumed, of any kernel: the share of issue slots that are used (four a clock and multiprocessor), the share of the tensor cores' peak
# that wgmma reaches, as a matmul of cuBLASLt does, µs of a load from memory and from L2, and µs between nodes of a graph.
ISSUED, WGMMA, LOAD_US, L2_US, GAP_US = 0.7, 0.81, 0.7, 0.3, 1.0
# What to expect, at best and at worst, around what one H200 did at 32 sequences (docs/performance.md). TFLOP/s of attention, causal, with
# heads of 64 and 1,024 tokens, each product counted; of matmuls of layers and of the head. Of other kernels, the
# factor over their least time. ms between nodes, in all.
FORWARD, BACKWARD, MATMULS, OTHERS, GAPS_MS = (310, 290), (370, 345), (720, 640), (1.2, 1.5), (1.5, 3)
# Multiply-adds of m16n8k16, counted as two; those of all tensor cores in a clock of a multiprocessor.
MMA_FLOP, PEAK_FLOP = 4096, 4096

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=64)
p.add_argument("--context", type=int, default=1024)
p.add_argument("--layers", type=int, default=12)
p.add_argument("--heads", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--vocab", type=int, default=50304)
p.add_argument("--gpu", choices=GPUS, default="h100")
p.add_argument("--tflops", type=float, help="of matmuls in bf16, TFLOP/s")
p.add_argument("--tbs", type=float, help="of memory, TB/s")
p.add_argument("--figures", default=os.environ.get("CARGO_TARGET_DIR", "target") + "/check-kernels/figures.json")
p.add_argument("--check")
a = p.parse_args()
gpu = GPUS[a.gpu]
gpu = gpu._replace(tflops=a.tflops or gpu.tflops, tbs=a.tbs or gpu.tbs)
if a.check:
    a.batch, a.context, a.layers, a.heads, a.width, a.vocab = 17, 64, 2, 2, 64, 512
else:
    try:
        figures = json.load(open(a.figures))["sm_90"]
    except (OSError, KeyError):
        raise SystemExit(f"gpt2_plan.py: expected the machine code's figures for sm_90 in {a.figures}; help: run launch/check-kernels")

T, L, H, C, V = a.context, a.layers, a.heads, a.width, a.vocab
R, F, D = a.batch * T, 4 * C, C // H
if R <= 1024 or C > 1024:
    raise SystemExit(f"gpt2_plan.py: expected more than 1,024 tokens and at most 1,024 columns, whose biases norms sum, got {R} and {C}")
parameters = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
# Rows of partial sums, of more than 1,024 rows.
sums = -(-R // max(16, -(-R // 1024)))
blocks_of = {}  # of each kernel, for --check
nodes = []  # (group, how many, bytes of each, FLOP of each, ms of each, what limits it)


def matmul(group, count, bytes, flop):
    times = {"memory": bytes / gpu.tbs / 1e9, "matmul": flop / gpu.tflops / 1e9}
    limit = max(times, key=times.get)
    nodes.append((group, count, bytes, flop, times[limit], limit))


def kernel(group, count, bytes, file, name, work, blocks=1 << 20, serial=0):
    """`work` gives, from the loops of the kernel, a list of (loop, how often a warp runs it). A thread loads `serial` bytes from L2, one
    batch of loads after the other."""
    if a.check:
        blocks_of.setdefault(name, set()).add(blocks)
        return nodes.append((group, count, bytes, 0, 0, ""))
    found = figures[file][name]
    runs = work(found["loops"])
    used = min(gpu.multiprocessors, blocks)
    slots = used * 4 * gpu.ghz * 1e6 * ISSUED
    tensor = sum(loop["tensor"] * MMA_FLOP * times for loop, times in runs)
    lane = max(loop["in_flight"] for loop, _ in runs)
    in_flight = lane * 32 * min(found["warps"], -(-blocks * found["threads"] // 32 // used))
    times = {
        "instructions": sum(loop["with_inner"] * times for loop, times in runs) / slots,
        "tensor cores": tensor / (used * PEAK_FLOP * gpu.ghz * 1e6 * WGMMA),
        "memory": bytes / min(gpu.tbs, used * in_flight / LOAD_US / 1e6) / 1e9 if in_flight else 0,
        "chain of loads": serial and -(-serial // lane) * L2_US / 1e3,
    }
    if tensor:
        times["memory"] = bytes / gpu.tbs / 1e9  # tiles come many at a time, by asynchronous copies
    limit = max(times, key=times.get)
    nodes.append((group, count, bytes, tensor, times[limit], limit))


def each(elements, way, size, exponentials=None):
    """The loop with the fewest instructions for an element, of which a lane reads or writes `size` bytes; with or without exponentials."""
    def work(loops):
        fits = lambda loop: loop[way] >= 4 and (exponentials is None or (loop["exponentials"] >= 8) == exponentials)
        cost = lambda loop: loop["with_inner"] / loop[way]
        loop = min(filter(fits, loops), key=cost)
        return [(loop, elements * size / loop[way] / 32)]
    return work


def rows(count):
    """The outer loop that reads most, once for each row by each warp that a row has."""
    warps = min(16, -(-2 * C // 2048))
    return lambda loops: [(max((loop for loop in loops if loop["depth"] == 0), key=lambda loop: loop["read"]), count * warps)]


def tiles(side, step):
    """The loops of unmasked and of masked tiles, by each of four warps of each block of `side` rows, for tiles of `step` of the others."""
    blocks = -(-T // side)
    masked = blocks * side // step
    all_tiles = sum(-(-min(T, (index + 1) * side) // step) for index in range(blocks))

    def work(loops):
        main, last = sorted((loop for loop in loops if loop["tensor"]), key=lambda loop: loop["instructions"])
        warps = 4 * a.batch * H
        return [(main, (all_tiles - masked) * warps), (last, masked * warps)]
    return work


def exponentials(elements):
    """The pass for maximum and sum, and that for the gradient, which alone stores."""
    def work(loops):
        cost = lambda loop: loop["with_inner"] / loop["read"]
        passes = [loop for loop in loops if loop["exponentials"] >= 8]
        pair = [min((loop for loop in passes if bool(loop["written"]) == stores), key=cost) for stores in (False, True)]
        return [(loop, elements * 2 / loop["read"] / 32) for loop in pair]
    return work


def linear(inputs, outputs, kept=1):
    """Forward with a bias; `kept` outputs are written."""
    matmul("matmuls, forward", L, 2 * (R * inputs + inputs * outputs + outputs + kept * R * outputs), 2 * R * inputs * outputs)


def backward(inputs, outputs, folded=False, summed=False):
    """Gradients of weight and bias, then that of the input; `folded` reads the GELU's input; if `summed`, a norm made the partial sums."""
    flop = 2 * R * inputs * outputs
    matmul("matmuls, weights' gradients", L, 2 * R * (inputs + outputs) + 4 * inputs * outputs, flop)
    matmul("matmuls, inputs' gradients", L, 2 * (R * (inputs + outputs) + inputs * outputs + folded * R * inputs), flop)
    size = 2 * R * outputs + 4 * sums * outputs
    if not summed:
        kernel("bias gradients", L, size, "linear.cu", "fold_and_sum_bf16", each(R * outputs, "read", 2), blocks=-(-outputs // 256) * sums)
    add_sums(L, outputs)


def add_sums(count, columns):
    """64 rows by each thread, in order."""
    size = 4 * (sums + 1) * columns
    work = each(sums * columns, "read", 4)
    kernel("sums of partial sums", count, size, "linear.cu", "add_row_sums_f32", work, -(-columns // 8), serial=4 * min(64, sums))


piece = min(R, 8192)
pieces = -(-R // piece)
head = 2 * piece * C * V
kernel("embedding", 1, 8 * R + 2 * T * C + 2 * min(V, R) * C + 2 * R * C, "embedding.cu", "embedding_bf16", each(R * C, "written", 2))
kernel("norms, forward", 1, 4 * R * C + 4 * C + 8 * R, "norm.cu", "norm_bf16", rows(R))
kernel("residual and norm, forward", 2 * L, 8 * R * C + 4 * C + 8 * R, "norm.cu", "norm_bf16", rows(R))
linear(C, 3 * C), linear(C, C), linear(C, F, kept=2), linear(F, C)
width = 64 if D <= 64 else 128
of_head = lambda kind: f"attention_tensor{kind}_{width}_bf16"
kernel("attention, forward", L, 8 * R * C + 4 * R * H, "attention_bf16.cu", of_head(""), tiles(width, 64))
matmul("head: logits", pieces, 2 * (piece * C + V * C + piece * V), head)
kernel("head: loss and its gradient", pieces, 4 * piece * V + 12 * piece, "cross_entropy.cu", "cross_entropy_wide_bf16", exponentials(piece * V))
matmul("head: weight's gradient", pieces, 2 * piece * (V + C) + 4 * V * C * (2 if pieces > 1 else 1), head)
matmul("head: input's gradient", pieces, 2 * (piece * V + V * C + piece * C), head)
size = 8 * R * C + 2 * C + 8 * R + 12 * sums * C
kernel("norms, backward with the residual", 2 * L + 1, size, "norm.cu", "norm_backward_summed_bf16", rows(R), blocks=sums)
add_sums(2 * (2 * L + 1), C)
backward(C, 3 * C), backward(C, C, summed=True), backward(C, F), backward(F, C, folded=True, summed=True)
kernel("attention, backward: dq", L, 12 * R * C + 8 * R * H, "attention_bf16.cu", of_head("_dq"), tiles(64, 64))
kernel("attention, backward: dk, dv", L, 12 * R * C + 8 * R * H, "attention_bf16.cu", of_head("_dkv"), tiles(64, 48 if width == 64 else 64))
size = 2 * R * C + 4 * T * C
kernel("positions' gradient", 1, size, "linear.cu", "sum_rows_to_f32_bf16", each(R * C, "read", 2), blocks=T * C // 128)
# Each of the 8 warps that sort 512 rows compares with all of them, 8 in each round of its loop.
sorting = lambda loops: [(max(loops, key=lambda it: it["instructions"]), -(-R // 512) * 8 * 64)]
kernel("tokens' gradient", 1, 16 * R, "embedding.cu", "embedding_sort", sorting)
# Each pass merges 16 parts at a time; each row halves its place in all of them, 16 loads of 8 bytes at a time.
length = 512
while length < R:
    halvings = length.bit_length()
    halving = lambda loops: [(max(loops, key=lambda it: it["depth"]), -(-R // 32) * halvings)]
    kernel("tokens' gradient", 1, 16 * R, "embedding.cu", "embedding_merge", halving, serial=128 * halvings)
    length *= 16
for name in ("embedding_add_bf16", "embedding_join"):
    kernel("tokens' gradient", 1, 2 * R * C + 4 * V * C, "embedding.cu", name, lambda loops: [(max(loops, key=lambda it: it["read"]), R)])
kernel("norm of the gradients", 1, 4 * parameters, "grad_norm.cu", "grad_norm_partials_f32", each(parameters, "read", 4))
kernel("AdamW", 1, 30 * parameters, "adamw.cu", "adamw_f32", each(parameters, "written", 14))
kernel("scale of clipping", 1, 64, "grad_norm.cu", "clip_scale_f32", lambda loops: [(loops[0], 16)], blocks=1)

ours = sum(count for _, count, *_ in nodes)
if a.check:
    lines = [json.loads(line) for line in open(a.check)]
    total, moved = lines[-1], sum(count * bytes for _, count, bytes, *_ in nodes)
    # The program counts a packed operand whole, and what a node's operation has written before as read and written by the node: dq, dk
    # and dv, and the gradient whose bias is summed.
    moved += L * (14 * R * C + 2 * R * F)
    print(f"nodes: plan {ours}, program {total['nodes']}; bytes: plan {moved:,}, program {total['moved_bytes']:,}")
    # 75 nodes here are 394 for GPT-2 124M with 64 sequences. These were 392 before three nodes sorted and merged the tokens of the embedding's
    # gradient, instead of one that counted them: its time grew with the square of the tokens.
    is_same = ours == total["nodes"] == 75 and abs(moved / total["moved_bytes"] - 1) < 0.04
    for name in ("add_row_sums_f32", "norm_backward_summed_bf16", "fold_and_sum_bf16"):
        found = {line["blocks"] for line in lines if line.get("name") == name}
        print(f"blocks of {name}: plan {sorted(blocks_of[name])}, program {sorted(found)}")
        is_same &= found == blocks_of[name]
    raise SystemExit(0 if is_same else 1)

# Products of two matrices in attention, each of half of T² elements: five in FlashAttention's backward, seven in ours.
products = {"attention, forward": (2, FORWARD), "attention, backward: dq": (3, BACKWARD), "attention, backward: dk, dv": (4, BACKWARD)}


def expected(group, limit, ms):
    """At best and at worst, in ms."""
    if group in products:
        count, rates = products[group]
        return [count * a.batch * H * T * T * D / rate / 1e9 for rate in rates]
    return [ms * gpu.tflops / rate for rate in MATMULS] if limit == "matmul" else [ms * factor for factor in OTHERS]


rows_of = {}
for group, count, bytes, flop, ms, limit in nodes:
    row = rows_of.setdefault(group, [0, 0, 0, 0, 0, 0, collections.Counter()])
    for index, value in enumerate((1, bytes / 1e9, flop / 1e12, ms, *expected(group, limit, ms))):
        row[index] += count * value
    row[6][limit] += count * ms
print("| nodes | how many | GB | TFLOP | at least, ms | expected, ms | limited by |\n|---|---|---|---|---|---|---|")
for group, (*numbers, limits) in rows_of.items():
    print("| {} | {} | {:.2f} | {:.2f} | {:.2f} | {:.1f} to {:.1f} | {} |".format(group, *numbers, limits.most_common(1)[0][0]))
gaps = ours * GAP_US / 1e3
print("| between nodes | | | | {:.2f} | {:.1f} to {:.1f} | |".format(gaps, *GAPS_MS))
gb, tflop, *times = (sum(row[index] for row in rows_of.values()) for index in range(1, 6))
least, best, worst = (time + more for time, more in zip(times, (gaps, *GAPS_MS)))
print(f"| all | {ours} | {gb:.1f} | {tflop:.1f} | {least:.1f} | {best:.0f} to {worst:.0f} | |")
print(f"\n{R / worst * 1e3:,.0f} to {R / best * 1e3:,.0f} tokens/s on one {a.gpu.upper()}; at most {R / least * 1e3:,.0f}, at {gpu.tflops:g} TFLOP/s and {gpu.tbs:g} TB/s")
