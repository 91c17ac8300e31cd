"""Draws cases that launch/test does not run, and runs them; launch/search starts it."""

import argparse
import collections
import glob
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "../checks"))
from programs import FEATURES, ROOT, Programs, devices_of

# A case that takes longer counts as hanging: the second limit is that of kinds that take long.
LIMIT_S, LONG_LIMIT_S = 1800, 3 * 3600
FOUND = os.path.join(HERE, "found.txt")
ORDERS = [["SIMCUDA_SCHEDULE", "lazy"], ["SIMCUDA_SCHEDULE", "eager"]]
NOT_KEPT = {"PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true"}
LARGE = ["counts_beyond_two_to_the_31", "tensors_beyond_what_mpi_can_count"]
# Ignored tests that launch/test leaves out because they take long or much memory; others are started by tests.
IGNORED = ["every_wait_of_ranks_with_two_gpus_each", "losing::ranks_that_are_killed_at_any_time", "a_missing_wait_or_barrier_is_found_in_every_order", *LARGE]
WITHOUT_MPI = "-p ddp-comm -p ddp --no-default-features --features ddp/program --tests --locked".split()
# Builds that are not those of launch/test, and what needs a network or an engine.
BUILDS = {
    "without-mpi": ["cargo", "test", *WITHOUT_MPI],
    "without-mpi-clippy": ["cargo", "clippy", *WITHOUT_MPI, "--all-targets", "--", "-D", "warnings"],
    # Clippy leaves out rustc's checks of pointers.
    "by-rustc": "cargo test -p ddp-kernels -p ddp-comm -p ddp-simcuda --tests --locked".split(),
    "release": ["env", "PROPTEST_CASES=20000", "cargo", "test", "--workspace", "--release", "--tests", *FEATURES, "--features", "ddp/faults", "--locked"],
    "documentation": ["env", "RUSTDOCFLAGS=-D warnings", "cargo", "doc", "--workspace", "--no-deps", *FEATURES, "--locked"],
    "crates": ["cargo", "deny", "--locked", "check"],
    # As launch/gpu-check runs ranks on one GPU.
    "shared-gpu": "env DDP_TEST_SHARE_GPUS=1 launch/with-simulated-gpus 1 cargo test -p ddp-comm --test mpirun --locked -- gpus".split(),
    "images": ["tests/docker/run", "--engine"],
    "numpy1": ["tests/python/run", "numpy1"],
}


class Search:
    def __init__(self):
        self.programs = Programs(f"{ROOT}/target/search-programs")
        self.listed = {}

    def build(self):
        os.makedirs(f"{ROOT}/target", exist_ok=True)
        self.programs.build()
        self.programs.load()
        # A seed draws the same cases whatever the order in which cargo builds.
        self.programs.all.sort()
        self.programs.set_environment(os.path.dirname(os.path.dirname(self.programs.all[0][2])))

    def tests(self, *targets):
        """Package, target and name of tests: of programs with one of these targets, else of all. What others start is left out."""
        found = []
        for package, target, file in self.programs.all:
            if targets and target not in targets:
                continue
            if file not in self.listed:
                ignored = {name for name in self.programs.names(file, "--ignored") if not any(word in name for word in IGNORED)}
                self.listed[file] = [name for name in self.programs.names(file) if name not in ignored]
            found += [[package, target, name] for name in self.listed[file]]
        return found

    def test(self, package, target, name, devices=None, **environment):
        """The command of one test, and its folder."""
        devices = devices or devices_of(target, name)
        on = [f"{ROOT}/launch/with-simulated-gpus", str(devices)] if devices else []
        set_to = [f"{key}={value}" for key, value in environment.items()]
        return [*on, "env", *set_to, self.programs.file(package, target), "--exact", "--include-ignored", name], package


