#!/usr/bin/env python3
"""Measures what digests, with all else that is logged of a step, cost at the default --log-every.

usage: tests/evidence/digest_cost.py [PROGRAM]

PROGRAM is ddp-train as released (default: target/release/ddp-train). Each model trains the same
steps twice, in turns: with every step logged, and with only the last. The difference of user CPU
times, by steps, is the price of a logged step; one in ten is logged by default. Both clip, so that
both have the norm of the gradients in every step; the line of the log is counted with the digests.
Of each pair of runs the ratio is taken, and of all pairs the median. Exits with 1 if a median is
over 1%.
"""

import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

PAIRS = 5
DEFAULT_LOG_EVERY = 10
PERCENT_MAX = 1.0
# Name, steps, and flags.
CASES = [
    ("perceptron 784-1024-1024-10, batch 128", 300, "--data glyphs,rows=8192,held-out=0 --hidden 1024,1024 --batch-size 128"),
    (
        "gpt, 2 layers of 128, batch 8, context 128",
        150,
        "--data {text} --model gpt,layers=2,heads=4,width=128,context=128 --batch-size 8",
    ),
]


def user_seconds(program, folder, words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    ended = subprocess.run([program, *words.split()], cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"{program} {words}: exit code {ended.returncode}\n{ended.stderr}")
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def percent(program, steps, flags):
    """What logging every tenth step adds to a step, in percent: of each pair of runs."""
    found = []
    for number in range(PAIRS):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder, "text.txt")
            text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
            words = f"{flags.format(text=text)} --steps {steps} --threads 1 --device cpu --seed {number}"
            words += " --eval-every 0 --checkpoint-every 0 --progress never --log-level error --grad-clip 1e9"
            # What both do besides steps: start, and the initial weights' digests.
            starts = user_seconds(program, folder, f"{words.replace(f'--steps {steps}', '--steps 1')} --out start")
            logged = user_seconds(program, folder, f"{words} --out logged --log-every 1")
            plain = user_seconds(program, folder, f"{words} --out plain --log-every {steps}")
            found.append((logged - plain) / (plain - starts) / DEFAULT_LOG_EVERY * 100)
    return found


def main():
    program = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/release/ddp-train").resolve()
    is_over = False
    for name, steps, flags in CASES:
        found = percent(program, steps, flags)
        median = statistics.median(found)
        is_over |= median > PERCENT_MAX
        each = ", ".join(f"{one:.2f}" for one in found)
        print(f"{name}: {median:.2f}% of a step's user time at --log-every {DEFAULT_LOG_EVERY} (pairs: {each})")
    sys.exit(is_over)


if __name__ == "__main__":
    main()
