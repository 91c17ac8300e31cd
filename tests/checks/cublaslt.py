"""Whether the cuBLASLt in FOLDER accepts what the product's matmuls set, and reads it back. Descriptors need neither a GPU
nor a driver; handles, and so algorithms and matmuls, do. launch/check-kernels starts it with the folder of installed wheels.

Of an attribute the library checks the number and the size, and takes any value: it would take an unknown epilogue. That
values are the headers' is compared by layouts.py. Sizes in Rust are those of simulated GPUs, which refuse others in tests."""

import ctypes, pathlib, re, sys

import wheels

SOURCES = pathlib.Path("kernels/src")
SIMULATED = pathlib.Path("tests/simcuda/src/cublaslt/attributes.rs")
U32, I32, U64, I64, SIZE = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_size_t
# CUDA_R_32F and CUDA_R_16BF; CUBLAS_COMPUTE_32F and the same by TF32.
F32, BF16 = 0, 14
COMPUTES = [68, 77]
# Rows, columns and inner length: of a perceptron, of GPT-2 124M's layers, of attention by matmuls.
SHAPES = [(1024, 128, 784), (10, 1024, 1024), (3072, 8192, 768), (50304, 8192, 768), (64, 1024, 1024)]
ALIGNMENT = (U32, [4, 16, 256])
# What plan.rs sets of each object: the type there, and values of every kind of matmul. Epilogues come from the header.
OPERATION = {
    "TRANSA": (I32, [0, 1]), "TRANSB": (I32, [0, 1]), "EPILOGUE": (U32, []), "SM_COUNT_TARGET": (I32, [116]), "BIAS_DATA_TYPE": (U32, [F32, BF16]),
    "BIAS_POINTER": (U64, [256, 0x7F00_0000_1000]), "EPILOGUE_AUX_POINTER": (U64, [256, 0x7F00_0000_1000]), "EPILOGUE_AUX_LD": (I64, [rows for rows, _, _ in SHAPES]),
}  # fmt: skip
LAYOUT = {"BATCH_COUNT": (I32, [12, 96]), "STRIDED_BATCH_OFFSET": (I64, [64 * 1024, 1 << 33])}
PREFERENCE = {"MAX_WORKSPACE_BYTES": (U64, [32 << 20]), "REDUCTION_SCHEME_MASK": (U32, [2, 3]), **{f"MIN_ALIGNMENT_{it}_BYTES": ALIGNMENT for it in "ABCD"}}
# The library's name of an object and the simulator's, what it is made with, and what is set.
KINDS = {
    "MATMUL_DESC": ("MatmulDesc", "Operation", ["COMPUTE_TYPE", "SCALE_TYPE"], OPERATION),
    "MATRIX_LAYOUT": ("MatrixLayout", "Layout", ["TYPE", "ROWS", "COLS", "LD"], LAYOUT),
    "MATMUL_PREF": ("MatmulPreference", "Preference", [], PREFERENCE),
}


class Object:
    """A descriptor, a layout or a preference of the library."""

    def __init__(self, library, kind, *arguments):
        self.library, self.kind, self.thing = library, kind, ctypes.c_void_p()
        self.call("Create", ctypes.byref(self.thing), *arguments)

    def status(self, what, *arguments):
        return getattr(self.library, f"cublasLt{self.kind}{what}")(*arguments)

    def call(self, what, *arguments):
        if code := self.status(what, *arguments):
            raise OSError(f"cublasLt{self.kind}{what} returned {code}")

    def set(self, attribute, value):
        return self.status("SetAttribute", self.thing, U32(attribute), ctypes.byref(value), SIZE(ctypes.sizeof(value)))

    def get(self, attribute, like):
        read, written = type(like)(), SIZE()
        code = self.status("GetAttribute", self.thing, U32(attribute), ctypes.byref(read), SIZE(ctypes.sizeof(read)), ctypes.byref(written))
        return (read.value, written.value) if code == 0 else f"status {code}"


