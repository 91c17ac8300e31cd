"""Draws cases that launch/test does not run, and runs them; launch/search starts it."""

import argparse
import glob
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../checks"))
from programs import BY_CLIPPY, FEATURES, NEED_GPUS, ON_FOUR, ON_ONE, ROOT, Programs

# A case that takes longer counts as hanging; one of these kinds takes long.
LIMIT_S, LONG_LIMIT_S = 1800, 4 * 3600
FOUND = os.path.join(HERE, "found.txt")
ORDERS = [["SIMCUDA_SCHEDULE", "lazy"], ["SIMCUDA_SCHEDULE", "eager"]]
MANY = {"PROPTEST_CASES": "2000", "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true"}
WITHOUT_MPI = "-p ddp-comm -p ddp --no-default-features --features ddp/program --tests --locked".split()
# Builds that are not those of launch/test, and what needs a network or an engine.
BUILDS = {
    "without-mpi": ["cargo", "test", *WITHOUT_MPI],
    "without-mpi-clippy": ["cargo", "clippy", *WITHOUT_MPI, "--", "-D", "warnings"],
    # Clippy leaves out rustc's checks of pointers.
    "by-rustc": "cargo test -p ddp-kernels -p ddp-comm -p ddp-simcuda --tests --locked".split(),
    "release": ["cargo", "test", "--workspace", "--release", "--tests", *FEATURES, "--features", "ddp/faults", "--locked"],
    "documentation": ["env", "RUSTDOCFLAGS=-D warnings", "cargo", "doc", "--workspace", "--no-deps", *FEATURES, "--locked"],
    "crates": ["cargo", "deny", "--locked", "check"],
    "images": ["tests/docker/run", "--engine"],
}


class Search:
    def __init__(self):
        self.programs = Programs(f"{ROOT}/target/search-programs")
        self.listed = {}

    def build(self):
        os.makedirs(f"{ROOT}/target", exist_ok=True)
        self.programs.build()
        self.programs.load()
        self.programs.set_environment(os.path.dirname(os.path.dirname(self.programs.all[0][2])))

    def tests(self, *wanted, named=""):
        """Package, target and name of tests: of programs with one of these targets, else of all."""
        found = []
        for package, target, file in self.programs.all:
            if wanted and target not in wanted:
                continue
            if file not in self.listed:
                self.listed[file] = self.programs.names(package, target)
            found += [[package, target, name] for name in self.listed[file] if named in name]
        return found

    def test(self, package, target, name, devices=None, **environment):
        """The command of one test."""
        devices = devices or devices_of(target, name)
        on = [f"{ROOT}/launch/with-simulated-gpus", str(devices)] if devices else []
        set_to = [f"{key}={value}" for key, value in {"DDP_TEST_ENOUGH_GPUS": "1", **environment}.items()]
        return [*on, "env", *set_to, self.programs.file(package, target), "--exact", "--include-ignored", name], package


def devices_of(target, name):
    """How many simulated GPUs a test needs."""
    if target == "gpu_threads" or name.startswith("gpus::") or any(name.startswith(four) for four in ON_FOUR) or "with_two_gpus" in name:
        return 4
    if target == "cuda" and any(name.startswith(one) for one in ON_ONE):
        return 1
    return 2 if target in NEED_GPUS else 0


# Each kind: what it tries; `draw(search, random)` gives the words of a case; `command(search, *words)` its command and
# folder; `all(search)` the words of all cases.


class Kind:
    what = ""
    is_long = False

    def draw(self, search, drawn):
        return drawn.choice(self.all(search))


class Cases(Kind):
    what = "other cases of properties (DDP_CASES): bytes, faults, moments, seeds, shapes"

    def draw(self, search, drawn):
        return [*drawn.choice(search.tests(*self.targets())), str(drawn.randrange(1, 1 << 20))]

    @staticmethod
    def targets():
        return ["jobs", "training", "mpirun", "cuda", "planted", "waits", "claims", "ddp_data", "ddp_engine", "ddp_tools", "ddp"]

    def all(self, search):
        return [[*test, "all"] for test in search.tests(*self.targets())]

    def command(self, search, package, target, name, seed):
        return search.test(package, target, name, DDP_CASES=seed)


class Orders(Kind):
    what = "GPU tests with another seed of the simulator, or the lazy or the eager schedule"

    def draw(self, search, drawn):
        order = drawn.choice([*ORDERS, ["SIMCUDA_SEED", str(drawn.randrange(1, 1 << 20))]])
        return [*drawn.choice(search.tests("cuda", "gpu_threads")), *order]

    def all(self, search):
        return [[*test, *order] for test in search.tests("cuda", "gpu_threads") for order in [*ORDERS, ["SIMCUDA_SEED", "1"]]]

    def command(self, search, package, target, name, key, value):
        return search.test(package, target, name, **{key: value})


