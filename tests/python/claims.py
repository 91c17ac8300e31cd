"""Claims about the Python package: tests/python/run starts it, perhaps with the NAME of one."""

import ast
import doctest
import fcntl
import glob
import html.parser
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import unittest.mock
import warnings

import numpy

import ddp_train
import estimator
from ddp_train import _data, _program, _run, _show

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
PACKAGE = os.path.dirname(ddp_train.__file__)
# The end of patience, and no measure.
PATIENCE_S = 120
RANDOM = numpy.random.default_rng(1)
X = RANDOM.normal(size=(200, 4))
Y = (X[:, 0] > 0).astype(int)
SHORT = {"epochs": 1, "threads": 1, "hidden": "8"}


# Processes of a claim, which end with it.
STARTED = []


class Skipped(Exception):
    pass


def need(module):
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"no {module} here")
    return importlib.import_module(module)


def raises(kind, part, does, *arguments, **settings):
    try:
        does(*arguments, **settings)
    except kind as error:
        assert part in str(error), f"{error}\nlacks {part!r}"
        return error
    raise AssertionError(f"expected {kind.__name__} with {part!r}")


def wait_until(is_so, what):
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"in vain: {what}"
        # Sleep: between two looks at what another process does.
        time.sleep(0.05)


def processes_of(folder):
    """The numbers of the processes of ddp-train that write a run into this folder of the claim's."""
    found, text = [], os.path.abspath(folder)
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                words = file.read()
        except OSError:
            continue
        if f"--out={text}".encode() in words.split(b"\0")[1:]:
            found.append(int(path.split("/")[2]))
    return found


def children_of(process):
    """The processes that this one has started."""
    children = []
    for path in glob.glob(f"/proc/{process}/task/*/children"):
        with open(path, encoding="ascii") as file:
            children += file.read().split()
    return children


def python(script, **how):
    """A Python that runs this script, in the folder of the claim."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    STARTED.append(subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], **how))
    return STARTED[-1]


def end_all():
    """What a claim that failed has left."""
    for run in list(_run._running):
        run._process.kill()
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.communicate()


# What the package says of itself.


def modules_parse_as_python_3_9():
    for path in glob.glob(f"{PACKAGE}/*.py*"):
        with open(path, encoding="utf-8") as file:
            ast.parse(file.read(), path, feature_version=(3, 9))


def other_pythons_import_it_and_train():
    found = [shutil.which(f"python3.{minor}") for minor in range(9, 15)] + glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python3"))
    for number, path in enumerate(filter(None, found)):
        version = subprocess.run([path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True, check=False).stdout
        if int(version or 0) >= 9:
            words = "import ddp_train; print(ddp_train.train('synthetic:regression,rows=200', steps=3, out='py%s').wait().outcome)" % number
            said = subprocess.run([path, "-W", "error", "-c", words], capture_output=True, text=True, check=False)
            assert said.stdout == "done\n", f"{path}: {said.stdout}{said.stderr}"


def types_of_settings_are_those_of_the_program():
    made = subprocess.run([sys.executable, f"{ROOT}/tests/python/stub.py"], capture_output=True, text=True, check=True).stdout
    with open(f"{PACKAGE}/_settings.pyi", encoding="utf-8") as file:
        help = "export PYTHONPATH=launch/python DDP_TRAIN=target/debug/ddp-train; python3 tests/python/stub.py >launch/python/ddp_train/_settings.pyi"
        assert file.read() == made, f"the types of settings are not those of the program; help: {help}"


def help_lists_every_setting_with_its_default():
    text = ddp_train.train.__doc__
    shown = _program.output("train", "--help")
    for name in re.findall(r"^ +--([a-z0-9-]+)", shown, re.MULTILINE):
        if name not in _program.NOT_KEYWORDS:
            assert f"\n    {name.replace('-', '_')}\n" in text, name
    assert "[default: 128]" in text and "[default: 60]" in text


def examples_in_docstrings_work():
    for module in (_run, _program, _data):
        failed, _ = doctest.testmod(module, globs={"ddp_train": ddp_train})
        assert failed == 0, module
    with open(f"{PACKAGE}/_run.py", encoding="utf-8") as file:
        assert file.read().count(">>>") > 15


def the_example_of_trainer_works():
    need("sklearn")
    assert ddp_train.Trainer.__doc__
    for example in doctest.DocTestFinder(recurse=False).find(ddp_train.Trainer, globs={}):
        found = doctest.DocTestRunner().run(example)
        assert found.attempted == 4 and found.failed == 0, found


def settings_are_checked_before_anything_starts():
    for settings, part in [({"lr": -1}, ": lr -1"), ({"batch_size": 0}, "batch_size"), ({"epoch": 3}, "'epoch'"), ({"num_epochs": 3}, "write epochs"), ({"ranks": 0}, "ranks"), ({"model": "mlpp"}, "mlpp"), ({"optimizer": "adam"}, "adamw")]:
        error = raises(ddp_train.SettingError, part, ddp_train.train, X, Y, out="run", **settings)
        assert error.code == 2 and isinstance(error, ValueError) and "Usage" not in str(error) and "--" not in str(error), error
    assert not os.path.exists("run")


# Data.


def arrays_of_every_type_arrive():
    run = ddp_train.train((X * 3).astype(">i8"), Y, out="run", **SHORT).wait()
    for kind in "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 >f4 >i8".split():
        x = (X * 3).astype(kind)
        assert (run.predict(x, logits=True) == run.predict(x.astype("f4"), logits=True)).all(), kind


def strides_do_not_matter():
    run = ddp_train.train(X, Y, out="run", **SHORT).wait()
    expected = run.predict(X, logits=True)
    wide = numpy.zeros((400, 8))
    wide[::2, ::2] = X
    backwards = numpy.ascontiguousarray(X[::-1])[::-1]
    for x in (wide[::2, ::2], numpy.asfortranarray(X), backwards, X.tolist(), X.astype(object)):
        assert (run.predict(x, logits=True) == expected).all()
    frozen = X.copy()
    frozen.flags.writeable = False
    assert (run.predict(frozen, logits=True) == expected).all()
    with unittest.mock.patch.object(_data, "PIECE_BYTES", 64):
        assert (run.predict(wide[::2, ::2], logits=True) == expected).all()


def what_cannot_be_given_is_refused_with_the_way_out():
    class Cuda:
        def __dlpack_device__(self):
            return (2, 1)

    class Sparse:
        def toarray(self):
            return X

    train = ddp_train.train
    gap = numpy.where(numpy.arange(800).reshape(200, 4) == 13, numpy.nan, X)
    for kind, part, x, y in [
        (TypeError, "cpu()", Cuda(), Y),
        (TypeError, "toarray()", Sparse(), Y),
        (TypeError, "filled", numpy.ma.array(X), Y),
        (TypeError, "complex128", X.astype(complex), Y),
        (TypeError, "datetime64", numpy.zeros((3, 2), "M8[s]"), [0, 1, 0]),
        (TypeError, "give columns of text in a frame", [["a", "b"], ["c", "d"]], [0, 1]),
        (TypeError, "data: expected", [[1, 2], [3]], [0, 1]),
        (TypeError, "expected numbers", numpy.zeros(3, "i4,f4"), [0, 1, 0]),
        (ValueError, "expected one for each of 200 rows, got 199", X, Y[1:]),
        (ValueError, "shape (0, 4)", X[:0], Y[:0]),
        (ValueError, "shape ()", 3.0, Y),
        (ValueError, "expected an array", X, "label"),
        (ValueError, "expected an array", X, 4),
        (TypeError, "texts and None", X[:3], ["a", "b", None]),
        (ddp_train.SettingError, "expected labels", X, None),
        (ddp_train.DataError, 'row 3, feature 1: expected a finite f32, got NaN (rows and features are counted from 0); help: give missing="mean", leave out', gap, Y),
        (ddp_train.DataError, "expected a finite f32", X.astype("f8") * 1e300, Y),
        (ddp_train.DataError, "NaN", X, Y * numpy.nan),
        (FileNotFoundError, "metrics.jsonl", None, None),
    ]:
        if kind is FileNotFoundError:
            raises(kind, part, ddp_train.Run, "nowhere")
        else:
            raises(kind, part, train, x, y, out="run", **SHORT)
    assert not os.path.exists("run/checkpoints")
    assert not glob.glob(f"{tempfile.gettempdir()}/{_data.PREFIX}*/data*")
    # As advised; and a model that was trained without gaps takes none.
    assert train(gap, Y, missing="mean", out="filled", **SHORT).wait().predict(gap).shape == (200,)
    error = raises(ddp_train.DataError, "help: leave out such rows", train(X, Y, out="whole", **SHORT).wait().predict, gap)
    assert "missing" not in str(error), error


def tensors_arrive_through_dlpack():
    class Tensor:
        """Has DLPack and nothing else."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **how):
            return self.array.__dlpack__(**how)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    run = ddp_train.train(Tensor(X), Tensor(Y), out="run", **SHORT).wait()
    assert (run.predict(Tensor(X)) == run.predict(X)).all()


