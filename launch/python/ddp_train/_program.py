"""The program ddp-train: where it is, how its settings are written, how it ends."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Error(RuntimeError):
    """The program ended with an error: its message, and its exit `code` (docs/errors.md)."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message, code)
        self.message, self.code = message, code

    def __str__(self) -> str:
        return visible(f"{self.message} (exit code {self.code})")


class SettingError(Error, ValueError):
    """A setting was refused, or the folder holds a run: exit code 2."""


class DataError(Error, ValueError):
    """Data, or a saved model, were refused: exit code 65."""


def failure(code: int, said: str) -> Error:
    """The error of a program that has ended with `code` after it `said` this on standard error."""
    code = code if code >= 0 else 128 - code
    # Log lines begin with a time, so this is the first line of an error.
    message = re.search(r"^[\w.-]+: .*?(?=\n\n  Usage:|\n\n  For more information|\Z)", said, re.MULTILINE | re.DOTALL)
    if message:
        text = as_keywords(message.group().strip())
    elif code > 128:
        text = f"ddp-train: killed by signal {code - 128}, without a message"
    else:
        text = said.strip() or "ddp-train: ended without a message"
    return {2: SettingError, 65: DataError}.get(code, Error)(without_folder(text), code)


# Folders with the names of files in memory, which go with this process and its runs.
PREFIX = f"ddp-train-{os.getuid()}-"


def without_folder(text: str) -> str:
    """A message with the names of such files without their folder, which says nothing."""
    return re.sub(rf"[^\s'\"]*/{PREFIX}\w+/", "", text)


def visible(text: str) -> str:
    """A text from a file, without the escape sequences that a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda it: repr(it[0])[1:-1], text)


def shell() -> Any:
    """The shell of IPython, if this process has one."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


# Advice of the program to give settings, after whose last value the clause ends: `give --drop 'id,home town' --missing mean;`.
_VALUE = r"(?:'[^']*'(?:\\''[^']*')*|-?[\w.,+-]*\w)"
_ADVICE = re.compile(rf"\b(give|set|out:)((?: --[a-z][a-z0-9-]* {_VALUE}(?=[,;:.)\n]|$| --))+)|\b(set)( --[a-z][a-z0-9-]* to [\w-]+)")
# Settings whose value is a list of names of columns.
_LISTS = ("drop", "categorical")


def as_keywords(text: str) -> str:
    """A text of the program with its flags as keywords, and advice as a call has it.

    >>> ddp_train._program.as_keywords("--lr -1: expected more; help: give --drop 'id,home town' --missing mean, or leave --lr out")
    'lr -1: expected more; help: give drop=["id", "home town"], missing="mean", or leave lr out'
    >>> print(ddp_train._program.as_keywords(r"leave it out: --drop 'it'\\''s'"))
    leave it out: drop=["it's"]
    """

    def call(found: re.Match[str]) -> str:
        verb, settings = filter(None, found.groups())
        given = re.findall(rf" --([a-z0-9-]+) (?:to )?({_VALUE})", settings)
        return f"{verb} " + ", ".join(f"{name.replace('-', '_')}={_written(name, shlex.split(value)[0])}" for name, value in given)

    text = text.replace("--resume auto to continue that run", "overwrite=True to remove that run, or ddp_train.resume to continue it")
    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*)", lambda it: it[1].replace("-", "_"), _ADVICE.sub(call, text))


def _written(name: str, value: str) -> str:
    """A value of a setting in Python; capitals stand for one."""
    if name in _LISTS and value not in ("auto", "none"):
        return json.dumps(value.split(","), ensure_ascii=False)
    if value in ("true", "false"):
        return value.title()
    return value if re.fullmatch(r"-?\d[\d.]*(e[+-]?\d+)?|[A-Z]+", value) else json.dumps(value, ensure_ascii=False)