class Devices(Kind):
    what = "GPU tests on one and on four GPUs, without peer access, and with NCCL's event nodes in graphs"

    def all(self, search):
        ways = [["1", "SIMCUDA_NO_PEER", "0"], ["4", "SIMCUDA_NO_PEER", "0"], ["2", "SIMCUDA_NO_PEER", "1"], ["4", "SIMCUDA_NCCL_EVENTS", "1"]]
        return [[*test, *way] for test in search.tests("cuda") for way in ways]

    def command(self, search, package, target, name, devices, key, value):
        words, folder = search.test(package, target, name, devices, **{key: value})
        # With fewer GPUs than it needs a test skips itself.
        return [word for word in words if not word.startswith("DDP_TEST_ENOUGH_GPUS")], folder


class Races(Kind):
    what = "operations with every access followed for races within a launch"

    def all(self, search):
        return [test for test in search.tests("cuda") if test[0] == "kernels"]

    def command(self, search, package, target, name):
        return search.test(package, target, name, SIMCUDA_INTRA="1")


class Mutants(Kind):
    is_long = True

    def __init__(self, name, what, texts, is_ours):
        self.name, self.what = name, what
        self.texts, self.is_ours = texts, is_ours

    def all(self, _):
        """The first line of each entry."""
        with open(f"{ROOT}/tests/mutants/{self.texts}", encoding="utf-8") as file:
            lines = file.read().splitlines()
        firsts = [at for at in range(1, len(lines)) if lines[at][:1].isalpha() and lines[at - 1][:1] in ("", "#")]
        return [[str(at + 1)] for at in firsts if self.is_ours(lines[at])]

    def command(self, _, line):
        return ["tests/mutants/run", self.name, line, "1"], "."


class Jobs(Kind):
    what = "ten thousand simulated jobs of other seeds (comm/tests/membership)"

    def draw(self, _, drawn):
        return [str(drawn.randrange(1, 1 << 20))]

    def all(self, _):
        return [[str(number)] for number in range(1, 50)]

    def command(self, search, number):
        return search.test("comm", "membership", "jobs_lose_nothing_and_end_whatever_happens", DDP_CASES=number)


class Storms(Kind):
    what = "storms of real kills (losing_often)"

    def all(self, search):
        return [[test[2], str(seed)] for test in search.tests("jobs", named="losing_often::") for seed in range(126)]

    def command(self, search, name, seed):
        return search.test("ddp", "jobs", name, DDP_CASES=f"{seed}..{int(seed) + 1}")


class Properties(Kind):
    what = "2,000 random cases of a property"

    def all(self, search):
        names = self.names()
        return [test for test in search.tests() if test[2].rsplit("::", 1)[-1] in names]

    @staticmethod
    def names():
        """Functions whose arguments are drawn: `fn sums(rows in 1..9usize)`."""
        found = set()
        for path in subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                text = file.read()
            if "proptest!" in text:
                found.update(re.findall(r"fn (\w+)\(\s*[\w(), ]+? in ", text))
        return found

    def command(self, search, package, target, name):
        return search.test(package, target, name, **MANY)


class Waits(Kind):
    what = "waits that are left out, one after the other"
    is_long = True

    def draw(self, search, drawn):
        return [*drawn.choice(self.places(search)), str(drawn.randrange(1, 1 << 20))]

    @staticmethod
    def places(search):
        return [test for test in search.tests("cuda", "waits") if "wait" in test[2] and "needed" in test[2]]

    def all(self, search):
        return [[*test, "all"] for test in self.places(search)]

    def command(self, search, package, target, name, seed):
        return search.test(package, target, name, DDP_CASES=seed)


class Launchers(Kind):
    what = "jobs whose ranks mpirun starts"

    def all(self, search):
        return [[test[2]] for test in search.tests("jobs")]

    def command(self, search, name):
        return search.test("ddp", "jobs", name, DDP_TEST_LAUNCHER="mpirun")


class Fuzz(Kind):
    what = "a fuzz target for a minute (cargo install cargo-fuzz)"

    def all(self, _):
        return [[os.path.relpath(path, ROOT)] for path in sorted(glob.glob(f"{ROOT}/*/fuzz/fuzz_targets/*.rs"))]

    def command(self, _, path):
        if not shutil.which("cargo-fuzz"):
            return None, "no cargo-fuzz (cargo install cargo-fuzz)"
        folder, name = path.split("/fuzz/")[0] + "/fuzz", os.path.basename(path).removesuffix(".rs")
        # RUSTC_BOOTSTRAP: the sanitizer's flags on a stable toolchain.
        return ["env", "RUSTC_BOOTSTRAP=1", "cargo", "fuzz", "run", "--fuzz-dir", folder, name, "--", "-max_total_time=60"], "."


class Load(Kind):
    what = "a test program beside four busy processes (tests/checks/again)"
    is_long = True

    def all(self, search):
        return [[f"{package}", target] for package, target, _ in search.programs.all if not target.startswith("ddp_")]

    def command(self, search, package, target):
        # Round 2 is loaded.
        return ["tests/checks/again", "--first=2", "--rounds=1", "--built", search.programs.listing, target], "."


