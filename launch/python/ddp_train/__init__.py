"""Train with ddp-train from Python: a thin layer over the program, in which a run is a process.

    run = ddp_train.train(x, y, epochs=20, out="runs/a")
    run.wait()
    answers = run.predict(x)

`help(ddp_train.train)` lists every setting, as the program has them. A crash of a run is an
exception with the program's own message and exit code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._program import DataError, Error, SettingError
from ._run import Event, Run, compare, resume

if TYPE_CHECKING:
    from ._estimator import Trainer
    from ._run import train

__all__ = ["DataError", "Error", "Event", "Run", "SettingError", "Trainer", "compare", "resume", "train"]


def __getattr__(name: str) -> object:
    """Makes what lists the program's settings, or needs scikit-learn, when it is first used."""
    if name == "train":
        from ._program import with_settings
        from ._run import train as found

        found.__doc__ = with_settings(found.__doc__)
    elif name == "Trainer":
        from ._estimator import Trainer as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
