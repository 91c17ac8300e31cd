"""Runs: processes that train, read through their metrics logs."""

from __future__ import annotations

import atexit
import contextlib
import glob
import itertools
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, TypeVar

from ._data import Files, _are_names, frame_of, has, in_memory, library, memory_file
from ._program import PREFIX, Error, SettingError, environment, failure, find_program, flags, output, shell, warn
from ._show import Live, line, out_of_fold, page

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._settings import Settings

T = TypeVar("T")
# Seconds between looks at a metrics log.
PERIOD_S = 0.1
STOPPED = 75
# This process; those that it forks inherit what is below.
_PROCESS = os.getpid()
# Runs of this process that have not ended.
_running: set[Run] = set()
# Why runs of this process failed of which nobody was told yet, by folder.
_untold: dict[str, Error] = {}


class Fields(dict):  # type: ignore[type-arg]
    """A dict whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"no {name!r}, but {', '.join(map(str, self))}")


class Event(Fields):
    """A line of the metrics log (docs/outputs.md). As an attribute, a field that it lacks is None.

    >>> event = ddp_train.Event(event="step", step=10, loss=0.5)
    >>> event.event, event.step, event.loss, event.accuracy
    ('step', 10, 0.5, None)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


# The lines that say when a run was started and resumed, which no other line equals.
BEGINNING = re.compile(rb'^\{"event":"(?:start|resume)","time_unix_s":.*\n', re.MULTILINE)


