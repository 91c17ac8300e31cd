"""Runs what launch/gpu-check has packed, on the machine with the GPU: one part after the other, each step within its time.

python gpu_check.py PART RESULTS SECONDS ELAPSED      started by gpu-check; PART is all, or one of those in SHARES
python gpu_check.py kernel-names FOLDER               what the names of the kernels in FOLDER/*.cu begin with
"""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
BIN = HERE / "bin"
# The part of the whole time at which each part ends.
SHARES = {"gpt": 0.44, "tests": 0.62, "ranks": 0.78, "sanitize": 0.84, "figures": 1.0}
# The most seconds of a step, so that a hang leaves time for the others. It has room for NCCL's joins, of 60 s each where ranks share a GPU.
STEP_MAX = 240
# What the log of a step has that found something before it was ended.
FINDING = re.compile(r"^test .*FAILED$|^========= (Invalid|Error|Barrier error|Warning: Race)", re.MULTILINE)
# Uses a GPU. Of simulated ones it says so.
PROBE = [BIN / "ddp-train", *"bench addmm --shapes 1x1x1 --seconds 0.01 --device cuda".split()]
GPT2 = "gpt --model gpt,layers=12,heads=12,width=768,vocab=50304,context=1024 --batch 32 --dtype bf16"
# What a GPT's step is made of, on a GPU that has never run it: one layer, and a head of 50,257 tokens, which is padded.
FIRST = "gpt --model gpt,layers=1,heads=12,width=768,vocab=50257,context=1024 --batch 2 --dtype bf16 --explain"
# The same of a Llama, whose heads have 128 columns.
LLAMA = FIRST.replace("heads=12,width=768", "heads=12,kv-heads=4,width=1536,norm=rms,position=rope,mlp=swiglu,bias=false")
# Kernels that ncu looks at, and what it says of them.
PROFILED = "regex:attention|cross_entropy|row_sums|norm"
PROFILE = "--clock-control none --section SpeedOfLight --section WarpStateStats --launch-count 40 --kernel-name".split()
# 8 layers of 8192.
LARGE = ",".join(["8192"] * 8)
# The shell of a step that must end with status 2 and the words in $0.
REFUSES = 'said=$("$@" 2>&1); status=$?; printf "%s\\n" "$said"; [ $status = 2 ] && case $said in *"$0"*) ;; *) exit 1 ;; esac'
ON_RANKS = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n"]
TRAININGS = {
    "eager": "--graph off", "captured": "--graph on", "zero": "--graph on --zero 1", "accumulated": "--graph on --micro-batch 8",
    "clipped": "--graph on --grad-clip 0.5", "reduced-in-bf16": "--graph on --reduce-dtype bf16", "bf16": "--graph on --dtype bf16",
}
LATE = "late"


