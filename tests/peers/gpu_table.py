"""The report of `launch/gpu-check`, as Markdown: how many steps passed, figures as medians over the rounds, ours beside PyTorch's, what
this project aims at and whether it was reached, and why steps did not pass.

python tests/peers/gpu_table.py FOLDER      with parts, steps.tsv, versions.txt and logs/, as gpu-check makes them
"""
import json
import pathlib
import re
import statistics
import sys

# Targets on one H200-class GPU: the speed of a small step relative to PyTorch's, and the share of
# its matmuls in a large step.
AIM_EAGER, AIM_COMPILED, AIM_MATMUL_SHARE = 3.0, 1.5, 0.8

HOWS = ("eager", "compiled", "graph", "compiled graph")

# How much of failed steps' logs to show: the rest is in logs.tgz.
LOGS_MAX, LINES_MAX = 6, 12


def lines(path):
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                pass  # the last line of a program that was ended


def collect(folder, pattern):
    """The figures of each case over all logs whose names match."""
    cases, units = {}, {}
    for path in sorted(folder.glob(pattern)):
        for entry in lines(path):
            if "value" in entry:
                cases.setdefault(entry["case"], []).append(entry["value"])
                units[entry["case"]] = entry["unit"]
    return {case: statistics.median(values) for case, values in cases.items()}, units


class Steps:
    """What `bench mlp` printed of one model, captured or not: medians over the rounds."""

    def __init__(self, entries):
        median = lambda field: statistics.median(values) if (values := [e[field] for e in entries if e.get(field) is not None]) else None
        self.us = median("step_ms") * 1e3
        self.tflops = median("tflops")
        self.optimizer_us = median("optimizer_ms") * 1e3
        self.optimizer_share = median("optimizer_share")
        self.memory_mb = median("device_peak_mb")


def steps(folder):
    """By name as PyTorch's side has it, and by whether they were captured."""
    cases = {}
    for path in sorted(folder.glob("mlp-*.log")):
        for entry in lines(path):
            if entry.get("step_ms") is not None:
                name = "large" if entry["layers"].startswith("8192,") else f"small {entry['batch']}"
                cases.setdefault((f"{name} {entry['dtype']}", entry["graph"]), []).append(entry)
    return {case: Steps(entries) for case, entries in cases.items()}


def matmuls(folder):
    """TFLOP/s of `bench addmm`, by dtype and shape."""
    cases = {}
    for path in sorted(folder.glob("addmm-*.log")):
        for entry in lines(path):
            if entry.get("tflop_per_s") is not None:
                cases.setdefault(f"addmm {entry['dtype']} {entry['shape']}", []).append(entry["tflop_per_s"])
    return {case: statistics.median(values) for case, values in cases.items()}


def print_operations(ours, theirs, units):
    print("| case | ours | PyTorch | unit | ours is faster by |")
    print("|---|---|---|---|---|")
    for case, value in ours.items():
        other = theirs.get(case)
        ratio = None if other is None else (other / value if units[case] == "us" else value / other)
        shown = [f"{value:.4g}", "" if other is None else f"{other:.4g}", units[case], "" if ratio is None else f"{ratio:.2f}"]
        print(f"| {case} | {' | '.join(shown)} |")
    copy = ours.get("copy")
    if copy and "adamw" in ours:
        print(f"\nadamw reaches {100 * ours['adamw'] / copy:.0f}% of the copy's bandwidth.")


def print_matmuls(rates):
    if not rates:
        return
    print("\n| matmul with bias, as layers call it | TFLOP/s |")
    print("|---|---|")
    for case, rate in rates.items():
        print(f"| {case} | {rate:.4g} |")