class Log:
    """The events of a metrics log, as they are written."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path, self.offset, self._last, self._beginnings = path, offset, b"", set[bytes]()
        with contextlib.suppress(OSError), open(path, "rb") as file:
            self._beginnings.update(BEGINNING.findall(file.read(offset)))

    def new(self) -> list[Event]:
        """Those written since the last call; where a resume has cut the log, those after that."""
        if not os.path.exists(self.path):
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                file.seek(0)
                whole = file.read()
                new = [it.start() for it in BEGINNING.finditer(whole) if it[0] not in self._beginnings]
                self.offset, self._last = new[0] if new else whole.rfind(b"\n") + 1, b""
                file.seek(self.offset)
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
        self.offset += sum(map(len, lines))
        self._last = lines[-1] if lines else self._last
        self._beginnings.update(line for line in lines if BEGINNING.match(line))
        return [Event(json.loads(line)) for line in lines]


class Run:
    """A run: of `train` or `resume`, or any folder that a run of ddp-train has written.

    >>> import ddp_train
    >>> run = ddp_train.train("synthetic:classification,rows=2000", epochs=2, out="made")
    >>> losses = [event.loss for event in run if event.event == "step"]
    >>> run.wait().outcome
    'done'
    >>> ddp_train.Run("made").best["step"] == run.best["step"]
    True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(folder)
        if not os.path.exists(self._log_file):
            raise FileNotFoundError(f"{self.folder}: expected the folder of a run, which has metrics.jsonl; help: give what its out= was")
        self._attach(None, False)

    def _attach(self, files: Optional[Files], detach: bool) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._files, self._is_detached, self._owner = files, detach, os.getpid()
        self._ended, self._said, self._warned, self._start = threading.Event(), -1, 0, 0
        self._seen, self._must_stop = ((0, 0), (0, b"")), False
        self._failed: Optional[BaseException] = None
        # The number of the cell of a notebook that has followed it.
        self._shown_in: Optional[int] = None

    @classmethod
    def _begin(cls, folder: str, words: list[str], files: Files, detach: bool) -> Run:
        """Starts the program, and waits until it trains or has ended."""
        # A folder stays the same where this process goes to another one.
        run = cls.__new__(cls)
        run.folder = os.path.abspath(folder)
        run._attach(files, detach)
        _untold.pop(run.folder, None)
        before = run._beginning()
        try:
            output(*words, "--print-config")
            inherited = files.write()
            _running.add(run)
            with run._interruptible():
                threading.Thread(target=run._host, args=(words, inherited), daemon=True).start()
                while not run._ended.wait(PERIOD_S / 5) and not run._has_begun(before):
                    pass
            if run._ended.is_set():
                run._raise()
        except BaseException:
            if run._process is None or (run._ended.is_set() and run._beginning() == before):
                _running.discard(run)
                shutil.rmtree(files.made, ignore_errors=True)
            raise
        run._start = run._beginning()[0]
        return run

    def _has_begun(self, before: tuple[int, bytes]) -> bool:
        """Whether its process, and no other that writes into its folder, has begun to train."""
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            return process is not None and self._beginning() != before and os.getsid(self._writer() or process.pid) == process.pid
        return False

    def _host(self, words: list[str], inherited: list[int]) -> None:
        """Has the process as its child: the kernel ends a run with the thread that started it."""
        try:
            self._said = memory_file("standard error")
            weakref.finalize(self, os.close, self._said).atexit = False
            # In a session of its own, Ctrl-C in a terminal reaches it through this process alone.
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self._said}
            self._process = subprocess.Popen([find_program(), *words], env=environment(not self._is_detached), start_new_session=True, pass_fds=inherited, **how)
            if self._must_stop:
                self._ask_to_stop()
            code = self._process.wait()
            if code not in (0, STOPPED):
                _untold[self.folder] = failure(code, self.log)
        except Exception as error:
            self._failed = error
        finally:
            self._ended.set()
            _running.discard(self)

    @property
    def _log_file(self) -> str:
        return os.path.join(self.folder, "metrics.jsonl")

    def _beginning(self) -> tuple[int, bytes]:
        """Where its last start or resume is in its log, and that line."""
        with contextlib.suppress(OSError):
            about = os.stat(self._log_file)
            if (about.st_ino, about.st_size) != self._seen[0]:
                with open(self._log_file, "rb") as file:
                    found = [(it.start(), it[0]) for it in BEGINNING.finditer(file.read())]
                self._seen = (about.st_ino, about.st_size), found[-1] if found else (0, b"")
            return self._seen[1]
        return 0, b""

    @property
    def log(self) -> str:
        """What the program has said on standard error, if this process started it."""
        return os.pread(self._said, os.fstat(self._said).st_size, 0).decode(errors="replace") if self._said >= 0 else ""

    def _warn(self) -> None:
        """Passes the program's warnings on."""
        for self._warned in warn(self.log, self._warned):
            pass

    @property
    def is_running(self) -> bool:
        """Whether it still trains."""
        return not self._ended.is_set() if self._process is not None and self._owner == os.getpid() else self._writer() is not None

    def _writer(self) -> Optional[int]:
        """The process on this machine that has its log open for writing."""
        log = os.path.realpath(self._log_file)
        for entry in glob.glob("/proc/[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                # The mode of the link is that in which the file was opened.
                if os.readlink(entry) == log and os.lstat(entry).st_mode & stat.S_IWUSR:
                    return int(entry.split("/")[2])
        return None

    @property
    def outcome(self) -> str:
        """`running`, `done`, `early` (stop_after), `stopped` (can be resumed), or `failed`."""
        if self.is_running:
            return "running"
        _untold.pop(self.folder, None)
        end = self._last("end")
        code = self._process.returncode if self._process is not None else None
        # A process that ignores SIGCHLD sees 0 of every child.
        if end and code in (None, 0, end.exit_code):
            return end.outcome if end.outcome in ("done", "early", "stopped") else "failed"
        return "stopped" if code == STOPPED else "failed"

    def _events(self) -> list[Event]:
        return Log(self._log_file).new()

    def _last(self, kind: str) -> Optional[Event]:
        return next((event for event in reversed(self._events()) if event.event == kind), None)

    def _raise(self) -> None:
        """The error of a run that has failed."""
        _untold.pop(self.folder, None)
        self._warn()
        if self._failed is not None:
            raise self._failed
        code = self._process.returncode if self._process is not None else None
        if code not in (None, 0, STOPPED):
            raise failure(code, self.log)
        end = self._last("end")
        if code != STOPPED and end and end.outcome == "failed":
            raise Error(end.reason, end.exit_code)
        if code != STOPPED and not end:
            raise Error(f"{self.folder}: the run ended without a word: it was killed, or its machine went down; help: resume", 137)

    def __iter__(self) -> Iterator[Event]:
        """Its events as they are logged, until it ends; of a run that was resumed, from there on."""
        return self._follow(self._start)

    def _follow(self, start: int, update: Optional[Live] = None, timeout: float = math.inf) -> Iterator[Event]:
        log, events, is_running, end = Log(self._log_file, start), [], True, time.monotonic() + timeout
        try:
            with self._interruptible():
                while is_running:
                    is_running = self.is_running
                    new = log.new()
                    if update is not None:
                        events += new
                        update(self, events, False)
                    yield from new
                    self._warn()
                    if time.monotonic() > end and is_running:
                        raise TimeoutError(f"{self.folder}: still running after {timeout} s")
                    self._ended.wait(PERIOD_S)
        finally:
            # After an interrupt, too.
            if update is not None:
                update(self, events + log.new(), True)
        self._raise()

    def wait(self, timeout: Optional[float] = None, show: bool = True) -> Run:
        """Waits for its end, and shows its progress and curve in a notebook or terminal.

        Raises an `Error` if it fails, and `TimeoutError` after `timeout` seconds. Ctrl-C stops the
        run, which saves; a second one returns at once.

        >>> ddp_train.train("synthetic:regression,rows=500", epochs=1, out="waited").wait().outcome
        'done'
        """
        try:
            for _ in self._follow(0, Live() if show else None, math.inf if timeout is None else timeout):
                pass
        except SystemExit:
            # A signal's handler may raise it here, between two events.
            if self._is_ours and not self._must_stop:
                self._ask_to_stop()
            raise
        return self

    @property
    def _is_ours(self) -> bool:
        """Whether it ends with this process."""
        return self in _running and self._owner == os.getpid() and not self._is_detached

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C stops the run and waits until it has saved; a second one does not wait."""
        old = signal.getsignal(signal.SIGINT)
        if not self._is_ours or threading.current_thread() is not threading.main_thread() or not callable(old):
            yield
            return
        count = 0

        def interrupt(number: int, frame: Any) -> None:
            nonlocal count
            count += 1
            if count == 1 and not self._ended.is_set():
                self._ask_to_stop()
                print(f"ddp_train: {self.folder} stops and saves; interrupt again to leave it to that", file=sys.stderr)
            old(number, frame)

        interrupt.old, interrupt.is_over = old, False  # type: ignore[attr-defined]
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        except KeyboardInterrupt:
            if count == 1:
                self._ended.wait()
            raise
        except SystemExit:
            self._ask_to_stop()
            raise
        finally:
            # Loops over runs need not end in the reverse order of their beginnings.
            interrupt.is_over, now = True, signal.getsignal(signal.SIGINT)  # type: ignore[attr-defined]
            while getattr(now, "is_over", False):
                now = now.old  # type: ignore[union-attr]
            signal.signal(signal.SIGINT, now)

    def _ask_to_stop(self) -> None:
        self._must_stop = True
        process = self._process.pid if self._process is not None else self._writer()
        if process is not None and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def stop(self, wait: bool = True) -> Run:
        """Makes it finish its step, save and end; `resume` continues it.

        >>> run = ddp_train.train("synthetic:classification", epochs=100000, out="long")
        >>> run.stop().outcome
        'stopped'
        """
        self._ask_to_stop()
        while wait and self.is_running:
            self._ended.wait(PERIOD_S)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run, defaults included; after a resume, those that it has now."""
        found = (self._last("start") or Event(config={})).config
        return {**found, **self._config()} if self._last("resume") else found

    def _config(self) -> dict[str, Any]:
        """What config.toml has: a setting a line, whose values are almost JSON."""
        found = {}
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "config.toml"), encoding="utf-8") as file:
            for line in file:
                name, _, value = line.strip().partition(" = ")
                with contextlib.suppress(ValueError):
                    found[name] = value[1:-1] if value[:1] == "'" else json.loads(value)
        return found

    @property
    def best(self) -> Optional[Event]:
        """The best evaluation on held-out rows, by the setting `best`; None without any."""
        def height(event: Event) -> float:
            value = event["balanced_accuracy" if event.best_by == "balanced" else event.best_by or "loss"]
            return -math.inf if value is None else value if event.best_by else -value

        return max((event for event in self._events() if event.event == "eval"), key=height, default=None)

    @property
    def out_of_fold(self) -> Optional[Event]:
        """How good models of a small table are on rows that they were not trained on, as folds showed before the run; None of other runs.

        `accuracy`, `r2` or `mean_r2`, and `loss` are of the run's model; `linear` and `constant` are that figure of simpler models.
        """
        found = out_of_fold(self._events())
        return Event(found) if found else None

    @property
    def metrics(self) -> Any:
        """A row for each logged step and evaluation: a frame of pandas or polars, else a dict of lists."""
        rows = [event for event in self._events() if event.event in ("step", "eval")]
        names = dict.fromkeys(name for row in rows for name in row if name not in ("digests", "columns"))
        columns = {name: [math.nan if row.get(name) is None else row[name] for row in rows] for name in names}
        if not (has("pandas") or has("polars")):
            return columns
        return library().DataFrame(columns, **({"strict": False} if library().__name__ == "polars" else {}))

    @property
    def report(self) -> str:
        """The path of its page of curves, made anew."""
        output("report", self.folder)
        return os.path.join(self.folder, "report.html")

    @property
    def checkpoint(self) -> str:
        """The folder of the checkpoint that `predict` uses: the best one, else the newest."""
        folder = os.path.join(self.folder, "checkpoints")
        names = sorted(name for name in os.listdir(folder) if re.fullmatch(r"step-\d+", name)) if os.path.isdir(folder) else []
        if not names:
            raise FileNotFoundError(f"{self.folder}: nothing is saved yet; help: wait() for its end, or checkpoint_every= sets the steps between checkpoints")
        best = self.best
        name = f"step-{best['step']:08}" if best else names[-1]
        return os.path.join(folder, name if name in names else names[-1])

    def _look(self, does: Callable[[str], T]) -> T:
        """What `does` finds in the checkpoint; in a later one if the run removes it meanwhile."""
        for _ in range(20):
            with contextlib.suppress(FileNotFoundError):
                return does(self.checkpoint)
            time.sleep(PERIOD_S / 5)
        return does(self.checkpoint)

    def _state(self) -> dict[str, Any]:
        return self._look(read_state)

    def state_dict(self) -> dict[str, Any]:
        """The model's parameters by name, as NumPy arrays mapped from the file.

        Changes to them stay in memory. `{name: torch.from_numpy(it) for name, it in …}` shares them.

        >>> sorted(ddp_train.Run("made").state_dict())[:2]
        ['0.bias', '0.weight']
        """
        import numpy

        mapped = self._look(lambda folder: numpy.memmap(os.path.join(folder, "model.safetensors"), mode="c"))
        start = 8 + int.from_bytes(mapped[:8], "little")
        header = json.loads(bytes(mapped[8:start]))
        header.pop("__metadata__", None)
        kinds = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
        arrays = {}
        for name, entry in header.items():
            first, end = (start + offset for offset in entry["data_offsets"])
            arrays[name] = mapped[first:end].view(kinds[entry["dtype"]]).reshape(entry["shape"])
        return arrays

    def predict(self, data: Any, *, probabilities: bool = False, logits: bool = False, **settings: Any) -> Any:
        """The model's prediction for each row of an array, frame or file: classes or numbers.

        Classes are as the labels were; texts that are all whole numbers become numbers. With `probabilities` or `logits` there is a column for each,
        in the order of `classes`. `ranks`, `device`, `threads` and `batch_size` are as in training.

        >>> ddp_train.Run("made").predict("synthetic:classification,rows=2000", probabilities=True).shape
        (2000, 10)
        """
        return predict(self.folder, self._state(), data, probabilities, logits, settings)

    @property
    def classes(self) -> Optional[list[Any]]:
        """The names of its classes in their order: texts or numbers; None of a model of numbers."""
        return classes_of(self._state())

    def evaluate(self, data: Any, labels: Any = None, **settings: Any) -> Fields:
        """The figures of `ddp-train eval` for these rows: loss, accuracy, scores of each class, errors.

        >>> ddp_train.Run("made").evaluate("synthetic:classification,rows=2000").rows
        2000
        """
        return Fields(json.loads(_use("eval", self.folder, self._state(), Files(), data, labels, settings, "--json")))

    def importances(self, data: Any, labels: Any, *, repeats: int = 5, seed: int = 0, **settings: Any) -> dict[Any, float]:
        """By how much accuracy or R² of these rows falls where the values of a column are shuffled among them, by column, the largest first.

        Give rows that were not trained on: an array, or a frame and perhaps the name of its label. Columns that say the same share what they say.

        >>> import numpy, ddp_train
        >>> x = numpy.random.default_rng(1).normal(size=(300, 3))
        >>> run = ddp_train.train(x, x[:, 1] > 0, epochs=20, lr=0.01, out="runs/c").wait()
        >>> found = run.importances(x, x[:, 1] > 0)
        >>> next(iter(found)), found[1] > 0.3 > found[0]
        (1, True)
        """
        import numpy

        def score(rows: Any, labels: Any) -> float:
            found = self.evaluate(rows, labels, **settings)
            return next(found[name] for name in ("accuracy", "r2", "mean_r2") if name in found)

        frame = frame_of(data)
        table = numpy.asarray(data) if frame is None else frame
        if frame is None and table.ndim != 2:
            raise ValueError(f"data: expected a column for each feature, got an array of shape {table.shape}")
        names = [labels] if isinstance(labels, (str, int)) else labels if _are_names(labels, table) else []
        whole = score(data, labels)
        read = {plan["name"] for plan in self._state().get("plan", {}).get("columns") or []}
        columns = range(table.shape[1]) if frame is None else [name for name in frame.columns if name not in names]
        # Others may be in a frame, as predictions.
        columns = [name for name in columns if str(name) in read] or columns
        again = numpy.tile(numpy.arange(len(table)), repeats)
        many = labels if names else numpy.asarray(labels)[again]
        random, falls = numpy.random.default_rng(seed), {}
        for column in columns:
            order = numpy.concatenate([random.permutation(len(table)) for _ in range(repeats)])
            if frame is None:
                rows = table[again]
                rows[:, column] = table[order, column]
            elif hasattr(frame, "with_columns"):
                rows = frame[again].with_columns(frame[column].gather(order))
            else:
                rows = frame.take(again).reset_index(drop=True)
                rows[column] = frame[column].take(order).array
            falls[column] = whole - score(rows, many)
        return dict(sorted(falls.items(), key=lambda it: -it[1]))

    def generate(self, prompt: str, **settings: Any) -> str:
        """What a transformer makes of `prompt`: `max_tokens`, `temperature` and so on as flags of `ddp-train generate`."""
        return output("generate", *flags({"checkpoint": self.folder, "prompt": prompt}, settings))

    def __repr__(self) -> str:
        return f"<ddp_train.Run {line(self, self._events())}>"

    def _ipython_display_(self) -> None:
        """Shows nothing below a cell that has followed it to here; else notebooks take what is below."""
        if self._shown_in is None or self._shown_in != shell().execution_count:
            raise NotImplementedError

    def _repr_html_(self) -> str:
        return page(self, self._events())


