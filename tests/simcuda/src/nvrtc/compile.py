"""NVIDIA's NVRTC, for nvrtc/compiler.rs: LIBRARY FOLDER NAME HEADERS OPTIONS... In FOLDER are `source`, `expressions` (names, one a
line), and the name and text of each header by its number. Writes `made`, the PTX after a line `//@ NAME EXPRESSION` for each
expression, and exits 0; or writes `log` and `code`, NVRTC's own, and exits 0. LIBRARY alone: prints its version."""

import ctypes, os, sys

library = sys.argv[1]
# NVRTC loads its builtins by name, and does not look in its own folder.
for name in os.listdir(os.path.dirname(library)):
    if name.startswith("libnvrtc-builtins.so."):
        ctypes.CDLL(os.path.join(os.path.dirname(library), name), mode=ctypes.RTLD_GLOBAL)
nvrtc = ctypes.CDLL(library)
if len(sys.argv) == 2:
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        sys.exit(f"{library} says no version")
    print(major.value, minor.value)
    sys.exit(0)
folder, name, count = sys.argv[2], sys.argv[3].encode(), int(sys.argv[4])
options = [option.encode() for option in sys.argv[5:]]


def read(name):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


def write(name, content):
    with open(os.path.join(folder, name), "wb") as file:
        file.write(content)


def array(texts):
    return (ctypes.c_char_p * len(texts))(*texts)


def output(size, get):
    length = ctypes.c_size_t()
    size(program, ctypes.byref(length))
    text = ctypes.create_string_buffer(length.value)
    get(program, text)
    return text.value


program = ctypes.c_void_p()
names, texts = ([read(f"{number}.{what}") for number in range(count)] for what in ("name", "text"))
code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), read("source"), name, count, array(texts), array(names))
if code != 0:
    sys.exit(f"nvrtcCreateProgram: error {code}")
expressions = read("expressions").splitlines()
for expression in expressions:
    if nvrtc.nvrtcAddNameExpression(program, expression) != 0:
        sys.exit(f"nvrtcAddNameExpression: {expression}")
code = nvrtc.nvrtcCompileProgram(program, len(options), array(options))
if code != 0:
    write("log", output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog))
    write("code", str(code).encode())
    sys.exit(0)
made = b""
for expression in expressions:
    lowered = ctypes.c_char_p()
    if nvrtc.nvrtcGetLoweredName(program, expression, ctypes.byref(lowered)) == 0:
        made += b"//@ " + lowered.value + b" " + expression + b"\n"
write("made", made + output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
