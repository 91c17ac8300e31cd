"""Runs: processes that train, read through their metrics logs."""

from __future__ import annotations

import atexit
import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Iterator, Optional

from ._data import Files, close_all
from ._program import Error, SettingError, environment, failure, find_program, flags, output

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._settings import Settings

# Seconds between looks at a metrics log.
PERIOD_S = 0.1
STOPPED = 75
# Runs of this process that have not ended, and those whose data are still in memory.
_running: set[Run] = set()
_known: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()


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


class Log:
    """The events of a metrics log, as they are written."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path, self.offset, self._last = path, offset, b""

    def new(self) -> list[Event]:
        """Those written since the last call; of a run that was resumed meanwhile, from there on."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self._last))
                is_cut = file.read(len(self._last)) != self._last
                if is_cut:
                    self.offset = _offset_of_resume(self.path)
                    file.seek(self.offset)
                lines = [line for line in file.readlines() if line.endswith(b"\n")]
        except FileNotFoundError:
            return []
        self.offset += sum(map(len, lines))
        self._last = lines[-1] if lines else b"" if is_cut else self._last
        return [Event(json.loads(line)) for line in lines]


def _offset_of_resume(path: str) -> int:
    """Where the last line of a resume begins; 0 if the run was not resumed."""
    with open(path, "rb") as file:
        return max(file.read().rfind(b'{"event":"resume"'), 0)


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
        self.folder = os.fspath(folder)
        if not os.path.exists(self._log_file):
            raise FileNotFoundError(f"{self.folder}: expected the folder of a run, which has metrics.jsonl; help: give what its out= was")
        self._attach(None, None)

    def _attach(self, process: Optional[subprocess.Popen[bytes]], files: Optional[Files]) -> None:
        self._process, self._files, self._owner = process, files, os.getpid()
        self._ended, self._said, self._warned, self._start = threading.Event(), -1, 0, 0

    @classmethod
    def _begin(cls, folder: str, words: list[str], files: Files, detach: bool) -> Run:
        """Starts the program, and waits until it trains or has ended."""
        output(*words, "--print-config")
        run = cls.__new__(cls)
        run.folder = folder
        run._attach(None, files)
        before, started = run._beginnings(), threading.Event()
        thread = threading.Thread(target=run._host, args=(words, detach, started), daemon=True)
        _running.add(run)
        with run._interruptible():
            thread.start()
            started.wait()
            while not run._ended.wait(PERIOD_S / 5) and run._beginnings() == before:
                pass
        run._start = _offset_of_resume(run._log_file) if run._beginnings() != before else 0
        if run._ended.is_set():
            run._raise()
        if files is not None:
            _known[os.path.realpath(folder)] = run
        return run

    def _host(self, words: list[str], detach: bool, started: threading.Event) -> None:
        """Has the process as its child: the kernel ends a run with the thread that started it."""
        self._said = os.memfd_create("standard error")
        env = dict(os.environ) if detach else environment()
        try:
            # In a session of its own, Ctrl-C in a terminal reaches it through this process alone.
            how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": self._said}
            inherited = self._files.descriptors if self._files else ()
            self._process = subprocess.Popen([find_program(), *words], env=env, start_new_session=True, pass_fds=inherited, **how)
            self._detached = detach
            started.set()
            self._process.wait()
        finally:
            started.set()
            self._ended.set()
            _running.discard(self)

    @property
    def _log_file(self) -> str:
        return os.path.join(self.folder, "metrics.jsonl")

    def _beginnings(self) -> list[bytes]:
        """The lines of its log that say when it was started and resumed."""
        try:
            with open(self._log_file, "rb") as file:
                return re.findall(rb'^\{"event":"(?:start|resume)","time_unix_s":[\d.]+.*\n', file.read(), re.MULTILINE)
        except FileNotFoundError:
            return []

    @property
    def log(self) -> str:
        """What the program has said on standard error, if this process started it."""
        if self._said < 0:
            return ""
        return os.pread(self._said, os.fstat(self._said).st_size, 0).decode(errors="replace")

    def _warn(self) -> None:
        """Passes the program's warnings on."""
        found = re.findall(r"^ *[\d.]+ s  WARN (.*)", self.log, re.MULTILINE)
        for text in found[self._warned :]:
            warnings.warn(text, stacklevel=3)
        self._warned = len(found)

    @property
    def is_running(self) -> bool:
        """Whether it still trains."""
        return not self._ended.is_set() if self._process is not None and self._owner == os.getpid() else self._writer() is not None

    def _writer(self) -> Optional[int]:
        """The process that holds the lock of its log."""
        about = os.stat(self._log_file)
        place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        with open("/proc/locks", encoding="ascii") as file:
            found = [line.split() for line in file]
        holders = [int(words[4]) for words in found if words[1] != "->" and words[5] == place]
        return holders[0] if holders else None

    @property
    def outcome(self) -> str:
        """`running`, `done`, `early` (stop_after), `stopped` (can be resumed), or `failed`."""
        if self.is_running:
            return "running"
        end = self._last("end")
        code = self._process.returncode if self._process is not None else None
        if end and code in (None, end.exit_code):
            return end.outcome
        return {0: "done", STOPPED: "stopped"}.get(code, "failed")

    def _events(self) -> list[Event]:
        return Log(self._log_file).new()

    def _last(self, kind: str) -> Optional[Event]:
        found = [event for event in self._events() if event.event == kind]
        return found[-1] if found else None

    def _raise(self) -> None:
        """The error of a run that has failed."""
        self._warn()
        code = self._process.returncode if self._process is not None else None
        if code not in (None, 0, STOPPED):
            raise failure(code, self.log)
        end = self._last("end") if code is None else None
        if end and end.outcome == "failed":
            raise Error(end.reason, end.exit_code)

    def __iter__(self) -> Iterator[Event]:
        """Its events as they are logged, until it ends; of a run that was resumed, from there on."""
        log = Log(self._log_file, self._start)
        with self._interruptible():
            is_running = True
            while is_running:
                is_running = self.is_running
                yield from log.new()
                self._warn()
                if is_running:
                    self._ended.wait(PERIOD_S)
        self._raise()

    def wait(self, timeout: Optional[float] = None, show: bool = True) -> Run:
        """Waits for its end, and shows its progress and curve in a notebook or terminal.

        Raises an `Error` if it fails, and `TimeoutError` after `timeout` seconds. Ctrl-C stops the
        run, which saves; a second one returns at once.

        >>> ddp_train.train("synthetic:regression,rows=500", epochs=1, out="waited").wait().outcome
        'done'
        """
        from ._show import live

        log, events, update = Log(self._log_file), [], live() if show else None
        end = None if timeout is None else time.monotonic() + timeout
        with self._interruptible():
            is_running = True
            while is_running:
                is_running = self.is_running
                events += log.new()
                if update is not None:
                    update(self, events, not is_running)
                self._warn()
                if end is not None and time.monotonic() > end and is_running:
                    raise TimeoutError(f"{self.folder}: still running after {timeout} s")
                self._ended.wait(PERIOD_S)
        self._raise()
        return self

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C stops the run and waits until it has saved; a second one does not wait."""
        is_ours = self._owner == os.getpid() and not self._ended.is_set() and self._files is not None
        old = signal.getsignal(signal.SIGINT)
        if not is_ours or threading.current_thread() is not threading.main_thread() or not callable(old):
            yield
            return

        def interrupt(number: int, frame: Any) -> None:
            signal.signal(signal.SIGINT, old)
            if not self._ended.is_set():
                print(f"ddp_train: {self.folder} stops and saves; interrupt again to leave it to that", file=sys.stderr)
                self._ask_to_stop()
            old(number, frame)

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        except KeyboardInterrupt:
            self._ended.wait()
            raise
        finally:
            if signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, old)

    def _ask_to_stop(self) -> None:
        process = self._process.pid if self._process is not None else self._writer()
        if process is not None and self.is_running:
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
        """Every setting of the run, defaults included."""
        return (self._last("start") or {}).get("config", {})

    @property
    def best(self) -> Optional[Event]:
        """The best evaluation on held-out rows, by the setting `best`; None without any."""
        found: Optional[Event] = None
        for event in self._events():
            if event.event == "eval":
                name = {"balanced": "balanced_accuracy"}.get(event.best_by or "loss", event.best_by or "loss")
                sign = -1 if name == "loss" else 1
                is_better = found is None or found[name] is None or (event[name] is not None and sign * event[name] > sign * found[name])
                found = event if is_better else found
        return found

    @property
    def metrics(self) -> Any:
        """A row for each logged step and evaluation: a frame of pandas or polars, else a dict of lists."""
        text = output("report", self.folder, "--csv", "-")
        for module in ("pandas", "polars"):
            if module in sys.modules:
                return sys.modules[module].read_csv(io.StringIO(text))
        with contextlib.suppress(ImportError):
            import pandas

            return pandas.read_csv(io.StringIO(text))
        rows = list(csv.DictReader(io.StringIO(text)))
        as_number = lambda cell: cell if re.search("[a-z]{3}", cell) else float(cell or "nan")
        return {name: [as_number(row[name]) for row in rows] for name in (rows[0] if rows else {})}

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
            raise FileNotFoundError(f"{self.folder}: nothing is saved yet; help: checkpoint_every= sets the steps between checkpoints")
        best = self.best
        name = f"step-{best['step']:08}" if best else names[-1]
        return os.path.join(folder, name if name in names else names[-1])

    def state_dict(self) -> dict[str, Any]:
        """The model's parameters by name, as NumPy arrays mapped from the file.

        Changes to them stay in memory. `{name: torch.from_numpy(it) for name, it in …}` shares them.

        >>> sorted(ddp_train.Run("made").state_dict())[:2]
        ['0.bias', '0.weight']
        """
        import numpy

        path = os.path.join(self.checkpoint, "model.safetensors")
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        kinds = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
        mapped = numpy.memmap(path, mode="c")
        arrays = {}
        for name, entry in header.items():
            first, end = (start + offset for offset in entry["data_offsets"])
            arrays[name] = mapped[first:end].view(kinds[entry["dtype"]]).reshape(entry["shape"])
        return arrays

    def predict(self, data: Any, *, probabilities: bool = False, logits: bool = False, **settings: Any) -> Any:
        """The model's prediction for each row of an array, frame or file: classes or numbers.

        Classes are as the labels were. With `probabilities` or `logits` there is a column for each,
        in the order of `classes`. `ranks`, `device`, `threads` and `batch_size` are as in training.

        >>> ddp_train.Run("made").predict("synthetic:classification,rows=2000", probabilities=True).shape
        (2000, 10)
        """
        return predict(self.checkpoint, data, probabilities, logits, settings)

    @property
    def classes(self) -> Optional[list[Any]]:
        """The names of its classes in their order: texts or numbers; None of a model of numbers."""
        return classes_of(self.checkpoint)

    def evaluate(self, data: Any, labels: Any = None, **settings: Any) -> Fields:
        """The figures of `ddp-train eval` for these rows: loss, accuracy, scores of each class, errors.

        >>> ddp_train.Run("made").evaluate("synthetic:classification,rows=2000").rows
        2000
        """
        files = Files()
        given = files.settings("data", data, labels)
        given.pop("task", None)
        return Fields(json.loads(output("eval", "--json", *flags({"checkpoint": self.checkpoint, **given, **settings}), inherited=files.descriptors)))

    def generate(self, prompt: str, **settings: Any) -> str:
        """What a transformer makes of `prompt`: `max_tokens`, `temperature` and so on as flags of `ddp-train generate`."""
        return output("generate", *flags({"checkpoint": self.checkpoint, "prompt": prompt, **settings}))

    def __repr__(self) -> str:
        from ._show import line

        return f"<ddp_train.Run {line(self, self._events())}>"

    def _repr_html_(self) -> str:
        from ._show import page

        return page(self, self._events())


def classes_of(checkpoint: str) -> Optional[list[Any]]:
    """The names of a model's classes in their order; None of a model of numbers."""
    with open(os.path.join(checkpoint, "state.json"), encoding="utf-8") as file:
        task = json.load(file)["task"].get("classification")
    if task is None:
        return None
    names = task["names"] or list(range(task["classes"]))
    are_whole = all(re.fullmatch(r"0|-?[1-9]\d*", str(name)) for name in names)
    return [int(name) for name in names] if are_whole else names