def reaching(pattern):
    """The names of functions in tests that contain a pattern, or that call such a function: one of their own file, or one whose name is unique."""
    bodies, count = {}, collections.Counter()
    for path in subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
        if "test" in path or "proptest" in text:
            parts = re.split(r"\bfn (\w+)", text)
            bodies.update({(path, name): body for name, body in zip(parts[1::2], parts[2::2])})
            count.update(parts[1::2])
    found, new = set(), {it for it, body in bodies.items() if re.search(pattern, body)}
    while new:
        found |= new
        everywhere = {name for _, name in new if count[name] == 1}
        calls = {it: set(re.findall(r"\b(\w+)\(", body)) for it, body in bodies.items() if it not in found}
        new = {it for it, called in calls.items() if called & everywhere or any((it[0], name) in new for name in called)}
    return {name for _, name in found}


def of(tests, functions):
    return [test for test in tests if test[2].rsplit("::", 1)[-1] in functions]


# Each kind: what it tries; `draw(search, random)` gives the words of a case; `command(search, *words)` its command and
# folder; `all(search)` the words of all cases.


class Kind:
    what = ""
    is_long = False

    def lacks(self):
        """What every case needs and this machine does not have."""
        return ""

    def draw(self, search, drawn):
        return drawn.choice(self.all(search))


class Cases(Kind):
    what = "other cases of properties (DDP_CASES): bytes, faults, moments, seeds, shapes"

    def draw(self, search, drawn):
        return [*drawn.choice(self.tests(search)), str(drawn.randrange(1, 1 << 20))]

    @staticmethod
    def tests(search):
        asks = reaching(r"ddp_testing::(cases|cases_of|all_cases)\(")
        # A macro makes the tests of planted bugs.
        planted = [test for test in search.tests("planted") if test[2].startswith("caught::")]
        return [test for test in of(search.tests(), asks) if test[1] != "ddp_testing"] + planted

    def all(self, search):
        return [[*test, "all"] for test in self.tests(search)]

    def command(self, search, package, target, name, seed):
        return search.test(package, target, name, DDP_CASES=seed)


class Orders(Kind):
    what = "GPU tests with another seed of the simulator, or the lazy or the eager schedule"

    def draw(self, search, drawn):
        order = drawn.choice([*ORDERS, ["SIMCUDA_SEED", str(drawn.randrange(1, 1 << 20))]])
        return [*drawn.choice(search.tests("cuda", "gpu_threads", "cuda_steady_state")), *order]

    def all(self, search):
        return [[*test, *order] for test in search.tests("cuda", "gpu_threads", "cuda_steady_state") for order in [*ORDERS, ["SIMCUDA_SEED", "1"]]]

    def command(self, search, package, target, name, key, value):
        return search.test(package, target, name, **{key: value})


class Devices(Kind):
    what = "GPU tests on one and on four GPUs, without peer access, and with NCCL's event nodes in graphs"

    def all(self, search):
        ways = [["1", "SIMCUDA_NO_PEER", "0"], ["4", "SIMCUDA_NO_PEER", "0"], ["2", "SIMCUDA_NO_PEER", "1"], ["4", "SIMCUDA_NCCL_EVENTS", "1"]]
        return [[*test, *way] for test in search.tests("cuda", "cuda_steady_state") for way in ways]

    def command(self, search, package, target, name, devices, key, value):
        return search.test(package, target, name, devices, **{key: value})


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
        mutants = SourceFileLoader("mutants", f"{ROOT}/tests/mutants/run").load_module()
        return [[entry.key] for entry in mutants.entries(self.texts) if self.is_ours(entry)]

    def command(self, _, key):
        return ["tests/mutants/run", self.name, key, "1"], "."


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
        tests = [test for test in search.tests("jobs") if test[2].startswith("losing_often::")]
        return [[test[2], str(seed)] for test in tests for seed in range(126)]

    def command(self, search, name, seed):
        return search.test("ddp", "jobs", name, DDP_CASES=f"{seed}..{int(seed) + 1}")


class Properties(Kind):
    what = "2,000 random cases of a property"

    def all(self, search):
        # Arguments are drawn: `fn sums(rows in 1..9usize)`.
        return [[*test, "1"] for test in of(search.tests(), reaching(r"^\(\s*[\w(), ]+? in |proptest!\("))]

    def draw(self, search, drawn):
        return [*drawn.choice(self.all(search))[:3], str(drawn.randrange(1, 1 << 20))]

    def command(self, search, package, target, name, seed):
        return search.test(package, target, name, PROPTEST_CASES="2000", PROPTEST_RNG_SEED=seed, **NOT_KEPT)