def read_state(checkpoint: str) -> dict[str, Any]:
    """What a checkpoint says of its model."""
    with open(os.path.join(checkpoint, "state.json"), encoding="utf-8") as file:
        return json.load(file)


def _use(command: str, folder: str, state: dict[str, Any], files: Files, data: Any, labels: Any, settings: dict[str, Any], *more: str) -> str:
    """What a command that uses a model prints about these rows. In the folder of a run it finds the best one, and holds it."""
    frame = frame_of(data)
    # A model that was trained on an array knows no names of columns.
    rows = data if frame is None or state["columns"] else frame.to_numpy()
    given = files.settings("data", rows, labels)
    for of_training in ("task", "categorical"):
        given.pop(of_training, None)
    return output(command, *flags({"checkpoint": folder}, given, settings), *more, inherited=files.write())


def classes_of(state: dict[str, Any]) -> Optional[list[Any]]:
    """The names of a model's classes in their order; None of a model of numbers."""
    task = state["task"].get("classification")
    if task is None:
        return None
    names = task["names"] or list(range(task["classes"]))
    are_whole = all(re.fullmatch(r"0|-?[1-9]\d*", str(name)) for name in names)
    return [int(name) for name in names] if are_whole else names


def predict(folder: str, state: dict[str, Any], data: Any, probabilities: bool, logits: bool, settings: dict[str, Any]) -> Any:
    """See `Run.predict`."""
    import numpy

    for name, instead in (("held_out", "evaluate(data, labels, held_out=True) has the figures of these rows"), ("out", "save what predict returns"), ("keep", "add what predict returns to the frame")):
        if settings.get(name):
            raise SettingError(f"predict: {name}={settings[name]!r}: expected no such setting, since predict returns an array with every row; help: {instead}", 2)
    files = Files()
    path = os.path.join(files.folder, "predictions.npy")
    # Several GPUs share large arrays; on the CPU one rank takes all cores.
    if "ranks" not in settings and getattr(data, "nbytes", 0) > 1 << 28:
        settings = {**settings, "ranks": "auto"}
    kinds = [f"--{name}" for name, is_wanted in (("probabilities", probabilities), ("logits", logits)) if is_wanted]
    _use("predict", folder, state, files, data, None, {"out": path, **settings}, *kinds)
    found = numpy.load(path)
    if found.ndim == 2 and found.shape[1] == 1 and not kinds:
        return found[:, 0]
    names = classes_of(state)
    is_index = names is not None and isinstance(names[0], str) and not kinds
    return numpy.array(names)[found] if is_index else found