def labels_come_back_as_they_were():
    for number, names in enumerate([["b", "a", "ü"], [-1, 1, 7], [True, False, True], ["1", "02", "3"]]):
        y = numpy.array(names)[RANDOM.integers(0, 3, 200)]
        run = ddp_train.train(X, y, val_data=X[:40], val_labels=y[:40], out=f"run{number}", **SHORT).wait()
        told = run.predict(X)
        assert set(told.tolist()) <= set(y.tolist()), (names, told)
        assert run.best.step == 2 and run.predict(X, probabilities=True).shape == (200, len(set(names)))
        assert run.evaluate(X, y).rows == 200


def models_of_arrays_take_frames_and_the_other_way():
    pandas = need("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    of_array = ddp_train.train(X, Y, out="array", **SHORT).wait()
    of_frame = ddp_train.train(frame, Y, out="frame", **SHORT).wait()
    assert (of_array.predict(frame, logits=True) == of_array.predict(X, logits=True)).all()
    assert (of_frame.predict(X, logits=True) == of_frame.predict(frame, logits=True)).all()
    assert of_array.evaluate(frame, Y).loss == of_array.evaluate(X, Y).loss
    raises(ddp_train.DataError, 'a column "d"', of_frame.predict, frame[["a", "b", "c"]])
    raises(ddp_train.DataError, "data.bin#features: expected 4 features", of_frame.predict, X[:, :3])


def predict_has_every_row_and_no_file():
    run = ddp_train.train(X, Y, val_split=0.2, out="run", **SHORT).wait()
    for name, value, part in [("held_out", True, "evaluate(data, labels, held_out=True)"), ("out", "answers.npy", "save what"), ("keep", "a", "add what")]:
        error = raises(ddp_train.SettingError, part, run.predict, X, **{name: value})
        assert name in str(error) and "predictions" not in str(error), error
    assert run.predict(X, held_out=False).shape == (200,) and run.evaluate(X, Y, held_out=True).rows == 40


def several_numbers_are_learned_together():
    run = ddp_train.train(X, X[:, :2] * 2, out="run", **SHORT).wait()
    assert run.predict(X).shape == (200, 2) and run.classes is None
    assert ddp_train.train(X, X[:, 0], out="one", **SHORT).wait().predict(X).shape == (200,)


def images_and_tokens_keep_their_shapes():
    images = RANDOM.integers(0, 255, (40, 8, 8)).astype("u1")
    run = ddp_train.train(images, numpy.arange(40) % 2, model="vit,layers=1,heads=1,width=8", epochs=1, normalize="unit", out="vit").wait()
    assert run.predict(images).shape == (40,)
    tokens = RANDOM.integers(0, 50, 2000)
    run = ddp_train.train(tokens, model="gpt,layers=1,heads=1,width=8,context=16", val_data=tokens[:100], steps=2, out="gpt").wait()
    assert run.best.perplexity > 1
    raises(ddp_train.Error, "help", ddp_train.train, tokens.astype("f4"), model="gpt", steps=1, out="float")


def frames_of_pandas_and_polars_are_tables():
    pandas = need("pandas")
    columns = {"a,b": X[:, 0], "c\td": X[:, 1], " e ": ["ü", "", 'q"', "two\nlines"] * 50, "f#g": Y.astype(bool), "row": numpy.arange(200) % 5, "rent": X[:, 2] * 100}
    frames = [pandas.DataFrame(columns), columns]
    if importlib.util.find_spec("polars"):
        polars = need("polars")
        frames += [polars.DataFrame(columns), polars.LazyFrame(columns)]
    if importlib.util.find_spec("pyarrow"):
        frames.append(need("pyarrow").Table.from_pandas(frames[0]))
    told = []
    for number, frame in enumerate(frames):
        run = ddp_train.train(frame, "rent", categorical="auto", missing="mean", normalize="standard", out=f"run{number}", **SHORT).wait()
        told.append(run.predict(frame))
    for other in told[1:]:
        assert (told[0] == other).all()
    mixed = frames[0][["rent", "row", " e ", "f#g", "c\td", "a,b"]].assign(more="text")
    assert (run.predict(mixed) == told[0]).all()
    assert isinstance(run.metrics, pandas.DataFrame) and len(run.metrics) == 2


def frames_of_numbers_arrive_with_and_without_parquet():
    pandas = need("pandas")
    frame = pandas.DataFrame(X.astype("f4"), index=RANDOM.permutation(200)).assign(rooms=pandas.array([1, 2, None, 4] * 50, "Int64"), yes=pandas.array([True, None] * 100, "boolean"))
    labels = pandas.Series(numpy.where(Y, "x", "y"), index=frame.index[::-1], name="rooms")
    run = ddp_train.train(frame, labels, missing="mean", out="run", **SHORT).wait()
    told = run.predict(frame, logits=True)
    with unittest.mock.patch.object(_data, "has", lambda module: False):
        again = ddp_train.train(frame, labels, missing="mean", out="text", **SHORT).wait()
    assert (again.predict(frame, logits=True) == told).all()
    assert set(run.predict(frame)) <= {"x", "y"}
    assert ddp_train.train(frame, X[:, 0], missing="mean", out="floats", **SHORT).wait().classes is None
    two = ddp_train.train(frame, X[:, :2], missing="mean", task=None, out="two", **SHORT).wait()
    assert two.predict(frame).shape == (200, 2) and two.evaluate(frame, X[:, :2]).rows == 200
    # Whole floats are numbers to learn, as in arrays.
    assert ddp_train.train(frame.assign(y=Y * 1.0), "y", missing="mean", out="whole", **SHORT).wait().classes is None
    assert ddp_train.train(frame.assign(y=Y), "y", missing="mean", out="last", **SHORT).wait().classes == [0, 1]


def columns_named_by_numbers_are_found_again():
    pandas = need("pandas")
    frame = pandas.DataFrame(X).assign(town="Bern")
    for has in (_data.has, lambda module: False):
        with unittest.mock.patch.object(_data, "has", has):
            folder = f"run{has('numpy')}"
            run = ddp_train.train(frame[[0, 1, 2, 3]], frame[3], out=folder, **SHORT).wait()
            assert run.predict(frame[[0, 1, 2, 3]]).shape == (200,)
            run = ddp_train.train(frame, 3, categorical="auto", out=f"{folder}-3", **SHORT).wait()
            assert run.classes is None and run.predict(frame[[0, 1, 2, "town"]]).shape == (200,)
    if importlib.util.find_spec("polars"):
        frame = need("polars").DataFrame({"0": X[:, 0], "1": X[:, 1]})
        run = ddp_train.train(frame, need("polars").Series("name", Y), out="polars", **SHORT).wait()
        assert run.predict(frame).shape == (200,)
        tokens = need("polars").Series(Y)
        assert ddp_train.train(tokens, model="gpt,layers=1,heads=1,width=8,context=8", steps=1, out="tokens").wait().outcome == "done"


def categories_are_the_same_beside_gaps_and_new_ones_are_warned_of():
    pandas = need("pandas")
    frame = pandas.DataFrame({"rooms": Y, "town": ["a", "b"] * 100})
    labels, tables = X[:, 0] + Y, [frame]
    if importlib.util.find_spec("polars"):
        tables.append(need("polars").DataFrame({"rooms": Y, "town": ["a", "b"] * 100}))
    with warnings.catch_warnings():
        # Nor does it take rows to evaluate on for those to train on.
        warnings.simplefilter("error")
        for number, table in enumerate(tables):
            how = {"val_data": table, "val_labels": labels, "categorical": "rooms,town", "out": f"run{number}", "missing": "mean"}
            run = ddp_train.train(table, labels, **how, **SHORT).wait()
            gap = frame.astype({"rooms": float}) if number == 0 else table.with_columns(table["rooms"].cast(float))
            assert (run.predict(gap) == run.predict(table)).all()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.predict(frame.assign(town="c"))
    assert len(caught) == 1 and "not trained on" in str(caught[0].message) and caught[0].filename == __file__, [str(it) for it in caught]


def advice_is_in_words_of_python():
    pandas = need("pandas")
    frame = pandas.DataFrame({"id": [f"n{number}" for number in range(200)], "home town": ["a", "b"] * 100, "x": X[:, 0], "free text": [f"t{number}" for number in range(200)], "y": Y})
    frame.loc[3, "x"] = numpy.nan
    error = raises(ddp_train.DataError, "help", ddp_train.train, frame, "y", plain=True, out="run")
    assert 'give categorical=["home town"], drop=["id", "free text"], missing="mean"; if' in str(error), error
    raises(ddp_train.SettingError, "give val_split=0.2", ddp_train.train, X, Y, stop_after=3, out="run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp_train.train(frame.assign(id=numpy.arange(200)), "y", categorical=["home town"], drop=["free text"], missing="mean", plain=True, out="run", **SHORT).wait()
    said = [str(it.message) for it in caught]
    assert any('leave them out: drop=["id"]' in it for it in said) and any('set normalize="standard"' in it for it in said), said
    if importlib.util.find_spec("sklearn"):
        raises(ValueError, 'give missing="mean"', ddp_train.Trainer(task="classification", plain=True).fit, frame[["x"]], Y)


def texts_that_count_as_missing_are_named():
    pandas = need("pandas")
    with open(f"{ROOT}/ddp/data/src/words.rs", encoding="utf-8") as file:
        words = re.search(r"const MISSING: .* = \[(.*)\];", file.read())[1]
    assert {*json.loads(f"[{words}]"), "nan"} == set(_data.MISSING)
    country = numpy.array(["NA", "CH", "None", "NO", None], object)[numpy.arange(200) % 5]
    frames = [pandas.DataFrame({"country": country, "x": X[:, 0], "y": Y})]
    frames.append(frames[0].astype({"country": "category"}))
    if importlib.util.find_spec("polars"):
        frames.append(need("polars").DataFrame({"country": country.tolist(), "x": X[:, 0], "y": Y}))
    for number, frame in enumerate(frames):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = ddp_train.train(frame, "y", categorical="auto", missing="mean", out=f"run{number}", **SHORT).wait()
            run.predict(frame)
        said = sorted(str(it.message) for it in caught if it.filename == __file__ and "missing" in str(it.message))
        assert len(said) == 2 and all("column 'country'" in it and "'NA'" in it and "'None'" in it for it in said), said
    # Cells that are missing in the frame, and other texts, are as they were.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = frames[0].assign(country=numpy.where(numpy.isin(country, ["NA", "None"]), "Namibia", country))
        ddp_train.train(whole, "y", categorical="auto", missing="mean", out="whole", **SHORT).wait()


def frames_need_no_settings_and_pandas_categories_may_be_numbers():
    pandas = need("pandas")
    frame = pandas.DataFrame({"code": pandas.Categorical(numpy.arange(200) % 3 + 5), "x": X[:, 0], "town": ["a", "b"] * 100, "y": X[:, 0] + numpy.arange(200) % 3 % 2})
    run = ddp_train.train(frame, "y", steps=300, threads=1, out="numbers").wait()
    assert '"code=5", "code=6", "code=7"' in run._last("start").data, run._last("start")
    # A category of the model is the same in a frame where it is a number.
    assert (run.predict(frame) == run.predict(frame.astype({"code": int}))).all()
    found = run.importances(frame, "y")
    assert list(found)[:2] == ["x", "code"] and set(found) == {"x", "code", "town"} and found["code"] > 0.1 > abs(found["town"]), found
    # A column that the model does not read is left out.
    assert found == run.importances(frame, frame["y"].to_numpy())
    run = ddp_train.train(frame.drop(columns="y"), "code", steps=1, threads=1, out="classes").wait()
    assert run.classes == [5, 6, 7]
    plain = ddp_train.train(frame[["code", "x", "y"]], "y", plain=True, steps=1, threads=1, out="plain").wait()
    assert '2 features: "code", "x"' in plain._last("start").data, plain._last("start").data


def frames_that_are_refused_say_why():
    pandas = need("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"], "y": [0, 1]})
    raises(ddp_train.DataError, 'give categorical=["b"]', ddp_train.train, frame, "y", plain=True, out="run")
    raises(ddp_train.Error, "nothing", ddp_train.train, frame, "nothing", out="run")
    raises(ValueError, "shape (0, 3)", ddp_train.train, frame[:0], "y", out="run")
    assert "a" not in ddp_train.train(frame, frame["a"], categorical="b", out="series", **SHORT).wait()._last("start").data.split("features:")[1]
    raises(ValueError, "name of a column", ddp_train.train, frame, out="run")
    raises(ValueError, ".txt", ddp_train.train, "a text\n" * 9, model="gpt", out="run")
    raises(ValueError, "one name each", ddp_train.train, frame[["a", "a"]], "a", out="run")
    raises(ddp_train.SettingError, "comma", ddp_train.train, frame, "y", drop=["a,b"], out="run")
    raises(ValueError, "2 rows, got 3", ddp_train.train, frame, [1, 2, 3], out="run")
    with open("file", "w", encoding="utf-8"):
        raises(ddp_train.Error, "file is a file", ddp_train.train, X, Y, out="file")
    raises(ddp_train.SettingError, "hosts", ddp_train.train, frame, "y", hosts="a:1,b:1", out="run")
    raises(TypeError, "column 'b', got complex128", ddp_train.train, frame.assign(b=[1j, 2]), "y", out="run")
    raises(ddp_train.SettingError, "hosts", ddp_train.train, "file.npy", Y, hosts="a:1,b:1", out="run")
    day = frame.assign(b=pandas.to_datetime(["2024-01-01", "2024-01-02"]))
    raises(ddp_train.DataError, "date", ddp_train.train, day, "y", categorical="auto", out="run")