class Check:
    def __init__(self, results, limit, elapsed):
        self.results, self.limit, self.start = results, limit, time.monotonic() - elapsed
        self.folder = tempfile.TemporaryDirectory()
        self.work = pathlib.Path(self.folder.name)
        for name in ("logs", "runs", "tmp"):
            (self.work / name).mkdir()
        self.part, self.why, self.outcomes = "", "out of time", []
        # When steps are ended, and whether it does not matter if one does not run.
        self.deadline, self.is_optional = 0.0, False
        self.simulated = self.has_torch = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)

    def interrupt(self, *_):
        self.why = "interrupted"

    def now(self):
        return time.monotonic() - self.start

    def is_over(self):
        """Whether there is no time for another step."""
        return self.why == "interrupted" or self.deadline - self.now() < 2

    def log(self, name):
        return self.work / "logs" / f"{name}.log"

    def record(self, title, name, outcome, seconds):
        """Writes down how a step went."""
        self.outcomes.append(outcome)
        with open(self.work / "steps.tsv", "a", encoding="utf-8") as file:
            print(self.part, title, name, outcome, int(seconds), sep="\t", file=file)
        print(f"==> {title}: {outcome}, {int(seconds)} s", flush=True)

    def step(self, title, name, *words, **env):
        """Runs one step; returns its outcome."""
        start = self.now()
        if self.is_over():
            outcome = f"not run: {self.why}"
            if not self.is_optional:
                self.record(title, name, outcome, 0)
            return outcome
        status = self.within(min(self.deadline - start, STEP_MAX), name, *words, **env)
        text = self.log(name).read_text(errors="replace")
        if status != LATE:
            outcome = "passed" if status == 0 else f"FAILED ({status})"
        elif not self.is_over():
            outcome = f"FAILED: no end within {STEP_MAX} s"
        elif FINDING.search(text):
            outcome = "FAILED: findings before its time was over"
        else:
            outcome = f"ended: {self.why}"
        for line in text.splitlines()[-3:]:
            print(f"    {line}")
        if not (outcome.startswith("ended") and self.is_optional):
            self.record(title, name, outcome, self.now() - start)
        return outcome

    def within(self, seconds, name, *words, **env):
        """Runs a command for this many seconds at most, in a session of its own, so that nothing of it outlives it. Its exit code, or LATE."""
        end = self.now() + seconds
        # It ends if this program is killed.
        parent = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
        with open(self.log(name), "wb") as log:
            try:
                child = subprocess.Popen(
                    [*parent, *map(str, words)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **env}
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                return 127
        while child.poll() is None and self.now() < end and self.why != "interrupted":
            time.sleep(0.05)
        status = LATE if child.returncode is None else child.returncode if child.returncode >= 0 else 128 - child.returncode
        end_session(child)
        return status

    # ---- what machine this is ----

    def look(self):
        # Kernels are compiled once for all calls. Libraries in Python's packages are found through VIRTUAL_ENV.
        os.environ.setdefault("DDP_KERNEL_CACHE", str(HERE / "kernels"))
        os.environ["TMPDIR"] = str(self.work / "tmp")
        os.environ["VIRTUAL_ENV"] = os.environ.get("VIRTUAL_ENV") or sys.prefix
        self.within(30, "nvidia-smi", "nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,compute_cap", "--format=csv")
        torch = 'import torch; print("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.is_available())'
        self.within(60, "torch", "python3", "-c", torch)
        self.within(60, "doctor", BIN / "ddp-train", "doctor")
        status = self.within(60, "probe", *PROBE)
        read = lambda name: self.log(name).read_text(errors="replace")
        last = (read("torch").splitlines() or [""])[-1]
        self.has_torch = re.fullmatch("torch .* True", last) is not None
        self.simulated = "simulated GPUs" in read("probe")
        versions = [f"commit {(HERE / 'commit').read_text().strip()}", *read("nvidia-smi").splitlines(), last]
        if self.simulated:
            versions.append("simulated GPUs: no figure is a measurement")
        text = "\n".join(versions) + "\n"
        (self.work / "versions.txt").write_text(text)
        print(text, end="", flush=True)
        if status != 0 and not self.simulated:
            print(read("doctor"), file=sys.stderr)
            print(f"gpu-check: no GPU can be used here (ddp-train: {status}): {read('probe').strip()}", file=sys.stderr)
            sys.exit(69)

    def gpu_count(self):
        if self.simulated:
            return int(os.environ.get("SIMCUDA_DEVICES", 1))
        try:
            return len(subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout.splitlines())
        except OSError:
            return 0

    def run(self, part):
        parts = list(SHARES) if part == "all" else [part]
        self.look()
        (self.work / "parts").write_text("\n".join(parts) + "\n")
        for self.part in parts:
            self.deadline = self.limit * (SHARES[self.part] if part == "all" else 1)
            getattr(self, self.part)()
            self.report()
        print(f"\n{(self.results / 'report.md').read_text()}\ngpu-check: {int(self.now())} s, {self.results}/report.md: ", end="")
        if any(outcome.startswith("FAILED") for outcome in self.outcomes):
            print("FAILED")
            return 1
        if any(re.match("(not run|ended): (out of time|interrupted)", outcome) for outcome in self.outcomes):
            print("nothing failed, but not all has run")
            return 75
        print("all passed")
        return 0

    def report(self):
        """Puts what is known so far where the caller wants it."""
        table = subprocess.run(["python3", "--", str(HERE / "gpu_table.py"), str(self.work)], stdout=subprocess.PIPE, check=False)
        if table.returncode == 0:
            (self.results / "report.md").write_bytes(table.stdout)
        with tarfile.open(self.work / "logs.tgz", "w:gz") as archive:
            for name in ("logs", "runs"):
                archive.add(self.work / name, name, filter=lambda it: None if it.name.endswith("/checkpoints") else it)
        shutil.copy(self.work / "logs.tgz", self.results / "logs.tgz")

    # ---- gpt: what a step of GPT-2 takes, and why ----

    def gpt(self):
        """In the order of what is worth knowing if there is time for little."""
        # The padding's mask is a bias of −∞ in the matmul's epilogue, which only the real library can prove.
        words = [BIN / "operations-cuda", "a_bias_of_minus_infinity", "--test-threads=1"]
        if self.step("a bias of minus infinity in an epilogue", "epilogue", *words).startswith("FAILED"):
            os.environ["DDP_EPILOGUES"] = "off"
            self.record("epilogues, from here on", "epilogue", "not run: DDP_EPILOGUES=off, kernels of ours add biases", 0)
        for name, words in (("gpt", FIRST), ("llama", LLAMA)):
            title = f"each kernel compiles and each matmul of a {name.upper()} runs"
            self.step(title, f"{name}-first", BIN / "ddp-train", "bench", *words.split(), "--device", "cuda")
        if self.simulated:
            words = ["bash", "-c", REFUSES, "figures of simulated GPUs mean nothing", BIN / "ddp-train", "bench"]
            self.step("timed nodes are refused on simulated GPUs", "refused-timed", *words, *f"{FIRST} --timed --device cuda".split())
            return
        clocks = self.beside("clocks", "nvidia-smi", "dmon", "-s", "pc", "-d", "1")
        try:
            for graph in ("on", "off"):
                self.bench(f"GPT-2 124M, bf16, batch 32, graph {graph}", f"gpt-{graph}", f"{GPT2} --graph {graph}")
            if self.has_torch:
                self.step("PyTorch: GPT-2 124M, attention", "torch-gpt", "python3", "--", HERE / "gpu_torch.py", "gpt", "attention")
            self.bench("each node", "nodes", f"{GPT2} --explain --timed")
            self.step("attention", "ours-attention", BIN / "bench-gpu", "attention")
            os.environ["PATH"] += ":/usr/local/cuda/bin"
            if shutil.which("ncu"):
                words = [*PROFILE, PROFILED, BIN / "ddp-train", "bench", *FIRST.replace("--batch 2", "--batch 32").split(), "--device", "cuda"]
                self.step("ncu: limits and stalls of our kernels", "ncu", "ncu", *words)
            else:
                self.record("ncu", "ncu", "not run: it is not installed", 0)
        finally:
            if clocks:
                end_session(clocks)

    def beside(self, name, *words):
        """A command that runs until it is ended; None where there is none of this name."""
        with open(self.log(name), "wb") as log:
            try:
                return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            except OSError:
                return None

    # ---- figures: ddp-train and PyTorch in turn ----

    def figures(self):
        if self.simulated:
            title = "operations: the GPU is simulated, so every case runs once and no figure is printed"
            self.step(title, "ours-1", BIN / "bench-gpu")
            for name in ("mlp", "addmm", "allreduce"):
                words = ["bash", "-c", REFUSES, "figures of simulated GPUs mean nothing", BIN / "ddp-train", "bench", name, "--device", "cuda"]
                self.step(f"bench {name} refuses simulated GPUs", f"refused-{name}", *words)
            return
        if not self.has_torch:
            self.record("PyTorch", "torch", "not run: python3 has no PyTorch that sees a GPU", 0)
        for turn in range(1, int(os.environ.get("GPU_CHECK_ROUNDS", 3)) + 1):
            start = self.now()
            self.one_round(turn)
            self.is_optional = True
            if self.now() - start > self.deadline - self.now():
                break
        self.is_optional = False
        if self.gpu_count() > 1 and self.find_mpirun():
            for name in ("all_reduce", "reduce_scatter", "all_gather"):
                words = f"bench allreduce --device cuda --operation {name} --sweep 0.001:512 --seconds 0.3 --rounds 3".split()
                self.on_ranks(f"{name} of all GPUs", f"collectives-{name}", self.gpu_count(), *words)

    def one_round(self, turn):
        """Operations and matmuls, then steps of perceptrons: the most telling first, and last what takes PyTorch minutes to compile."""
        if self.has_torch:
            self.step(f"PyTorch ({turn})", f"torch-{turn}", "python3", "--", HERE / "gpu_torch.py", "operations", "steps")
        self.bench(f"matmuls in bf16 ({turn})", f"addmm-bf16-{turn}", "addmm --dtype bf16 --shapes 8192x8192x8192,128x1024x784")
        self.step(f"operations, ours ({turn})", f"ours-{turn}", BIN / "bench-gpu")
        self.bench(f"matmuls in tf32 ({turn})", f"addmm-tf32-{turn}", "addmm --dtype tf32 --shapes 4096x4096x4096")
        self.bench(f"matmuls in f32 ({turn})", f"addmm-f32-{turn}", "addmm --shapes 4096x4096x4096")
        self.steps_of(turn, "f32", 128)
        for graph in ("off", "on"):
            words = f"mlp --layers {LARGE} --batch 8192 --dtype bf16 --graph {graph}"
            self.bench(f"large perceptron, bf16, graph {graph} ({turn})", f"mlp-large-{graph}-{turn}", words)
        for dtype in ("f32", "tf32", "bf16"):
            for batch in (128, 1024, 8192):
                if (dtype, batch) != ("f32", 128):
                    self.steps_of(turn, dtype, batch)
        if self.has_torch:
            self.step(f"PyTorch, compiled ({turn})", f"torch-compiled-{turn}", "python3", "--", HERE / "gpu_torch.py", "compiled")

    def steps_of(self, turn, dtype, batch):
        """Training steps of a small perceptron, eager and captured."""
        for graph in ("off", "on"):
            words = f"mlp --layers 784,1024,1024,10 --batch {batch} --dtype {dtype} --graph {graph}"
            self.bench(f"perceptron, {dtype}, batch {batch}, graph {graph} ({turn})", f"mlp-{dtype}-{batch}-{graph}-{turn}", words)

    def bench(self, title, name, words):
        self.step(title, name, BIN / "ddp-train", "bench", *words.split(), "--device", "cuda", "--seconds", "1")

    # ---- tests ----

    def tests(self):
        # These name lines of the source, which stripped programs lack.
        without = ["--skip=caught::", "--skip=every_wait_of_the_loader"] if self.simulated else []
        self.step("operations, copies, streams, graphs", "operations", BIN / "operations-cuda", "--test-threads=4")
        for program in [*sorted(BIN.glob("trainer-*")), *sorted(BIN.glob("tests-*"))]:
            self.step(program.name, program.name, program, "--test-threads=2", *without, DDP_TRAIN=str(BIN / "faulty/ddp-train"))
        self.step("the placement tour", "placement", BIN / "placement")
        env = {"DDP_CASES": "all", "CUDA_LAUNCH_BLOCKING": "1"}
        self.step("operations: every case, and launches that wait", "operations-all", BIN / "operations-cuda", "--test-threads=4", **env)

    # ---- ranks ----

    def find_mpirun(self):
        """Puts a working mpirun first in PATH: the machine's, or the packed one."""
        # Test machines are often containers, where everything runs as root.
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"):
            os.environ[name] = "1"
        packed = HERE / "openmpi"
        if self.works_mpirun():
            return True
        if not os.access(packed / "bin/mpirun", os.X_OK):
            return False
        libraries = [str(packed / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        os.environ.update(OPAL_PREFIX=str(packed), PATH=f"{packed}/bin:{os.environ['PATH']}", LD_LIBRARY_PATH=":".join(libraries))
        return self.works_mpirun()

    def works_mpirun(self):
        probe = "bench allreduce --mb 0.01 --seconds 0.05 --device cpu --threads 1 --timeout-s 20".split()
        status = self.within(40, "mpirun", *ON_RANKS, 2, BIN / "ddp-train-mpi", *probe)
        return status == 0 and '"ranks":2' in self.log("mpirun").read_text(errors="replace")

    def on_ranks(self, title, name, count, *words):
        """As step, ddp-train on ranks."""
        return self.step(title, name, *ON_RANKS, count, BIN / "ddp-train-mpi", *words)

    def ranks(self):
        """Real NCCL: collectives, then trainings whose metrics logs gpu_ranks.py compares."""
        end, first = self.deadline, ["gpus::every_operation", "gpus::a_graph_of_collectives"]
        if not self.find_mpirun():
            self.record("mpirun", "mpirun", "not run: no mpirun works here, and none is packed", 0)
            return
        gpus, tests = self.gpu_count(), BIN / "ranks-mpirun"
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]
        print(f"    {gpus} GPUs; {shutil.which('mpirun')}: {version}")
        # Time to compare what there is.
        self.deadline = end - 4
        shared = {"DDP_TEST_SHARE_GPUS": "1"}
        self.of_ranks(1, gpus)
        self.of_ranks(2, gpus)
        self.step("collectives: values, and captured as eager", "ranks-first", tests, *first, "--test-threads=1", **shared)
        self.of_ranks(4, gpus)
        skipped = [f"--skip={name}" for name in first]
        self.step("collectives: faults", "ranks-rest", tests, "gpus", *skipped, "--test-threads=1", **shared)
        self.deadline = end
        self.step("trainings agree", "agree", "python3", "--", HERE / "gpu_ranks.py", self.work / "runs")

    def of_ranks(self, count, gpus):
        """The values of collectives, and trainings, on this many ranks."""
        share = []
        if count > gpus:
            # On one shared GPU NCCL has loopback alone, and its kernels must leave room for those of the other ranks.
            share = ["--share-gpus"]
            os.environ.update(NCCL_IB_DISABLE="1", NCCL_MAX_CTAS="2")
        if count > 1 and not self.simulated:
            for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
                words = f"bench allreduce --operation {name} --mb 1 --seconds 0.2 --device cuda".split()
                self.on_ranks(f"{name} of {count} ranks, its values", f"values-{name}-{count}", count, *words, *share)
        length = ["--steps", "12"] if self.simulated else ["--epochs", "2"]
        for mode, flags in TRAININGS.items():
            out = self.work / "runs" / f"{mode}-{count}"
            words = ["--device", "cuda", *share, "--out", out, "--data", "glyphs,rows=4000,held-out=500", *length, *"--log-every 1 --progress never".split()]
            outcome = self.on_ranks(f"{count} ranks train: {mode}", f"train-{mode}-{count}", count, *words, *flags.split())
            if outcome.startswith("ended"):
                # It is not compared.
                shutil.rmtree(out, ignore_errors=True)

    # ---- the sanitizer ----

    def sanitize(self):
        os.environ["PATH"] += ":/usr/local/cuda/bin"
        if self.simulated or not shutil.which("compute-sanitizer"):
            why = "the GPU is simulated" if self.simulated else "it is not installed"
            self.record("compute-sanitizer", "sanitize", f"not run: {why}", 0)
            return
        self.within(30, "sanitize", "compute-sanitizer", *PROBE)
        if "Device not supported" in self.log("sanitize").read_text(errors="replace"):
            self.record("compute-sanitizer", "sanitize", "not run: it does not support this GPU here", 0)
            return
        # Before CUDA 12.3 it had another name. Other kernels, cuBLASLt's, would take minutes.
        self.within(30, "sanitize-help", "compute-sanitizer", "--help")
        has_name = "--kernel-name" in self.log("sanitize-help").read_text(errors="replace")
        names = (HERE / "kernel-names").read_text().split()
        only = [word for name in names for word in ("--kernel-name" if has_name else "--kernel-regex", f"kns={name}")]
        end, tools = self.deadline, ["memcheck", "racecheck", "synccheck"]
        for index, tool in enumerate(tools):
            self.deadline = self.now() + (end - self.now()) / (len(tools) - index)
            # Tests make calls that fail on purpose.
            words = ["compute-sanitizer", "--tool", tool, *only, "--report-api-errors", "no", "--error-exitcode", "1"]
            self.step(f"compute-sanitizer {tool}", tool, *words, BIN / "operations-cuda", "--test-threads=1")


def end_session(child):
    """Ends the session's processes; gives up on one that cannot be ended, as in a broken driver."""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may have spaces: state, parent, group, session.
            if int(stat.read_text(errors="replace").rsplit(") ", 1)[1].split()[3]) == child.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except (OSError, IndexError):
            continue
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        pass


def kernel_names(folder):
    """What the names of this project's kernels begin with: up to a macro's argument. A name that begins with one begins with its file's name."""
    pattern = re.compile(r"(?:\bKERNEL|__launch_bounds__)\([^)]*\)[\s\\]*(\w+?)(?:##|\()")
    found = ((path, name) for path in pathlib.Path(folder).glob("*.cu") for name in pattern.findall(path.read_text()))
    return sorted({path.stem if name.isupper() else name for path, name in found})


if sys.argv[1] == "kernel-names":
    print(*kernel_names(sys.argv[2]), sep="\n")
else:
    part, results, limit, elapsed = sys.argv[1:]
    sys.exit(Check(pathlib.Path(results), int(limit), int(elapsed)).run(part))
