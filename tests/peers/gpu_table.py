"""The table of `launch/gpu-check`: medians over the rounds that lie in a folder of logs, ours beside PyTorch's, as Markdown.

python tests/peers/gpu_table.py RESULTS
"""
import json
import pathlib
import statistics
import sys


def lines(path):
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def collect(folder, pattern):
    """The figures of each case over all logs whose names match."""
    cases, units = {}, {}
    for path in sorted(folder.glob(pattern)):
        for entry in lines(path):
            if "value" in entry:
                cases.setdefault(entry["case"], []).append(entry["value"])
                units[entry["case"]] = entry["unit"]
    return {case: statistics.median(values) for case, values in cases.items()}, units


def steps(folder):
    """Microseconds of a step of the trainer's bench, by batch and graph."""
    cases = {}
    for path in sorted(folder.glob("mlp-*.log")):
        _, batch, graph, _ = path.stem.split("-")
        for entry in lines(path):
            if entry.get("step_ms") is not None:
                how = "captured" if graph == "on" else "eager"
                cases.setdefault(f"mlp {batch} {how}", []).append(entry["step_ms"] * 1e3)
    return {case: statistics.median(values) for case, values in cases.items()}


def main(folder):
    folder = pathlib.Path(folder)
    print("```text")
    print((folder / "versions.txt").read_text(errors="replace").strip())
    print("```\n")
    ours, units = collect(folder, "ours-*.log")
    theirs, more_units = collect(folder, "torch-*.log")
    units |= more_units
    rate = lambda unit: unit != "us"
    if not ours:
        print("No figures: the GPU is simulated, or the bench failed.")
        return
    print("| case | ours | PyTorch | unit | ours is faster by |")
    print("|---|---|---|---|---|")
    for case, value in ours.items():
        other = theirs.get(case)
        ratio = None if other is None else (value / other if rate(units[case]) else other / value)
        shown = [f"{value:.4g}", "" if other is None else f"{other:.4g}", units[case], "" if ratio is None else f"{ratio:.2f}"]
        print(f"| {case} | {' | '.join(shown)} |")
    copy = ours.get("copy")
    if copy and "adamw" in ours:
        print(f"\nadamw reaches {100 * ours['adamw'] / copy:.0f}% of the copy's bandwidth.\n")
    print("| training step, us | ours | PyTorch eager | compiled | CUDA graph |")
    print("|---|---|---|---|---|")
    for case, value in steps(folder).items():
        batch = case.split()[1]
        others = [theirs.get(f"mlp {batch} {how}") for how in ("eager", "compiled", "graph")]
        cells = ["" if other is None else f"{other:.1f} ({other / value:.2f})" for other in others]
        print(f"| {case} | {value:.1f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