# Runs.


def pages_work():
    need("sklearn")
    need("polars")
    for page in ("docs/python.md", "README.md"):
        with open(f"{ROOT}/{page}", encoding="utf-8") as file:
            blocks = re.findall(r"^```python ddp_train\n(.*?)^```", file.read(), re.MULTILINE | re.DOTALL)
        assert blocks, page
        os.makedirs(os.path.basename(page))
        script = f"import os; os.chdir({os.path.basename(page)!r})\n" + "\n".join(blocks)
        said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{page}: {said.stdout}{said.stderr}"


def settings_arrive_as_their_flags():
    given = {"hidden": [16, 8], "lr": numpy.float32(0.5), "nesterov": True, "optimizer": "sgd", "drop_last": numpy.bool_(True), "class_weights": {"0": 2, "1": 3}}
    run = ddp_train.train(X, Y, steps=1, out="run", sample=None, group="*.bias:lr=0.1", **given).wait()
    told = run.settings
    assert (told["hidden"], told["lr"], told["nesterov"], told["drop-last"]) == ([16, 8], 0.5, True, True), told
    assert ddp_train.train(X, Y, steps=1, hidden=[], out="linear").wait().settings["hidden"] == []


def events_come_while_it_trains_and_after():
    run = ddp_train.train("synthetic:classification", epochs=100000, log_every=1, out="run")
    seen = []
    for event in run:
        seen.append(event)
        if len(seen) == 5:
            assert run.is_running and run.outcome == "running" and "running" in repr(run)
            run.stop()
    assert [seen[0].event, seen[-1].event] == ["start", "end"] and run.outcome == "stopped"
    assert [event.step for event in seen if event.event == "step"][:4] == [1, 2, 3, 4]
    assert list(run) == seen == list(ddp_train.Run("run"))
    assert ddp_train.Run("run").outcome == "stopped"


