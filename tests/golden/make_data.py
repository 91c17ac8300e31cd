"""Small files of every format and element, as numpy and safetensors write them, and what they hold: for ddp/data/src/files/tests.rs.

    python tests/golden/make_data.py        (with a Python that has numpy and safetensors; writes tests/golden/data)
"""
import gzip, json, struct, zipfile
from pathlib import Path

import numpy as np
import safetensors

folder = Path(__file__).resolve().parent / "data"
folder.mkdir(exist_ok=True)

SHAPE = (3, 2, 2)
INTEGERS = {"u1": "u8", "i1": "i8", "u2": "u16", "i2": "i16", "u4": "u32", "i4": "i32", "u8": "u64", "i8": "i64"}
FLOATS = {"f2": "f16", "f4": "f32", "f8": "f64"}


def integers(dtype):
    about = np.iinfo(dtype)
    values = [about.min, about.max, about.max // 2 + 1, 0, 1, 2, 3, about.max // 3, 100, 101, about.min + 1, about.max - 1]
    return np.array(values, dtype=dtype).reshape(SHAPE)


def floats(dtype):
    about = np.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, about.max if dtype != "f8" else 1e30, about.tiny, -7.25, 65504.0, 2.0**-14, np.pi]
    return np.array(values, dtype=dtype).reshape(SHAPE)


arrays = {name: integers(dtype) for dtype, name in INTEGERS.items()}
arrays |= {name: floats(dtype) for dtype, name in FLOATS.items()}
arrays["bool"] = np.arange(12).reshape(SHAPE) % 3 == 1

with np.errstate(over="ignore", under="ignore"):
    expected = {
        name: {
            "exact": [value.item() if array.dtype.kind != "b" else int(value) for value in array.ravel()],
            "f32": [float(value) for value in array.astype("f4").ravel()],
        }
        for name, array in arrays.items()
    }
# A bfloat16 is the first half of a float.
halves = np.array([0x3F80, 0xBFC0, 0x0000, 0x4049, 0x7F7F, 0x0080, 0x3DCD, 0x4780, 0xC0E8, 0x3EAB, 0x3F00, 0x4000], dtype="u2")
values = [float(value) for value in (halves.astype("u4") << 16).view("f4")]
expected["bf16"] = {"exact": values, "f32": values}
(folder / "expected.json").write_text(json.dumps({"shape": SHAPE, "arrays": expected}, indent=1) + "\n")

np.savez(folder / "little.npz", **arrays)
np.savez(folder / "big.npz", **{name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()})
np.savez_compressed(folder / "packed.npz", **{name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()})
np.savez(folder / "columns.npz", **{name: np.asfortranarray(array) for name, array in arrays.items()})
np.savez_compressed(folder / "packed-columns.npz", **{name: np.asfortranarray(array) for name, array in arrays.items()})
for name, array in arrays.items():
    np.save(folder / f"{name}.npy", array)
np.save(folder / "columns.npy", np.asfortranarray(arrays["f64"]))
np.save(folder / "objects.npy", np.array(["cat", None, 3], dtype=object), allow_pickle=True)
np.save(folder / "texts.npy", np.array(["cat", "dog"]))
np.save(folder / "number.npy", np.float32(3.0))
np.save(folder / "empty.npy", np.zeros((0, 4), dtype="f4"))
np.savez(folder / "mixed.npz", x=arrays["f32"], names=np.array(["cat", "dog"], dtype=object), epochs=np.int64(3))

spec = lambda dtype, array: safetensors.TensorSpec(
    dtype=dtype, shape=list(SHAPE), data_ptr=array.ctypes.data, data_len=array.nbytes)
tensors = {"bf16": spec("bfloat16", halves)} | {name: spec(str(array.dtype), array) for name, array in arrays.items()}
(folder / "all.safetensors").write_bytes(safetensors.serialize(tensors))

CODES = {"u8": 0x08, "i8": 0x09, "i16": 0x0B, "i32": 0x0C, "f32": 0x0D, "f64": 0x0E}
for name, code in CODES.items():
    array = arrays[name]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    data = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    (folder / f"{name}-idx3-ubyte").write_bytes(data)
(folder / "f32-idx3-ubyte.gz").write_bytes(gzip.compress((folder / "f32-idx3-ubyte").read_bytes(), mtime=0))
(folder / "f32.npy.gz").write_bytes(gzip.compress((folder / "f32.npy").read_bytes(), mtime=0))

# The layout of torch.save, without anything that torch would run.
with zipfile.ZipFile(folder / "model.pt", "w") as archive:
    archive.writestr(zipfile.ZipInfo("model/data.pkl"), b"\x80\x02}q\x00.")
    archive.writestr(zipfile.ZipInfo("model/version"), b"3\n")
