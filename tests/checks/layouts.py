"""Compares what the product takes from cudarc's bindings, and its own numbers, with NVIDIA's headers in FOLDER: values of
enumerators, sizes of types, offsets of fields. launch/check-kernels starts it with the folder of installed wheels.
A Rust program prints what the bindings mean as they are built here, a C program what the header means."""

import json, pathlib, re, subprocess, sys, tempfile

import wheels

# cudarc's modules, and the headers that they bind.
HEADERS = {"driver": "cuda.h", "cublaslt": "cublasLt.h", "nccl": "nccl.h"}
SOURCES = [pathlib.Path("kernels/src"), pathlib.Path("comm/src")]
BLASLT = "kernels/src/launch/blaslt"
# Structs that the product declares in place of cudarc's, field by field.
COPIES = {(f"{BLASLT}/library.rs", "Heuristic"): ("cublaslt", "cublasLtMatmulHeuristicResult_t")}
# Numbers in the product's source, by the pattern that captures them; without a group the number is 1.
# Those of epilogues are compared with cudarc's by a unit test of blaslt.rs.
NUMBERS = [
    ("kernels/src/memory/pinned.rs", r"PORTABLE: u32 = (\d+);", "driver", "CU_MEMHOSTALLOC_PORTABLE"),
    ("kernels/src/device/driver.rs", r"CAPABILITY: \[c_int; 2\] = \[(\d+), \d+\];", "driver", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
    ("kernels/src/device/driver.rs", r"CAPABILITY: \[c_int; 2\] = \[\d+, (\d+)\];", "driver", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    ("kernels/src/cuda/nodes.rs", r"(\d+) => &mut counts.kernels", "driver", "CU_GRAPH_NODE_TYPE_KERNEL"),
    ("kernels/src/cuda/nodes.rs", r"(\d+) => &mut counts.copies", "driver", "CU_GRAPH_NODE_TYPE_MEMCPY"),
    ("kernels/src/cuda/nodes.rs", r"(\d+) => &mut counts.fills", "driver", "CU_GRAPH_NODE_TYPE_MEMSET"),
    (f"{BLASLT}/library.rs", r"NOT_SUPPORTED: c_int = (\d+);", "cublaslt", "CUBLAS_STATUS_NOT_SUPPORTED"),
    (f"{BLASLT}/plan.rs", r"IN_PLACE: u32 = (\d+);", "cublaslt", "CUBLASLT_REDUCTION_SCHEME_INPLACE"),
    (f"{BLASLT}/plan.rs", r"COMPUTE_TYPE: u32 = (\d+);", "cublaslt", "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"),
    (f"{BLASLT}/plan.rs", r"kind\.transposed\.map\(i32::from\)", "cublaslt", "CUBLAS_OP_T"),
]
# What old releases lack: results that they never return, and fields that are zero in every call.
NEWER = {"ncclTimeout", "CUDA_ERROR_CONTAINED", "CUDA_ERROR_TENSOR_MEMORY_LEAK", "CUmemPoolProps.maxSize", "CUmemPoolProps.usage"}


class Bindings:
    """A module of cudarc as it is built: what is left out by its features is not here."""

    def __init__(self, text, features):
        self.enums, self.flags, self.structs, self.aliases, self.constants = {}, {}, {}, {}, set()
        is_in = True
        lines = iter(text.splitlines())
        for line in lines:
            if match := re.match(r"#\[cfg\((not\()?(?:any\()?(feature = .*?)\)*\]", line):
                is_in = (match[1] is None) == any(it in features for it in re.findall(r'"([^"]+)"', match[2]))
                continue
            if line.startswith("#"):
                continue
            body = []
            if line.endswith("{"):
                for inner in lines:
                    if inner.startswith("}"):
                        break
                    body.append(inner)
            if is_in:
                self.item(line, "\n".join(body))
            is_in = True

    def item(self, line, body):
        if match := re.match(r"pub enum (\w+) \{", line):
            self.enums[match[1]] = re.findall(r"^    (\w+) = ", body, re.MULTILINE)
        elif match := re.match(r"impl (\w+) \{", line):
            self.flags.setdefault(match[1], []).extend(re.findall(r"pub const (\w+): ", body))
        elif match := re.match(r"pub struct (\w+) \{", line):
            self.structs[match[1]] = re.findall(r"^    pub (\w+): (.+),$", body, re.MULTILINE)
        elif match := re.match(r"pub (?:type (\w+) = (.+);|use self::(\w+) as (\w+);)", line):
            self.aliases[match[1] or match[4]] = match[2] or match[3]
        elif match := re.match(r"pub const (\w+): ", line):
            self.constants.add(match[1])

    def fields(self, name):
        while name in self.aliases:
            name = self.aliases[name]
        return self.structs.get(name, [])

    def questions(self, words, module):
        """{what is asked of the header: the Rust expression that answers it} for those of `words` that are here."""
        asked, path = {}, f"cudarc::{module}::sys"
        for enum, variants in self.enums.items():
            asked |= {("value", it): f"{path}::{enum}::{it} as i64" for it in variants if it in words}
        for flags, known in self.flags.items():
            asked |= {("value", it): f"i64::from({path}::{flags}::{it}.0)" for it in known if it in words}
        asked |= {("value", it): f"{path}::{it} as i64" for it in self.constants & words}
        # With the types of fields, from which offsets within follow.
        types, seen = sorted(words & {*self.enums, *self.flags, *self.structs, *self.aliases}), set()
        while types:
            name = types.pop()
            fields = self.fields(name)
            # Opaque structs have no public fields.
            if name in seen or name in self.structs and not fields:
                continue
            seen.add(name)
            asked["size", name] = f"size_of::<{path}::{name}>() as i64"
            for field, kind in fields:
                if field == "reserved":
                    continue
                asked["offset", f"{name}.{field.rstrip('_')}"] = f"std::mem::offset_of!({path}::{name}, {field}) as i64"
                types += {kind} & {*self.structs, *self.aliases}
        return asked


def words_of_product():
    """The words of the files that use the bindings."""
    texts = [path.read_text() for folder in SOURCES for path in folder.glob("**/*.rs")]
    return {word for text in texts if "cudarc::" in text for word in re.findall(r"\w+", text)}


def asked_of_bindings(folder):
    """{module: {question: value}}, as cudarc is built for the product."""
    words = ["cargo", "build", "--quiet", "--locked", "--package", "cudarc", "--message-format", "json"]
    lines = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    built = next(it for it in messages if it.get("target", {}).get("name") == "cudarc" and it["reason"] == "compiler-artifact")
    library = next(it for it in built["filenames"] if it.endswith(".rlib"))
    words, questions, copies = words_of_product(), {}, ""
    for module in HEADERS:
        text = (pathlib.Path(built["manifest_path"]).parent / f"src/{module}/sys/mod.rs").read_text()
        bindings = Bindings(text, set(built["features"]))
        questions |= {(module, *key): rust for key, rust in bindings.questions(words, module).items()}
        for (path, name), (of, theirs) in COPIES.items():
            if of != module:
                continue
            declared = re.search(rf"#\[repr\(C\)\]\n(?:#.*\n)*.*struct {name} \{{\n(.*?)\n\}}", pathlib.Path(path).read_text(), re.DOTALL)[1]
            copies += f"#[repr(C)]\npub struct {name} {{\n{declared.replace('pub(super) ', '')}\n}}\n"
            own = re.findall(r"^\s*(?:pub\(super\) )?(\w+):", declared, re.MULTILINE)
            fields = [field for field, _ in bindings.fields(theirs)]
            assert len(own) == len(fields), f"{path}: {name} has not the fields of {theirs}"
            questions[module, f"size of our {name}:", theirs] = f"size_of::<{name}>() as i64"
            for mine, field in zip(own, fields):
                questions[module, f"offset of our {name}.{mine}:", f"{theirs}.{field}"] = f"std::mem::offset_of!({name}, {mine}) as i64"
    printed = "\n".join(f'    println!("{{}}", {rust});' for rust in questions.values())
    uses = "#![allow(unused_imports)]\nuse std::ffi::c_int;\nuse cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;\n"
    (folder / "ours.rs").write_text(f"{uses}{copies}fn main() {{\n{printed}\n}}\n")
    dependencies = pathlib.Path(library).parent / "deps"
    words = ["rustc", "--edition", "2024", folder / "ours.rs", "-o", folder / "ours"]
    subprocess.run([*words, "--extern", f"cudarc={library}", "-L", f"dependency={dependencies}"], check=True)
    values = subprocess.run([folder / "ours"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    found = {}
    for (module, kind, what), value in zip(questions, map(int, values), strict=True):
        found.setdefault(module, []).append((kind, what, value, "cudarc"))
    return found


def numbers_of_product():
    """The same of numbers that stand in the source."""
    found = {module: [] for module in HEADERS}
    for path, pattern, module, name in NUMBERS:
        matches = list(re.finditer(pattern, pathlib.Path(path).read_text()))
        assert len(matches) == 1, f"{path} has {len(matches)} places like {pattern}: correct NUMBERS"
        found[module].append(("value", name, int(matches[0][1]) if matches[0].groups() else 1, path))
    path = "kernels/src/device/driver.rs"
    codes = re.findall(r'^\s+(\d+) => \{?\s*"\((\w+)\)', pathlib.Path(path).read_text(), re.MULTILINE)
    found["driver"] += [("value", f"CUDA_ERROR_{name}", int(code), path) for code, name in codes]
    path = "comm/src/transport/nccl/library.rs"
    names = re.search(r"const NAMES: \[&str; \d+\] = \[(.*?)\];", pathlib.Path(path).read_text(), re.DOTALL)[1]
    found["nccl"] += [("value", name, code, path) for code, name in enumerate(re.findall(r'"(\w+)"', names))]
    return found


def expression(kind, what):
    if "offset" in kind:
        return "(long long)offsetof({}, {})".format(*what.split("."))
    if "size" in kind:
        tag = re.search(r"_(enum|st)$", what)
        return f"(long long)sizeof({({'enum': 'enum ', 'st': 'struct '}[tag[1]] if tag else '') + what})"
    return f"(long long)({what})"


def asked_of_header(folder, header, questions):
    """What the header says, None where it lacks a name, by (kind, name)."""
    includes = [f"-I{path}" for path in sorted(folder.glob("nvidia/**/include"))]
    asked = sorted({(kind, what) for kind, what, _, _ in questions})
    with tempfile.TemporaryDirectory() as place:
        source, program = pathlib.Path(place) / "theirs.c", pathlib.Path(place) / "theirs"
        # Headers of half types include it, and use it in C++ alone, where they define what nccl.h asks for.
        (pathlib.Path(place) / "nv").mkdir()
        (pathlib.Path(place) / "nv/target").touch()
        lacks = set()
        while True:
            lines = [f'  printf("%lld\\n", {expression(*it)});' for it in asked if it not in lacks]
            source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include <{header}>\nint main(void) {{\n" + "\n".join(lines) + "\n}\n")
            words = ["cc", *includes, f"-I{place}", "-D__CUDA_BF16_TYPES_EXIST__", "-fmax-errors=0", source, "-o", program]
            ran = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
            if ran.returncode == 0:
                break
            # The fifth line of the program asks the first question.
            known = [it for it in asked if it not in lacks]
            wrong = {int(line) - 5 for line in re.findall(r"theirs\.c:(\d+):\d+: error: .*(?:undeclared|no member named)", ran.stderr)}
            if not wrong:
                sys.exit(f"{header} cannot be compiled:\n{ran.stderr}")
            lacks |= {known[it] for it in wrong}
        values = iter(subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout.split())
    return {it: None if it in lacks else int(next(values)) for it in asked}


def main():
    folders = [pathlib.Path(it) for it in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as place:
        ours = asked_of_bindings(pathlib.Path(place))
    for module, more in numbers_of_product().items():
        ours[module] += more
    problems = []
    for folder in folders:
        counts = []
        for module, header in HEADERS.items():
            if wheels.header(folder, header) is None:
                continue
            theirs = asked_of_header(folder, header, ours[module])
            for kind, what, value, of in ours[module]:
                known = theirs[kind, what]
                if known is None and what not in NEWER:
                    problems.append(f"{header} of {folder} has no {what}, which {of} has ({kind} {value})")
                elif known is not None and known != value:
                    problems.append(f"{kind} {what} is {value} in {of}, and {known} in {header} of {folder}")
            counts.append(f"{len(ours[module])} of {header}")
        if counts:
            print(f"values, sizes and offsets are those of NVIDIA's headers: {', '.join(counts)}" * (not problems))
    if problems:
        sys.exit("problems:\n  " + "\n  ".join(problems))


main()
