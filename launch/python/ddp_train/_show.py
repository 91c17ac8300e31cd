"""How a run looks: a line in a terminal, a card with its curve in a notebook."""

from __future__ import annotations

import html
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Optional

from ._program import shell, visible, without_folder

if TYPE_CHECKING:
    from ._run import Event, Run

BARS = "▁▂▃▄▅▆▇█"
# Seconds between redraws.
REDRAW_S = 0.5
COLORS = {"training": "#3b82c4", "held out": "#d9730d"}


def number(value: Any) -> Optional[float]:
    """A finite number as it is, None for anything else: others may have written the log."""
    return value if isinstance(value, (int, float)) and abs(value) < 1e300 else None


def curves(events: list[Event]) -> dict[str, list[tuple[float, float]]]:
    """The losses in training and on held-out rows."""
    of = lambda kind: [(number(event.step), number(event.loss)) for event in events if event.event == kind]
    found = {name: [point for point in of(kind) if None not in point] for name, kind in (("training", "step"), ("held out", "eval"))}
    return {name: points for name, points in found.items() if points}


def figures(events: list[Event]) -> dict[str, str]:
    """The last figures by name."""
    shown = {}
    for kind, prefix in (("step", ""), ("eval", "held-out ")):
        last = next((event for event in reversed(events) if event.event == kind), None)
        for name in ("loss", "accuracy", "perplexity", "rmse", "r2", "auc"):
            value = number(last.get(name)) if last is not None else None
            if value is not None and not (prefix == "" and name == "perplexity"):
                shown[prefix + name] = f"{value:.1%}" if name == "accuracy" else f"{value:.4g}"
    for name, value in out_of_fold(events).items():
        if name in ("accuracy", "r2", "mean_r2"):
            shown["out-of-fold " + name] = f"{value:.1%}" if name == "accuracy" else f"{value:.4g}"
    return shown


def out_of_fold(events: list[Event]) -> dict[str, Any]:
    """What folds showed before a run on a small table, by name."""
    start = next((event for event in events if event.event == "start"), None)
    folds = start.get("out_of_fold") if start is not None else None
    if not isinstance(folds, dict):
        return {}
    others = folds.get("others") if isinstance(folds.get("others"), dict) else {}
    found = {"loss": folds.get("loss"), str(others.get("figure")): folds.get("score"), "linear": others.get("linear"), "constant": others.get("constant")}
    return {name: value for name, value in found.items() if number(value) is not None}


def progress(run: Run, events: list[Event]) -> tuple[int, int]:
    """Steps taken, and of how many."""
    of = lambda fields, name: int(number(fields.get(name)) or 0) if isinstance(fields, dict) else 0
    taken = max((of(event, "step") or of(event, "steps") for event in events if event.event in ("step", "eval", "end", "checkpoint")), default=0)
    start = next((event for event in events if event.event == "start"), None)
    total = of(start, "steps") or of(start.config, "steps") if start else 0
    if start and any(event.event == "resume" for event in events):
        told = run._config()
        total = of(told, "steps") or of(told, "epochs") * of(start, "steps_per_epoch")
    return taken, max(total, taken)


def line(run: Run, events: list[Event], width: int = 16) -> str:
    """A run in a line: `runs/a: running, step 250 of 500 ━━━━━····· █▅▃▂ loss 0.42`."""
    taken, total = progress(run, events)
    losses = next(iter(curves(events).values()), [])
    values = [loss for _, loss in losses][:: max(1, len(losses) // width)][-width:]
    low, high = (min(values), max(values)) if values else (0, 0)
    spark = "".join(BARS[int(7 * (value - low) / ((high - low) or 1))] for value in values)
    bar = "━" * int(10 * taken / (total or 1))
    parts = [f"{os.path.relpath(run.folder)}: {run.outcome}, step {taken} of {total} {bar:·<10}", spark, ", ".join(f"{name} {value}" for name, value in figures(events).items())]
    return visible(" ".join(part for part in parts if part))


def page(run: Run, events: list[Event]) -> str:
    """A run as HTML without scripts, which notebooks show as it is: the head of its report, and its curve.

    Whatever comes from the log is a number or escaped.
    """
    taken, total = progress(run, events)
    outcome, data = run.outcome, next((event.data for event in events if event.event == "start"), "")
    end = next((event for event in reversed(events) if event.event == "end"), None)
    reason = f"<div style='white-space:pre-wrap'>{html.escape(str(end.reason))}</div>" if end and outcome in ("failed", "early") else ""
    cell = "<span style='display:inline-block;margin-right:1.5em'><small>{}</small><br><b>{}</b></span>"
    cells = "".join(cell.format(name, value) for name, value in figures(events).items())
    return (
        f"<div style='max-width:48em'><b>{html.escape(os.path.relpath(run.folder))}</b> · {html.escape(outcome)} · step {taken} of {total} "
        f"<progress value='{taken}' max='{max(total, 1)}'></progress>{reason}"
        f"<div><small>{html.escape(without_folder(str(data)))}</small></div>{cells}{_chart(curves(events))}</div>"
    )


def _chart(lines: dict[str, list[tuple[float, float]]]) -> str:
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points))
    # Left of the curves there is room for the longest number.
    x = lambda step: 64 + 526 * (step - left) / ((right - left) or 1)
    y = lambda loss: 150 - 140 * (loss - low) / ((high - low) or 1)
    texts = f"<text x='60' y='14'>{high:.3g}</text><text x='60' y='152'>{low:.3g}</text><text x='590' y='170'>step {right}</text>"
    drawn, legend = "", ""
    for name, line in lines.items():
        thinned = line[:: max(1, len(line) // 300)] + line[-1:]
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in thinned)
        drawn += f"<polyline points='{path}' fill='none' stroke='{COLORS[name]}' stroke-width='2'/>"
        legend += f"<tspan fill='{COLORS[name]}'>■</tspan> {name}  "
    legend = f"<text x='64' y='170' style='text-anchor:start'>loss: {legend}</text>"
    style = "width:100%;font:11px sans-serif;fill:currentColor;text-anchor:end"
    return f"<svg viewBox='0 0 600 176' style='{style}'>{texts}{legend}{drawn}</svg>"


class Live:
    """Shows a run again and again: in a notebook, in a terminal, or nowhere."""

    def __init__(self) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._draw = self._in_notebook if hasattr(shell(), "kernel") else self._in_terminal if is_terminal else None
        self._next, self._handle = 0.0, None

    def __call__(self, run: Run, events: list[Event], is_last: bool) -> None:
        """Draws it, if it is time to."""
        if self._draw and (is_last or time.monotonic() > self._next):
            self._next = time.monotonic() + REDRAW_S
            self._draw(run, events, is_last)

    def _in_notebook(self, run: Run, events: list[Event], is_last: bool) -> None:
        from IPython.display import HTML, display

        run._shown_in = shell().execution_count
        shown = HTML(page(run, events))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def _in_terminal(self, run: Run, events: list[Event], is_last: bool) -> None:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r\x1b[K{line(run, events)[: columns - 1]}" + "\n" * is_last)
        sys.stderr.flush()
