"""Every check of this project; launch/test starts it: NAME ('' for all) LONG (yes or no)."""

import glob
import json
import os
import shutil
import subprocess
import sys
import zlib

import examples
from programs import BY_CLIPPY, FEATURES, NEED_GPUS, ON_FOUR, ON_ONE, RUN_FIRST, UNIT_TESTS, Programs
from steps import Failure, Steps, command, plural

CORES = len(os.sched_getaffinity(0))
# Seconds of CPU on a Zen 4, as the table at the end of a run says: of the build, of all that follows (600 to 950), and of
# what a commit that changes kernels runs besides.
BUILD_S, CHECKS_S, KERNELS_S = 350, 800, 300
UNIT_TESTS_BUILT = "build and clippy, unit tests of libraries"
# Other orders of the work that CUDA leaves open.
ORDERS = [("SEED", "1"), ("SCHEDULE", "lazy"), ("SCHEDULE", "eager")]
# How many checks `once_more` has; the one that is the simulator's unit tests.
ONCE_MORE, SIMULATOR = 86, 17
# A test that skips itself for want of GPUs fails.
ENOUGH = {"DDP_TEST_ENOUGH_GPUS": "1"}
# What takes long: ranks, and the waits and orders of trainings.
WITHOUT_RANKS = [word for name in "ranks zero split jobs timeline waits orders".split() for word in ("--skip", f"{name}::")]
IN_RELEASE = ["cargo", "test", "--workspace", "--release", "--tests"]


