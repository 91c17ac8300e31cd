#!/usr/bin/env python3
"""Measures what docs/elastic.md says that a lost rank costs.

usage: tests/evidence/lost_ranks.py PROGRAM losses RANKS [FLAGS…]
       tests/evidence/lost_ranks.py PROGRAM idle [FLAGS…]

losses  kills ten ranks of a job, one after the other, and prints how many seconds later the others
        were about to take the next step, and how many later the rank that was started again took part
idle    trains in pairs, without --min-ranks and with it, and prints how much longer a step takes
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SMALL = "--data glyphs,rows=8192,held-out=256 --hidden 256,256 --batch-size 256 --same-bits 8"
LARGE = "--data glyphs,rows=8192 --hidden 1024,1024 --batch-size 512 --steps 240 --ranks 2"
QUIET = ["--threads", "1", "--progress", "never", "--log-level", "error"]
KILLS, PAIRS, LIMIT_S = 10, 11, 60


def events(out):
    """The events of a metrics log; the last line may be half written."""
    try:
        lines = open(f"{out}/metrics.jsonl").read().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def wait_for(found):
    began = time.time()
    while not (value := found()):
        if time.time() - began > LIMIT_S:
            sys.exit("nothing happened for a minute")
        time.sleep(0.005)
    return value


def losses(program, ranks, flags):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        words = [*SMALL.split(), *QUIET, "--ranks", ranks, "--min-ranks", "1", "--restarts", "1000", *flags]
        words += ["--log-every", "1", "--steps", "1000000", "--out", out]
        job = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)
        wait_for(lambda: any(it["event"] == "step" for it in events(out)))
        continued, joined = [], []
        for _ in range(KILLS):
            time.sleep(1)
            count = len([it for it in events(out) if it["event"] == "ranks"])
            children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True, check=True)
            killed = time.time()
            os.kill(int(random.choice(children.stdout.split())), signal.SIGKILL)

            def changes(kind):
                new = [it for it in events(out) if it["event"] == "ranks"][count:]
                return next((it["time_unix_s"] - killed for it in new if it[kind]), None)

            continued.append(wait_for(lambda: changes("lost")))
            joined.append(wait_for(lambda: changes("joined")))
        job.terminate()
        job.wait()
    for name, times in ("continued", continued), ("joined", joined):
        print(f"{name}: {min(times):.2f} to {max(times):.2f} s, median {statistics.median(times):.2f} s")


def idle(program, flags):
    ratios = []
    for pair in range(PAIRS):
        seconds = [0, 0]
        # In turns: the second run of a pair may find a faster machine.
        for which in [0, 1] if pair % 2 else [1, 0]:
            words = ["--min-ranks", "1"] if which else []
            with tempfile.TemporaryDirectory() as folder:
                command = [program, *LARGE.split(), *QUIET, *words, *flags, "--out", f"{folder}/out"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seconds[which] = events(f"{folder}/out")[-1]["seconds"]
        ratios.append(100 * (seconds[1] / seconds[0] - 1))
    print(f"median {statistics.median(ratios):+.1f}%, from {min(ratios):+.1f}% to {max(ratios):+.1f}%")


def main():
    match sys.argv[1:]:
        case [program, "losses", ranks, *flags]:
            losses(program, ranks, flags)
        case [program, "idle", *flags]:
            idle(program, flags)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