def train(
    data: Any = None, labels: Any = None, *, val_data: Any = None, val_labels: Any = None,
    out: Optional[str | os.PathLike[str]] = None, overwrite: bool = False, detach: bool = False, **settings: Unpack[Settings],
) -> Run:
    """Starts a run, and returns when it trains; `wait` waits for its end.

    `data` are rows: an array of NumPy or of any library with DLPack, a frame of pandas or polars, or
    what `--data` takes (a file, a pattern, `glyphs`). A one-dimensional array of integers holds tokens.
    `labels` are an array, the name of a column, or several for numbers. By their type whole numbers and
    texts are classes, floats are numbers to predict, unless `task` says otherwise.

    `out` is a new folder for the run (by default out, out-2, …); with `overwrite` it may hold another
    run, which is removed. The run stops, and saves, when this process ends, unless `detach`, which keeps
    arrays in OUT/data and leaves the run alone.

    >>> import numpy, ddp_train
    >>> x = numpy.random.default_rng(1).normal(size=(300, 4))
    >>> run = ddp_train.train(x, x[:, 0] > 0, epochs=20, lr=0.01, out="runs/a").wait()
    >>> bool((run.predict(x) == (x[:, 0] > 0)).mean() > 0.9)
    True

    Every setting of ddp-train is a keyword; what is left out, or None, has its default:
    """
    folder = os.fspath(out) if out is not None else "out" if overwrite else _free("out")
    try:
        files, given = _files(settings, detach, folder, data, labels, val_data, val_labels)
        if labels is None and "cache_dir" in given[0]:
            raise ValueError("labels: expected the name of a column of the frame, several, or an array")
        words = ["train", *flags({"progress": "never"}, *given, settings, {"out": folder})]
        with _replaced(folder) if overwrite else contextlib.nullcontext():
            return Run._begin(folder, words, files, detach)
    finally:
        if out is None:
            # It is empty if the run was refused.
            with contextlib.suppress(OSError):
                os.rmdir(folder)