class Waits(Kind):
    what = "waits that are left out, one after the other"
    is_long = True

    def draw(self, search, drawn):
        return [*drawn.choice(self.places(search)), str(drawn.randrange(1, 1 << 20))]

    @staticmethod
    def places(search):
        return [test for test in search.tests("cuda", "waits") if "every_wait" in test[2]]

    def all(self, search):
        return [[*test, "all"] for test in self.places(search)]

    def command(self, search, package, target, name, seed):
        return search.test(package, target, name, DDP_CASES=seed)


class Launchers(Kind):
    what = "jobs whose ranks mpirun starts"

    def all(self, search):
        return [[test[2]] for test in of(search.tests("jobs"), reaching(r"\.(ranks\([^)]|together\()"))]

    def command(self, search, name):
        return search.test("ddp", "jobs", name, DDP_TEST_LAUNCHER="mpirun")


class Fuzz(Kind):
    what = "a fuzz target for a minute (cargo install cargo-fuzz)"

    def draw(self, search, drawn):
        return [drawn.choice(self.all(search))[0], str(drawn.randrange(1, 1 << 20))]

    def all(self, _):
        return [[os.path.relpath(path, ROOT), "1"] for path in sorted(glob.glob(f"{ROOT}/*/fuzz/fuzz_targets/*.rs"))]

    def lacks(self):
        return "" if shutil.which("cargo-fuzz") else "no cargo-fuzz (cargo install cargo-fuzz)"

    def command(self, _, path, seed):
        if why := self.lacks():
            return None, why
        folder, name = path.split("/fuzz/")[0] + "/fuzz", os.path.basename(path).removesuffix(".rs")
        # RUSTC_BOOTSTRAP: the sanitizer's flags on a stable toolchain.
        return ["env", "RUSTC_BOOTSTRAP=1", "cargo", "fuzz", "run", "--fuzz-dir", folder, name, "--", "-max_total_time=60", f"-seed={seed}"], "."


class Load(Kind):
    what = "a test program beside four busy processes (tests/checks/again)"
    is_long = True

    def all(self, search):
        # These rounds are loaded; mpirun starts the ranks of round 2.
        return [[f"{package}/{target}", number] for package, target, _ in search.programs.all for number in ("2", "4")]

    def command(self, search, program, number):
        return ["tests/checks/again", f"--first={number}", "--rounds=1", "--built", search.programs.listing, program], "."


class Large(Kind):
    what = "tensors of more than 2³¹ elements or bytes (up to 20 GB of memory)"

    def all(self, search):
        return [test for test in search.tests("ddp_comm", "mpirun") if any(word in test[2] for word in LARGE)]

    def command(self, search, package, target, name):
        return search.test(package, target, name)


class Releases(Kind):
    what = "signatures and layouts of an old or new release of NVIDIA's libraries (up to 600 MB); kernels for sm_75, sm_80 and sm_100"

    def all(self, _):
        return [*([f"--releases={number}"] for number in range(8)), ["--for=sm_75,sm_80,sm_100"]]

    def command(self, _, option):
        return ["launch/check-kernels", option], "."


class Arm(Kind):
    what = "aarch64 under qemu against x86-64 (launch/check-arm; the first builds)"
    is_long = True

    def all(self, _):
        return [[claim] for claim in "units perceptron gpt bf16 amx lora ranks back".split()]

    def command(self, _, claim):
        return ["launch/check-arm", claim], "."


class Builds(Kind):
    what = f"other builds: {', '.join(BUILDS)}"
    is_long = True

    def all(self, _):
        return [[name] for name in BUILDS]

    def command(self, _, name):
        if name == "crates" and not shutil.which("cargo-deny"):
            return None, "no cargo-deny (cargo install cargo-deny)"
        # What launch/test has built stays.
        return ["env", f"CARGO_TARGET_DIR={ROOT}/target/search", *BUILDS[name]], "."


def is_membership(entry):
    return entry.tests == ["membership/"]


