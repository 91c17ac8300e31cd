"""Every claim of this project, once; launch/test starts it: NAME ('' for all)."""

import glob
import json
import os
import subprocess
import sys

import examples
from programs import BY_CLIPPY, FEATURES, NEED_GPUS, ON_FOUR, ON_ONE, RUN_FIRST, UNIT_TESTS, Programs, devices_of
from steps import Failure, Steps, command, plural

CORES = len(os.sched_getaffinity(0))
BUILD, UNITS = "build and clippy", "build and clippy, unit tests of libraries"
PACKAGES = "packages for several hosts and Slurm"
STEP = "--model gpt,layers=2,heads=2,width=64,vocab=512,context=64 --batch 17 --dtype bf16 --explain --device cuda"
PLAN = f'file=$(mktemp) && trap \'rm -f "$file"\' EXIT && "${{DDP_TRAIN:-target/debug/ddp-train}}" bench gpt {STEP} >"$file" && python3 -B tests/evidence/gpt2_plan.py --check "$file"'
# Programs whose tests say more where there are GPUs.
ON_BOTH = ["ddp_kernels", "transfers"]
# A test that skips itself for want of GPUs fails.
ENOUGH = {"DDP_TEST_ENOUGH_GPUS": "1"}
# Of operations: approximate instructions err as far as the ISA lets them.
APPROXIMATE = {"SIMCUDA_APPROXIMATE": "1"}


class Checks:
    def __init__(self, name):
        self.name = name
        # Many checks mostly wait.
        self.steps = Steps(int(os.environ.get("DDP_TEST_JOBS", CORES + 1)), keeps_logs=name == "")
        self.threads = os.environ.get("RUST_TEST_THREADS")
        self.programs = Programs(f"{self.steps.folder()}/programs")
        metadata = command("cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", stdout=subprocess.PIPE).stdout
        self.built = json.loads(metadata)["target_directory"] + "/debug"
        self.examples = [example for example in examples.names() if name in ("", example)]

    def run_all(self):
        steps, beside = self.steps, self.steps.beside
        beside(PACKAGES, install, waits=True)
        beside("formatting", ["cargo", "fmt", "--all", "--check"])
        steps.need(BUILD, self.programs.build, RUN_FIRST)
        self.programs.load()
        self.programs.set_environment(self.built)
        # Beside the tests, one after the other: cargo has a lock.
        beside(UNITS, self.programs.build, UNIT_TESTS, waits=True)
        beside("documentation", documentation, waits=True)
        words = "cargo package --workspace --exclude-lockfile --no-verify --allow-dirty --offline --quiet"
        beside("packages of all crates", words.split(), waits=True)
        steps.wait_for(PACKAGES)
        # What mostly waits comes first, then what takes longest.
        for title, does, waits in [*self.that_wait(), *self.on_gpus(), *self.others()]:
            beside(title, *does, env=ENOUGH if "simulated GPU" in title else None, waits=waits)
        steps.wait_for(UNITS)
        beside("what launch/search has found", ["launch/search", "--found"], waits=True)
        self.programs.load()
        for package in sorted({it[0] for it in self.programs.unit}):
            beside(f"unit tests of {package}", self.programs.run, [it for it in self.programs.unit if it[0] == package])
        beside("unit tests that need a GPU, 1 simulated GPU", self.programs.on_gpus, 1, "ddp_kernels", "ledger", "nvrtc", "device::", env=ENOUGH)
        steps.wait_for_all()
        steps.step("every kernel was launched", self.every_kernel_was_launched)

    def that_wait(self):
        """Title, what it does, whether it mostly waits."""
        launch = ["tests/launch/run"]
        yield "tests/launch: slurm", [[*launch, "slurm"]], True
        yield "tests/launch: kubernetes gpu-check trust", [[*launch, "kubernetes", "gpu-check", "trust"]], True
        yield "several hosts", [["tests/hosts/run"]], True
        yield "tests of ddp: jobs", [self.with_more_threads, "ddp", "jobs", "--skip=losing_often::"], False
        yield "tests of comm: mpirun", [self.with_more_threads, "comm", "mpirun", "--skip=gpus::"], False

    def with_more_threads(self, *arguments):
        os.environ["RUST_TEST_THREADS"] = self.threads or str(3 * CORES)
        self.programs.one(*arguments)

    def on_gpus(self):
        """On simulated ones."""
        on_gpus, words = self.programs.on_gpus, [word for name in ON_FOUR + ON_ONE for word in ("--skip", name)]
        launches = {"SIMCUDA_KERNELS": f"{self.steps.folder()}/launches", **APPROXIMATE}
        operations = lambda: (os.environ.update(launches), on_gpus(2, "cuda", package="kernels"))
        yield "trainer, 2 simulated GPUs", [lambda: on_gpus(2, "cuda", *words, package="ddp")], False
        yield "ranks, lost ranks and split models, 4 simulated GPUs", [lambda: on_gpus(4, "cuda", *ON_FOUR, package="ddp")], False
        yield "operations, 2 simulated GPUs", [operations], False
        yield "one rank in any order, 1 simulated GPU", [lambda: on_gpus(1, "cuda", *ON_ONE, package="ddp")], False
        yield "transfers, warnings, faults, planted bugs, waits, 2 simulated GPUs", [on_gpus, 2, "transfers warnings faults planted waits"], False
        yield "ranks as processes, 4 simulated GPUs", [on_gpus, 4, "mpirun", "gpus::"], False
        yield "ranks as threads, 4 simulated GPUs", [on_gpus, 4, "gpu_threads"], False
        yield "steady state, 2 simulated GPUs", [on_gpus, 2, "cuda_steady_state"], False
        yield "the plan of GPT-2's step has the program's nodes, bytes and blocks", [["launch/with-simulated-gpus", 1, "bash", "-c", PLAN]], False
        if glob.glob("/dev/nvidia[0-9]*"):
            yield "tests on real GPUs", [on_gpus, None, " ".join(NEED_GPUS)], False
        else:
            self.steps.skip("tests on real GPUs", "this machine has none (launch/gpu-check is for those that have)")

    def others(self):
        yield "tests of ddp: training", [self.programs.one, "ddp", "training"], False
        yield "the commands of README.md and docs/", [["tests/readme/run", self.built]], False
        yield "kernels for sm_90, through NVIDIA's compiler", [["launch/check-kernels", "--for=sm_90"]], False
        yield "from Python and notebooks", [["tests/python/run"]], False
        yield "the report in a browser", [["tests/report/run"]], False
        yield "examples", [self.run_examples], False
        yield "checkpoints, read by numpy and safetensors", [["tests/checks/checkpoints"]], False
        for package, programs in self.programs.others().items():
            yield f"tests of {package}", [self.programs.run, programs], False
        yield "structure: cycles, comments, rooms, lines", [[f"{self.built}/ddp-house", "all"]], False
        yield "lock files of the fuzz targets", [fuzz_locks], False
        yield "wrong kernels and wrong code can be planted", [["tests/mutants/run", "texts", self.programs.file("kernels", "cuda")]], False
        yield "tests/launch: scripts docker simulated-gpus", [["tests/launch/run", "scripts", "docker", "simulated-gpus"]], False

    def run_examples(self):
        # docs/placement.md shows the tour on 4 GPUs.
        examples.run(self.built, self.examples, self.steps.folder(), self.name != "", [1, 2, 4])

    def every_kernel_was_launched(self):
        """Whether the operations launched every kernel that the compiler made."""
        launches = f"{self.steps.folder()}/launches"
        if not os.path.exists(launches):
            raise Failure("no test of operations launched a kernel")
        with open(launches) as lines, open(os.path.dirname(self.built) + "/check-kernels/figures.json") as figures:
            launched = {line.split("\t")[0] for line in lines}
            # Samples of chains are named after what they compute; their texts are compared.
            made = {kernel for kernels in json.load(figures)["sm_90"].values() for kernel in kernels if not kernel.startswith("chain_")}
        if missing := sorted(made - launched):
            raise Failure(f"no operation's test launches {', '.join(missing)}")
        print(f"{plural(len(made), 'kernel')} are launched by tests of operations")

    def run_named(self):
        """Tests on as many simulated GPUs as they need, and without any."""
        step, name = self.steps.step, self.name
        self.steps.need(BUILD, self.programs.build)
        self.programs.load()
        self.programs.set_environment(self.built)
        found = 0
        for package, target, file in self.programs.all:
            by_devices = {}
            # Ignored ones are started by others, or searched.
            ignored = self.programs.names(file, "--ignored")
            for test in self.programs.names(file):
                if name in test and test not in ignored:
                    needed = devices_of(target, test)
                    for devices in {0, 2} if target in ON_BOTH else {needed}:
                        by_devices.setdefault(devices, []).append(test)
            for devices, tests in sorted(by_devices.items()):
                found += len(tests)
                title = f"{target} of {package}: *{name}*" + f", simulated GPUs: {devices}" * (devices > 0)
                words = [[package, target, file]], devices, ("--exact", *tests)
                env = ENOUGH if devices and target not in ON_BOTH else {}
                step(title, self.programs.run, *words, env=env | APPROXIMATE if (package, target) == ("kernels", "cuda") else env)
        if self.examples:
            step(f"example {name}", self.run_examples)
        if not found and not self.examples:
            step(f"examples in documentation named *{name}*", documentation, name)
        if self.steps.counts["passed"] + self.steps.counts["failed"] <= 1 and not found and not self.examples:
            print(f"\nlaunch/test: FAILED: no test ran and no example is called {name}", file=sys.stderr)
            sys.exit(1)


