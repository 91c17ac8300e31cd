"""Our operations and PyTorch's in turn, as a table in Markdown: medians over the rounds, and the ratio.

python tests/peers/compare.py [--rounds 3] [--threads 2] [--filter NAME]     (with a Python that has torch)
Run it on a machine that does nothing else.
"""
import argparse, json, platform, statistics, subprocess, sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--filter", default="")
arguments = parser.parse_args()
here = Path(__file__).resolve().parent
root = here.parent.parent
ours = ["cargo", "bench", "-q", "--locked", "-p", "ddp-kernels", "--bench", "ops", "--",
        "--json", "--threads", str(arguments.threads)] + ([arguments.filter] if arguments.filter else [])
theirs = [sys.executable, str(here / "ops_torch.py"), "--threads", str(arguments.threads), "--filter", arguments.filter]


def lines(command):
    output = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


figures, units, shares, versions = {}, {}, {}, set()
for _ in range(arguments.rounds):
    for who, command in (("ours", ours), ("torch", theirs)):
        for line in lines(command):
            figures.setdefault(line["name"], {"ours": [], "torch": []})[who].append(line["figure"])
            units[line["name"]] = line["unit"]
            for of, share in line.get("shares", {}).items():
                shares.setdefault((line["name"], of), []).append(share)
            if "version" in line:
                versions.add(line["version"])

model = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), platform.machine())
print(f"{model}, {arguments.threads} pinned threads, PyTorch {', '.join(versions)}, {arguments.rounds} rounds in turn.\n")
print("| operation | ours | PyTorch | ours / PyTorch | share of the limit |")
print("|---|---|---|---|---|")
for name, both in figures.items():
    mine = statistics.median(both["ours"]) if both["ours"] else None
    peer = statistics.median(both["torch"]) if both["torch"] else None
    if mine is None:
        continue
    share = lambda of: f"{statistics.median(shares[name, of]):.0%}" if (name, of) in shares else ""
    limit = share("the multiply-adds") or share("a copy in turn")
    ratio = f"{mine / peer:.2f}" if peer else ""
    print(f"| {name} | {mine:.1f} {units[name]} | {f'{peer:.1f}' if peer else ''} | {ratio} | {limit} |")