def predict(checkpoint: str, data: Any, probabilities: bool, logits: bool, settings: dict[str, Any]) -> Any:
    """See `Run.predict`."""
    import numpy

    files = Files()
    given = files.settings("data", data, None)
    given.pop("task", None)
    path = os.path.join(files.folder, "predictions.npy")
    # Several GPUs share large arrays; on the CPU one rank takes all cores.
    if "ranks" not in settings and getattr(data, "nbytes", 0) > 1 << 28:
        settings = {**settings, "ranks": "auto"}
    kinds = [f"--{name}" for name, is_wanted in (("probabilities", probabilities), ("logits", logits)) if is_wanted]
    output("predict", *flags({"checkpoint": checkpoint, **given, "out": path, "log_level": "error", **settings}), *kinds, inherited=files.descriptors)
    found = numpy.load(path)
    if found.ndim == 2 and found.shape[1] == 1 and not kinds:
        return found[:, 0]
    names = classes_of(checkpoint)
    is_index = names is not None and isinstance(names[0], str) and not kinds
    return numpy.array(names)[found] if is_index else found


def train(
    data: Any = None,
    labels: Any = None,
    *,
    val_data: Any = None,
    val_labels: Any = None,
    out: Optional[str | os.PathLike[str]] = None,
    detach: bool = False,
    **settings: Unpack[Settings],
) -> Run:
    """Starts a run, and returns when it trains; `wait` waits for its end.

    `data` are rows: an array of NumPy or of any library with DLPack, a frame of pandas or polars, or
    what `--data` takes (a file, a pattern, `glyphs`). A one-dimensional array of integers are tokens.
    `labels` are an array, the name of a column, or several for numbers. By their type whole numbers and
    texts are classes, floats are numbers to predict, unless `task` says otherwise.

    `out` is a new folder for the run (by default out, out-2, …). The run stops, and saves, when
    this process ends, unless `detach`, which keeps arrays in OUT/data and leaves the run alone.

    >>> import numpy, ddp_train
    >>> x = numpy.random.default_rng(1).normal(size=(300, 4))
    >>> run = ddp_train.train(x, x[:, 0] > 0, epochs=20, lr=0.01, out="runs/a").wait()
    >>> bool((run.predict(x) == (x[:, 0] > 0)).mean() > 0.9)
    True

    Every setting of ddp-train is a keyword; what is left out, or None, has its default:
    """
    folder = os.fspath(out) if out is not None else _free("out")
    files = _files(settings, detach, folder, data, val_data)
    given = {**files.settings("data", data, labels), **files.settings("val_data", val_data, val_labels)}
    words = ["train", *flags({**given, **settings, "out": folder, "progress": "never"})]
    return Run._begin(folder, words, files, detach)


