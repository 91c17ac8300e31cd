"""NVIDIA's NVRTC, for nvrtc/real.rs: LIBRARY FOLDER NAME HEADERS OPTIONS... In FOLDER are `source`, and the name and text of each
header by its number. Writes `made`, the PTX, and exits 0, or prints the compiler's log and exits 1."""

import ctypes, pathlib, sys

library, folder, name, count = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3].encode(), int(sys.argv[4])
options = [option.encode() for option in sys.argv[5:]]
# NVRTC loads its builtins by name, and does not look in its own folder.
for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
nvrtc = ctypes.CDLL(str(library))


def array(texts):
    return (ctypes.c_char_p * len(texts))(*texts)


def output(size, read):
    length = ctypes.c_size_t()
    size(program, ctypes.byref(length))
    text = ctypes.create_string_buffer(length.value)
    read(program, text)
    return text.value


program = ctypes.c_void_p()
names, texts = ([(folder / f"{number}.{what}").read_bytes() for number in range(count)] for what in ("name", "text"))
code = nvrtc.nvrtcCreateProgram(ctypes.byref(program), (folder / "source").read_bytes(), name, count, array(texts), array(names))
if code == 0:
    code = nvrtc.nvrtcCompileProgram(program, len(options), array(options))
if code != 0:
    print(f"error {code} of {library}")
    print(output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace"))
    sys.exit(1)
(folder / "made").write_bytes(output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
