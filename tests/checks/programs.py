"""Test programs: building all, and running some of them, perhaps on simulated GPUs."""

import json
import os
import subprocess

from steps import Failure, command

ROOT = os.getcwd()
# The one set of features that everything is built with.
FEATURES = ["--features", "ddp/parquet"]
# Clippy compiles this repository's crates, which costs next to nothing; a check of its own would read
# every crate again. The variables are those that `cargo clippy` sets for `cargo check`. What clippy
# compiles lacks rustc's checks for null and misaligned pointers; --long runs tests with them.
BY_CLIPPY = {"RUSTC_WORKSPACE_WRAPPER": "clippy-driver", "CLIPPY_ARGS": "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__"}
# Programs that have a step to themselves, because they take long.
SLOW = ["jobs", "mpirun"]


class Programs:
    """The test programs: tuples of package (a folder), target and file."""

    def __init__(self, listing):
        self.listing = listing
        self.all = []

    def build(self):
        """Builds everything that runs, and lists the test programs in a file."""
        words = ["cargo", "build", "--workspace", "--all-targets", *FEATURES, "--locked", "--message-format=json-render-diagnostics"]
        built = command(*words, env={**os.environ, **BY_CLIPPY}, stdout=subprocess.PIPE, text=True)
        found = []
        for message in map(json.loads, built.stdout.splitlines()):
            kinds = message.get("target", {}).get("kind")
            if message.get("executable") and message["profile"]["test"] and kinds not in (["example"], ["bench"]):
                package = os.path.relpath(os.path.dirname(message["manifest_path"]))
                found.append((package, message["target"]["name"], message["executable"]))
        with open(self.listing, "w", encoding="utf-8") as file:
            json.dump(found, file)
        print(f"    {len(found)} test programs")

    def load(self):
        with open(self.listing, encoding="utf-8") as file:
            self.all = json.load(file)

    def packages(self):
        return sorted({package for package, _, _ in self.all})

    def slow(self):
        return [(package, target) for package, target, _ in self.all if target in SLOW]

    def file(self, package, target):
        return next(file for known, name, file in self.all if (known, name) == (package, target))

    def of_package(self, package):
        self._run([it for it in self.all if it[0] == package and it[1] not in SLOW], None, [])

    def one(self, package, target, *arguments):
        self._run([it for it in self.all if it[:2] == [package, target]], None, arguments)

    def on_gpus(self, devices, targets, *arguments, package=None):
        """Those with these names, of one package or any, on simulated GPUs."""
        chosen = [it for it in self.all if it[1] in targets.split() and package in (None, it[0])]
        self._run(chosen, devices, arguments)

    def some_on_gpus(self, package, devices, parts, part, *arguments):
        """Every PARTS-th test of one package's `cuda`."""
        words = [self.file(package, "cuda"), "--list", "--format", "terse", *arguments]
        listed = command(*words, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        names = [line.removesuffix(": test") for line in listed if line.endswith(": test")]
        self.on_gpus(devices, "cuda", "--exact", *names[(part - 1) % parts :: parts], package=package)

    @staticmethod
    def _run(chosen, devices, arguments):
        """As cargo does, in the package's folder."""
        if not chosen:
            raise Failure("no test program is called that")
        on = [f"{ROOT}/launch/with-simulated-gpus", devices] if devices else []
        for package, target, file in chosen:
            print(f"     Running {target} of {package}" + (f", simulated GPUs: {devices}" if devices else ""))
            command(*on, file, "--quiet", *arguments, cwd=package)
