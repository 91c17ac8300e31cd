"""Compares the functions that the product looks up in NVIDIA's libraries with the headers and libraries in FOLDER:
launch/check-kernels starts it with the folder of installed wheels. Each argument and result has the header's kind: a
pointer or handle, a number of so many bits, or a struct; and the library exports each function."""

import pathlib, re, sys

import wheels

# Where the product lists its functions, and the header of each library.
TABLES = {"kernels/src/cuda/calls.rs": "cuda.h", "kernels/src/device/driver.rs": "cuda.h", "kernels/src/cuda/nvrtc/compiler.rs": "nvrtc.h"}
TABLES |= {"kernels/src/launch/blaslt/library.rs": "cublasLt.h", "comm/src/transport/nccl/library.rs": "nccl.h"}
# The driver is not in any wheel.
LIBRARIES = {"nvrtc.h": "libnvrtc", "cublasLt.h": "libcublasLt", "nccl.h": "libnccl"}
# Handles are pointers in the headers: typedef struct CUctx_st *CUcontext.
HANDLES = set("CUcontext CUevent CUfunction CUgraph CUgraphExec CUgraphNode CUmemoryPool CUmodule CUstream NvrtcProgram nvrtcProgram".split())
HANDLES |= set("Opaque cublasLtHandle_t cublasLtMatmulDesc_t cublasLtMatrixLayout_t cublasLtMatmulPreference_t cudaStream_t ncclComm_t".split())
# Structs that are passed by value; layouts.py compares what is in them.
STRUCTS = {"ncclUniqueId"}
BITS = {"c_int": 32, "c_uint": 32, "u32": 32, "i32": 32, "u64": 64, "i64": 64, "usize": 64, "c_ulonglong": 64, "c_uchar": 8, "CUresult": 32}
BITS |= {"int": 32, "unsigned int": 32, "size_t": 64, "unsigned long long": 64, "cuuint32_t": 32, "cuuint64_t": 64, "unsigned char": 8}
BITS |= {"CUdeviceptr": 64, "CUdevice": 32, "float": 32, "uint32_t": 32, "uint64_t": 64, "int64_t": 64}
# Enums, by how their names begin; in C they are as large as an int (layouts.py compares those that the product uses).
ENUM = re.compile(
    r"^(CU(device|func|function|mem|memPool|stream|graph)[A-Za-z]*(_attribute|_flags|Mode|Type|_enum)?|nvrtcResult|cublasStatus_t|cublasComputeType_t"
    r"|cudaDataType(_t)?|cublasLt\w+Attributes?_t|nccl(Result|DataType|RedOp)_t)$"
)


def kind(text):
    """What a type, of Rust or C, is for the calling convention."""
    text = " ".join(text.replace("const ", "").split())
    if "*" in text or "[" in text:
        return "pointer"
    # In C a name follows the type.
    for name in (text, text.rsplit(" ", 1)[0]):
        if name in HANDLES:
            return "pointer"
        if name in BITS:
            return f"{BITS[name]} bits"
        if ENUM.match(name):
            return "32 bits"
        if name in STRUCTS:
            return f"struct {name}"
    return f"unknown type {text!r}"


def split(arguments):
    return [part for part in (part.strip() for part in arguments.split(",")) if part and part != "void"]


def ours(path):
    """{name: kinds of result and arguments} of the tables in a file of ours."""
    text = pathlib.Path(path).read_text()
    tables = re.findall(r"^(?:library::)?functions! \{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"fn (\w+)\(([^)]*)\)(?: -> ([^;]+))?;", "".join(tables))
    return {name: [kind(result), *map(kind, split(arguments))] for name, arguments, result in found}


def theirs(header):
    """The same of a header, for each name all that it declares, and what its macros rename."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(errors="replace"), flags=re.DOTALL)
    declared = {}
    for result, name, arguments in re.findall(r"^\s*((?:const )?\w+ ?\*?)\s*(?:CUDAAPI |CUBLASWINAPI )?(\w+)\(([^()]*)\);", text, re.MULTILINE):
        declared.setdefault(name, []).append([kind(result), *map(kind, split(arguments))])
    newest = dict(re.findall(r"^\s*#\s*define (cu\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+)\)?\s*$", text, re.MULTILINE))
    return declared, newest


def main():
    folder = pathlib.Path(sys.argv[1])
    problems, checked = [], {}
    for path, name in TABLES.items():
        header = wheels.header(folder, name)
        if header is None:
            continue
        declared, newest = theirs(header)
        functions = ours(path)
        if not functions:
            problems.append(f"{path} has no table of functions that this check can read")
        exported = wheels.exported(folder, LIBRARIES[name]) if name in LIBRARIES else None
        for function, ours_are in functions.items():
            # The header renames bare names to their newest versions by macros, and declares older ones after these.
            known = declared.get(function, [])[1 if function in newest else 0 :]
            known += [declared[bare][0] for bare, full in newest.items() if full == function and bare in declared]
            checked[name] = checked.get(name, 0) + 1
            if ours_are not in known:
                problems.append(f"{path}: {function} is {', '.join(ours_are)} (the result first), and {name} has {known or 'no such function'}")
            if exported is not None and function not in exported:
                problems.append(f"{path}: {LIBRARIES[name]} does not export {function}")
    if not checked:
        problems.append(f"none of NVIDIA's headers is in {folder}")
    counts = ", ".join(f"{count} of {name}" for name, count in checked.items())
    print(f"functions have the signatures of NVIDIA's headers: {counts}" if not problems else "problems:\n  " + "\n  ".join(problems))
    sys.exit(1 if problems else 0)


main()
