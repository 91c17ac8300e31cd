"""The nodes of a training step of GPT-2 in bf16 on one GPU, with the bytes and multiply-adds of each
and the time that the hardware allows for the larger of the two. A plan, not a measurement.

python3 tests/evidence/gpt2_plan.py                    GPT-2 124M, 64 sequences of 1,024 tokens
python3 tests/evidence/gpt2_plan.py --check FILE       compares nodes and bytes with what
    ddp-train bench gpt --model gpt,layers=2,heads=2,width=64,vocab=512,context=64 --batch 2 \\
      --dtype bf16 --explain >FILE
printed, on a GPU or a simulated one.
"""
import argparse, json

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=64)
p.add_argument("--context", type=int, default=1024)
p.add_argument("--layers", type=int, default=12)
p.add_argument("--heads", type=int, default=12)
p.add_argument("--width", type=int, default=768)
p.add_argument("--vocab", type=int, default=50304)
p.add_argument("--tflops", type=float, default=790, help="of products in bf16, TFLOP/s")
p.add_argument("--tbs", type=float, default=4.3, help="of memory, TB/s")
p.add_argument("--check")
a = p.parse_args()
if a.check:
    a.batch, a.context, a.layers, a.heads, a.width, a.vocab = 2, 64, 2, 2, 64, 512

T, L, H, C, V = a.context, a.layers, a.heads, a.width, a.vocab
R, F = a.batch * T, 4 * C
parameters = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
sums = (R + 63) // 64  # rows of partial sums for the gradients of biases and norms
nodes = []  # (group, how many, bytes of each, FLOP of each)


def node(group, count, bytes, flop=0):
    nodes.append((group, count, bytes, flop))


def linear(inputs, outputs, kept=1):
    """Forward with a bias; `kept` outputs are written."""
    node("products, forward", L, 2 * (R * inputs + inputs * outputs + outputs + kept * R * outputs), 2 * R * inputs * outputs)


def backward(inputs, outputs, folded=False):
    """Gradients of weight and bias, then that of the input; `folded` reads the GELU's input."""
    flop = 2 * R * inputs * outputs
    node("products, weights' gradients", L, 2 * R * (inputs + outputs) + 4 * inputs * outputs, flop)
    node("products, inputs' gradients", L, 2 * (R * (inputs + outputs) + inputs * outputs + folded * R * inputs), flop)
    # Its bias: a pass that sums dy, in the layer below the GELU partial sums and their sum.
    node("bias gradients", L, 2 * R * outputs + 4 * outputs)


node("embedding", 1, 8 * R + 2 * T * C + 2 * min(V, R) * C + 2 * R * C)
node("norms, forward", 1, 4 * R * C + 4 * C + 8 * R)
node("residual and norm, forward", 2 * L, 8 * R * C + 4 * C + 8 * R)
linear(C, 3 * C), linear(C, C), linear(C, F, kept=2), linear(F, C)
node("attention, forward", L, 8 * R * C + 4 * R * H, 2 * R * T * C)
piece = min(R, 8192)
pieces = (R + piece - 1) // piece
head = 2 * piece * C * V
node("head: logits", pieces, 2 * (piece * C + V * C + piece * V), head)
node("head: loss and its gradient", pieces, 4 * piece * V + 12 * piece)
node("head: weight's gradient", pieces, 2 * piece * (V + C) + 4 * V * C * (2 if pieces > 1 else 1), head)
node("head: input's gradient", pieces, 2 * (piece * V + V * C + piece * C), head)
node("norms, backward with the residual", 2 * L + 1, 8 * R * C + 2 * C + 8 * R + 8 * sums * C)
node("sums of partial sums", 2 * (2 * L + 1) + L, 4 * sums * C)
backward(C, 3 * C), backward(C, C), backward(C, F), backward(F, C, folded=True)
node("attention, backward: rows of dO·O", L, 4 * R * C + 4 * R * H)
node("attention, backward: dq", L, 10 * R * C + 8 * R * H, 3 * R * T * C)
node("attention, backward: dk", L, 10 * R * C + 8 * R * H, 3 * R * T * C)
node("attention, backward: dv", L, 10 * R * C + 8 * R * H, 2 * R * T * C)
node("positions' gradient", 1, 2 * R * C + 4 * T * C)
node("tokens' gradient", 3, 2 * R * C + 4 * V * C)
node("norm of the gradients", 1, 4 * parameters)
node("AdamW", 1, 30 * parameters)
node("scale of clipping", 1, 64)

if a.check:
    lines = [json.loads(line) for line in open(a.check)]
    total = lines[-1]
    ours = sum(count for _, count, _, _ in nodes)
    moved = sum(count * bytes for _, count, bytes, _ in nodes)
    print(f"nodes: plan {ours}, program {total['nodes']}; bytes: plan {moved:,}, program {total['moved_bytes']:,}")
    raise SystemExit(0 if ours == total["nodes"] and abs(moved / total["moved_bytes"] - 1) < 0.1 else 1)

print("| nodes | how many | GB | TFLOP | ms allowed |\n|---|---|---|---|---|")
rows = {}
for group, count, bytes, flop in nodes:
    row = rows.setdefault(group, [0, 0, 0, 0])
    ms = max(bytes / a.tbs / 1e9, flop / a.tflops / 1e9)
    for index, value in enumerate((count, count * bytes / 1e9, count * flop / 1e12, count * ms)):
        row[index] += value
for group, row in rows.items():
    print("| {} | {} | {:.2f} | {:.2f} | {:.2f} |".format(group, *row))
print("| all | {} | {:.1f} | {:.1f} | {:.1f} |".format(*(sum(column) for column in zip(*rows.values()))))