# What a run writes into its folder (docs/outputs.md), and what `detach` does.
WRITTEN = ("metrics.jsonl", "config.toml", "checkpoints", "report.html", "trace.json", "tensorboard", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "data")


@contextlib.contextmanager
def _replaced(folder: str) -> Iterator[None]:
    """Puts the files of a run aside, until another one has begun in its folder. If that is refused, they are back."""
    earlier = Run.__new__(Run)
    earlier.folder = os.path.abspath(folder)
    if earlier._writer() is not None:
        raise SettingError(f"{folder}: overwrite: expected no run that still trains in it; help: ddp_train.Run({folder!r}).stop()", 2)
    names = [name for name in WRITTEN if os.path.exists(os.path.join(folder, name))]
    aside = tempfile.mkdtemp(prefix=".overwritten-", dir=folder) if names else ""
    for name in names:
        os.rename(os.path.join(folder, name), os.path.join(aside, name))
    try:
        yield
    finally:
        log = os.path.join(folder, "metrics.jsonl")
        if not os.path.exists(log) or os.path.getsize(log) == 0:
            for name in names:
                os.rename(os.path.join(aside, name), os.path.join(folder, name))
        if aside:
            shutil.rmtree(aside)


def resume(
    run: str | os.PathLike[str] | Run, data: Any = None, labels: Any = None, *,
    val_data: Any = None, val_labels: Any = None, detach: bool = False, **settings: Unpack[Settings],
) -> Run:
    """Continues the run in a folder from its newest checkpoint, with its settings and these.

    Data that were files need not be given again, nor arrays while this process has the `Run` that they were given to.

    >>> run = ddp_train.train("synthetic:classification", schedule="constant", steps=20, warmup_steps=2, out="runs/b").wait()
    >>> ddp_train.resume("runs/b", steps=40).wait()._last("end").steps
    40
    """
    folder = run.folder if isinstance(run, Run) else os.fspath(run)
    files, given = _files(settings, detach, folder, data, labels, val_data, val_labels)
    given[0].pop("categorical", None)
    files.earlier = _still_needed(folder, data=data, labels=labels, val_data=val_data, val_labels=val_labels)
    return Run._begin(folder, ["resume", folder, *flags({"progress": "never"}, *given, settings)], files, detach)