def a_resumed_run_gives_its_new_events():
    run = ddp_train.train(X, Y, schedule="constant", warmup_steps=1, steps=10, checkpoint_every=5, log_every=1, threads=1, out="run").wait()
    again = ddp_train.resume(run, steps=15).wait()
    assert again.settings["steps"] == 15 and "step 15 of 15" in repr(again)
    steps = [event.step for event in again if event.event == "step"]
    assert steps == [11, 12, 13, 14, 15] and again.outcome == "done"
    del run, again
    raises(ddp_train.SettingError, "went with its Run", ddp_train.resume, "run", steps=20)
    assert ddp_train.resume("run", X, Y, steps=20).wait().outcome == "done"
    raises(ddp_train.SettingError, "by override", ddp_train.resume, "run", X + 1, Y, steps=25)


def a_resume_may_replace_a_part_of_the_data():
    run = ddp_train.train(X, Y, val_data=X, val_labels=Y, schedule="constant", warmup_steps=0, steps=4, threads=1, out="run").wait()
    again = ddp_train.resume(run, val_data=X[:50], val_labels=Y[:50], steps=8).wait()
    # From another process it has none of these arrays, though a file with the same number may be there.
    process = python("import ddp_train; ddp_train.train([[1.0], [2.0]] * 9, [0, 1] * 9, epochs=1, out='other'); ddp_train.resume('run', steps=12)")
    assert "went with its Run" in process.communicate(timeout=PATIENCE_S)[1]
    assert again.best.step and ddp_train.resume(again, X, Y, steps=12).wait().outcome == "done"


def a_restarted_run_gives_no_event_twice():
    run = ddp_train.train(X, Y, schedule="constant", warmup_steps=0, steps=4, threads=1, ranks=2, out="run").wait()
    again, seen = ddp_train.resume(run, steps=3000, ranks=2, restarts=2, checkpoint_every=100), []
    for event in again:
        seen.append(event)
        if event.event == "checkpoint" and event.step == 200:
            os.kill(int(children_of(again._process.pid)[1]), signal.SIGKILL)
    assert [event.event for event in seen].count("resume") == 2 and "start" not in [event.event for event in seen]
    assert "step 3000 of 3000" in repr(again)


