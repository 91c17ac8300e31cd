"""Compiles the kernels with NVRTC, and prints what each takes and what its loops do; launch/check-kernels starts it: FOLDER NAME
ARCHITECTURES LOOPS ('loops' to print them). Figures of all files go to FOLDER/figures.json, too."""

import concurrent.futures, ctypes, hashlib, json, math, pathlib, re, subprocess, sys, sysconfig

import gates
import machine_code

FOLDER, NAME, ARCHITECTURES, LOOPS = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4] == "loops"
IS_ALL = not NAME
SOURCES = pathlib.Path("kernels/src")
# What sources include, and samples of chains.
HEADERS = [*sorted(SOURCES.glob("ops/*.cuh")), SOURCES / "ops/chain.cu"]
# Patterns of the lines that ptxas writes about a kernel.
KERNEL = re.compile(r"Compiling entry function '([^']+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# What is printed of a kernel, by the names of the columns.
COLUMNS = {"registers": "registers", "shared": "shared bytes", "warps": "warps", "stack": "stack bytes", "spills": "spilled bytes", "tensor": "HMMA"}
# Of a multiprocessor: registers, and the most warps, blocks and bytes of shared memory.
REGISTERS, BLOCKS_MAX = 65536, {"sm_75": 16}
WARPS_MAX, SHARED_MAX = {"sm_75": 32}, {"sm_75": 64 << 10, "sm_80": 164 << 10}
# The most shared memory of a block, which it opts in to above 48 KiB.
BLOCK_SHARED_MAX = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_120": 99 << 10}
# Where launches declare dynamic shared memory, and the ends of the kernels' names: see attention/gpu.rs.
DYNAMIC = re.compile(r'static (\w+): Kernels = tensor!\(\[[^]]*\], ([\d *+]+), "(\w+)"\)')
# Blocks have shared memory in these units, and each one KiB that is the system's.
SHARED_UNIT, SHARED_OWN = 128, 1024

# Of a kernel whose last block goes on (`ends_last` of common.cuh): a barrier, a fence, the atomics, a fence, a barrier.
ENDS_LAST = re.compile("BM+A+M+B")
# Accesses to words that the host reads or writes while the kernel runs (`volatile`): relaxed ones of scope sys.
OF_HOST = {"progress_begin": 7, "progress_end": 1, "clip_scale_f32": 1, "vote_stopped_f32": 1}


def load_nvrtc():
    libraries = sorted(pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/**/libnvrtc*.so.*"))
    # NVRTC loads its builtins by name, so they come first; the `alt` ones are for old systems.
    for library in libraries:
        if "builtins" in library.name and ".alt." not in library.name:
            ctypes.CDLL(str(library.resolve()), mode=ctypes.RTLD_GLOBAL)
    return next(ctypes.CDLL(str(path.resolve())) for path in libraries if path.name.startswith("libnvrtc.so."))


def product_options():
    text = (SOURCES / "cuda/nvrtc/compiler.rs").read_text()
    return re.findall(r'"([^"]+)"', re.search(r"const OPTIONS: \[&str; \d+\] = \[([^]]*)]", text)[1])


def dynamic_shared(architecture):
    """Bytes of dynamic shared memory that the product's launches give to blocks, by kernel."""
    found, other = {}, "HOPPER" if architecture != "sm_90" else "TENSOR"
    for source in SOURCES.glob("**/*.rs"):
        for kernels_of_gpu, bytes_of, end in DYNAMIC.findall(source.read_text()):
            if kernels_of_gpu.startswith(other):
                continue
            size = sum(math.prod(map(int, factors.split("*"))) for factors in bytes_of.split("+"))
            found |= {f"attention_tensor_{part}{end}_{dtype}": size for part in ("", "dq_", "dkv_") for dtype in ("f32", "bf16")}
    return found


def compile_source(nvrtc, source, architecture, options):
    """The compiler's exit code (0: it compiled), its output and the machine code."""
    program, length = ctypes.c_void_p(), ctypes.c_size_t()
    headers = (ctypes.c_char_p * len(HEADERS))(*(header.read_bytes() for header in HEADERS))
    names = (ctypes.c_char_p * len(HEADERS))(*(header.name.encode() for header in HEADERS))
    options = [f"--gpu-architecture={architecture}", *options, "--ptxas-options=-v", "-lineinfo"]
    strings = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), len(HEADERS), headers, names)
    code = nvrtc.nvrtcCompileProgram(program, len(options), strings)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(length))
    log = ctypes.create_string_buffer(length.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(length))
    image = ctypes.create_string_buffer(length.value if code == 0 else 0)
    if code == 0:
        nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.value.decode(errors="replace"), image.raw