def _files(settings: Any, detach: bool, folder: str, data: Any, labels: Any, val_data: Any, val_labels: Any) -> tuple[Files, list[dict[str, Any]]]:
    """The files for arrays and frames, which other hosts do not see, and the settings for them."""
    are_paths = all(it is None or _are_names(it, it) for it in (data, labels, val_data, val_labels))
    if not are_paths and (settings.get("hosts") or settings.get("hostfile")):
        raise SettingError("hosts: expected files as data, since other hosts do not see this process's memory; help: save the arrays", 2)
    keep_in = os.path.join(folder, "data")
    if os.path.exists(keep_in):
        keep_in = tempfile.mktemp(prefix="data-", dir=folder)
    files = Files(keep_in if detach else None)
    given = [files.settings("data", data, labels), files.settings("val_data", val_data, val_labels)]
    if settings.get("plain"):
        given[0].pop("categorical", None)
    return files, given


def _still_needed(folder: str, **given: Any) -> list[Files]:
    """The files in memory that a resume does not replace; refuses it if they are gone."""
    told, needed = Run(folder).settings, []
    for name, value in given.items():
        path = str(told.get(name.replace("_", "-")) or "")
        if value is None and PREFIX in path:
            needed += [files for files in list(in_memory) if files.folder in path]
            if not any(files.folder in path for files in needed):
                raise SettingError(f"{folder}: its {name} was in memory, and went with its Run or process; help: give {name}= and its labels again", 2)
    return needed