class Checks:
    def __init__(self, name, is_long):
        self.name, self.is_long = name, is_long
        # Many checks mostly wait.
        self.steps = Steps(int(os.environ.get("DDP_TEST_JOBS", CORES + 2)))
        self.programs = Programs(f"{self.steps.folder()}/programs")
        metadata = command("cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", stdout=subprocess.PIPE).stdout
        self.built = json.loads(metadata)["target_directory"] + "/debug"
        self.examples = [example for example in examples.names() if name in ("", example)]

    def selected(self, check, count):
        """The number, below `count`, that the slice selects for a check; all numbers with --long. Numbers of commits
        select one after the other, so that `count` commits in a row select all; hashes select at random."""
        which = os.environ["DDP_TEST_SLICE"]
        if which == "all":
            return list(range(count))
        first = int(which) if which.isdecimal() else 0
        return [(first + zlib.crc32(check.encode() if which.isdecimal() else f"{which}/{check}".encode())) % count]

    def expected(self):
        """About how long it will take."""
        is_built = os.path.exists(f"{self.built}/ddp-train")
        seconds = (CHECKS_S + BUILD_S * (not is_built) + KERNELS_S * changes_kernels()) / CORES
        time = f"about {plural(round(seconds / 60 + 0.5), 'minute')} on {plural(CORES, 'idle core')} of a Zen 4, up to twice that on older ones"
        return time + ", and a build of what changed" * is_built

    def run_all(self):
        steps, beside = self.steps, self.steps.beside
        print(f"expected: {'hours' if self.is_long else self.expected()}", flush=True)
        beside("packages for several hosts and Slurm", install, waits=True)
        beside("formatting", ["cargo", "fmt", "--all", "--check"])
        steps.need("build and clippy", self.programs.build, RUN_FIRST)
        self.programs.load()
        os.environ.update(SIMCUDA_LIBRARY=f"{self.built}/libddp_simcuda.so", DDP_TRAIN=f"{self.built}/ddp-train")
        # It compiles the kernels of simulated GPUs. What it prints is its path.
        found = subprocess.run(["launch/check-kernels", "--nvrtc"], stdout=subprocess.PIPE, text=True, check=False)
        if found.returncode != 0:
            sys.exit(found.returncode)
        os.environ["SIMCUDA_NVRTC"] = found.stdout.strip()
        threads = os.environ.get("RUST_TEST_THREADS")
        os.environ["RUST_TEST_THREADS"] = threads or str(2 * CORES)
        # Of properties, whose cases are random: four runs try as many as one would by default.
        os.environ.setdefault("PROPTEST_CASES", "256" if self.is_long else "64")
        # How the ranks of most jobs are started: commits alternate, the next ten the other way round, so that each
        # slice of the jobs' cases is run in both ways. A tenth of the jobs. --long runs all of them in both ways.
        turn = self.selected("launcher", 60)[0]
        by_mpirun = (turn + turn // 10) % 2 == 1
        os.environ["DDP_TEST_LAUNCHER"] = "mpirun" if by_mpirun else "own"
        # Beside the tests, one after the other: cargo has a lock.
        # Unit tests and documentation take their turn, and run where the last commit changed their crate.
        sixths = self.selected("unit tests", 6)
        turns = {"ddp-simcuda": SIMULATOR in self.selected("once more", ONCE_MORE) or changed("tests/simcuda")}
        for sixth, folders in enumerate(["kernels", "ddp/nn", "ddp/data ddp/tables", "comm", "ddp/engine", "ddp/tools"]):
            turns.update({f"ddp-{os.path.basename(it)}": sixth in sixths or changed(f"{it}/src") for it in folders.split()})
        left_out = [word for crate, has_turn in turns.items() if not has_turn for word in ("--exclude", crate)]
        beside(UNIT_TESTS_BUILT, self.programs.build, [*UNIT_TESTS, *left_out], waits=True)
        beside("documentation", documentation, left_out, waits=True)
        # What mostly waits comes first, then what takes longest.
        steps.wait_for("packages for several hosts and Slurm")
        # In one of three commits, whose unit tests take less.
        if {2, 5}.intersection(sixths):
            beside("tests/launch: slurm", ["tests/launch/run", "slurm"], waits=True)
        beside("tests/launch: kubernetes gpu-check trust", ["tests/launch/run", "kubernetes", "gpu-check", "trust"], waits=True)
        for which in self.selected("hosts", 6):
            beside(f"tests/hosts, part {which + 1} of 6", ["tests/hosts/run", f"{which + 1}/6"], waits=True)
        for package, target in self.programs.slow():
            mostly_waits = {"RUST_TEST_THREADS": threads or str(3 * CORES)}
            if target == "jobs" and not self.is_long:
                # Storms of real kills: simulated jobs lose 20,000 processes in each commit instead (comm/tests/membership).
                parts = (10, turn % 10, "--skip=losing_often::")
                beside(f"tests of ddp: jobs, part {turn % 10 + 1} of 10", self.programs.some, package, target, *parts, env=mostly_waits)
                continue
            if target == "training":
                for which in self.selected("training", 10):
                    beside(f"tests of ddp: training, part {which + 1} of 10", self.programs.some, package, target, 10, which)
                continue
            for which in self.selected("mpirun", 2):
                beside(f"tests of {package}: {target}, part {which + 1} of 2", self.programs.some, package, target, 2, which, "--skip=gpus::", env=mostly_waits)
        self.on_simulated_gpus()
        steps.wait_for(UNIT_TESTS_BUILT)
        self.programs.load()
        for package in sorted({it[0] for it in self.programs.unit}):
            beside(f"unit tests of {package}", self.programs.run, [it for it in self.programs.unit if it[0] == package])
        if any(it[0] == "kernels" for it in self.programs.unit):
            beside("unit tests that need a GPU, 1 simulated GPU", self.programs.on_gpus, 1, "ddp_kernels", "ledger", "nvrtc", "device::")
        for which in self.selected("documents", 10):
            beside(f"the commands of README.md and docs/, part {which + 1} of 10", ["tests/readme/run", self.built, f"{which + 1}/10"])
        for which in self.selected("report", 4):
            beside(f"tests/report, part {which + 1} of 4", ["tests/report/run", f"{which + 1}/4"])
        beside("examples", self.run_examples)
        # A quarter of the files for one architecture; all of them for sm_90 where the commit changed kernels.
        architectures = ["sm_75", "sm_80", "sm_90", "sm_100"]
        part, which = divmod(self.selected("architectures", 16)[0], 4)
        parts = {architectures[which]: f"{part + 1}/4"}
        if changed("kernels/src"):
            parts["sm_90"] = "1/1"
        if self.is_long:
            parts = {",".join(architectures): "1/1"}
        for which, part in parts.items():
            beside(f"kernels, through the compiler for {which}, part {part}", ["launch/check-kernels", f"--for={which}", f"--part={part}"])
        # One of the eight entries of tests/checks/wheels.py; but in five of six commits one of the first two, the driver's headers:
        # others have up to 600 MB.
        turns = (divmod(turn, 6) for turn in self.selected("unit tests", 48))
        for which in sorted({which if sixth == 5 else sixth % 2 for which, sixth in turns}):
            beside(f"signatures and layouts of NVIDIA's releases, part {which + 1} of 8", ["launch/check-kernels", f"--releases={which}"])
        beside("checkpoints, read by numpy and safetensors", ["tests/checks/checkpoints"])
        for which in self.selected("python", 10):
            beside(f"from Python and notebooks, part {which + 1} of 10", ["tests/python/run", f"{which + 1}/10"])
        for package, programs in self.programs.others().items():
            beside(f"tests of {package}", self.programs.run, programs)
        beside("structure: cycles, comments, rooms, lines", [f"{self.built}/ddp-house", "all"])
        beside("lock files of the fuzz targets", fuzz_locks)
        if not self.is_long:
            # --long tries all, with others.
            which = f"{self.selected('planted faults', 20)[0]}/20"
            beside(f"faults of membership are found, {which} of tests/mutants", ["tests/mutants/run", "membership", which, "1"], waits=True)
        words = "cargo package --workspace --exclude-lockfile --no-verify --allow-dirty --offline --quiet"
        beside("packages of all crates", words.split(), waits=True)
        beside("tests/launch: scripts docker simulated-gpus", ["tests/launch/run", "scripts", "docker", "simulated-gpus"])
        if glob.glob("/dev/nvidia[0-9]*"):
            beside("tests on real GPUs", self.programs.on_gpus, None, " ".join(NEED_GPUS))
        else:
            steps.skip("tests on real GPUs", "this machine has none (launch/gpu-check is for those that have)")
        steps.wait_for_all()
        if self.is_long:
            self.run_long()

    def run_examples(self):
        # docs/placement.md shows the tour on 4 GPUs.
        tours_on = [*(which + 1 for which in self.selected("tours", 2)), 4]
        examples.run(self.built, self.examples, self.steps.folder(), self.name != "", tours_on)

    def on_simulated_gpus(self):
        """What GPUs do: a tenth of the operations and of the trainer's tests on 2 GPUs, and some once more in another way. The slice selects both."""
        beside, on_gpus, some = self.steps.beside, self.programs.on_gpus, self.programs.some_on_gpus
        apart = [word for name in ON_FOUR + ON_ONE for word in ("--skip", name)]
        # Every kernel in ten commits: each case of a test is run on one of the GPUs. All tenths would take more than ten minutes.
        tenths = self.selected("operations", 10)
        if not self.is_long and changes_kernels():
            tenths += [(tenths[0] + more) % 10 for more in (1, 2)]
        for which in tenths:
            # Approximate instructions err as far as the ISA lets them.
            env = {"SIMCUDA_KERNELS": f"{self.steps.folder()}/launches", "SIMCUDA_APPROXIMATE": "1", **ENOUGH}
            beside(f"operations, 2 simulated GPUs, part {which + 1} of 10", some, "kernels", 2, 10, which, env=env)
        for which in self.selected("trainer", 10):
            beside(f"trainer, 2 simulated GPUs, part {which + 1} of 10", some, "ddp", 2, 10, which, *apart, env=ENOUGH)
        for which in self.selected("ranks", 16):
            events, which = divmod(which, 8)
            env = {"SIMCUDA_NCCL_EVENTS": str(events), **ENOUGH}
            title = f"ranks, lost ranks and split models, 4 simulated GPUs{', NCCL with event nodes' * events}, part {which + 1} of 8"
            beside(title, some, "ddp", 4, 8, which, *ON_FOUR, env=env)
        beside("one rank in any order, 1 simulated GPU", lambda: on_gpus(1, "cuda", *ON_ONE, package="ddp"), env=ENOUGH)
        for which in self.selected("transfers", 2):
            targets = ["transfers warnings faults", "planted waits"][which]
            beside(f"{targets.replace(' ', ', ')}, 2 simulated GPUs", on_gpus, 2, targets, env=ENOUGH)
        beside("ranks as processes, 4 simulated GPUs", on_gpus, 4, "mpirun", "gpus::", env=ENOUGH)
        beside("ranks as threads, 4 simulated GPUs", on_gpus, 4, "gpu_threads", env=ENOUGH)
        which = "0/1" if self.is_long else f"{self.selected('wrong kernels', 85)[0]}/85"
        mutants = ["tests/mutants/run", "kernels", self.programs.file("kernels", "cuda"), which, "1"]
        beside(f"wrong kernels are found, {which} of tests/mutants", mutants)
        beside("steady state, 2 simulated GPUs", on_gpus, 2, "cuda_steady_state", env=ENOUGH)
        step = "--model gpt,layers=2,heads=2,width=64,vocab=512,context=64 --batch 17 --dtype bf16 --explain --device cuda"
        plan = f'file=$(mktemp) && trap \'rm -f "$file"\' EXIT && "$DDP_TRAIN" bench gpt {step} >"$file" && python3 -B tests/evidence/gpt2_plan.py --check "$file"'
        beside("the plan of GPT-2's step has the program's nodes, bytes and blocks", ["launch/with-simulated-gpus", "1", "bash", "-c", plan])
        for which in self.selected("once more", ONCE_MORE):
            self.once_more(which)

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

    def once_more(self, which):
        """Each commit runs one of these. Most repeat another check in another order or on other devices."""
        beside, some, on_gpus = self.steps.beside, self.programs.some_on_gpus, self.programs.on_gpus
        if which < 12:
            # Races that come late in a launch are only seen so.
            what = f"operations, 1 simulated GPU, every access followed, part {which + 1} of 12"
            beside(what, some, "kernels", 1, 12, which, env={"SIMCUDA_INTRA": "1"})
        elif which == 12:
            # Other features need another check of most packages. It takes its turn at cargo's lock.
            words = "cargo clippy -p ddp-comm -p ddp --no-default-features --features ddp/program --all-targets --locked -- -D warnings"
            beside("clippy, without MPI and Parquet", words.split(), waits=True)
        elif which == 13:
            beside("copies and split models, 2 simulated GPUs without peer access", on_gpus, 2, "cuda", "copies", "split::", env={"SIMCUDA_NO_PEER": "1"})
        elif which < SIMULATOR:
            name, value = ORDERS[which - 14]
            what = f"copies, streams and ranks, 2 simulated GPUs, SIMCUDA_{name}={value}"
            beside(what, on_gpus, 2, "cuda", "copies", "streams", "graphs", "ranks::", env={f"SIMCUDA_{name}": value})
        elif which == SIMULATOR:
            pass  # Its unit tests: run_all has built them.
        elif which < 68:
            self.again("kernels", (which - 18) // 10, (which - 18) % 10, 10)
        else:
            order, part = divmod(which - 68, 6)
            name, value = ORDERS[order]
            what = f"ZeRO-1 and split models, 4 simulated GPUs, SIMCUDA_{name}={value}, part {part + 1} of 6"
            beside(what, some, "ddp", 4, 6, part, "zero::", "split::", env={f"SIMCUDA_{name}": value})

    def again(self, package, way, part, parts):
        """A part of the GPU tests of one package, with other GPUs or in another order."""
        devices, (name, value) = [(1, ("SEED", "0")), (4, ("SEED", "0")), *((1, order) for order in ORDERS)][way]
        left_out = [] if self.is_long and way < 2 else WITHOUT_RANKS
        what = "trainer" if package == "ddp" else "operations"
        env, title = {f"SIMCUDA_{name}": value}, f"{what}, {devices} simulated GPUs, SIMCUDA_{name}={value}"
        self.steps.beside(f"{title}, part {part + 1} of {parts}", self.programs.some_on_gpus, package, devices, parts, part, *left_out, env=env)
        if (package, part) == ("kernels", 0):
            steady = lambda: self.programs.on_gpus(devices, "cuda_steady_state", package="kernels")
            self.steps.beside(f"{title}, steady state", steady, env=env)

    def run_long(self):
        step = self.steps.step
        step("every kernel was launched", self.every_kernel_was_launched)
        step("wrong Rust code is found", ["tests/mutants/run", "switches", "0/1", CORES])
        step("tests of ddp: jobs whose ranks mpirun starts", self.programs.one, "ddp", "jobs", env={"DDP_TEST_LAUNCHER": "mpirun"})
        for way in range(5):
            for sixth in range(6):
                self.again("ddp", way, sixth, 6)
        strict = {"RUSTDOCFLAGS": "-D warnings"}
        step("documentation of programs", ["cargo", "doc", "--workspace", "--no-deps", *FEATURES, "--locked"], env=strict)
        # They need up to 9 GB of memory.
        step("tensors beyond 2³¹ elements, under mpirun", self.programs.one, "comm", "mpirun", "--ignored", "tensors_beyond_what_mpi_can_count")
        step("tensors beyond 2³¹ elements, of threads", self.programs.one, "comm", "ddp_comm", "--ignored", "counts_beyond_two_to_the_31")
        step("tests without MPI", "cargo test -p ddp-comm -p ddp --no-default-features --features ddp/program --tests --locked --quiet".split())
        words = "cargo test -p ddp-kernels -p ddp-comm -p ddp-simcuda --tests --locked --quiet".split()
        step("tests of the crates with unsafe code, built by rustc, with its checks of pointers", words)
        words = "launch/with-simulated-gpus 1 cargo test -p ddp-comm --test mpirun --locked --quiet -- gpus".split()
        step("ranks that share one simulated GPU, as launch/gpu-check runs them", words, env={"DDP_TEST_SHARE_GPUS": "1"})
        words = [*IN_RELEASE, "--features", "ddp/faults", "--locked", "--quiet"]
        step("tests in release, 20000 cases a property", words, env={"PROPTEST_CASES": "20000"})
        if shutil.which("cargo-deny"):
            step("licences, sources and advisories of crates", check_crates)
        else:
            self.steps.skip("licences, sources and advisories of crates", "no cargo-deny (cargo install cargo-deny)")
        step("every test program in 20 rounds, half of them loaded", ["tests/checks/again", "--built", self.programs.listing])
        step("images, in a container engine", ["tests/docker/run", "--engine"])
        for source in sorted(glob.glob("*/fuzz/fuzz_targets/*.rs")):
            fuzz = os.path.basename(source).removesuffix(".rs")
            if not shutil.which("cargo-fuzz"):
                self.steps.skip(f"fuzz target {fuzz}", "no cargo-fuzz (cargo install cargo-fuzz)")
                continue
            words = ["cargo", "fuzz", "run", "--fuzz-dir", source.split("/fuzz/")[0] + "/fuzz", fuzz, "--", "-max_total_time=60"]
            # RUSTC_BOOTSTRAP: the sanitizer's flags on a stable toolchain.
            step(f"fuzz target {fuzz}, 60 s", words, env={"RUSTC_BOOTSTRAP": "1"})

    def run_named(self):
        step, name = self.steps.step, self.name
        words = ["cargo", "test", "--workspace", *FEATURES, "--locked", "--", name]
        step(f"tests named *{name}*", words)
        step(f"tests named *{name}*, on 2 simulated GPUs", ["launch/with-simulated-gpus", 2, *words])
        if self.steps.counts["passed"] <= 0 and not self.examples:
            print(f"\nlaunch/test: FAILED: no test ran and no example is called {name}", file=sys.stderr)
            sys.exit(1)
        if self.examples:
            self.steps.need("build and clippy", self.programs.build, RUN_FIRST)
            step(f"example {name}", self.run_examples)
        if self.is_long:
            words = [*IN_RELEASE, *FEATURES, "--features", "ddp/faults", "--locked", name]
            step(f"tests named *{name}*, in release, 20000 cases a property", words, env={"PROPTEST_CASES": "20000"})

    def report(self):
        self.steps.print_table()
        self.steps.close(f"the checks named {self.name}" if self.name else "all checks")


def install():
    """Servers that are not started. What cannot be installed is skipped where it is needed, which says so."""
    # In a group of its own: where a step fails meanwhile, the package manager is not ended halfway.
    subprocess.run(["launch/setup"], env={**os.environ, "SETUP_FOR": "launching"}, stdin=subprocess.DEVNULL, process_group=0, check=False)


def changed(folder):
    """Whether it is not as it was before the last commit."""
    return subprocess.run(["git", "diff", "--quiet", "HEAD^", "--", folder], stderr=subprocess.DEVNULL, check=False).returncode == 1


def changes_kernels():
    return changed("kernels/src") or changed("tests/simcuda")


def fuzz_locks():
    """The fuzz targets are workspaces of their own, which no other step builds."""
    for folder in ("kernels", "ddp"):
        words = ["cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", f"{folder}/fuzz/Cargo.toml"]
        command(*words, stdout=subprocess.DEVNULL)


def documentation(left_out):
    """Documentation, and the examples in it, of the libraries that have their turn."""
    env = {**os.environ, **BY_CLIPPY, "RUSTDOC": os.path.abspath("tests/checks/rustdoc")}
    command("cargo", "test", "--workspace", *left_out, "--doc", *FEATURES, "--locked", "--quiet", env=env)


def check_crates():
    """Licences and sources of crates, and advisories where their database can be reached."""
    command("cargo", "deny", "--locked", "check", "bans", "licenses", "sources")
    try:
        command("cargo", "deny", "--locked", "fetch", "db")
    except subprocess.CalledProcessError:
        print("skipped: advisories on crates, whose database could not be fetched")
    else:
        command("cargo", "deny", "--locked", "check", "advisories")


def main():
    checks = Checks(sys.argv[1], sys.argv[2] == "yes")
    if not checks.name and not checks.examples:
        sys.exit("launch/test: FAILED: no [[example]] found in examples/Cargo.toml")
    print(f"slice of exhaustive checks: {os.environ['DDP_TEST_SLICE']} (DDP_TEST_SLICE); --long runs all of them", flush=True)
    try:
        checks.run_named() if checks.name else checks.run_all()
        checks.report()
    finally:
        checks.steps.stop()


main()