def install():
    """Servers that are not started. What cannot be installed is skipped where it is needed, which says so."""
    # In a group of its own: where a step fails meanwhile, the package manager is not ended halfway.
    subprocess.run(["launch/setup"], env={**os.environ, "SETUP_FOR": "launching"}, stdin=subprocess.DEVNULL, process_group=0, check=False)


def fuzz_locks():
    """The fuzz targets are workspaces of their own, which no other step builds."""
    for folder in ("kernels", "ddp"):
        words = ["cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", f"{folder}/fuzz/Cargo.toml"]
        command(*words, stdout=subprocess.DEVNULL)


def documentation(name=""):
    """Documentation of libraries, and the examples in it."""
    env = {**os.environ, **BY_CLIPPY, "RUSTDOC": os.path.abspath("tests/checks/rustdoc")}
    command("cargo", "test", "--workspace", "--doc", *FEATURES, "--locked", "--quiet", "--", name, env=env)


def main():
    # Operations launch every kernel; only there threads are looked at for races.
    os.environ.setdefault("SIMCUDA_INTRA", "0")
    checks = Checks(sys.argv[1])
    if not checks.name and not checks.examples:
        sys.exit("launch/test: FAILED: no [[example]] found in examples/Cargo.toml")
    try:
        checks.run_named() if checks.name else checks.run_all()
        checks.steps.print_table()
        checks.steps.close(f"the checks named {checks.name}" if checks.name else "all checks")
    finally:
        checks.steps.stop()


main()