def _free(name: str) -> str:  # type: ignore[return]
    """`out`, or the first of out-2, out-3, … that is free; makes it, so that no other start takes it."""
    for number in itertools.count(1):
        path = name if number == 1 else f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path


def compare(first: str | os.PathLike[str] | Run, second: str | os.PathLike[str] | Run) -> Fields:
    """Where two runs part (docs/compare.md): `first_difference` is None if they are the same.

    >>> for name in ("one", "two"):
    ...     run = ddp_train.train("synthetic:regression", epochs=1, out=name).wait()
    >>> ddp_train.compare("one", "two").first_difference is None
    True
    """
    folders = [run.folder if isinstance(run, Run) else os.fspath(run) for run in (first, second)]
    found = json.loads(output("compare", *folders, "--json", may_end=(0, 1)))
    return Fields(first_difference=found["first"] and Fields(found.pop("first")), **found)


@atexit.register
def _at_exit() -> None:
    """A script waits for its runs, as it does for its threads; a notebook, or an error, stops them."""
    is_interactive = hasattr(sys, "ps1") or shell() is not None
    untold, is_interrupted = _untold if os.getpid() == _PROCESS else {}, False
    for run in [run for run in list(_running) if run._owner == os.getpid() and not run._is_detached]:
        # Warnings were for those who wait.
        try:
            if is_interactive or hasattr(sys, "last_value"):
                run.stop(wait=False)
            run.wait(show=False)
        except Error as error:
            untold[run.folder] = error
        except KeyboardInterrupt:
            # It has stopped the run.
            is_interrupted = True
        except Exception:
            pass
    for folder, error in untold.items():
        print(f"ddp_train: {folder}: {error}", file=sys.stderr)
    if (untold or is_interrupted) and not is_interactive:
        globals()["_last"] = _Exit(130 if is_interrupted else 1)


class _Exit:
    """Ends this process with this code when Python drops it, at its very end: from other places it would skip what still follows."""

    def __init__(self, code: int) -> None:
        self._exit, self._code = os._exit, code

    def __del__(self) -> None:
        self._exit(self._code)
