"""PyTorch's own sample inputs (OpInfo) for the operations of formulas: which of them a formula over `Var` can express, with
what PyTorch's autograd makes of them in f64.

    python tests/peers/op_info.py --all > samples.json     (with a Python that has torch)
    DDP_OP_INFO=samples.json cargo test -p ddp --test training op_info -- --nocapture
    python tests/peers/op_info.py > ddp/tests/golden/op_info.json

Without --all it writes the samples whose numbers are few. An operation of which PyTorch has more than 40 samples
(pooling) gives every n-th. On standard error it says how many can be expressed, and names the others.
Each sample is a program: operations of `Var`, one after the other, on tensors. docs/from-pytorch.md has the same table.
"""
import json
import sys
import types
import unittest

import torch

try:
    from torch.testing._internal.common_methods_invocations import op_db
except ModuleNotFoundError:  # It wants a package for tests of its own, of which nothing is used here.
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
    from torch.testing._internal.common_methods_invocations import op_db

SAMPLES_MAX = 40


class Missing(Exception):
    """No formula expresses it."""


class Program:
    def __init__(self):
        self.steps, self.tensors = [], []


class V:
    """A `Var` while its program is written: its methods are those of `Var`, with PyTorch's shapes beside them."""

    def __init__(self, program, step, shape):
        self.program, self.id, self.shape = program, len(program.steps), list(shape)
        program.steps.append(step)

    def push(self, name, shape, *arguments):
        return V(self.program, [name, self.id, *[a.id if isinstance(a, V) else a for a in arguments]], shape)

    def number(self, value):
        return V(self.program, ["number", numbers(torch.tensor(value, dtype=torch.float64))[0]], [])

    def numbers(self, tensor):
        return leaf(self.program, tensor)

    def of(self, other):
        return other if isinstance(other, V) else self.number(other)

    def axis(self, axis):
        return axis + len(self.shape) if axis < 0 else axis

    def binary(self, name, other):
        other = self.of(other)
        return self.push(name, torch.broadcast_shapes(self.shape, other.shape), other)

    def __add__(self, other):
        return self.binary("add", other)

    def __sub__(self, other):
        return self.binary("sub", other)

    def __mul__(self, other):
        return self.binary("mul", other)

    def __truediv__(self, other):
        return self.binary("div", other)

    def less(self, other):
        return self.binary("less", other)

    def less_equal(self, other):
        return self.binary("less_equal", other)

    def equal(self, other):
        return self.binary("equal", other)

    def maximum(self, other):
        return self.binary("maximum", other)

    def minimum(self, other):
        return self.binary("minimum", other)

    def unary(self, name):
        return self.push(name, self.shape)

    def pow(self, power):
        return self.push("pow", self.shape, power)

    def select(self, yes, no):
        yes, no = self.of(yes), self.of(no)
        return self.push("select", torch.broadcast_shapes(self.shape, yes.shape, no.shape), yes, no)

    def reduced(self, name, axis):
        shape = list(self.shape)
        shape[axis] = 1
        return self.push(name, shape, axis)

    def along(self, name, axis):
        return self.push(name, self.shape, axis)

    def expand(self, shape):
        return self.push("expand", shape, list(shape))

    def reshape(self, shape):
        shape = list(shape)
        if -1 in shape:
            shape[shape.index(-1)] = torch.Size(self.shape).numel() // -torch.Size(shape).numel()
        return self.push("reshape", shape, shape)

    def permute(self, axes):
        axes = [self.axis(axis) for axis in axes]
        return self.push("permute", [self.shape[axis] for axis in axes], axes)

    def transpose(self, a, b):
        axes = list(range(len(self.shape)))
        a, b = self.axis(a), self.axis(b)
        axes[a], axes[b] = axes[b], axes[a]
        return self.push("transpose", [self.shape[axis] for axis in axes], a, b)

    def slice(self, axis, start, end):
        shape = list(self.shape)
        shape[axis] = end - start
        return self.push("slice", shape, axis, start, end)

    def every(self, axis, step):
        shape = list(self.shape)
        shape[axis] = -(-shape[axis] // step)
        return self.push("every", shape, axis, step)

    def windows(self, axis, size, step):
        shape = list(self.shape) + [size]
        axis = self.axis(axis)
        shape[axis] = (shape[axis] - size) // step + 1
        return self.push("windows", shape, axis, size, step)

    def pad(self, axis, before, after):
        shape = list(self.shape)
        shape[axis] += before + after
        return self.push("pad", shape, axis, before, after)

    def concatenate(self, others, axis):
        shape = list(self.shape)
        shape[axis] += sum(other.shape[axis] for other in others)
        return self.push("concatenate", shape, axis, *others)

    def matmul(self, other):
        batch = torch.broadcast_shapes(self.shape[:-2], other.shape[:-2])
        return self.push("matmul", [*batch, self.shape[-2], other.shape[-1]], other)

    def gather(self, axis, index):
        shape = index.shape if len(index.shape) > axis + 1 else [*index.shape, *self.shape[axis + 1:]]
        return self.push("gather", shape, axis, index)

    def rows(self, index):
        return self.push("rows", [*index.shape, *self.shape[1:]], index)

    def pool(self, name, size, stride, *padding):
        after = [(n + 2 * sum(padding) - size) // stride + 1 for n in self.shape[-2:]]
        return self.push(name, [*self.shape[:-2], *after], size, stride, *padding)

    def convolve(self, weight, stride, padding, dilation, groups):
        axes = len(self.shape) - 2
        places = [(n + 2 * p - d * (k - 1) - 1) // s + 1
                  for n, k, s, p, d in zip(self.shape[2:], weight.shape[2:], stride, padding, dilation)]
        sides = [[1] * (2 - axes) + side for side in (list(weight.shape[2:]), stride)] + [
            [0] * (2 - axes) + padding, [1] * (2 - axes) + dilation]
        return self.push("convolve", [self.shape[0], weight.shape[0], *places], weight, *sides, groups)


def leaf(program, tensor):
    program.tensors.append(tensor)
    return V(program, ["tensor", len(program.tensors) - 1], tensor.shape)


# What a user writes for PyTorch's function, by the name of its OpInfo.


def axes_of(x, dim):
    dims = list(range(len(x.shape))) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    return sorted(x.axis(d) for d in dims)


def without(x, axes, keepdim=False):
    return x if keepdim else x.reshape([n for at, n in enumerate(x.shape) if at not in axes])


def reduce(name):
    def body(x, dim=None, keepdim=False, dtype=None):
        axes = axes_of(x, dim) if x.shape else []
        for axis in axes:
            x = x.reduced(name, axis)
        return without(x, axes, keepdim)
    return body


def largest_with_index(name):
    def body(x, dim=None, keepdim=False):
        if dim is None:
            return reduce(name)(x)
        if not x.shape:
            return x, x * 0.0
        axis = x.axis(dim)
        value = x.reduced(name, axis)
        index = x.numbers(torch.arange(x.shape[axis]).reshape([-1] + [1] * (len(x.shape) - axis - 1)))
        first = x.equal(value).select(index, x.number(float(x.shape[axis]))).reduced("smallest", axis)
        return without(value, [axis], keepdim), without(first, [axis], keepdim)
    return body


def matmul(x, y):
    is_row, is_column = len(x.shape) == 1, len(y.shape) == 1
    x = x.reshape([1, *x.shape]) if is_row else x
    y = y.reshape([*y.shape, 1]) if is_column else y
    out = x.matmul(y)
    rows = [] if is_row else [out.shape[-2]]
    return out.reshape(out.shape[:-2] + rows + ([] if is_column else [out.shape[-1]]))


def addmm(acc, x, y, beta=1, alpha=1):
    return acc * beta + x.matmul(y) * alpha


def linear(x, weight, bias=None):
    y = matmul(x, weight.transpose(0, 1) if len(weight.shape) > 1 else weight)
    return y if bias is None else y + bias


def softmax(name):
    return lambda x, dim=None, dtype=None: x.along(name, dim) if x.shape else x * 0.0 + (name == "softmax")


def power(x, y):
    if not isinstance(y, V):
        if isinstance(y, complex) or not isinstance(x, V):
            raise Missing("complex numbers")
        return x.pow(float(y))
    x = x if isinstance(x, V) else y.number(x)
    return (x.unary("log") * y).unary("exp")


def split(x, sizes, dim=0):
    dim = x.axis(dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - at) for at in range(0, x.shape[dim], sizes)]
    ends = [sum(sizes[:at + 1]) for at in range(len(sizes))]
    return [x.slice(dim, end - size, end) for end, size in zip(ends, sizes)]


def concatenate(tensors, dim=0):
    parts = [x for x in tensors if len(x.shape) != 1 or x.shape[0] > 0] or tensors[:1]
    return parts[0].concatenate(parts[1:], parts[0].axis(dim)) if len(parts) > 1 else parts[0]


def stack(tensors, dim=0):
    dim = dim + len(tensors[0].shape) + 1 if dim < 0 else dim
    return concatenate([x.reshape([*x.shape[:dim], 1, *x.shape[dim:]]) for x in tensors], dim)


def squeeze(x, dim=None):
    axes = [axis for axis in (axes_of(x, dim) if x.shape else []) if x.shape[axis] == 1]
    return without(x, axes)


def unsqueeze(x, dim):
    dim = dim + len(x.shape) + 1 if dim < 0 else dim
    return x.reshape([*x.shape[:dim], 1, *x.shape[dim:]])


def expand(x, *shape):
    shape = shape[0] if isinstance(shape[0], (list, tuple, torch.Size)) else shape
    missing = len(shape) - len(x.shape)
    return x.expand([x.shape[at - missing] if n == -1 else n for at, n in enumerate(shape)])


def narrow(x, dim, start, length):
    dim = x.axis(dim)
    start = int(start.value.item()) if isinstance(start, Numbers) else start
    start = start + x.shape[dim] if start < 0 else start
    return x.slice(dim, start, start + length)


def slice_of(x, dim=0, start=None, end=None, step=1):
    start, end, _ = slice(start, end).indices(x.shape[x.axis(dim)])
    y = x.slice(x.axis(dim), start, max(start, end))
    return y if step == 1 else y.every(x.axis(dim), step)


def unfold(x, dim, size, step):
    if not x.shape:
        return x.reshape([1] if size else [1])
    if size == 0:
        raise Missing("windows without elements")
    return x.windows(x.axis(dim), size, step)


def embedding(table, index, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Missing("max_norm, scale_grad_by_freq")
    if padding_idx is not None:
        rows = table.numbers(torch.arange(table.shape[0])).reshape([-1, 1])
        padding = padding_idx % table.shape[0]
        table = rows.equal(padding).select(table.unary("without_gradient"), table)
    return table.rows(index.lift(table))


def gather(x, dim, index, sparse_grad=False):
    shape = index.shape
    if not x.shape or 0 in shape:
        return x.expand(shape) if not x.shape else x.slice(dim, 0, 0).reshape(shape)
    places, dim = index.lift(x).reshape(shape or [1]), x.axis(dim)
    for axis, n in enumerate(places.shape):
        x = x if axis == dim else x.slice(axis, 0, n)
    return x.gather(dim, places).reshape(shape)


def index_select(x, dim, index):
    if not x.shape:
        return x
    dim = x.axis(dim)
    return x.transpose(dim, 0).rows(index.lift(x).reshape([-1])).transpose(dim, 0)


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    # A dropout, `m.dropout("weights", &weights, p)`, comes before the matmul with v: it is checked without.
    if enable_gqa:
        heads, groups = q.shape[-3], k.shape[-3]
        repeat = lambda x: x.reshape([*x.shape[:-3], groups, 1, *x.shape[-2:]]).expand(
            [*x.shape[:-3], groups, heads // groups, *x.shape[-2:]]).reshape([*x.shape[:-3], heads, *x.shape[-2:]])
        k, v = repeat(k), repeat(v)
    scores = q.matmul(k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        past = q.numbers(torch.arange(k.shape[-2])).less_equal(q.numbers(torch.arange(q.shape[-2])).reshape([-1, 1]))
        scores = past.select(scores, scores.number(-1e30))
    if isinstance(attn_mask, Numbers) and attn_mask.value.dtype == torch.bool:
        scores = attn_mask.lift(q).select(scores, scores.number(-1e30))
    elif attn_mask is not None:
        scores = scores + (attn_mask.lift(q) if isinstance(attn_mask, Numbers) else attn_mask)
    return scores.along("softmax", -1).matmul(v)


def rows_norm(x, count, eps, centres):
    """The norm over the last `count` axes, as rows."""
    first = len(x.shape) - count
    rows = x.reshape([*x.shape[:first], torch.Size(x.shape[first:]).numel()])
    rows = rows - rows.reduced("mean", -1) if centres else rows
    scale = ((rows * rows).reduced("mean", -1) + eps).unary("rsqrt")
    return (rows * scale).reshape(x.shape)


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    y = rows_norm(x, len(normalized_shape), eps, True)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x, normalized_shape, weight=None, eps=None):
    y = rows_norm(x, len(normalized_shape), torch.finfo(torch.float64).eps if eps is None else eps, False)
    return y if weight is None else y * weight


def group_norm(x, groups, weight=None, bias=None, eps=1e-5):
    y = rows_norm(x.reshape([x.shape[0], groups, torch.Size(x.shape[1:]).numel() // groups]), 1, eps, True).reshape(x.shape)
    each = [-1] + [1] * (len(x.shape) - 2)
    y = y if weight is None else y * weight.reshape(each)
    return y if bias is None else y + bias.reshape(each)


def per_axis(value, axes):
    return [value] * axes if isinstance(value, int) else list(value) * (axes if len(value) == 1 else 1)


def convolution(axes):
    def body(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        is_batch = len(x.shape) == axes + 2
        x = x if is_batch else x.reshape([1, *x.shape])
        stride, dilation = per_axis(stride, axes), per_axis(dilation, axes)
        if padding == "same":
            for axis in range(axes):
                total = dilation[axis] * (weight.shape[2 + axis] - 1)
                x = x.pad(2 + axis, total // 2, total - total // 2) if total else x
        padding = [0] * axes if isinstance(padding, str) else per_axis(padding, axes)
        y = x.convolve(weight, stride, padding, dilation, groups)
        y = y if bias is None else y + bias.reshape([-1] + [1] * axes)
        return y if is_batch else y.reshape(y.shape[1:])
    return body


def pooled(x, axes, outside, size, stride, padding, dilation, ceil_mode):
    """The windows of the last axes, whose contents are new last axes."""
    first = len(x.shape) - axes
    for axis in range(axes):
        at, n, reach = first + axis, x.shape[first + axis], dilation[axis] * (size[axis] - 1) + 1
        rest = n + 2 * padding[axis] - reach
        places = (-(-rest // stride[axis]) if ceil_mode else rest // stride[axis]) + 1
        places -= (places - 1) * stride[axis] >= n + padding[axis]
        after = max(0, (places - 1) * stride[axis] + reach - n - padding[axis])
        x = padded(x, at, padding[axis], after, outside)
        x = x.slice(at, 0, (places - 1) * stride[axis] + reach).windows(at, reach, stride[axis])
        x = x.every(len(x.shape) - 1, dilation[axis])
    return x


def over_windows(name, x, axes):
    for axis in range(axes):
        x = x.reduced(name, len(x.shape) - 1 - axis)
    return x


def is_square(*settings):
    return all(down == across for down, across in settings)


def max_pool(axes):
    def body(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        size, padding, dilation = (per_axis(value, axes) for value in (kernel_size, padding, dilation))
        stride = per_axis(stride, axes) if stride else size
        if axes == 2 and not (ceil_mode or return_indices) and is_square(size, stride, padding) and dilation == [1, 1]:
            return x.pool("max_pool2d", size[0], stride[0], padding[0])
        of = (size, stride, padding, dilation, ceil_mode)
        windows = pooled(x, axes, float("-inf"), *of)
        largest = over_windows("largest", windows, axes)
        y = largest.reshape(largest.shape[:-axes])
        if not return_indices:
            return y
        image = x.shape[len(x.shape) - axes:]
        index = pooled(x.numbers(torch.arange(torch.Size(image).numel()).reshape(image)), axes, 1e9, *of)
        first = over_windows("smallest", windows.equal(largest).select(index, 1e9), axes)
        return y, first.reshape(y.shape)
    return body


def avg_pool(axes):
    def body(x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        size, padding = per_axis(kernel_size, axes), per_axis(padding, axes)
        stride = per_axis(stride, axes) if stride else size
        if axes == 2 and not ceil_mode and not divisor_override and is_square(size, stride, padding) and padding == [0, 0]:
            return x.pool("avg_pool2d", size[0], stride[0])
        of = (size, stride, padding, [1] * axes, ceil_mode)
        total = over_windows("sum", pooled(x, axes, 0.0, *of), axes)
        total = total.reshape(total.shape[:-axes])
        if divisor_override:
            return total * (1.0 / divisor_override)
        image = x.shape[len(x.shape) - axes:]
        ones = torch.ones(image)
        if count_include_pad:
            ones = torch.nn.functional.pad(ones, [p for p in padding[::-1] for _ in range(2)], value=1.0)
            of = (size, stride, [0] * axes, [1] * axes, ceil_mode)
        counts = over_windows("sum", pooled(x.numbers(ones), axes, 0.0, *of), axes)
        places = total.shape[len(total.shape) - axes:]
        for axis, n in enumerate(places):
            counts = counts.slice(axis, 0, n)
        return total / counts.reshape(places)
    return body


def padded(x, axis, before, after, value):
    if before < 0 or after < 0:
        x = x.slice(axis, max(0, -before), x.shape[axis] - max(0, -after))
        before, after = max(0, before), max(0, after)
    if value == 0.0:
        return x.pad(axis, before, after) if before or after else x
    part = lambda n: x.number(value).expand([*x.shape[:axis], n, *x.shape[axis + 1:]])
    parts = [part(before)] if before else []
    parts += [x] + ([part(after)] if after else [])
    return concatenate(parts, axis)


def pad(x, pad, mode="constant", value=None):
    for at in range(0, len(pad), 2):
        x = padded(x, len(x.shape) - 1 - at // 2, pad[at], pad[at + 1], value or 0.0)
    return x


def cross_entropy(x, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    classes = 0 if len(x.shape) == 1 else 1
    n = x.shape[classes]
    logs = x.along("log_softmax", classes)
    each = [-1] + [1] * (len(x.shape) - classes - 1)
    weight = None if weight is None else (weight.lift(x) if isinstance(weight, Numbers) else weight).reshape(each)
    if isinstance(target, Numbers) and not target.value.is_floating_point():
        places = target.lift(x)
        places = places.reshape([*places.shape[:classes], 1, *places.shape[classes:]])
        chosen = places.equal(x.numbers(torch.arange(n).reshape(each)))
        counts = x.number(1.0) - places.equal(float(ignore_index))
        chosen = chosen * counts
    else:
        chosen = target.lift(x) if isinstance(target, Numbers) else target
        counts = None
    each_class = chosen * (1 - label_smoothing) + (counts if counts is not None else x.number(1.0)) * (label_smoothing / n)
    of_class = each_class if weight is None else each_class * weight
    loss = (of_class * logs).reduced("sum", classes) * -1.0
    loss = loss.reshape([m for at, m in enumerate(loss.shape) if at != classes])
    if reduction == "none":
        return loss
    total = loss
    for axis in range(len(loss.shape)):
        total = total.reduced("sum", axis)
    total = total.reshape([])
    if reduction == "sum":
        return total
    if counts is None:
        return total * (1.0 / max(1, torch.Size(loss.shape).numel()))
    weights = chosen if weight is None else chosen * weight
    for axis in range(len(weights.shape)):
        weights = weights.reduced("sum", axis)
    return total / weights.reshape([])


class Numbers:
    """A tensor without a gradient, which a formula has as numbers."""

    def __init__(self, value):
        self.value, self.shape = value, list(value.shape)

    def lift(self, like):
        return like.numbers(self.value)


def lifted(function):
    """With numbers as values, as most functions take them."""
    def body(x, *args, **kwargs):
        values = [v for v in (x, *args, *kwargs.values()) if isinstance(v, V)]
        lift = lambda v: v.lift(values[0]) if isinstance(v, Numbers) else v
        return function(lift(x), *map(lift, args), **{name: lift(v) for name, v in kwargs.items()})
    return body


def unary(name):
    return lambda x: x.unary(name)


def comparison(name, swaps=False, negates=False):
    def body(x, y):
        y = x.of(y)
        value = getattr(y if swaps else x, name)(x if swaps else y)
        return x.number(1.0) - value if negates else value
    return lifted(body)


def arithmetic(name):
    return lifted(lambda x, y, alpha=1: getattr(x, name)(y if alpha == 1 else x.of(y) * alpha))


OPERATIONS = {
    "add": arithmetic("__add__"), "sub": arithmetic("__sub__"), "mul": arithmetic("__mul__"),
    "div.no_rounding_mode": lifted(lambda x, y, rounding_mode=None: x / y), "true_divide": arithmetic("__truediv__"),
    "rsub": lifted(lambda x, y, alpha=1: x.of(y) - (x if alpha == 1 else x * alpha)),
    "neg": unary("neg"), "abs": unary("abs"), "exp": unary("exp"), "log": unary("log"), "sqrt": unary("sqrt"),
    "rsqrt": unary("rsqrt"), "tanh": unary("tanh"), "sigmoid": unary("sigmoid"), "square": lambda x: x * x,
    "nn.functional.silu": lambda x, inplace=False: x.unary("silu"),
    "nn.functional.relu": lambda x, inplace=False: x.unary("relu"),
    "nn.functional.gelu": lambda x, approximate="none": x.unary("gelu_tanh" if approximate == "tanh" else "gelu"),
    "pow": lifted(power), "float_power": lifted(power),
    "maximum": lifted(V.maximum), "minimum": lifted(V.minimum), "max.binary": lifted(V.maximum), "min.binary": lifted(V.minimum),
    "lt": comparison("less"), "le": comparison("less_equal"), "eq": comparison("equal"),
    "gt": comparison("less", swaps=True), "ge": comparison("less_equal", swaps=True), "ne": comparison("equal", negates=True),
    "where": lambda x, condition, y: condition.lift(x if isinstance(x, V) else y).select(x, y),
    "masked_fill": lambda x, mask, value: mask.lift(x).select(value.lift(x) if isinstance(value, Numbers) else value, x),
    "sum": reduce("sum"), "mean": reduce("mean"), "amax": reduce("largest"), "amin": reduce("smallest"),
    "max.reduction_no_dim": reduce("largest"), "min.reduction_no_dim": reduce("smallest"),
    "max.reduction_with_dim": largest_with_index("largest"), "min.reduction_with_dim": largest_with_index("smallest"),
    "softmax": softmax("softmax"), "softmax.with_dtype": softmax("softmax"),
    "log_softmax": softmax("log_softmax"), "log_softmax.with_dtype": softmax("log_softmax"),
    "matmul": lifted(matmul), "mm": lifted(matmul), "bmm": lifted(matmul), "addmm": lifted(addmm), "nn.functional.linear": lifted(linear),
    "reshape": lambda x, *shape: x.reshape(shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape),
    "view": lambda x, *shape: x.reshape(shape[0] if shape and isinstance(shape[0], (tuple, list)) else shape),
    "transpose": lambda x, a, b: x.transpose(a, b) if x.shape else x,
    "permute": lambda x, *axes: x.permute(axes[0] if axes and isinstance(axes[0], (tuple, list)) else axes),
    "T": lambda x: x.permute(range(len(x.shape))[::-1]), "mT": lambda x: x.transpose(-1, -2),
    "squeeze": squeeze, "squeeze.multiple": squeeze, "unsqueeze": unsqueeze, "expand": expand,
    "slice": slice_of, "narrow": narrow, "split": split, "split.list_args": split, "unfold": unfold,
    "chunk": lambda x, n, dim=0: split(x, -(-x.shape[dim] // n), dim),
    "cat": concatenate, "stack": stack,
    "nn.functional.embedding": embedding, "gather": gather, "index_select": index_select,
    "nn.functional.scaled_dot_product_attention": attention,
    "nn.functional.layer_norm": lifted(layer_norm), "nn.functional.rms_norm": lifted(rms_norm), "nn.functional.group_norm": lifted(group_norm),
    "nn.functional.conv1d": lifted(convolution(1)), "nn.functional.conv2d": lifted(convolution(2)),
    "nn.functional.max_pool1d": max_pool(1), "nn.functional.max_pool2d": max_pool(2),
    "nn.functional.avg_pool1d": avg_pool(1), "nn.functional.avg_pool2d": avg_pool(2),
    "nn.functional.pad.constant": pad, "nn.functional.cross_entropy": cross_entropy,
}


def numbers(values):
    return [float(f"{v:.13g}") if v == v and abs(v) < float("inf") else str(v) for v in values.detach().double().flatten().tolist()]


def expressed(name, op, sample):
    """The sample as a program with its values and gradients."""
    program, trained = Program(), []

    def value(it):
        if isinstance(it, torch.Tensor):
            if not it.requires_grad:
                return Numbers(it.detach())
            trained.append((len(program.tensors), it))
            return leaf(program, it)
        return type(it)(map(value, it)) if isinstance(it, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in it) else it

    args = [value(it) for it in (sample.input, *sample.args)]
    kwargs = {key: value(it) for key, it in sample.kwargs.items()}
    if not any(isinstance(v, V) for v in [*args, *kwargs.values(), *(args[0] if isinstance(args[0], (list, tuple)) else [])]):
        raise Missing("no value with a gradient")
    if "dropout_p" in sample.kwargs:
        sample.kwargs["dropout_p"] = 0.0
    here = OPERATIONS[name](*args, **kwargs)
    here = list(here) if isinstance(here, (list, tuple)) else [here]
    there = op(sample.input, *sample.args, **sample.kwargs)
    there = list(there) if isinstance(there, (list, tuple)) else [there]
    weights = [torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape) for y in there]
    loss = sum((y.double() * w).sum() for y, w in zip(there, weights))
    gradients = torch.autograd.grad(loss, [x for _, x in trained], allow_unused=True) if loss.requires_grad else [None] * len(trained)
    zeros = lambda x, gradient: torch.zeros_like(x) if gradient is None else gradient
    return dict(
        name=name, steps=program.steps, outputs=[y.id for y in here], shapes=[list(y.shape) for y in there],
        tensors=[dict(shape=list(x.shape), values=numbers(x), trains=any(at == i for i, _ in trained))
                 for at, x in enumerate(program.tensors)],
        y=[v for y in there for v in numbers(y)], dy=[v for w in weights for v in numbers(w)],
        gradients={str(at): numbers(zeros(x, gradient)) for (at, x), gradient in zip(trained, gradients)})


def main():
    torch.manual_seed(0)
    everything, samples, missing = 0, [], {}
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if name not in OPERATIONS:
            continue
        of_op = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
        for sample in of_op[:: -(-len(of_op) // SAMPLES_MAX)]:
            everything += 1
            try:
                samples.append(expressed(name, op, sample))
            except Exception as reason:
                missing.setdefault(f"{name}: {reason}", []).append(sample)
    for reason, of in missing.items():
        print(f"{len(of):4} not expressed: {reason}", file=sys.stderr)
    print(f"{len(samples)} of {everything} samples of {len(OPERATIONS)} operations expressed", file=sys.stderr)
    if "--all" not in sys.argv:
        size = lambda sample: len(sample["y"]) + sum(len(t["values"]) for t in sample["tensors"])
        samples = [sample for sample in samples if size(sample) <= 120]
    print("[\n" + ",\n".join(map(json.dumps, samples)) + "\n]")


main()