def a_refused_start_leaves_the_data_of_others_alone():
    run = ddp_train.train(X, Y, detach=True, schedule="constant", steps=2, out="run").wait()
    raises(ddp_train.SettingError, "holds a run", ddp_train.train, X[:9], Y[:9], detach=True, out="run")
    raises(ddp_train.SettingError, "lr -1", ddp_train.train, X, Y, detach=True, out="bad", lr=-1)
    assert glob.glob("run/data*/*") == ["run/data/data.bin"] and not os.path.exists("bad")
    assert ddp_train.resume(run, steps=4).wait().outcome == "done"
    assert ddp_train.resume(run, X, Y, detach=True, steps=6).wait().outcome == "done" and len(glob.glob("run/data*/*")) == 2


def the_environment_of_a_launcher_does_not_matter():
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "DDP_DRY_RUN": "true", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    with unittest.mock.patch.dict(os.environ, ranks):
        assert ddp_train.train(X, Y, **SHORT).wait().outcome == "done"
    # Then every child seems to have ended with 0.
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        raises(ddp_train.Error, "not finite", lambda: ddp_train.train(X, X[:, 0] * 1e30, optimizer="sgd", lr=1e30, epochs=50).wait())
    finally:
        signal.signal(signal.SIGCHLD, old)


def a_program_that_cannot_start_is_an_error():
    with unittest.mock.patch.object(_run, "find_program", lambda: "/missing"):
        raises(FileNotFoundError, "/missing", ddp_train.train, X, Y, **SHORT)
    assert not _run._running and not os.path.exists("out")
    with unittest.mock.patch.object(os, "memfd_create", side_effect=AttributeError):
        assert ddp_train.train(X, Y, **SHORT).wait().predict(X).shape == (200,)


def ranks_share_the_rows_and_one_that_dies_is_an_error():
    run = ddp_train.train(X, Y, ranks=2, epochs=100000, out="run")
    children = children_of(run._process.pid)
    assert len(children) == 2, children
    os.kill(int(children[1]), signal.SIGKILL)
    error = raises(ddp_train.Error, "rank 1", run.wait, show=False)
    assert error.code == 137 and run.outcome == "failed"
    raises(ddp_train.Error, "rank 1", lambda: list(run))


def a_killed_run_is_an_error_and_the_next_one_resumes():
    run = ddp_train.train(X, Y, epochs=100000, checkpoint_every=10, out="run")
    wait_until(lambda: any(event.event == "checkpoint" for event in run._events()), "a checkpoint")
    os.kill(run._process.pid, signal.SIGKILL)
    error = raises(ddp_train.Error, "killed by signal 9", run.wait)
    assert error.code == 137 and run.predict(X).shape == (200,)
    assert ddp_train.resume(run).stop().outcome == "stopped"


def a_loss_that_is_not_finite_is_an_error_with_its_code():
    error = raises(ddp_train.Error, "not finite", lambda: ddp_train.train(X, X[:, 0] * 1e30, optimizer="sgd", lr=1e30, epochs=50, out="run").wait())
    assert error.code == 76 and ddp_train.Run("run").outcome == "failed"
    raises(ddp_train.Error, "not finite", ddp_train.Run("run").wait)


def two_runs_do_not_write_into_one_folder():
    run = ddp_train.train(X, Y, epochs=100000, out="run")
    raises(ddp_train.SettingError, "holds a run", ddp_train.train, X, Y, out="run")
    assert run.is_running
    run.stop()
    first, second = ddp_train.train(X, Y, **SHORT), ddp_train.train(X, Y, **SHORT)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert [os.path.basename(run.wait().folder) for run in (first, second)] == ["out", "out-2"]


def a_run_is_overwritten_once_the_next_one_trains():
    ddp_train.train(X, Y, detach=True, out="run", **SHORT).wait()
    with open("run/mine.txt", "w", encoding="utf-8") as file:
        file.write("stays")
    before = sorted(os.listdir("run"))
    raises(ddp_train.SettingError, "overwrite=True to remove that run", ddp_train.train, X, Y, out="run", **SHORT)
    # What is refused leaves the run as it was.
    raises(ddp_train.SettingError, "lr -1", ddp_train.train, X, Y, out="run", overwrite=True, lr=-1)
    raises(ddp_train.DataError, "NaN", ddp_train.train, X, Y * numpy.nan, out="run", overwrite=True)
    assert sorted(os.listdir("run")) == before and ddp_train.Run("run").predict(X).shape == (200,)
    run = ddp_train.train(X, Y, out="run", overwrite=True, epochs=10**6, threads=1)
    raises(ddp_train.SettingError, ".stop()", ddp_train.train, X, Y, out="run", overwrite=True)
    assert run.stop().outcome == "stopped" and sorted(os.listdir("run")) == [name for name in before if name != "data"]
    for _ in range(2):
        assert ddp_train.train(X, Y, overwrite=True, **SHORT).wait().outcome == "done"
    assert glob.glob("out*") == ["out"]


def runs_compare():
    runs = [ddp_train.train(X, Y, out=f"run{seed}", seed=seed, **SHORT).wait() for seed in (1, 2)]
    runs.append(ddp_train.train(X, Y, out="same", seed=1, **SHORT).wait())
    assert ddp_train.compare(*runs[:2]).first_difference.thing == "initial weights", ddp_train.compare(*runs[:2])
    assert ddp_train.compare(runs[0], "same").first_difference is None
    raises(AttributeError, "first_difference", lambda: ddp_train.compare(runs[0], "same").first_differences)


def state_is_mapped_and_changes_stay_in_memory():
    run = ddp_train.train(X, Y, out="run", **SHORT).wait()
    state = run.state_dict()
    assert {name: it.shape for name, it in state.items()} == {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (2, 8), "2.bias": (2,)}
    hidden = numpy.maximum(X.astype("f4") @ state["0.weight"].T + state["0.bias"], 0)
    logits = hidden @ state["2.weight"].T + state["2.bias"]
    assert numpy.allclose(logits, run.predict(X, logits=True), atol=1e-5)
    state["0.bias"][:] = 9
    assert not (run.state_dict()["0.bias"] == 9).any()