KINDS = {
    "cases": Cases(),
    "orders": Orders(),
    "devices": Devices(),
    "races": Races(),
    "kernels": Mutants("kernels", "wrong kernels, which a test must find", "kernels.txt", lambda entry: True),
    "code": Mutants("switches", "wrong Rust code, which a test must find; the first builds a copy", "switches.txt", lambda entry: not is_membership(entry)),
    "membership": Mutants("membership", "faults of membership, which simulated jobs must find", "switches.txt", is_membership),
    "jobs": Jobs(),
    "storms": Storms(),
    "properties": Properties(),
    "waits": Waits(),
    "launchers": Launchers(),
    "fuzz": Fuzz(),
    "load": Load(),
    "large": Large(),
    "releases": Releases(),
    "arm": Arm(),
    "builds": Builds(),
}
# What takes too long to be drawn among others.
BY_NAME_ONLY = {"code", "load", "large", "arm", "builds", "releases"}


def run(search, case):
    """Whether a case passed; None if it was skipped."""
    kind, *words = shlex.split(case) or [""]
    if kind not in KINDS or len(words) != KINDS[kind].command.__code__.co_argcount - 2:
        print(f"launch/search: FAILED: there is no case {case!r}; help: expected a KIND and its words, as a failure prints them", flush=True)
        return False
    print(f"launch/search --case {shlex.quote(case)}", flush=True)
    try:
        command, folder = KINDS[kind].command(search, *words)
    except StopIteration:
        print(f"    FAILED: no program of tests is called {' '.join(words[:2])}", flush=True)
        return False
    if command is None:
        print(f"    skipped: {folder}", flush=True)
        return None
    began, limit_s = time.monotonic(), LONG_LIMIT_S if KINDS[kind].is_long or "all" in words else LIMIT_S
    with tempfile.TemporaryFile("w+", errors="replace") as log, tempfile.NamedTemporaryFile("r") as skipped:
        environment = {**os.environ, "DDP_TEST_SKIPPED": skipped.name}
        process = subprocess.Popen(command, cwd=os.path.join(ROOT, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = f"none, still running after {limit_s} s"
        finally:
            # What it has started ends with it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        log.seek(0)
        text, why = log.read(), skipped.read()
    seconds = time.monotonic() - began
    if status == 0 and (why or "skipped: " in text):
        print(f"    skipped: {case}: {(why or text).strip().splitlines()[-1]}", flush=True)
        return None
    if status == 0 and re.search(r"^running \d+ test", text, re.MULTILINE) and not re.search(r"^running [1-9]", text, re.MULTILINE):
        status = "0, but no test ran"
    if status == 0:
        print(f"    passed in {seconds:.0f} s", flush=True)
        return True
    lines = text.splitlines()
    # Stacks after it may be longer than the end that is shown: those of a fuzz target are.
    panics = [line for before, line in zip(["", *lines], lines[:-60]) if "panicked at" in before + line]
    print("\n".join([*panics[:20], *lines[-60:]]))
    print(f"    FAILED after {seconds:.0f} s: exit status {status}\n    alone: launch/search --case {shlex.quote(case)}", flush=True)
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
            print(f"                 {name:12}{kind.what}" + "; only by name" * (name in BY_NAME_ONLY))
        return 0
    os.chdir(ROOT)
    # Those of the user's shell would be everywhere.
    for name in ("DDP_CASES", "DDP_TEST_LAUNCHER"):
        os.environ.pop(name, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with open(FOUND, encoding="utf-8") as file:
        found = [line.strip() for line in file if line.strip() and not line.startswith("#")]
    if asked.found:
        # There a case that is skipped for want of GPUs fails.
        os.environ["DDP_TEST_ENOUGH_GPUS"] = "1"
    if asked.found and not found:
        print("nothing in tests/search/found.txt")
        return 0
    # Each case would be skipped at once, and another drawn, until the time is over.
    if asked.only and not asked.case and (why := KINDS[asked.only].lacks()):
        print(f"launch/search: no case of {asked.only} can run: {why}", file=sys.stderr)
        return 69
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
        print(f"launch/search: FAILED: launch/search --case {shlex.quote(case)}")
    print(f"{outcomes.count(True)} passed, {len(failed)} failed, {outcomes.count(None)} skipped")
    return 1 if failed else 0


sys.exit(main())
