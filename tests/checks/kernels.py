"""Compiles the kernels with NVRTC, and prints what each takes; launch/check-kernels starts it: FOLDER NAME ARCHITECTURES."""

import concurrent.futures, ctypes, hashlib, json, pathlib, re, struct, sys, sysconfig

FOLDER, NAME, ARCHITECTURES = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
SOURCES = pathlib.Path("kernels/src")
HEADER = SOURCES / "ops/common.cuh"
# Patterns of the lines that ptxas writes about a kernel.
KERNEL = re.compile(r"Compiling entry function '([^']+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# What is printed of a kernel, by the names of the columns.
COLUMNS = {"registers": "registers", "shared": "shared bytes", "stack": "stack bytes", "spills": "spilled bytes", "tensor": "HMMA"}
# From sm_80 on; nvdisasm calls it HMMA. Instructions are 16 bytes, of which the lowest 12 bits say which they are.
HMMA = 0x23C


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


def compile_source(nvrtc, source, architecture, options):
    """The compiler's exit code (0: it compiled), its output and the machine code."""
    program, length = ctypes.c_void_p(), ctypes.c_size_t()
    headers = (ctypes.c_char_p * 1)(HEADER.read_bytes())
    names = (ctypes.c_char_p * 1)(b"common.cuh")
    options = [f"--gpu-architecture={architecture}", *options, "--ptxas-options=-v"]
    strings = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 1, headers, names)
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


def tensor_instructions(image):
    """How many HMMA instructions each kernel of an ELF image has: its code is the section .text.KERNEL."""
    (headers,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, headers + index * size) for index in range(count)]
    found = {}
    for name, _, _, _, start, length in sections:
        name = image[sections[names][4] + name :].split(b"\0", 1)[0].decode()
        if name.startswith(".text."):
            words = (struct.unpack_from("<H", image, at)[0] for at in range(start, start + length, 16))
            found[name.removeprefix(".text.")] = sum(word & 0xFFF == HMMA for word in words)
    return found


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


def check(nvrtc, source, architecture, options):
    what = "\0".join([*COLUMNS, source.read_text(), HEADER.read_text(), source.name, architecture, *options, (FOLDER / "wheel").read_text()])
    known = FOLDER / f"{source.stem}-{architecture}.json"
    key = hashlib.sha256(what.encode()).hexdigest()
    try:
        result = json.loads(known.read_text())
        if result["key"] == key:
            return result
    except (OSError, ValueError, KeyError):
        pass
    code, log, image = compile_source(nvrtc, source, architecture, options)
    said = [line for line in log.splitlines() if line.strip() and not line.startswith("ptxas ")]
    kernels, tensor = kernels_of(log), tensor_instructions(image) if code == 0 else {}
    for kernel, takes in kernels.items():
        takes["tensor"] = tensor.get(kernel, 0)
    result = {"key": key, "failed": code != 0, "said": said, "kernels": kernels}
    known.write_text(json.dumps(result))
    return result


def one_or_all(values):
    return str(values[0]) if len(set(values)) == 1 else " ".join(map(str, values))


def main():
    nvrtc, options = load_nvrtc(), product_options()
    sources = sorted(source for source in SOURCES.glob("**/*.cu") if NAME in source.name)
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
                if "_tensor_" in kernel and not takes["tensor"] and architecture != "sm_75":
                    problems.append(f"{kernel} of {source} does not use tensor cores on {architecture}")
        for kernel in sorted({kernel for result in by_architecture for kernel in result["kernels"]}):
            takes = [result["kernels"][kernel] for result in by_architecture if kernel in result["kernels"]]
            columns = [one_or_all([each[column] for each in takes]) for column in COLUMNS]
            rows.append([source.name, kernel, *columns])

    titles = ["file", "kernel", *COLUMNS.values()]
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    for row in [titles, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"\n{len(rows)} kernels of {len(sources)} files for {', '.join(ARCHITECTURES)}"
          " (one number where all are the same)", end="")
    print(": none spills" if not problems else f", problems:\n  " + "\n  ".join(problems))
    sys.exit(1 if problems else 0)


main()