def a_model_is_used_while_its_run_removes_checkpoints():
    """Whoever looks at a checkpoint finds it gone, as when the run saves the next one just then."""
    run = ddp_train.train(X, numpy.where(Y, "a", "b"), steps=40, schedule="constant", checkpoint_every=10, keep=4, threads=1, out="run").wait()
    names, looked = sorted(os.listdir("run/checkpoints")), _run.Run.checkpoint.fget

    def look(run):
        found = looked(run)
        if removed[0]:
            removed[0] = False
            os.rename(found, f"{found}.gone")
        return found

    def output(*words, **how):
        # As another checkpoint comes, this one goes.
        if len(os.listdir("run/checkpoints")) > 1:
            shutil.rmtree(looked(run))
        return _program.output(*words, **how)

    for use in (lambda: run.classes, run.state_dict, lambda: run.predict(X), lambda: run.evaluate(X, numpy.where(Y, "a", "b"))):
        removed = [True]
        with unittest.mock.patch.object(_run.Run, "checkpoint", property(look)), unittest.mock.patch.object(_run, "output", output):
            assert len(use()) > 0
        for gone in glob.glob("run/checkpoints/*.gone"):
            os.rename(gone, gone[: -len(".gone")])
    assert len(names) == 4 and len(os.listdir("run/checkpoints")) == 2


def warnings_of_the_program_are_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp_train.train(X * [1, 1, 1e-6, 1], Y, out="run", **SHORT).wait()
    assert len(caught) == 1 and caught[0].filename == __file__, [str(it) for it in caught]


def threads_start_runs_that_outlive_them():
    runs = []
    threads = [threading.Thread(target=lambda number=number: runs.append(ddp_train.train(X, Y, threads=1, checkpoint_every=0, steps=100 + number))) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.wait().outcome for run in runs] == ["done"] * 3
    assert sorted(run.settings["steps"] for run in runs) == [100, 101, 102] and len(glob.glob("out*")) == 3


def forked_processes_leave_a_run_alone():
    run = ddp_train.train(X, Y, epochs=100000, out="run")
    child = os.fork()
    if child == 0:
        # As a process that ends by itself does.
        _run._at_exit()
        assert next(iter(run)).event == "start"
        os._exit(0 if run.is_running else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run.is_running and run.stop().outcome == "stopped"
    assert os.path.isdir(run._files.folder)


def files_in_memory_go_with_the_run():
    def folders():
        return set(glob.glob(f"{tempfile.gettempdir()}/{_data.PREFIX}*"))

    before = folders()
    run = ddp_train.train(X, Y, out="run", **SHORT).wait()
    assert len(folders() - before) == 1
    del run
    assert folders() <= before
    # Of a process that was killed: the next one removes it.
    process = python("import ddp_train, time\nimport os; run = ddp_train.train([[1.0], [2.0]] * 9, [0, 1] * 9, epochs=10**6, out=os.path.abspath('killed'))\nprint(run._files.folder, flush=True)\ntime.sleep(600)")
    folder = process.stdout.readline().strip()
    assert os.path.isdir(folder)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of("killed"), "the end of the run of a killed process")
    assert ddp_train.Run("killed").outcome == "stopped"
    _data.Files()
    assert not os.path.exists(folder)


def a_new_folder_is_not_taken_for_an_abandoned_one():
    flock = fcntl.flock

    def late(descriptor, how):
        if how == fcntl.LOCK_EX:
            _data._remove_abandoned()
        flock(descriptor, how)

    # Another process may look for abandoned folders before this one has locked its new one.
    with unittest.mock.patch.object(fcntl, "flock", late):
        files = _data.Files()
    assert os.path.isdir(files.folder)
    os.mkfifo(f"{tempfile.gettempdir()}/{_data.PREFIX}fifo")
    _data._remove_abandoned()


def dev_shm_may_be_full():
    if os.geteuid() != 0 or not shutil.which("unshare"):
        raise Skipped("mounting a small /dev/shm needs root")
    script = "import ddp_train, numpy; x = numpy.zeros((200000, 8)); x[:, 0] = numpy.arange(200000) % 2; print(ddp_train.train(x, x[:, 0].astype(int), steps=2, out='run').wait().predict(x).shape)"
    words = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh", sys.executable, "-c", script]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unshare" in said.stderr or "mount" in said.stderr:
        raise Skipped(f"no namespace of mounts: {said.stderr.strip()}")
    assert said.stdout == "(200000,)\n", said.stdout + said.stderr


# Ends.


def a_script_waits_for_its_runs_and_an_error_stops_them():
    script = "import ddp_train; run = ddp_train.train([[1.0], [2.0]] * 9, [0, 1] * 9, steps=%s, checkpoint_every=0, out='%s'); %s"
    process = python(script % (300, "waited", ""))
    assert process.wait(PATIENCE_S) == 0, process.stderr.read()
    assert ddp_train.Run("waited").outcome == "done"
    process = python(script % (10**7, "failed", "1 / 0"))
    assert process.wait(PATIENCE_S) == 1
    assert ddp_train.Run("failed").outcome == "stopped"
    assert not os.listdir(tempfile.gettempdir())
    process = python("import ddp_train, signal, sys; signal.signal(signal.SIGALRM, lambda *it: sys.exit(3))\n" + script % (10**7, "left", "signal.alarm(1); run.wait()"))
    assert process.wait(PATIENCE_S) == 3 and ddp_train.Run("left").outcome == "stopped", process.stderr.read()
    # The handler may run between two events, outside of what gives them.
    leaves = """
        import ddp_train, sys
        told = []
        def leaves(frame, event, _):
            if event == "return" and frame.f_code is ddp_train.Run._follow.__code__:
                told.append(event)
            if told and frame.f_code is ddp_train.Run.wait.__code__:
                sys.exit(3)
            return leaves
    """
    process = python(textwrap.dedent(leaves) + script % (10**7, "between", "sys.settrace(leaves); run.wait()"))
    assert process.wait(PATIENCE_S) == 3 and ddp_train.Run("between").outcome == "stopped", process.stderr.read()
    process = python(textwrap.dedent(leaves) + script.replace("out=", "detach=True, out=") % (10**7, "apart", "sys.settrace(leaves); run.wait()"))
    assert process.wait(PATIENCE_S) == 3 and ddp_train.Run("apart").is_running, process.stderr.read()
    ddp_train.Run("apart").stop()
    # Ctrl-C once it waits at its end.
    process = python("""
        import ddp_train, os, signal, threading, time
        def interrupt():
            while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        run = ddp_train.train([[1.0], [2.0]] * 9, [0, 1] * 9, steps=10**7, checkpoint_every=0, out="interrupted")
        threading.Thread(target=interrupt, daemon=True).start()
    """)
    assert process.wait(PATIENCE_S) == 130 and ddp_train.Run("interrupted").outcome == "stopped", process.stderr.read()