def caution(text: str) -> None:
    """A warning at the line that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and os.path.dirname(frame.f_code.co_filename) == os.path.dirname(__file__):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def warn(said: str, after: int = 0) -> Iterator[int]:
    """Passes the warnings of a program that has said this on; skips so many; yields how many it has passed on."""
    found = re.findall(r"^ *[\d.]+ s  WARN (.*)", said, re.MULTILINE)
    for number, text in enumerate(found[after:], after + 1):
        yield number  # first: a warning may be an error
        caution(without_folder(as_keywords(text)))


def find_program() -> str:
    """The path of ddp-train: DDP_TRAIN, or among the scripts of this environment or of the user, or in PATH."""
    # The last of these is that of `pip install --target FOLDER`.
    folders = [sysconfig.get_path("scripts"), os.path.join(site.getuserbase(), "bin"), os.path.join(os.path.dirname(os.path.dirname(__file__)), "bin")]
    places = [os.environ["DDP_TRAIN"]] if "DDP_TRAIN" in os.environ else [os.path.join(folder, "ddp-train") for folder in [*folders, *os.get_exec_path()]]
    for path in places:
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"no program ddp-train: {', '.join(places)}; help: pip install --force-reinstall ddp-train")


def output(*words: str, may_end: tuple[int, ...] = (0,), inherited: Sequence[int] = ()) -> str:
    """What the program prints on standard output; an `Error` if it ends with another code."""
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8", "errors": "replace", "pass_fds": inherited}
    ended = subprocess.run([find_program(), *words], env=environment(), **how)
    if ended.returncode not in may_end:
        raise failure(ended.returncode, ended.stderr)
    list(warn(ended.stderr))
    return ended.stdout


# With these a launcher makes this process one of its ranks, or the program does something else than to train.
NOT_INHERITED = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)|OMPI_.*|PMI.*|SLURM_(PROCID|NTASKS|LOCALID)|DDP_(DRY_RUN|PRINT_CONFIG|PARENT)")


def environment(ends_with_this: bool = True) -> dict[str, str]:
    """That of a program, which the kernel asks to stop when this process ends."""
    inherited = {name: value for name, value in os.environ.items() if not NOT_INHERITED.fullmatch(name)}
    return {**inherited, **({"DDP_PARENT": str(os.getpid())} if ends_with_this else {})}


def flags(*layers: Mapping[str, Any]) -> list[str]:
    """Settings as flags, of which later layers win: `batch_size=64` is `--batch-size=64`, None is none."""
    given = {name.replace("_", "-"): value for layer in layers for name, value in layer.items() if value is not None}
    return [f"--{name}={_text(name, value)}" for name, value in given.items()]


def _text(name: str, value: Any) -> str:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(f"{key}={_text(name, it)}" for key, it in value.items())
    if isinstance(value, (list, tuple, set)):
        texts = [_text(name, it) for it in value]
        odd = [text for text in texts if "," in text]
        if odd:
            raise SettingError(f"{name}: expected names without a comma, got {odd[0]!r}; help: rename the column", 2)
        return ",".join(texts) or "none"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


@functools.lru_cache
def listed() -> dict[str, Any]:
    """Every flag of training with its help, as the program lists them."""
    return json.loads(output("settings"))


# What is no keyword: the rest are.
NOT_KEYWORDS = ("help", "data", "labels", "val-data", "val-labels", "out", "resume", "print-config", "dry-run")


def keywords() -> dict[str, dict[str, Any]]:
    """The settings that are keywords, by the name of the keyword."""
    return {flag["name"].replace("-", "_"): flag for flag in listed()["flags"] if flag["name"] not in NOT_KEYWORDS}


def with_settings(about: Any) -> str:
    """A docstring, and then the settings by group, each with its help and default."""
    groups: dict[str, list[str]] = {}
    for name, flag in keywords().items():
        choices = f" ({', '.join(flag['choices'])})" if flag["choices"] else ""
        default = f" [default: {flag['default']}]" if flag["default"] else ""
        lines = textwrap.wrap(f"{as_keywords(flag['help'])}{choices}{default}", 88, initial_indent="        ", subsequent_indent="        ")
        groups.setdefault(flag["group"] or "Other", []).extend([f"    {name}", *lines])
    return "\n\n".join([inspect.cleandoc(about or ""), *("\n".join([f"{group}:", *lines]) for group, lines in groups.items())])
