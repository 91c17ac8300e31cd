#!/usr/bin/env python3
"""Writes metrics logs of runs that are hard to come by, for the report to be made from: usage: make_runs.py FOLDER"""

import json
import math
import pathlib
import random
import sys

HOSTILE = '<script>alert(1)</script>"\'><img src=x onerror=alert(2)>&amp;\u202e{{name}}'


def start(**changes):
    return {"event": "start", "time_unix_s": 1.0, "config": {"model": "mlp", "data": "glyphs", "lr": 0.002, "out": changes.pop("out", "out")},
            "versions": {"ddp-train": "0.6.0"}, "devices": ["cpu on a, 1 threads", "cpu on a, 1 threads"],
            "world": {"ranks": 2, "hosts": 1, "threads": 1, "transport": "shared memory", "overlap": True, "buckets": 1},
            "data": "glyphs: 2000 rows to train on", "fingerprint": "f", "parameters": 1000, "steps": 1000, "steps_per_epoch": 100, **changes}


def step(number, **changes):
    noise = random.Random(number).random
    loss = 2.3 * math.exp(-number / 300) + 0.05 + 0.1 * noise()
    return {"event": "step", "step": number, "epoch": 1, "loss": loss, "accuracy": 1 - loss / 2.5, "lr": 1e-3 * math.cos(number / 700) ** 2, "grad_norm": 0.5 + noise(),
            "samples_per_s": 10_000 + 3000 * noise(), "step_ms": 10 + noise(), "data_ms": 0.2 * noise(), "reduce_ms": 0.8 * noise(),
            "save_ms": 0.0, **changes}


def end(**changes):
    return {"event": "end", "reason": "done", "exit_code": 0, "steps": 1000, "samples": 128_000, "seconds": 754.2, "samples_per_s": 11_000.0,
            "loss": 0.1, "eval_loss": 0.2, "accuracy": None, "peak_mb": 120.5, "device_peak_mb": None, **changes}


def write(folder, events, text=""):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + text, encoding="utf-8")


def many_classes(count):
    rows = [50] * count
    right = [50 - index % 7 for index in range(count)]
    mistakes = [[index, (index + 1) % count, 6 - index % 6] for index in range(50)]
    return {"event": "confusion", "step": 1000, "names": [f"class number {index} of many" for index in range(count)], "rows": rows,
            "predicted": rows, "right": right, "counts": None, "mistakes": mistakes}


def thirty_classes():
    names = ["aeroplane with a long name", *[f"c{index}" for index in range(29)]]
    counts = [[40 if row == column else (row * column) % 3 for column in range(30)] for row in range(30)]
    return {"event": "confusion", "step": 1000, "names": names, "rows": [sum(row) for row in counts],
            "predicted": [sum(column) for column in zip(*counts)], "right": [40] * 30, "counts": counts, "mistakes": [[0, 1, 2]]}


def placement(simulated):
    amount = {"count": 2.0, "bytes": 940_816.0}
    rank = lambda number: {"rank": number, "devices": [f"cuda:{number} Simulated GPU {number}" if simulated else "cpu"], "rows": 1000, "passes": 10,
                           "per_step": {"between ranks": amount, "device to host": {"count": 0.5, "bytes": 4096.0}},
                           "phases": {"setup": {"between ranks": {"count": 3, "bytes": 500}}}}
    difference = {"kind": "device to host", "at": "ddp/src/somewhere/far/away/in/a/long/path.rs:123", "implicit": False, "announced": None,
                  "amounts": [{"count": 10, "bytes": 40_960}, {"count": 0, "bytes": 0}, None]}
    hint = {"pattern": "scalar", "lines": ["a.rs:1"], "ranks": [0, 1], "count": 12, "text": "a number is read in each step: " + "read it less often " * 6}
    return {"event": "placement", "steps": 10, "simulated": simulated, "ranks": [rank(number) for number in range(3)],
            "differences": [difference], "hints": [hint]}


def main():
    folder = pathlib.Path(sys.argv[1])
    steps = lambda first, last, every=1: [step(number) for number in range(first, last + 1, every)]
    evals = [{"event": "eval", "step": number, "loss": 0.2 + 100 / number, "accuracy": 1 - 20 / number} for number in range(100, 1001, 100)]
    checkpoints = [{"event": "checkpoint", "step": number} for number in range(100, 1001, 100)]
    resume = {"event": "resume", "step": 400, "from": "step-00000400", "ranks": 3, "devices": ["cpu on a, 1 threads"] * 3,
              "overridden": ["--lr 0.002 (was 0.001)"]}
    write(folder / "resumed", [start(), *steps(1, 400), *checkpoints, resume, *steps(401, 1000), *evals, placement(False), thirty_classes(), end()])
    write(folder / "stopped", [start(steps=5000), *steps(1, 700, 10), end(reason="stopped by SIGTERM after step 700: continue with --resume auto", exit_code=75)])
    write(folder / "failed", [start(), *steps(1, 30), step(31, loss=None, grad_norm=None),
                              end(reason="step 31: the loss is not finite. " + "Rows 1, 2, 3 of rank 1 made it. " * 8, exit_code=76, loss=None)])
    write(folder / "one-step", [start(), step(1), end(steps=1)])
    write(folder / "no-step", [start()], "not json\n{\"event\": 3}\n{\"half\n")
    nothing = {"samples_per_s": None, "step_ms": None, "data_ms": None, "reduce_ms": None, "save_ms": None}
    simulated = [f"cuda:{number} Simulated GPU {number} on a, 1 threads" for number in range(2)]
    write(folder / "simulated", [start(devices=simulated), *[step(number, **nothing) for number in range(1, 50)], placement(True), end(samples_per_s=None)])
    gpus = [f"cuda:{number} NVIDIA H200 on host-{number}, 8 threads" for number in range(4)]
    write(folder / "many-classes", [start(devices=gpus), *[step(number, reduce_ms=None) for number in range(1, 100)], *evals[:1], many_classes(1000),
                                    end(device_peak_mb=70_250.0)])
    write(folder / "long", [start(steps=100_000), *steps(1, 100_000), end(steps=100_000)])
    confusion = {"event": "confusion", "step": 3, "names": [HOSTILE, "b"], "rows": [2, 1], "predicted": [1, 2], "right": [1, 1],
                 "counts": [[1, 1], [0, 1]], "mistakes": [[0, 1, 1]]}
    hostile = start(out="x/" + HOSTILE, data=HOSTILE, devices=[HOSTILE] * 2, versions={HOSTILE: HOSTILE})
    hostile["config"][HOSTILE] = HOSTILE
    placed = placement(False)
    placed["differences"][0].update(kind=HOSTILE, at=HOSTILE)
    placed["ranks"][0].update(devices=[HOSTILE], per_step={HOSTILE: {"count": 1.0, "bytes": 8.0}}, phases={HOSTILE: {HOSTILE: {"count": 1, "bytes": 1}}})
    placed["hints"][0]["text"] = HOSTILE
    huge = [step(number, loss=1.7e308, lr=5e-324, grad_norm=-1e300) for number in (1, 2)]
    write(folder / "hostile", [hostile, *huge, step(2**63, loss=-1.7e308), placed, confusion, end(reason=HOSTILE, exit_code=70)])


if __name__ == "__main__":
    main()