def a_script_whose_run_dies_without_its_knowledge_says_so_and_ends_with_1():
    # Handlers that were there before the package, and what is printed last, are not lost.
    script = """
        import atexit, os, signal, sys
        atexit.register(lambda: print("handled"))
        import ddp_train
        run = ddp_train.train([[1.0], [2.0]] * 9, [0, 1] * 9, steps=10**7, checkpoint_every=0, out="%s")
        %s
        print("ends")
    """
    dies = "os.kill(run._process.pid, signal.SIGKILL)"
    caught = "try:\n            run.wait()\n        except ddp_train.Error:\n            pass"
    cases = [
        ("dies", dies, 1, True),
        ("died", f"{dies}; run._ended.wait()", 1, True),
        ("told", f"{dies}\n        {caught}", 0, False),
        ("asked", f"{dies}; run._ended.wait(); run.outcome", 0, False),
        ("stopped", "run.stop()", 0, False),
    ]
    for name, does, code, is_said in cases:
        process = python(script % (name, does))
        said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code and said[0] == "ends\nhandled\n", (name, process.returncode, said)
        told = f"ddp_train: {os.path.abspath(name)}: ddp-train: killed by signal 9, without a message (exit code 137)\n"
        assert (told in said[1]) == is_said, (name, said)


def a_first_interrupt_saves_and_a_second_one_returns():
    script = """
        import ddp_train, os, signal, threading, time
        run = ddp_train.train("synthetic:classification", epochs=10**6, out=os.path.abspath("run%d"))
        def tell():
            while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(0.01)
            print("trains", flush=True)
        threading.Thread(target=tell).start()
        try:
            %s
        except KeyboardInterrupt:
            print("interrupted", run.outcome, flush=True)
    """
    body = "for event in run:\n                while event.event == 'step': pass"
    for number, (waits, outcomes) in enumerate([("run.wait()", ["stopped"]), ("list(run)", ["stopped"]), (body, ["stopped", "running"])]):
        process = python(script % (number, waits))
        assert process.stdout.readline() == "trains\n"
        if waits == body:
            wait_until(lambda: any(event.event == "step" for event in ddp_train.Run(f"run{number}")._events()), "a step")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)
        assert said[0].split()[0] == "interrupted" and said[0].split()[1] in outcomes, said
        wait_until(lambda: ddp_train.Run(f"run{number}").outcome == "stopped", "saved")
    # The run cannot end while it is stopped: only a second interrupt gives the prompt back.
    process = python(script % (9, "run.wait()"))
    assert process.stdout.readline() == "trains\n"
    [run] = processes_of("run9")
    os.kill(run, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert "interrupt again" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted running\n"
    os.kill(run, signal.SIGCONT)
    said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and ddp_train.Run("run9").outcome == "stopped", (process.returncode, said, ddp_train.Run("run9"))


def an_interrupted_fit_keeps_the_model_so_far():
    need("sklearn")
    script = """
        import ddp_train, numpy, signal, threading, time
        wait, waits = ddp_train.Run.wait, threading.Event()
        ddp_train.Run.wait = lambda *it, **how: (waits.set(), wait(*it, **how))
        def tell():
            waits.wait()
            while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(0.01)
            print("trains", flush=True)
        threading.Thread(target=tell).start()
        x = numpy.random.default_rng(1).normal(size=(200, 4))
        model = ddp_train.Trainer(task="classification", epochs=10**6, threads=1, hidden="8").fit(x, x[:, 0] > 0)
        print(model.predict(x).shape)
    """
    process = python(script)
    assert process.stdout.readline() == "trains\n", process.stderr.read()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE_S)
    assert said[0] == "(200,)\n" and "interrupted by the user: the model so far is kept" in said[1], said


def no_rank_outlives_a_killed_process_unless_detached():
    script = "import ddp_train, os, time; run = ddp_train.train([[1.0], [2.0]] * 9, [0, 1] * 9, epochs=10**6, ranks=2, detach=%s, out=os.path.abspath('%s')); print(run.is_running, flush=True); time.sleep(600)"
    for detach in (False, True):
        process = python(script % (detach, f"run{detach}"))
        assert process.stdout.readline() == "True\n"
        process.kill()
        process.wait()
    wait_until(lambda: not processes_of("runFalse"), "the end of all ranks")
    assert ddp_train.Run("runFalse").outcome == "stopped"
    run = ddp_train.Run("runTrue")
    assert run.is_running and run.outcome == "running"
    assert run.stop().outcome == "stopped" and os.path.exists("runTrue/data/data.bin")
    assert ddp_train.resume("runTrue").stop().outcome == "stopped"