def print_steps(ours, theirs):
    print("\n| training step | ours, us | TFLOP/s | of it AdamW, us | memory, MB |"
          " PyTorch eager, us (ratio) | compiled | CUDA graph | compiled, CUDA graph | ratio to its best | its memory, eager, MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (name, is_captured), step in sorted(ours.items(), key=lambda case: (case[0][1], case[0][0])):
        others = [theirs.get(f"mlp {name} {how}") for how in HOWS]
        cells = ["" if other is None else f"{other:.1f} ({other / step.us:.2f})" for other in others]
        known = [other for other in others if other is not None]
        cells.append(f"{min(known) / step.us:.2f}" if known else "")
        memory = theirs.get(f"mlp {name} eager memory")
        cells.append("" if memory is None else f"{memory:.0f}")
        own = [f"{step.us:.1f}", f"{step.tflops:.1f}", f"{step.optimizer_us:.1f} ({100 * step.optimizer_share:.0f}%)"]
        own.append("" if step.memory_mb is None else f"{step.memory_mb:.0f}")
        print(f"| {name}, {'captured' if is_captured else 'eager'} | {' | '.join(own + cells)} |")


def aims(ours, theirs, rates):
    """What is aimed at, what was reached, and whether that is enough; none where it was not measured."""
    small = ours.get(("small 128 f32", True))
    for how, aim in (("eager", AIM_EAGER), ("compiled", AIM_COMPILED)):
        other = theirs.get(f"mlp small 128 f32 {how}")
        ratio = other / small.us if small and other else None
        yield f"small MLP, batch 128, f32, captured: {aim} times as fast as PyTorch {how}", ratio, aim
    large = [step.tflops for (name, _), step in ours.items() if name == "large bf16"]
    matmul = rates.get("addmm bf16 8192x8192x8192")
    share = max(large) / matmul if large and matmul else None
    yield f"large MLP in bf16: {100 * AIM_MATMUL_SHARE:.0f}% of the rate of its matmuls alone", share, AIM_MATMUL_SHARE


def print_aims(ours, theirs, rates):
    print("\n| aim | reached | |")
    print("|---|---|---|")
    for what, reached, aim in aims(ours, theirs, rates):
        verdict = "not measured" if reached is None else "pass" if reached >= aim else "FAIL"
        print(f"| {what} | {'' if reached is None else f'{reached:.2f}'} | {verdict} |")


def print_gpt(folder, theirs):
    """Steps of GPT-2 beside PyTorch's; its nodes."""
    steps = {how: entry for how in ("on", "off") for entry in lines_of(folder, f"gpt-{how}") if "step_ms" in entry}
    if steps:
        print("\n| GPT-2 124M, bf16, batch 32 | ms | tokens/s | memory, MB | PyTorch eager, ms (ratio) | compiled |")
        print("|---|---|---|---|---|---|")
    for how, entry in steps.items():
        others = [theirs.get(f"gpt2 124M batch 32 bf16 {peer}") for peer in ("eager", "compiled")]
        cells = ["" if other is None else f"{other:.2f} ({other / entry['step_ms']:.2f})" for other in others]
        name = "captured" if entry.get("graph") else "eager"
        print(f"| {name} | {entry['step_ms']:.2f} | {entry.get('tokens_per_s', '')} | {entry.get('device_peak_mb', '')} | {' | '.join(cells)} |")
    print_nodes([entry for entry in lines_of(folder, "nodes") if "node" in entry and entry.get("ms")])
    clocks = folder / "clocks.log"
    if clocks.exists():
        rows = [row.split() for row in clocks.read_text(errors="replace").splitlines() if row.strip() and not row.startswith("#")]
        # The second column is power; the last two, after temperatures that may be "-", are clocks.
        numbers = [[float(cell) for cell in (row[1], *row[-2:])] for row in rows if len(row) > 3 and "-" not in (row[1], *row[-2:])]
        if numbers:
            watts, memory, cores = map(statistics.median, zip(*numbers))
            lowest = min(row[2] for row in numbers)
            print(f"\nMeanwhile: {watts:.0f} W, memory at {memory:.0f} MHz, cores at {cores:.0f} MHz, {lowest:.0f} at least (medians of {len(numbers)} s).")


def lines_of(folder, name):
    path = folder / f"{name}.log"
    return list(lines(path)) if path.exists() else []


def groups_of(nodes):
    """Nodes of one operation and name together: how many, ms, and the medians of their rates."""
    groups = {}
    for node in nodes:
        groups.setdefault((node["op"], node["name"]), []).append(node)
    return {key: (len(of), sum(node["ms"] for node in of), of) for key, of in groups.items()}


def print_nodes(nodes):
    if not nodes:
        return
    print("\n| nodes of an eager step | how many | ms | GB/s | of the copy | TFLOP/s | of the matmul |\n|---|---|---|---|---|---|---|")
    for (op, name), (count, ms, of) in sorted(groups_of(nodes).items(), key=lambda it: -it[1][1])[:40]:
        median = lambda field: f"{statistics.median(known):.3g}" if (known := [node[field] for node in of if node[field] is not None]) else ""
        print(f"| {op}: {name} | {count} | {ms:.3f} | {' | '.join(map(median, ('gb_per_s', 'of_copy', 'tflop_per_s', 'of_matmul')))} |")


def print_collectives(folder):
    rows = [entry for path in sorted(folder.glob("collectives-*.log")) for entry in lines(path) if "bus_gb_per_s" in entry]
    if rows:
        print("\n| collective | ranks | bytes | us | algorithm GB/s | bus GB/s |")
        print("|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["operation"], row["ranks"], row["bytes"], row["time_us"], row["alg_gb_per_s"], row["bus_gb_per_s"]]
        print(f"| {' | '.join(str(cell) for cell in cells)} |")


def print_agreement(folder):
    log = folder / "agree.log"
    if log.exists():
        text = log.read_text(errors="replace").strip().splitlines()
        failed = [line for line in text if line.startswith("FAILED")]
        print("\nTrainings of 1, 2 and 4 ranks (gpu_ranks.py): " + (text[-1] if text else "nothing was compared") + ".")
        for line in failed:
            print(f"- {line}")


class GpuStep:
    """A step of gpu-check, as it wrote it down."""

    def __init__(self, line):
        self.part, self.title, log, self.outcome, seconds = line.split("\t")
        self.log, self.seconds = f"{log}.log", int(seconds)

    def is_failed(self):
        return self.outcome.startswith("FAILED")


def print_parts(parts, gpu_steps):
    kinds = (("passed", "passed"), ("FAILED", "failed"), ("ended", "ended early"), ("not run", "not run"))
    print("| part | " + " | ".join(name for _, name in kinds) + " | seconds |")
    print("|---|---|---|---|---|---|")
    for part in parts:
        own = [step for step in gpu_steps if step.part == part]
        counts = [sum(step.outcome.startswith(kind) for step in own) for kind, _ in kinds]
        cells = [str(count or "") for count in counts] if own else ["", "", "", "all"]
        print(f"| {part} | {' | '.join(cells)} | {sum(step.seconds for step in own)} |")


def print_unpassed(gpu_steps):
    unpassed = [step for step in gpu_steps if step.outcome != "passed"]
    if unpassed:
        print("\n| part | step that did not pass | | s |")
        print("|---|---|---|---|")
    for step in sorted(unpassed, key=lambda step: not step.is_failed()):
        print(f"| {step.part} | {step.title} | {step.outcome} | {step.seconds} |")


def print_logs(folder, gpu_steps):
    """What the logs of failed steps end with, after the tests that failed or did not end."""
    failed = [step for step in gpu_steps if step.is_failed()]
    for step in failed[:LOGS_MAX]:
        path = folder / "logs" / step.log
        text = path.read_text(errors="replace") if path.exists() else ""
        print(f"\n{step.title}, logs/{step.log}:\n\n```text")
        print("\n".join([f"failed: {name}" for name in failed_tests(text)] + text.splitlines()[-LINES_MAX:]))
        print("```")
    if len(failed) > LOGS_MAX:
        print(f"\nLogs of {len(failed) - LOGS_MAX} more failed steps are in logs.tgz.")


def failed_tests(text):
    return re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M) + [
        f"{name}, which ran for over a minute and had no end" for name in re.findall(r"^test (\S+) has been running for over", text, re.M)
        if not re.search(rf"^test {re.escape(name)} \.\.\. ", text, re.M)
    ]


def print_skipped(folder):
    """What tests could not do here, each with how many said so."""
    counts = {}
    for path in (folder / "logs").glob("*.log"):
        for why in re.findall(r"^skipped: (.*)", path.read_text(errors="replace"), re.M):
            counts[why] = counts.get(why, 0) + 1
    if counts:
        print("\nSkipped inside steps: " + "; ".join(f"{why} ({count})" for why, count in sorted(counts.items())) + ".")


def main(folder):
    folder = pathlib.Path(folder)
    logs, path = folder / "logs", folder / "steps.tsv"
    gpu_steps = [GpuStep(line) for line in path.read_text().splitlines()] if path.exists() else []
    print("# gpu-check\n\n```text")
    print((folder / "versions.txt").read_text(errors="replace").strip())
    print("```\n")
    print_parts((folder / "parts").read_text().split(), gpu_steps)
    print_unpassed(gpu_steps)
    print_skipped(folder)
    print_agreement(logs)
    print_logs(folder, gpu_steps)
    ours, units = collect(logs, "ours-*.log")
    theirs, more_units = collect(logs, "torch-*.log")
    units |= more_units
    our_steps, rates = steps(logs), matmuls(logs)
    print_gpt(logs, theirs)
    print()
    if ours or our_steps or rates:
        print_operations(ours, theirs, units)
        print_matmuls(rates)
        print_steps(our_steps, theirs)
        print_aims(our_steps, theirs, rates)
        print_collectives(logs)
    else:
        print("No figures: the GPU is simulated, or nothing was measured.")


if __name__ == "__main__":
    main(*sys.argv[1:])