class Releases(Kind):
    what = "signatures and layouts of an old or new release of NVIDIA's libraries (up to 600 MB)"

    def all(self, _):
        return [[str(number)] for number in range(8)]

    def command(self, _, number):
        return ["launch/check-kernels", f"--releases={number}"], "."


class Builds(Kind):
    what = f"other builds: {', '.join(BUILDS)}"
    is_long = True

    def all(self, _):
        return [[name] for name in BUILDS]

    def command(self, _, name):
        if name == "crates" and not shutil.which("cargo-deny"):
            return None, "no cargo-deny (cargo install cargo-deny)"
        return BUILDS[name], "."


def is_membership(line):
    return line.split(":", 1)[1].split() == ["membership/"]


KINDS = {
    "cases": Cases(),
    "orders": Orders(),
    "devices": Devices(),
    "races": Races(),
    "kernels": Mutants("kernels", "wrong kernels, which a test must find", "kernels.txt", lambda line: True),
    "code": Mutants("switches", "wrong Rust code, which a test must find; the first builds a copy", "switches.txt", lambda line: not is_membership(line)),
    "membership": Mutants("membership", "faults of membership, which simulated jobs must find", "switches.txt", is_membership),
    "jobs": Jobs(),
    "storms": Storms(),
    "properties": Properties(),
    "waits": Waits(),
    "launchers": Launchers(),
    "fuzz": Fuzz(),
    "load": Load(),
    "releases": Releases(),
    "builds": Builds(),
}
# What takes too long to be drawn among others.
BY_NAME_ONLY = {"code", "load", "builds", "releases"}


def run(search, case):
    """Whether a case passed; None if it was skipped."""
    kind, *words = shlex.split(case)
    began = time.monotonic()
    try:
        command, folder = KINDS[kind].command(search, *words)
    except (KeyError, TypeError, StopIteration):
        print(f"launch/search: FAILED: {case}: there is no such case; help: --help lists the kinds", flush=True)
        return False
    if command is None:
        print(f"    skipped: {kind}: {folder}", flush=True)
        return None
    limit_s = LONG_LIMIT_S if KINDS[kind].is_long else LIMIT_S
    try:
        ended = subprocess.run(command, cwd=os.path.join(ROOT, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False, timeout=limit_s)
        text, status = ended.stdout, f"exit status {ended.returncode}" if ended.returncode else ""
    except subprocess.TimeoutExpired as error:
        text, status = (error.stdout or b"").decode(errors="replace"), f"still running after {limit_s} s"
    if not status and re.search(r"^running 0 tests", text, re.MULTILINE) and "running 1 test" not in text and kind not in ("builds", "load"):
        status = "no test ran"
    seconds = time.monotonic() - began
    if not status:
        print(f"    passed in {seconds:.0f} s: {case}", flush=True)
        return True
    print("\n".join(text.splitlines()[-60:]))
    print(f"launch/search: FAILED ({status}, after {seconds:.0f} s); again: launch/search --case {shlex.quote(case)}", flush=True)
    return False


def said(kind, words):
    return " ".join([kind, *map(shlex.quote, words)])


def drawn_until(search, kinds, seed, end):
    """Cases until the time is over."""
    drawn = random.Random(seed)
    while time.monotonic() < end:
        kind = drawn.choice(kinds)
        yield said(kind, KINDS[kind].draw(search, drawn))


def main():
    parser = argparse.ArgumentParser(prog="launch/search")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", choices=KINDS)
    for flag in ("--all", "--found", "--kinds"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--case")
    asked = parser.parse_args()
    if asked.kinds:
        for name, kind in KINDS.items():
            print(f"                 {name:12}{kind.what}")
        return 0
    os.chdir(ROOT)
    with open(FOUND, encoding="utf-8") as file:
        found = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    if asked.found and not found:
        print("nothing in tests/search/found.txt")
        return 0
    search = Search()
    search.build()
    kinds = [asked.only] if asked.only else [name for name in KINDS if name not in BY_NAME_ONLY]
    seed = asked.seed if asked.seed is not None else random.randrange(1 << 31)
    if asked.case or asked.found:
        cases = [asked.case] if asked.case else found
    elif asked.all:
        kinds = [asked.only] if asked.only else list(KINDS)
        cases = (said(kind, words) for kind in kinds for words in KINDS[kind].all(search))
    else:
        print(f"seed {seed}: launch/search --seed {seed} draws the same cases", flush=True)
        cases = drawn_until(search, kinds, seed, time.monotonic() + 60 * asked.minutes)
    outcomes, failed = [], []
    for case in cases:
        outcomes.append(run(search, case))
        failed += [case] * (outcomes[-1] is False)
    for case in failed:
        print(f"launch/search: FAILED: {case}")
    print(f"{outcomes.count(True)} passed, {len(failed)} failed, {outcomes.count(None)} skipped")
    return 1 if failed else 0


sys.exit(main())