def notebooks_show_a_curve_and_restart_without_ranks():
    need("nbclient")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    try:
        client.execute_interactive("import ddp_train", timeout=PATIENCE_S, output_hook=lambda message: None)
        shown = []
        train = "run = ddp_train.train('glyphs,rows=2000', epochs=%s, ranks=2, out='%s'); run.wait()"
        client.execute_interactive(train % (2, "nb"), timeout=PATIENCE_S, output_hook=shown.append)
        kinds = [message["msg_type"] for message in shown]
        pages = [message["content"]["data"]["text/html"] for message in shown if "text/html" in message["content"].get("data", {})]
        # Once, though the run is also the cell's value.
        assert kinds.count("display_data") == 1 and "update_display_data" in kinds and "execute_result" not in kinds, kinds
        assert "<svg" in pages[-1] and "done" in pages[-1] and "<script" not in pages[-1], pages[-1]
        shown.clear()
        client.execute_interactive("run", timeout=PATIENCE_S, output_hook=shown.append)
        [value] = [message["content"]["data"] for message in shown if message["msg_type"] == "execute_result"]
        assert "<svg" in value["text/html"] and "done" in value["text/plain"], value
        # Interrupt: the cell ends, and the run is saved.
        shown.clear()
        client.execute(train % (10**6, "stopped"))
        wait_until(lambda: os.path.exists("stopped/metrics.jsonl") and any(it.event == "step" for it in ddp_train.Run("stopped")._events()), "a step")
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=PATIENCE_S)
        assert reply["content"]["ename"] == "KeyboardInterrupt", reply["content"]
        assert ddp_train.Run("stopped").outcome == "stopped"
        # A crash is an exception, and the kernel lives.
        reply = client.execute_interactive("ddp_train.train([[1.0]], [float('nan')])", timeout=PATIENCE_S, output_hook=lambda message: None)
        assert reply["content"]["ename"] == "DataError", reply["content"]
        client.execute_interactive("import os; run = ddp_train.train('glyphs', epochs=10**6, ranks=2, out=os.path.abspath('left'))", timeout=PATIENCE_S, output_hook=lambda message: None)
        assert processes_of("left")
        manager.restart_kernel(now=True)
        wait_until(lambda: not processes_of("left"), "the end of all ranks")
        assert ddp_train.Run("left").outcome == "stopped"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def a_log_puts_no_html_into_a_notebook_and_no_escapes_into_a_terminal():
    """Every value of a log that another wrote, replaced by what a browser or a terminal would obey."""
    attack = "\x1b]0;x\x07</b><script>alert(1)</script><img src=x onerror='alert(1)'>\"><svg onload=alert(1)>"
    events = [
        {"event": "start", "time_unix_s": 1.0, "steps": 9, "steps_per_epoch": 3, "data": "label: y", "config": {"steps": 9, "epochs": 3}},
        {"event": "step", "step": 1, "loss": 2.5, "accuracy": 0.5, "rmse": 1.0},
        {"event": "step", "step": 2, "loss": 1.5, "accuracy": 0.6, "rmse": 1.0},
        {"event": "eval", "step": 2, "loss": 1.5, "perplexity": 2.0, "r2": 0.5, "auc": 0.5, "best_by": "r2"},
        {"event": "resume", "time_unix_s": 2.0, "step": 2},
        {"event": "end", "outcome": "failed", "reason": "why", "exit_code": 76, "steps": 2},
    ]
    tags = {"div", "b", "progress", "small", "span", "br", "svg", "text", "tspan", "polyline"}
    found = []

    class Page(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.append((tag, *sorted(name for name, _ in attributes)))

    def parsed(page):
        found.clear()
        Page().feed(page)
        return set(found)

    def look(changed):
        with open("run/metrics.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in changed)
        run = ddp_train.Run("run")
        assert "\x1b" not in repr(run) and "\x07" not in repr(run), repr(run)
        try:
            run.wait(show=False)
        except ddp_train.Error as error:
            assert "\x1b" not in str(error), repr(str(error))
        return parsed(run._repr_html_())

    os.mkdir("run")
    harmless = look(events)
    assert {it[0] for it in harmless} == tags, harmless
    for event in events:
        for place in (event, event.get("config", {})):
            for key, old in place.items():
                place[key] = attack
                assert look(events) <= harmless, (event, key)
                place[key] = old
    with open("run/config.toml", "w", encoding="utf-8") as file:
        file.write(f"steps = {json.dumps(attack)}\nepochs = {json.dumps(attack)}\n")
    for event in events:
        event.update({name: attack for name in event if name not in ("event", "config")})
    events[0]["config"].update(steps=attack, epochs=attack)
    assert look(events) <= harmless
    # Nor from the name of its folder.
    os.makedirs(attack.replace("/", ""))
    shutil.copy("run/metrics.jsonl", attack.replace("/", ""))
    run = ddp_train.Run(attack.replace("/", ""))
    assert parsed(run._repr_html_()) <= harmless and "\x1b" not in repr(run)


def numbers_fit_beside_the_curve():
    for low, high in [(-1.234e-5, 1.234e-5), (-1.23e-30, 1), (1234567, 12345678)]:
        chart = _show._chart({"training": [(1, high), (2, low)]})
        texts = re.findall(r"<text x='(\d+)' y='\d+'>([^<]*)", chart)[:2]
        # Digits of 11 px take 6.2 px, and end at x.
        assert len(texts) == 2 and all(6.2 * len(text) <= int(x) for x, text in texts), texts


def a_notebook_runs_from_its_first_cell_to_its_last():
    nbclient, nbformat = need("nbclient"), need("nbformat")
    cells = ["import ddp_train, pandas", "run = ddp_train.train('synthetic:regression,rows=500', epochs=2)\nrun.wait()", "run.metrics.tail(1)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=PATIENCE_S).execute()
    assert "held-out" in json.dumps(notebook.cells[1].outputs) and "loss" in json.dumps(notebook.cells[2].outputs)


def a_terminal_shows_a_line():
    import pty

    leader, follower = pty.openpty()
    process = python("import ddp_train; ddp_train.train('glyphs,rows=500', epochs=2, out='run').wait()", stderr=follower)
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:
            break
        said += piece
        if not piece:
            break
    assert process.wait(PATIENCE_S) == 0
    text = said.decode()
    assert "\r" in text and "run: done, step 8 of 8 ━━━━━━━━━━ █" in text and "held-out loss" in text, text


def estimators_pass_the_checks_of_scikit_learn():
    need("sklearn")
    estimator.check()


def estimators_work_with_what_scikit_learn_has():
    sklearn = need("sklearn")
    estimator.use()


# What runs with NumPy 1, too, besides what is about the package.
OF_DATA = {"arrays_of_every_type_arrive", "strides_do_not_matter", "what_cannot_be_given_is_refused_with_the_way_out", "tensors_arrive_through_dlpack", "labels_come_back_as_they_were", "frames_of_numbers_arrive_with_and_without_parquet", "state_is_mapped_and_changes_stay_in_memory"}


def main():
    here = sys.modules[__name__]
    helpers = {"need", "raises", "wait_until", "processes_of", "children_of", "python", "end_all", "main"}
    claims = [it for it in vars(here).values() if callable(it) and getattr(it, "__module__", "") == __name__ and not isinstance(it, type) and it.__name__ not in helpers]
    if numpy.__version__ < "2":
        with_numpy_1 = OF_DATA | {"estimators_pass_the_checks_of_scikit_learn", "types_of_settings_are_those_of_the_program"}
        claims = [claim for claim in claims if claim.__name__ in with_numpy_1]
    if sys.argv[1]:
        claims = [claim for claim in claims if claim.__name__ == sys.argv[1]]
        if not claims:
            sys.exit(f"tests/python/run: no claim is called {sys.argv[1]}; help: the claims are functions of tests/python/claims.py")
    failed, passed = [], 0
    for claim in claims:
        # Alone, too, a claim gets the same numbers.
        here.RANDOM = numpy.random.default_rng(1)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            # Other processes of this user have files in the usual one.
            os.environ["TMPDIR"] = tempfile.tempdir = os.path.join(folder, ".temporary")
            os.mkdir(tempfile.tempdir)
            try:
                claim()
                passed += 1
                print(f"    {time.monotonic() - began:5.1f} s  {claim.__name__}", flush=True)
            except Skipped as why:
                print(f"    skipped: {claim.__name__}: {why}")
            except BaseException:
                traceback.print_exc()
                numpy_1 = "numpy1 " if numpy.__version__ < "2" else ""
                print(f"FAILED: {claim.__name__}\n    alone: tests/python/run {numpy_1}{claim.__name__}", flush=True)
                failed.append(claim.__name__)
            end_all()
            os.chdir("/")
            del os.environ["TMPDIR"]
            tempfile.tempdir = None
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {len(failed)} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