def simulated_sizes(name):
    """{attribute: bytes} that an object of simulated GPUs takes."""
    body = SIMULATED.read_text().split(f"impl Attributes for {name} {{")[1].split("\n}\n")[0]
    fields = re.findall(r"(\d+)(?:\.\.=(\d+))? => Field::[UIF](\d+)", body)
    return {number: int(bits) // 8 for first, last, bits in fields for number in range(int(first), int(last or first) + 1)}


def epilogues_of(header):
    """{name: number}: some are sums of those before."""
    found = {}
    for name, terms in re.findall(r"\bCUBLASLT_EPILOGUE_(\w+)\s*=\s*([^,]+),", header):
        for term, number in re.findall(r"CUBLASLT_EPILOGUE_(\w+)|(\d+)", terms):
            found[name] = found.get(name, 0) | (found[term] if term else int(number))
    return found


def main():
    folder = pathlib.Path(sys.argv[1])
    header = wheels.header(folder, "cublasLt.h")
    if header is None:
        return
    path = next(folder.glob("nvidia/**/libcublasLt.so*"), None)
    if path is None:
        sys.exit(f"{folder} has no libcublasLt: remove it, so that it is installed again")
    library, header = ctypes.CDLL(path), header.read_text(errors="replace")
    numbers = {name: int(number) for name, number in re.findall(r"\b(CUBLASLT_\w+)\s*=\s*(\d+)", header)}
    problems, count = [], 0

    def expect(holds, what):
        nonlocal count
        count += 1
        if not holds:
            problems.append(what)

    text = "".join(path.read_text() for path in SOURCES.glob("**/*.rs"))
    used = set(re.findall(r"\bCUBLASLT_(MATMUL_DESC|MATRIX_LAYOUT|MATMUL_PREF)_(\w+)", text))
    known = {(kind, name) for kind, (*_, attributes) in KINDS.items() for name in attributes}
    expect(used == known, f"{SOURCES} sets other attributes than this check: {sorted(used ^ known)}")
    epilogues, named = epilogues_of(header), sorted(set(re.findall(r"\bCUBLASLT_EPILOGUE_([A-Z]\w+)", text)))
    # No test sets it.
    expect("fn multiprocessors() -> Option<i32>" in text, "SM_COUNT_TARGET is not an i32 in Rust, or this check cannot read what it is")
    expect(named, f"{SOURCES} names no epilogues that this check can read")
    expect(set(named) <= set(epilogues), f"the header lacks epilogues of {SOURCES}: {sorted(set(named) - set(epilogues))}")
    OPERATION["EPILOGUE"][1].extend(epilogues[name] for name in named if name in epilogues)

    shapes = {(rows, columns) for m, n, k in SHAPES for rows, columns in ((m, k), (k, m), (k, n), (n, k), (m, n))}
    arguments = {
        "MATMUL_DESC": [(I32(compute), I32(F32)) for compute in COMPUTES],
        "MATRIX_LAYOUT": [(I32(dtype), U64(rows), U64(columns), I64(rows)) for rows, columns in shapes for dtype in (F32, BF16)],
        "MATMUL_PREF": [()],
    }
    for kind, (function, simulated, made_with, attributes) in KINDS.items():
        sizes = simulated_sizes(simulated)
        for of in arguments[kind]:
            thing = Object(library, function, *of)
            for name, value in zip(made_with, of, strict=True):
                read = thing.get(numbers[f"CUBLASLT_{kind}_{name}"], value)
                expect(read == (value.value, ctypes.sizeof(value)), f"{kind}_{name} is made with {value.value}, and read as {read}")
            for name, (number_type, values) in attributes.items():
                attribute, size = numbers[f"CUBLASLT_{kind}_{name}"], ctypes.sizeof(number_type)
                expect(sizes.get(attribute) == size, f"{kind}_{name} has {size} bytes here, and {sizes.get(attribute)} in {SIMULATED}")
                for value in map(number_type, values):
                    title = f"{kind}_{name} = {value.value} of {size} bytes"
                    expect(thing.set(attribute, value) == 0, f"{title} is refused")
                    read = thing.get(attribute, value)
                    expect(read == (value.value, size), f"{title} is read as {read}")
                expect(thing.set(attribute, ctypes.c_uint16(1)) != 0, f"{kind}_{name} is accepted in 2 bytes: this check could not fail")
            expect(thing.set(9999, I32(0)) != 0, f"{kind}: attribute 9999 is accepted: this check could not fail")
            thing.call("Destroy", thing.thing)
    if problems:
        sys.exit("cuBLASLt:\n  " + "\n  ".join(dict.fromkeys(problems)))
    print(f"cuBLASLt {library.cublasLtGetVersion()} accepts what matmuls set, and reads it back: {count} answers")


main()
