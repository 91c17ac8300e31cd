"""Do the trainings that `launch/gpu-check` made with several ranks agree with each other? One line a comparison.

python tests/peers/gpu_ranks.py RUNS        exits 1 if any does not; RUNS holds folders MODE-RANKS, as ddp-train --out made them

What must hold, and why so closely:
- eager and captured, of as many ranks: the same bits of every loss and of the model, since the same kernels ran in the same order.
- any number of ranks, first step: the loss of the same rows under the same values. A mean of 128 losses in f32, summed in another order, moves by
  at most 128 * 2^-24 = 8e-6 of it, and matmuls over 784 inputs by less than that at these magnitudes: 2e-5 in all. In bf16 a logit (below 1
  at the start) may be rounded to its neighbour: 2^-8 = 4e-3.
- ZeRO-1 beside none, of as many ranks, first step: the same bits on every rank, nothing having been updated. NCCL does not promise an order of
  additions, so the sum of the losses of N ranks may differ by N - 1 roundings in each of the two runs: 2 (N - 1) 2^-24, and 0 for two ranks.
- from then on rounding grows from step to step, so that only what is learned can be compared: the mean loss of the last ten steps to 10%, the
  accuracy on 500 held-out rows to 25 of them.
"""
import json
import pathlib
import sys


class Run:
    def __init__(self, folder):
        self.mode, ranks = folder.name.rsplit("-", 1)
        self.ranks = int(ranks)
        record = folder / "metrics.jsonl"
        events = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        self.losses = [event["loss"] for event in events if event["event"] == "step"]
        self.end = next((event for event in events if event["event"] == "end"), {})
        models = sorted(folder.glob("checkpoints/*/model.safetensors"))
        self.model = models[-1].read_bytes() if models else b""

    def is_whole(self):
        return self.end.get("reason") == "done" and bool(self.losses) and bool(self.model)

    def lacks(self):
        if not self.end:
            return f"no end after {len(self.losses)} steps"
        return f"its end is {self.end.get('reason')!r} after {len(self.losses)} steps, with a model of {len(self.model)} bytes"

    def late_loss(self):
        return sum(self.losses[-10:]) / len(self.losses[-10:])


def first_step_bound(mode):
    return 4e-3 if mode == "bf16" else 2e-5


def compare(runs):
    """Pairs of what was compared and what is wrong with it, which is empty where nothing is."""
    by = {(run.mode, run.ranks): run for run in runs}
    for run in runs:
        yield f"{run.mode}, {run.ranks} ranks: ended well", [] if run.is_whole() else [run.lacks()]
    runs = [run for run in runs if run.is_whole()]
    for run in runs:
        eager = by.get(("eager", run.ranks))
        if run.mode == "captured" and eager and eager.is_whole():
            wrong = [f"losses of step {step}: {a!r} and {b!r}" for step, (a, b) in enumerate(zip(eager.losses, run.losses), 1) if a != b][:1]
            if len(eager.losses) != len(run.losses):
                wrong.append(f"{len(eager.losses)} and {len(run.losses)} steps")
            if eager.model != run.model:
                wrong.append("the models differ")
            yield f"{run.ranks} ranks: captured is bit-identical to eager", wrong
        captured = by.get(("captured", run.ranks))
        if run.mode == "zero" and captured and captured.is_whole():
            bound = 2 * (run.ranks - 1) * 2**-24 if run.ranks > 2 else 0.0
            yield f"{run.ranks} ranks: ZeRO-1 begins as none does", unequal(captured.losses[0], run.losses[0], bound)
            yield f"{run.ranks} ranks: ZeRO-1 learns what none does", learned(captured, run)
        alone = by.get((run.mode, 1))
        if run.ranks > 1 and alone and alone.is_whole():
            yield f"{run.mode}: {run.ranks} ranks begin as one", unequal(alone.losses[0], run.losses[0], first_step_bound(run.mode))
            yield f"{run.mode}: {run.ranks} ranks learn what one does", learned(alone, run)


def unequal(expected, got, bound):
    away = abs(got - expected)
    # Also where one of them is not a number.
    return [] if away <= bound * abs(expected) else [f"the first loss is {got!r}, expected {expected!r} to {bound:g} of it"]


def learned(expected, got):
    wrong = []
    a, b = expected.late_loss(), got.late_loss()
    if not abs(a - b) <= 0.1 * max(a, b, 0.02):
        wrong.append(f"the last losses are {b:.4f}, expected {a:.4f} to 10%")
    a, b = expected.end["accuracy"], got.end["accuracy"]
    if not abs(a - b) <= 0.05:
        wrong.append(f"the accuracy is {b:.3f}, expected {a:.3f} to 0.05")
    return wrong


def main(folder):
    folders = sorted(path for path in pathlib.Path(folder).iterdir() if path.is_dir())
    failed = made = 0
    for what, wrong in compare([Run(folder) for folder in folders]):
        made += 1
        failed += bool(wrong)
        print(f"{'FAILED' if wrong else 'ok'}: {what}{'' if not wrong else ': ' + '; '.join(wrong)}")
    print(f"{made - failed} of {made} comparisons hold, of {len(folders)} trainings")
    return 1 if failed or not made else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