def resume(
    run: str | os.PathLike[str] | Run,
    data: Any = None,
    labels: Any = None,
    *,
    val_data: Any = None,
    val_labels: Any = None,
    detach: bool = False,
    **settings: Unpack[Settings],
) -> Run:
    """Continues the run in a folder from its newest checkpoint, with its settings and these.

    Data that were files, or arrays of a run that this process has started, need not be given again.

    >>> run = ddp_train.train("synthetic:classification", schedule="constant", steps=20, warmup_steps=2, out="runs/b").wait()
    >>> ddp_train.resume("runs/b", steps=40).wait()._last("end").steps
    40
    """
    folder = run.folder if isinstance(run, Run) else os.fspath(run)
    earlier = _known.get(os.path.realpath(folder))
    if data is None and earlier is not None and earlier._files is not None:
        files = earlier._files
    else:
        files = _files(settings, detach, folder, data, val_data)
    given = {**files.settings("data", data, labels), **files.settings("val_data", val_data, val_labels)}
    if data is None and files is not getattr(earlier, "_files", None):
        _check_data(folder)
    return Run._begin(folder, ["resume", folder, *flags({**given, **settings, "progress": "never"})], files, detach)


def _files(settings: Any, detach: bool, folder: str, *given: Any) -> Files:
    """The files for arrays and frames, which other hosts do not see."""
    are_paths = all(it is None or isinstance(it, (str, os.PathLike)) for it in given)
    if not are_paths and (settings.get("hosts") or settings.get("hostfile")):
        raise SettingError("hosts: expected files as data, since other hosts do not see this process's memory; help: save the arrays", 2)
    return Files(os.path.join(folder, "data") if detach else None)


def _check_data(folder: str) -> None:
    """Refuses to resume a run whose data were in the memory of a process that is gone."""
    from ._data import PREFIX

    for name in ("data", "val-data"):
        spec = Run(folder).settings.get(name)
        path = str(spec or "").replace("tokens:", "").split("#")[0]
        if f"/{PREFIX}" in path and not os.path.exists(path.split(",")[0]):
            raise SettingError(f"{folder}: its {name} were in the memory of a process that has ended; help: give data= and labels= again", 2)


def _free(name: str) -> str:
    """`out`, or the first of out-2, out-3, … that is free."""
    names = [name, *(f"{name}-{number}" for number in range(2, 10000))]
    return next(name for name in names if not os.path.exists(name))


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
    runs = [run for run in list(_running) if run._owner == os.getpid() and not getattr(run, "_detached", False)]
    is_interactive = hasattr(sys, "ps1") or "IPython" in sys.modules
    for run in runs:
        # Errors and warnings were for those who wait; an interrupt has stopped it.
        with contextlib.suppress(KeyboardInterrupt, Exception):
            if is_interactive or hasattr(sys, "last_value"):
                run.stop(wait=False)
            run.wait(show=False)
    close_all()
