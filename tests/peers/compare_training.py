"""Training steps of ddp-train beside PyTorch's, taken in turn on the same pinned cores. Prints a table in Markdown.

    python tests/peers/compare_training.py --ours target/release/ddp-train --peer MLP_TORCH.py --startup-peer STARTUP_TORCH.py

MLP_TORCH.py takes --batch --threads --rounds --seconds (and runs as ranks under torchrun) and prints one JSON line with
samples_per_s; STARTUP_TORCH.py prints one with first_step_s and peak_mb. Every round takes each side once; what is quoted is the
median of the rounds, and of the ratios within a round. "Tuned" is PyTorch with a malloc that keeps its memory.
"""
import argparse, json, os, statistics, subprocess, sys

p = argparse.ArgumentParser()
p.add_argument("--ours", required=True)
p.add_argument("--peer", required=True)
p.add_argument("--startup-peer", required=True)
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--seconds", type=float, default=4.0)
a = p.parse_args()

KEEP = {"MALLOC_TOP_PAD_": str(1 << 28), "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
TORCHRUN = os.path.join(os.path.dirname(sys.executable), "torchrun")


def line(command, env=None):
    done = subprocess.run(command, env={**os.environ, **ROOT, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return json.loads([l for l in done.stdout.splitlines() if l.startswith("{")][-1])


def ours(ranks, batch, threads):
    bench = [a.ours, "bench", "mlp", "--batch", str(batch), "--threads", str(threads), "--device", "cpu",
             "--rounds", "3", "--seconds", str(a.seconds)]
    return line((["mpirun", "-n", str(ranks)] if ranks > 1 else []) + bench)


def theirs(ranks, batch, threads, env):
    peer = [a.peer, "--batch", str(batch), "--threads", str(threads), "--rounds", "3", "--seconds", str(a.seconds / 3)]
    start = [TORCHRUN, "--nproc_per_node", str(ranks)] if ranks > 1 else ["taskset", "-c", f"0-{threads - 1}", sys.executable]
    return line(start + peer, env)


median = statistics.median
print("| ranks × threads | global batch | ours, samples/s | PyTorch as it comes | tuned | ours / as it comes | ours / tuned | hidden share |")
print("|---|---|---|---|---|---|---|---|")
for ranks, batch, threads in [(1, 128, 2), (1, 1024, 2), (2, 128, 1), (2, 1024, 1)]:
    rows = []
    for _ in range(a.rounds):
        mine = ours(ranks, batch, threads)
        rows.append((mine["samples_per_s"], theirs(ranks, batch, threads, None)["samples_per_s"],
                     theirs(ranks, batch, threads, KEEP)["samples_per_s"], mine["hidden_share"]))
    mine, plain, tuned, hidden = zip(*rows)
    ratios = [median(m / t for m, t in zip(mine, side)) for side in (plain, tuned)]
    hidden = "" if hidden[0] is None else f"{median(hidden):.0%}"
    print(f"| {ranks} × {threads} | {batch} | {median(mine):,.0f} | {median(plain):,.0f} | {median(tuned):,.0f} | "
          f"{ratios[0]:.2f} | {ratios[1]:.2f} | {hidden} |", flush=True)

reduced = [line(["mpirun", "-n", "2", a.ours, "bench", "allreduce", "--mb", "7.4", "--seconds", "2"])["ms"] for _ in range(a.rounds)]
print(f"\nall-reduce of 7.4 MB between two ranks: {median(reduced):.2f} ms (of {a.rounds} runs: {min(reduced):.2f} to {max(reduced):.2f})")
starts = []
for _ in range(a.rounds):
    mine = line([a.ours, "bench", "mlp", "--batch", "128", "--threads", "2", "--device", "cpu", "--seconds", "0.1", "--rounds", "1"])
    peer = line(["taskset", "-c", "0-1", sys.executable, a.startup_peer])
    starts.append((mine["first_step_s"], mine["first_step_mb"], peer["first_step_s"], peer["peak_mb"]))
mine_s, mine_mb, peer_s, peer_mb = (median(column) for column in zip(*starts))
print(f"process start to first step finished, batch 128: {mine_s:.2f} s and {mine_mb:.0f} MB; PyTorch {peer_s:.2f} s and {peer_mb:.0f} MB")
