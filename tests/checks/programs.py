"""Test programs: building all, and running some of them, perhaps on simulated GPUs."""

import json
import os
import shlex
import subprocess
import sys

from steps import Failure, command

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
# The one set of features that everything is built with.
FEATURES = ["--features", "ddp/parquet"]
# The variables that `cargo clippy` sets for `cargo check`, with a compiler that is clippy.
BY_CLIPPY = {"RUSTC_WORKSPACE_WRAPPER": f"{ROOT}/tests/checks/compiler", "CLIPPY_ARGS": "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"}
# Programs that have a step to themselves, because they take long.
SLOW = ["jobs", "mpirun", "training"]
# Programs whose tests all need GPUs: they run on simulated ones.
NEED_GPUS = ["cuda", "cuda_steady_state", "gpu_threads", "warnings", "faults", "planted", "waits"]
# Tests of the trainer that need four GPUs, and those that need one.
ON_FOUR = ["ranks::", "losing::", "zero::", "split::", "orders::with_shards", "orders::split_models"]
ON_ONE = ["orders::one_rank"]
# What runs first; unit tests of libraries are built meanwhile.
ALL = ["build", "--all-targets"]
RUN_FIRST = ["build", "--lib", "--bins", "--examples", "--test=*", "--bench=*"]
UNIT_TESTS = ["test", "--no-run", "--lib", "--bins"]


def devices_of(target, test):
    """How many simulated GPUs a test needs."""
    on_four = {"cuda": (*ON_FOUR, "waits::every_wait_of_ranks_with_two_gpus_each"), "mpirun": ("gpus::",), "gpu_threads": ("",)}
    if test.startswith(on_four.get(target, ())):
        return 4
    if target == "cuda" and test.startswith(tuple(ON_ONE)):
        return 1
    return 2 if target in NEED_GPUS else 0


class Programs:
    """The test programs: lists of package (a folder), target and file."""

    def __init__(self, listing):
        self.listing = listing
        self.all, self.unit = [], []

    def build(self, targets=ALL):
        """Builds some targets of all packages, and lists the test programs in a file; unit tests come last."""
        words = ["cargo", *targets, "--workspace", *FEATURES, "--locked", "--message-format=json-render-diagnostics"]
        built = command(*words, env={**os.environ, **BY_CLIPPY}, stdout=subprocess.PIPE, text=True)
        found = []
        for message in map(json.loads, built.stdout.splitlines()):
            kinds = message.get("target", {}).get("kind")
            if message.get("executable") and message["profile"]["test"] and kinds not in (["example"], ["bench"]):
                package = os.path.relpath(os.path.dirname(message["manifest_path"]))
                found.append((package, message["target"]["name"], message["executable"]))
        with open(self.listing, "w", encoding="utf-8") as file:
            json.dump(self.all + found, file)
        print(f"    {len(found)} test programs")

    def load(self):
        """What another process has built. What comes in addition is unit tests."""
        others = self.all
        with open(self.listing, encoding="utf-8") as file:
            self.all = json.load(file)
        self.unit = self.all[len(others) :] if others else []

    def set_environment(self, built):
        """What test programs are to use."""
        # It compiles the kernels of simulated GPUs. What it prints is its path.
        found = subprocess.run(["launch/check-kernels", "--nvrtc"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode != 0:
            sys.exit(found.returncode)
        os.environ.update(SIMCUDA_LIBRARY=f"{built}/libddp_simcuda.so", DDP_TRAIN=f"{built}/ddp-train", SIMCUDA_NVRTC=found.stdout.strip())
        os.environ.setdefault("RUST_TEST_THREADS", str(2 * len(os.sched_getaffinity(0))))
        # Of properties: cases that are random, and the same in every run.
        for name, value in (("CASES", "64"), ("RNG_SEED", "1"), ("DISABLE_FAILURE_PERSISTENCE", "true")):
            os.environ.setdefault(f"PROPTEST_{name}", value)

    def file(self, package, target):
        return next(it[2] for it in self.all if (it[0], it[1]) == (package, target))

    def others(self):
        """Tests on the CPU that have no step to themselves, by package."""
        chosen = [it for it in self.all if it not in self.unit and it[1] not in SLOW + NEED_GPUS]
        return {package: [it for it in chosen if it[0] == package] for package in sorted({it[0] for it in chosen})}

    def one(self, package, target, *arguments):
        self.run([it for it in self.all if it[:2] == [package, target]], None, arguments)

    def on_gpus(self, devices, targets, *arguments, package=None):
        """Those with these names, of one package or any, on simulated GPUs."""
        chosen = [it for it in self.all if it[1] in targets.split() and package in (None, it[0])]
        self.run(chosen, devices, arguments)

    @staticmethod
    def names(file, *arguments):
        """The tests of a program."""
        listed = command(file, "--list", "--format", "terse", *arguments, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        return [line.removesuffix(": test") for line in listed if line.endswith(": test")]

    @staticmethod
    def run(chosen, devices=None, arguments=()):
        """As cargo does, in the package's folder."""
        if not chosen:
            raise Failure("no test program is called that")
        on = [f"{ROOT}/launch/with-simulated-gpus", devices] if devices else []
        for package, target, file in chosen:
            print(f"     Running {target} of {package}" + (f", simulated GPUs: {devices}" if devices else ""))
            followed = {} if package.startswith(("comm", "ddp")) else {"SIMCUDA_INTRA": ""}
            try:
                command(*on, file, *arguments, cwd=package, env={**os.environ, **followed})
            except subprocess.CalledProcessError as error:
                # Else the harness lists the tests that failed.
                if error.returncode != 101:
                    print(f"    alone: cd {package} && {shlex.join(map(str, [*on, file, *arguments]))}")
                raise
