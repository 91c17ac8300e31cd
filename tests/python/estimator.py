"""`ddp_train.Trainer` and scikit-learn: its own checks, and what people do with estimators."""

import pickle
import unittest.mock
import warnings
from unittest import SkipTest

import numpy

import ddp_train


def check():
    """Its checks, of a classifier and a regressor."""
    from sklearn.utils.estimator_checks import estimator_checks_generator

    how = {"epochs": 60, "batch_size": 16, "lr": 0.01, "hidden": "32", "threads": 1, "normalize": "standard"}
    for task in ("classification", "regression"):
        checks = list(estimator_checks_generator(ddp_train.Trainer(task=task, **how)))
        failed = []
        for estimator, does in checks:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    does(estimator)
            except SkipTest:
                # Of SciPy's experimental array API.
                pass
            except Exception as error:
                failed.append(f"{does.func.__name__} of {task}: {type(error).__name__}: {error}")
        assert not failed, "\n".join(failed)


def use():
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    generator = numpy.random.default_rng(2)
    x = generator.normal(size=(200, 3))
    y = numpy.where(x[:, 0] > 0, "yes", "no")
    model = ddp_train.Trainer(task="classification", epochs=20, batch_size=16, lr=0.01, hidden="16", threads=1)
    scores = cross_val_score(make_pipeline(StandardScaler(), model), x, y, cv=2, n_jobs=2)
    assert scores.mean() > 0.9, scores
    fitted = pickle.loads(pickle.dumps(model.fit(x, y)))
    assert set(fitted.predict(x)) == {"yes", "no"} and fitted.predict_proba(x).shape == (200, 2)
    assert fitted.best_ is None and "lr=0.01" in repr(model)
    assert ddp_train.Trainer(val_split=0.2, epochs=1, class_weights={"yes": 2}).fit(x, y).best_.step
    two = ddp_train.Trainer(task="regression", epochs=1).fit(x, x[:, :2])
    assert two.predict(x).shape == (200, 2)
    try:
        ddp_train.Trainer(epoch=3)
    except TypeError as error:
        assert "epoch" in str(error)
    else:
        raise AssertionError("Trainer took a setting that does not exist")
    as_others_do(x, y)
    pandas = __import__("pandas")
    # Settings that name columns, of frames without texts, and of arrays.
    numbers = pandas.DataFrame({"id": numpy.arange(200), "town": numpy.where(x[:, 0] > 0, 7, numpy.arange(200) % 2 * 9)})
    how = {"task": "classification", "epochs": 20, "batch_size": 16, "lr": 0.02, "threads": 1, "drop": ["id"]}
    model = ddp_train.Trainer(categorical=["town"], **how).fit(numbers, y)
    assert model.score(numbers, y) == 1 and (model.predict(numbers.to_numpy()) == y).all()
    numbered = numbers.rename(columns={"id": 0, "town": 1})
    for rows in (numbered, numbers.to_numpy()):
        assert ddp_train.Trainer(categorical=["c1"], **{**how, "drop": ["c0"]}).fit(rows, y).score(rows, y) == 1
    frame = pandas.DataFrame({"town": ["a", "b"] * 100, "x": x[:, 0]})
    told = ddp_train.Trainer(categorical="auto", epochs=1).fit(frame, y).predict(frame)
    assert set(told) <= {"yes", "no"}


def as_others_do(x, y):
    """What scikit-learn's and XGBoost's users give to fit."""
    how = {"task": "classification", "batch_size": 16, "lr": 0.01, "hidden": "16", "threads": 1}
    model = ddp_train.Trainer(epochs=50, stop_after=2, **how).fit(x, y, eval_set=[(x[:50], y[:50])], sample_weight=None)
    assert model.best_.accuracy > 0.9 and model.best_.step < 50 * 13
    same = [ddp_train.Trainer(epochs=1, **{name: seed}, **how).fit(x, y).predict_proba(x) for name, seed in (("random_state", 7), ("seed", 7), ("random_state", 8))]
    assert (same[0] == same[1]).all() and (same[0] != same[2]).any()
    states = [numpy.random.RandomState(1) for _ in range(2)]
    same = [ddp_train.Trainer(epochs=1, random_state=state, **how).fit(x, y).predict_proba(x) for state in states]
    assert (same[0] == same[1]).all()
    with unittest.mock.patch.object(ddp_train.Run, "wait", autospec=True, side_effect=ddp_train.Run.wait) as wait:
        for verbose in (None, True):
            ddp_train.Trainer(epochs=1, verbose=verbose, **how).fit(x, y)
    assert [call.kwargs["show"] for call in wait.call_args_list] == [False, True]
    number = ddp_train.Trainer(task="regression", epochs=1, threads=1).fit(x, x[:, 0], eval_set=(x, x[:, 0]))
    assert number.best_.rmse > 0
    for part, wrong, given in [
        ("class_weights=", {}, {"sample_weight": numpy.ones(200)}),
        ("no argument 'early_stopping_rounds'", {}, {"early_stopping_rounds": 3}),
        ("one pair", {}, {"eval_set": [(x, y), (x, y)]}),
        ("got 'maybe'", {}, {"eval_set": [(x[:1], ["maybe"])]}),
        ("seed and random_state", {"seed": 1, "random_state": 1}, {}),
        ("task='clasification'", {"task": "clasification"}, {}),
    ]:
        try:
            ddp_train.Trainer(**{**how, **wrong}).fit(x, y, **given)
        except (TypeError, ValueError) as error:
            assert part in str(error), error
        else:
            raise AssertionError(f"Trainer took {wrong} {given}")
