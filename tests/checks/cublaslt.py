"""Whether the cuBLASLt in FOLDER accepts what the product's matmuls set, and reads it back. Descriptors need neither a GPU
nor a driver; algorithms and matmuls do. launch/check-kernels starts it with the folder of installed wheels."""

import ctypes, pathlib, re, sys

import wheels

PLAN = pathlib.Path("kernels/src/launch/blaslt/plan.rs")
U32, I32, U64, I64, SIZE = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_size_t
# CUDA_R_32F and CUDA_R_16BF; CUBLAS_COMPUTE_32F and the same by TF32. layouts.py compares the product's numbers with headers.
F32, BF16 = 0, 14
COMPUTES = {"f32 or bf16": 68, "tf32": 77}
# Rows, columns, inner length and batch: of a perceptron, of GPT-2 124M's layers, of attention by matmuls.
SHAPES = [(1024, 128, 784, 1), (10, 1024, 1024, 1), (3072, 8192, 768, 1), (50304, 8192, 768, 1), (64, 1024, 1024, 96)]
ALIGNMENT = (U32, [4, 16, 256])
# What plan.rs sets of each object: the type there, and values of every kind of matmul. For epilogues the header's numbers.
OPERATION = {
    "TRANSA": (I32, [0, 1]), "TRANSB": (I32, [0, 1]), "EPILOGUE": (U32, []), "SM_COUNT_TARGET": (I32, [116]), "BIAS_DATA_TYPE": (U32, [F32, BF16]),
    "BIAS_POINTER": (U64, [256, 0x7F00_0000_1000]), "EPILOGUE_AUX_POINTER": (U64, [256, 0x7F00_0000_1000]), "EPILOGUE_AUX_LD": (I64, [rows for rows, *_ in SHAPES]),
}  # fmt: skip
LAYOUT = {"BATCH_COUNT": (I32, [12, 96]), "STRIDED_BATCH_OFFSET": (I64, [64 * 1024, 1 << 33])}
PREFERENCE = {"MAX_WORKSPACE_BYTES": (U64, [32 << 20]), "REDUCTION_SCHEME_MASK": (U32, [2, 3]), **{f"MIN_ALIGNMENT_{it}_BYTES": ALIGNMENT for it in "ABCD"}}
KINDS = {"MATMUL_DESC": ("MatmulDesc", OPERATION), "MATRIX_LAYOUT": ("MatrixLayout", LAYOUT), "MATMUL_PREF": ("MatmulPreference", PREFERENCE)}


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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call("Destroy", self.thing)


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
    epilogues = {"DEFAULT": 1, "RELU": 2, "BIAS": 4, "RELU_BIAS": 6, "GELU_BIAS": 36, "GELU_AUX": 160, "GELU_AUX_BIAS": 164, "DGELU": 192}
    OPERATION["EPILOGUE"][1].extend(epilogues.values())
    problems, count = [], 0

    def expect(holds, what):
        nonlocal count
        count += 1
        if not holds:
            problems.append(what)

    used = set(re.findall(r"\bCUBLASLT_(MATMUL_DESC|MATRIX_LAYOUT|MATMUL_PREF)_(\w+)", PLAN.read_text()))
    known = {(kind, name) for kind, (_, attributes) in KINDS.items() for name in attributes}
    expect(used == known, f"{PLAN} sets other attributes than this check: {sorted(used ^ known)}")
    named = set(re.findall(r"Number::CUBLASLT_EPILOGUE_(\w+)", pathlib.Path("kernels/src/launch/blaslt.rs").read_text()))
    expect(named == set(epilogues), f"the product has other epilogues than this check: {sorted(named ^ set(epilogues))}")
    for name, number in epilogues.items():
        # Some are sums there, whose values layouts.py compares.
        expect(f"CUBLASLT_EPILOGUE_{name}" in header, f"no CUBLASLT_EPILOGUE_{name} in the header")

    arguments = {kind: [] for kind in KINDS}
    arguments["MATMUL_DESC"] = [(I32(compute), I32(F32)) for compute in COMPUTES.values()]
    shapes = {(rows, columns) for m, n, k, _ in SHAPES for rows, columns in ((m, k), (k, n), (m, n))}
    arguments["MATRIX_LAYOUT"] = [(I32(dtype), U64(rows), U64(columns), I64(rows)) for rows, columns in shapes for dtype in (F32, BF16)]
    arguments["MATMUL_PREF"] = [()]
    for kind, (function, attributes) in KINDS.items():
        for of in arguments[kind]:
            with Object(library, function, *of) as thing:
                for name, (number_type, values) in attributes.items():
                    attribute = numbers[f"CUBLASLT_{kind}_{name}"]
                    for value in map(number_type, values):
                        title = f"{kind}_{name} = {value.value} of {ctypes.sizeof(value)} bytes"
                        expect(thing.set(attribute, value) == 0, f"{title} is refused")
                        expect(thing.get(attribute, value) == (value.value, ctypes.sizeof(value)), f"{title} is read as {thing.get(attribute, value)}")
                    other = ctypes.c_uint16(1)
                    expect(thing.set(attribute, other) != 0, f"{kind}_{name} is accepted in 2 bytes: this check could not fail")
                expect(thing.set(9999, I32(0)) != 0, f"{kind}: attribute 9999 is accepted: this check could not fail")
    if problems:
        sys.exit("cuBLASLt:\n  " + "\n  ".join(problems))
    print(f"cuBLASLt {library.cublasLtGetVersion()} accepts what matmuls set, and reads it back: {count} answers")


main()
