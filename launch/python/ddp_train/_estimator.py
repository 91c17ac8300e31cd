"""`Trainer`, an estimator of scikit-learn."""

from __future__ import annotations

import inspect
import os
import pathlib
import tempfile
import warnings
from numbers import Integral
from typing import Any, Optional

try:
    import numpy
    from sklearn.base import BaseEstimator
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.utils import ClassifierTags, RegressorTags, check_random_state
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(f"ddp_train.Trainer needs scikit-learn 1.6 or later: {error}; help: pip install -U scikit-learn, or use ddp_train.train") from None

from ._data import frame_of, library
from ._program import SettingError, keywords, with_settings
from ._run import predict, read_state, train


def _init(self: Trainer, **settings: Any) -> None:
    unknown = set(settings) - set(NAMES)
    if unknown:
        raise TypeError(f"Trainer: no setting {sorted(unknown)[0]!r}; help(ddp_train.Trainer) lists all")
    for name in NAMES:
        setattr(self, name, settings.get(name))


# Two are as in other estimators: the rest are the program's.
NAMES = sorted([*keywords(), "random_state", "verbose"])
_PARAMETERS = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in NAMES]
_init.__signature__ = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *_PARAMETERS])  # type: ignore[attr-defined]


class Trainer(BaseEstimator):  # type: ignore[misc]
    """A model of ddp-train with the interface of scikit-learn.

    `task="classification"` or `"regression"` says what it learns; without it floats are numbers to
    predict, and whole numbers and texts are classes. Frames may have columns of text, with
    `categorical`. The fitted model is part of the object, which can be pickled. An interrupt of `fit`
    keeps the model so far. `random_state` is another name of `seed`; with `verbose=True` fit shows its progress.

    >>> import numpy, ddp_train
    >>> x = numpy.random.default_rng(1).normal(size=(200, 3))
    >>> model = ddp_train.Trainer(task="classification", epochs=20, lr=0.01).fit(x, x[:, 0] > 0)
    >>> bool(model.score(x, x[:, 0] > 0) > 0.9)
    True

    Its parameters are the settings of ddp-train; what is left out, or None, has its default:
    """

    __init__ = _init

    @property
    def _is_classifier(self) -> Optional[bool]:
        if self.task is None and hasattr(self, "task_"):
            return self.task_ == "classification"
        return None if self.task is None else self.task == "classification"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.allow_nan = self.missing in ("mean", "zero")
        if self._is_classifier:
            tags.estimator_type, tags.classifier_tags = "classifier", ClassifierTags()
        elif self._is_classifier is False:
            tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
            tags.target_tags.multi_output = True
        return tags

    def _rows(self, x: Any, is_new: bool, **y: Any) -> Any:
        """Rows, checked: as an array; as a frame if it has columns of text, or a setting names columns."""
        frame = frame_of(x) if hasattr(x, "columns") else None
        is_numeric = lambda kind: kind.is_numeric() if hasattr(kind, "is_numeric") else getattr(kind, "kind", "O") in "iufb"
        if frame is not None and not all(map(is_numeric, frame.dtypes)):
            validate_data(self, frame, reset=is_new, skip_check_array=True)
            return frame
        finite = True if self.missing in (None, "error") else "allow-nan"
        kinds = {"dtype": [numpy.float64, numpy.float32], "ensure_all_finite": finite}
        if y:
            kinds.update(y=y["y"], y_numeric=self._is_classifier is False, multi_output=self._is_classifier is False)
        try:
            found = validate_data(self, x, reset=is_new, **kinds)
        except ValueError as error:
            if finite is True and "contains NaN" in str(error):
                # scikit-learn would advise another estimator.
                raise ValueError(f'{str(error).splitlines()[0]} help: give missing="mean" or "zero", or leave such rows out') from None
            raise
        if self.categorical is None and self.drop is None:
            return found
        if frame is None:
            rows = found[0] if y else found
            names = getattr(self, "feature_names_in_", [f"c{number}" for number in range(rows.shape[1])])
            frame = library().DataFrame(dict(zip(names, rows.T)))
        return (frame, found[1]) if y else frame

    def fit(self, X: Any, y: Any, *, eval_set: Any = None, **others: Any) -> Trainer:
        """Trains on rows `X` with labels `y`. `eval_set=[(X, y)]` are rows to evaluate on, for `best` and `stop_after`."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        for name in (name for name, value in others.items() if value is not None):
            help = "give class_weights=, or repeat rows: numpy.repeat(X, counts, axis=0)" if name == "sample_weight" else "help(ddp_train.Trainer) lists all settings"
            raise TypeError(f"Trainer.fit: no argument {name!r}: expected X, y and eval_set; help: {help}")
        if self.task not in (None, "classification", "regression"):
            raise SettingError(f"Trainer: task={self.task!r}: expected \"classification\" or \"regression\"", 2)
        found = self._rows(X, True, y=y)
        x, y = found if isinstance(found, tuple) else (found, numpy.asarray(y))
        is_class = self._is_classifier if self.task is not None else y.dtype.kind != "f"
        self.task_ = "classification" if is_class else "regression"
        if is_class and self.task is None:
            warnings.warn("task is not given: trained as classification; help: give task=\"classification\", so that scikit-learn treats this as a classifier", stacklevel=2)
        if is_class:
            check_classification_targets(y)
            self.classes_, y = numpy.unique(y, return_inverse=True)
            if len(self.classes_) < 2:
                raise ValueError(f"y: expected at least two classes, got one class: {self.classes_[0]!r}")
        else:
            y = numpy.asarray(y, dtype=numpy.float64)
        # The best evaluation is saved, and the end: its folder goes, so that nothing else helps.
        settings = {**self.get_params(), "task": self.task_, **self._held_out(eval_set)}
        settings["checkpoint_every"] = self.checkpoint_every or 0
        state, is_shown = settings.pop("random_state"), bool(settings.pop("verbose"))
        if state is not None:
            if self.seed is not None:
                raise ValueError("seed and random_state: expected one of them, got both")
            settings["seed"] = state if isinstance(state, Integral) else check_random_state(state).randint(2**31)
        if isinstance(self.class_weights, dict) and is_class:
            settings["class_weights"] = {list(self.classes_).index(name): weight for name, weight in self.class_weights.items()}
        with tempfile.TemporaryDirectory() as folder:
            run = train(x, y, out=os.path.join(folder, "run"), **settings)
            try:
                run.wait(show=is_shown)
            except KeyboardInterrupt:
                # A second interrupt does not wait for the model.
                if run.outcome != "stopped":
                    raise
                warnings.warn("Trainer: interrupted by the user: the model so far is kept", stacklevel=2)
            finally:
                run.stop()
            self.best_ = run.best
            self.checkpoint_ = {path.name: path.read_bytes() for path in pathlib.Path(run.checkpoint).iterdir()}
        return self

    def _held_out(self, eval_set: Any) -> dict[str, Any]:
        """The settings for rows to evaluate on, once the classes are known."""
        if eval_set is None:
            return {}
        pairs = [eval_set] if isinstance(eval_set, tuple) else list(eval_set)
        if [len(pair) for pair in pairs] != [2]:
            raise ValueError(f"eval_set: expected one pair of rows and labels, as [(X, y)], got lengths {[len(pair) for pair in pairs]}")
        x, y = self._rows(pairs[0][0], False), numpy.asarray(pairs[0][1])
        if self.task_ == "regression":
            return {"val_data": x, "val_labels": y.astype(numpy.float64)}
        unknown = numpy.setdiff1d(y, self.classes_)
        if unknown.size:
            raise ValueError(f"eval_set: expected the classes of y, got {unknown.tolist()[0]!r}")
        return {"val_data": x, "val_labels": numpy.searchsorted(self.classes_, y)}

    def _predict(self, X: Any, probabilities: bool) -> Any:
        check_is_fitted(self, "checkpoint_")
        x = self._rows(X, False)
        settings = {name: getattr(self, name) for name in ("ranks", "device", "threads", "share_gpus")}
        with tempfile.TemporaryDirectory() as folder:
            for name, contents in self.checkpoint_.items():
                pathlib.Path(folder, name).write_bytes(contents)
            return predict(folder, read_state(folder), x, probabilities, False, settings)

    def predict(self, X: Any) -> Any:
        """The class or numbers of each row."""
        found = self._predict(X, False)
        return self.classes_[found] if self.task_ == "classification" else found.astype(numpy.float64)

    @available_if(lambda self: self._is_classifier is not False)
    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, in the order of `classes_`, for each row."""
        return self._predict(X, True)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy, or R² of numbers."""
        of = accuracy_score if getattr(self, "task_", None) == "classification" else r2_score
        return float(of(y, self.predict(X), sample_weight=sample_weight))


Trainer.__doc__ = with_settings(Trainer.__doc__)