def disassembled(source, image):
    """What the code of each kernel does, and its launch bound."""
    text = subprocess.run([NVDISASM, "-c", "-g", str(image)], stdout=subprocess.PIPE, text=True, check=True).stdout
    texts = {path.name: path.read_text().splitlines() for path in (source, *HEADERS)}
    found = {name: machine_code.analyse(kernel, texts) for name, kernel in machine_code.parse(text).items()}
    for name, threads in machine_code.threads_of(image.read_bytes()).items():
        found[name]["threads"] = threads
    return found


def resident_warps(takes, architecture):
    """The most warps of a kernel that a multiprocessor holds at once, by registers, shared memory and threads."""
    if "threads" not in takes:
        return 0
    warps = -(-takes["threads"] // 32)
    by_registers = REGISTERS // (-(-takes["registers"] * 32 // 256) * 256 or 1) // 4 * 4 // warps
    shared = -(-takes["shared"] // SHARED_UNIT) * SHARED_UNIT + (0 if architecture == "sm_75" else SHARED_OWN)
    by_shared = SHARED_MAX.get(architecture, 228 << 10) // shared if shared else 32
    by_warps = WARPS_MAX.get(architecture, 64) // warps
    return warps * min(by_registers, by_shared, by_warps, BLOCKS_MAX.get(architecture, 32))


def refusal(takes, architecture):
    """Why no launch of a kernel with as many threads as its bound allows is possible; None if it is."""
    most = BLOCK_SHARED_MAX.get(architecture, 227 << 10)
    if takes["shared"] > most:
        return f"needs {takes['shared']} bytes of shared memory, static and dynamic, and a block has at most {most}"
    # Registers are given to warps, in units of 256.
    registers = -(-takes.get("threads", 1) // 32) * -(-takes["registers"] * 32 // 256) * 256
    if registers > REGISTERS:
        return f"needs {registers} registers for {takes['threads']} threads, and a block has at most {REGISTERS}"
    if "threads" not in takes:
        return "has no launch bound, so nothing limits its registers"
    return None


def kernels_of(log):
    """ptxas' figures for each kernel: {name: {registers, shared, stack, spills}}."""
    found, current = {}, None
    for line in log.splitlines():
        if match := KERNEL.search(line):
            current = found.setdefault(match[1], {"registers": 0, "shared": 0, "stack": 0, "spills": 0})
        elif current is not None and (match := STACK.search(line)):
            # Functions that were not inlined report on their own, after the kernel that calls them.
            current["stack"] = max(current["stack"], int(match[1]))
            current["spills"] += int(match[2]) + int(match[3])
        elif current is not None and (match := USED.search(line)):
            current["registers"] = int(match[1])
            current["shared"] = int(match[1]) if (match := SHARED.search(line)) else 0
    return found


def kept(path, key, make):
    """What `make` returned when it was last called with this key, or returns now."""
    key = hashlib.sha256("\0".join(key).encode()).hexdigest()
    try:
        found = json.loads(path.read_text())
        if found["key"] == key:
            return found["value"]
    except (OSError, ValueError, KeyError):
        pass
    value = make()
    path.write_text(json.dumps({"key": key, "value": value}))
    return value


def check(nvrtc, source, architecture, options):
    # As the product does: see compiler.rs.
    compile_for = architecture + ("a" if f"__CUDA_ARCH_FEAT_SM{architecture[3:]}_ALL" in source.read_text() else "")
    key = [*(path.read_text() for path in (source, *HEADERS)), source.name, compile_for, *options, (FOLDER / "wheels").read_text()]
    stem = f"{source.stem}-{architecture}"
    image = FOLDER / f"{stem}.cubin"

    def compile_it():
        code, log, bytes_of = compile_source(nvrtc, source, compile_for, options)
        image.write_bytes(bytes_of)
        return code, log

    dynamic = dynamic_shared(architecture)

    def analyse():
        code, log = kept(FOLDER / f"{stem}.log.json", key, compile_it)
        said = [line for line in log.splitlines() if line.strip() and not line.startswith("ptxas ")]
        kernels, does = kernels_of(log), disassembled(source, image) if code == 0 else {}
        for kernel, takes in kernels.items():
            takes["shared"] += dynamic.get(kernel, 0)
            takes.update(does.get(kernel, {"tensor": 0, "loops": []}))
            takes["warps"] = resident_warps(takes, architecture)
        return {"failed": code != 0, "said": said, "kernels": kernels}

    tools = [pathlib.Path(module.__file__).read_text() for module in (machine_code, sys.modules[__name__])]
    return kept(FOLDER / f"{stem}.json", [*key, *tools, str(dynamic)], analyse)


def one_or_all(values):
    return str(values[0]) if len(set(values)) == 1 else " ".join(map(str, values))


def print_table(titles, rows):
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    for row in [titles, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def print_loops(results):
    """A line for each loop of each kernel, indented by how many loops are around it."""
    for (source, architecture), result in results.items():
        rows = []
        for kernel, takes in sorted(result["kernels"].items()):
            for loop in takes["loops"]:
                memory = ", ".join(f"{count} {name}" for name, count in sorted(loop["memory"].items()))
                others = [loop["instructions"], loop["all_instructions"], loop["tensor"], loop["longest_without_tensor"] or "", loop["exponentials"], loop["barriers"], loop["in_flight"], loop["copies"]]
                rows.append([kernel, "  " * loop["depth"] + loop["at"], *map(str, others), memory])
        if rows:
            print(f"\nloops of {source.name} for {architecture}")
            print_table(["kernel", "loop", "path", "of all", "HMMA", "without", "EX2", "BAR", "in flight", "copies", "loads and stores, bits of a lane"], rows)


def main():
    machine_code.check_mixed()
    nvrtc, options = load_nvrtc(), product_options()
    # Of chains, whose kernels formulas make, there are samples.
    sources = [*SOURCES.glob("**/*.cu"), *(SOURCES.parent / "tests/chains").glob("*.cu")]
    sources = sorted(source for source in sources if NAME in source.name)
    if not sources:
        sys.exit(f"launch/check-kernels: no .cu file under {SOURCES} is called {NAME!r}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {(s, a): pool.submit(check, nvrtc, s, a, options) for s in sources for a in ARCHITECTURES}
        results = {job: future.result() for job, future in jobs.items()}

    problems, rows = [], []
    for source in sources:
        by_architecture = [results[source, architecture] for architecture in ARCHITECTURES]
        for architecture, result in zip(ARCHITECTURES, by_architecture):
            if result["said"]:
                print(f"{source} for {architecture}:", *result["said"], sep="\n")
            if result["failed"]:
                problems.append(f"{source} does not compile for {architecture}")
            for kernel, takes in result["kernels"].items():
                if takes["spills"]:
                    problems.append(f"{kernel} of {source} spills {takes['spills']} bytes on {architecture}")
                if why := refusal(takes, architecture):
                    problems.append(f"{kernel} of {source} {why}, on {architecture}")
                order = takes.get("order", "")
                if "ends_last(" in source.read_text() and "A" in order and not ENDS_LAST.search(order):
                    problems.append(f"{kernel} of {source} lost fences of ends_last on {architecture}: barriers, fences and atomics are {order}")
                of_host = takes.get("of_host", 0)
                if of_host < OF_HOST.get(kernel, 0):
                    problems.append(f"{kernel} of {source} has {of_host} accesses of scope sys on {architecture}, expected {OF_HOST[kernel]}")
                for read in takes.get("mixed", []):
                    problems.append(f"{kernel} of {source} reads rows from registers that the compiler has given to something else, on {architecture}: HGMMA {read}")
                if takes["shared"] == 0 and "extern __shared__" in source.read_text():
                    problems.append(f"{kernel} of {source} has dynamic shared memory, expected its bytes in what {SOURCES} launches: see DYNAMIC")
        for kernel in sorted({kernel for result in by_architecture for kernel in result["kernels"]}):
            takes = [result["kernels"][kernel] for result in by_architecture if kernel in result["kernels"]]
            columns = [one_or_all([each[column] for each in takes]) for column in COLUMNS]
            rows.append([source.name, kernel, *columns])

    if IS_ALL:
        there = {kernel for result in results.values() for kernel in result["kernels"]}
        problems += [f"there is no kernel {kernel}, which OF_HOST names" for kernel in OF_HOST.keys() - there]
    print_table(["file", "kernel", *COLUMNS.values()], rows)
    if LOOPS:
        print_loops(results)
    figures = {}
    for (source, architecture), result in results.items():
        figures.setdefault(architecture, {})[source.name] = result["kernels"]
    if IS_ALL:
        (FOLDER / "figures.json").write_text(json.dumps(figures))
    passed, failed = gates.judge(figures)
    problems += failed
    print(f"\n{passed} gates of {gates.TABLE.name} pass", end="")
    print(f"\n{len(rows)} kernels of {len(sources)} files for {', '.join(ARCHITECTURES)}"
          " (one number where all are the same)", end="")
    print(": none spills" if not problems else f", problems:\n  " + "\n  ".join(problems))
    sys.exit(1 if problems else 0)


NVDISASM = next(pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/**/bin/nvdisasm"))
main()
