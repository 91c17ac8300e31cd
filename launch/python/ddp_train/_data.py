"""Arrays and frames as files that the program reads: in memory, or in the folder of a detached run.

Arrays go as our flat .bin, which is mapped and, unlike .npy, holds features, labels and the names
of classes together (layout: files/flat.rs in the data crate). Frames go as tables with their names
of columns: numbers as Parquet where polars or pyarrow writes it, all else as text between tabs.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib.util
import json
import os
import shutil
import struct
import sys
import tempfile
import weakref
import zlib
from numbers import Number
from typing import Any, BinaryIO, Callable, Optional

from ._program import PREFIX, caution, listed

# As the flat format names them.
ELEMENTS = {f"{kind}{bytes}": f"{kind}{8 * int(bytes)}" for kind in "iuf" for bytes in "1248" if kind + bytes != "f1"}
# Rows copied at a time, so that an array with strides needs no second one in memory.
PIECE_BYTES = 1 << 24

in_memory: weakref.WeakSet[Files] = weakref.WeakSet()


class Files:
    """Files in memory, and the folder with their names, which go when this does; or files in `keep_in`, which stay."""

    def __init__(self, keep_in: Optional[str] = None) -> None:
        self.keep_in, self.made = keep_in, ""
        _remove_abandoned()
        # While it is locked, another process leaves it alone, so it gets its name after that.
        new = tempfile.mkdtemp(prefix=f".{PREFIX}")
        self._lock = os.open(new, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = os.path.join(os.path.dirname(new), os.path.basename(new)[1:])
        os.rename(new, self.folder)
        self._later: list[tuple[str, Callable[[BinaryIO], object]]] = []
        self.descriptors: list[int] = []
        # Those of a run that this one resumes.
        self.earlier: list[Files] = []
        in_memory.add(self)
        weakref.finalize(self, _close, self.folder, self._lock, self.descriptors, os.getpid())

    def add(self, name: str, write: Callable[[BinaryIO], object]) -> str:
        """The path of a new file, which `write` writes after the settings are checked."""
        self._later.append((os.path.join(self.keep_in or self.folder, name), write))
        return self._later[-1][0]

    def write(self) -> list[int]:
        """Writes the files; what a program must inherit to see them."""
        if self.keep_in is not None and self._later:
            os.makedirs(self.keep_in)
            self.made = self.keep_in
        while self._later:
            path, write = self._later.pop()
            if self.keep_in is None:
                self.descriptors.append(memory_file(os.path.basename(path)))
                os.symlink(f"/proc/self/fd/{self.descriptors[-1]}", path)
            with open(path, "wb") as file:
                write(file)
        return [it for files in (self, *self.earlier) for it in files.descriptors]

    def settings(self, what: str, data: Any, labels: Any) -> dict[str, Any]:
        """The settings `data` and `labels` (or val_data and val_labels) for what was given as such."""
        prefix = "val_" if what == "val_data" else ""
        if isinstance(data, str) and ("\n" in data or len(data) > 4096):
            raise ValueError(f"{what}: expected an array, a frame or the name of a file, got {data[:40]!r}…; help: save a text as a .txt file")
        if data is None or isinstance(data, (str, os.PathLike)):
            if labels is not None and not _are_names(labels, labels):
                array = _labels(f"{prefix}labels", labels)
                labels = self.add(f"{prefix}labels.bin", lambda file: write_flat(file, *array))
            return {what: data, f"{prefix}labels": labels}
        frame = frame_of(data)
        if frame is not None:
            return self._of_frame(prefix, what, frame, labels)
        features = numbers(what, data)
        if features.ndim == 0 or len(features) == 0:
            raise ValueError(f"{what}: expected rows, got an array of shape {features.shape}")
        if labels is None and features.ndim == 1 and features.dtype.kind in "iu":
            tokens = self.add(f"{prefix}tokens.bin", lambda file: write_flat(file, {"tokens": features}))
            return {what: f"tokens:{tokens}"}
        arrays, classes = {"features": features}, None
        if labels is not None:
            if isinstance(labels, (str, os.PathLike, Number)):
                raise ValueError(f"{prefix}labels: expected an array, since {what} is one, got {labels!r}")
            targets, classes = _labels(f"{prefix}labels", labels)
            _check_rows(prefix, features, targets["labels"])
            arrays.update(targets)
        return {what: self.add(f"{prefix}data.bin", lambda file: write_flat(file, arrays, classes))}

    def _of_frame(self, prefix: str, what: str, frame: Any, labels: Any) -> dict[str, Any]:
        if len(frame) == 0 or len(frame.columns) == 0:
            raise ValueError(f"{what}: expected rows, got a frame of shape {frame.shape}")
        if hasattr(frame, "rename_axis"):
            if frame.columns.nlevels > 1 or not frame.columns.is_unique:
                raise ValueError(f"{what}: expected columns with one name each, got {list(frame.columns)[:8]}")
            frame = frame.rename(columns=_name)
        names = list(frame.columns)
        labels, name = _name(labels) if isinstance(labels, Number) else labels, getattr(labels, "name", None)
        # Its own column is no feature.
        if hasattr(labels, "equals") and _name(name) in names and labels.equals(frame[_name(name)]):
            labels = _name(name)
        if labels is not None and not _are_names(labels, names):
            array = labels.to_numpy() if hasattr(labels, "to_numpy") else _host(f"{prefix}labels", labels)
            _check_rows(prefix, frame, array)
            name, labels = name if isinstance(name, str) and name else "label", []
            for column in array.reshape(len(array), -1).T:
                # A name that no feature has.
                while name in names:
                    name += "_"
                frame = frame.hstack(type(frame)({name: column})) if hasattr(frame, "hstack") else frame.assign(**{name: column})
                names.append(name)
                labels.append(name)
        wanted = [labels] if isinstance(labels, str) else list(labels or [])
        path, is_float = _write_frame(self, f"{prefix}data", frame, wanted)
        settings = {what: path, f"{prefix}labels": labels, "cache_dir": self.keep_in or self.folder}
        # As of arrays, the type decides; in text 1.0 and 1 are the same.
        if not prefix and wanted and all(is_float.get(str(name)) for name in wanted):
            settings["task"] = "regression"
        # Categories may be numbers, and then the table does not show what they are.
        kinds = zip(names, frame.dtypes)
        categories = [str(name) for name, kind in kinds if str(kind).lower().startswith(("categor", "enum"))]
        if not prefix and wanted and set(wanted) <= set(categories):
            settings["task"] = "classification"
        categories = [name for name in categories if name not in wanted]
        if not prefix and categories:
            settings["categorical"] = ["common", *categories]
        return settings


# Handlers of exits run in reverse, and weakref's begins here: that of the runs comes before it.
weakref.finalize(Files, bool)


def memory_file(name: str) -> int:
    """A file that takes no disk, is not limited by the size of /dev/shm, and goes with the last process."""
    try:
        return os.memfd_create(name)
    except (AttributeError, OSError):
        # Some builds of Python lack it: an unlinked file.
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _close(folder: str, lock: int, descriptors: list[int], owner: int) -> None:
    # A forked process has copies of the descriptors, and leaves the folder to its owner.
    for descriptor in [lock, *descriptors]:
        os.close(descriptor)
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Removes folders of processes that were killed: nothing locks them."""
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _are_names(labels: Any, columns: Any) -> bool:
    """Whether labels are a column, a file, or a list of these columns."""
    if isinstance(labels, (str, os.PathLike, Number)):
        return True
    return isinstance(labels, (list, tuple)) and bool(labels) and all(isinstance(it, str) and it in columns for it in labels)


def _name(column: Any) -> str:
    """The name of a column in the program, which takes a line of numbers for a row."""
    return column if isinstance(column, str) else f"c{column}"


def _check_rows(prefix: str, data: Any, labels: Any) -> None:
    if len(data) != len(labels):
        raise ValueError(f"{prefix}labels: expected one for each of {len(data)} rows, got {len(labels)}")


def _host(what: str, given: Any) -> Any:
    """An array in host memory: of NumPy, a list, or of any library with DLPack or `__array__`."""
    import numpy

    if hasattr(given, "__dlpack_device__"):
        kind, number = given.__dlpack_device__()
        # 1 is the CPU, 3 and 11 memory of the host that a GPU can read.
        if int(kind) not in (1, 3, 11):
            raise TypeError(f"{what}: expected host memory, got a tensor on device {number} of DLPack's kind {int(kind)} (2 is CUDA); help: give {what}.cpu()")
    if hasattr(given, "toarray"):
        raise TypeError(f"{what}: expected a dense array, got a sparse {type(given).__name__}; help: give {what}.toarray()")
    if isinstance(given, numpy.ma.MaskedArray):
        raise TypeError(f"{what}: expected an array without a mask; help: give {what}.filled(numpy.nan) and missing=\"mean\"")
    if hasattr(given, "detach"):
        given = given.detach()
    if hasattr(given, "__dlpack__") and not hasattr(given, "__array__"):
        return numpy.from_dlpack(given)
    try:
        return numpy.asarray(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: expected an array of numbers, got {type(given).__name__}: {error}; help: of bfloat16 give {what}.float()") from None


def numbers(what: str, given: Any) -> Any:
    """An array of a type that the program reads."""
    import numpy

    array = _host(what, given)
    if array.dtype == object:
        try:
            array = numpy.array(array.tolist())
        except ValueError as error:
            raise TypeError(f"{what}: expected rows of the same length: {error}") from None
    if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8:
        raise TypeError(f"{what}: expected numbers, got {array.dtype}; help: give columns of text in a frame, times as numbers, of complex numbers .real and .imag")
    return array


def _labels(what: str, given: Any) -> tuple[dict[str, Any], Optional[list[str]]]:
    """The array of labels, and the names of classes, if labels are texts."""
    import numpy

    array = _host(what, given)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    are_texts = array.dtype.kind in "UT" or (array.dtype == object and any(isinstance(it, str) for it in array.flat))
    odd = [it for it in array.flat if not isinstance(it, str)] if are_texts else []
    if odd:
        raise TypeError(f"{what}: expected texts, or numbers, got texts and {odd[0]!r}; help: leave such rows out")
    if not are_texts:
        return {"labels": numbers(what, array)}, None
    names, codes = numpy.unique(array.astype(str), return_inverse=True)
    # The program sorts texts by their bytes, as Python sorts by code points: the same order.
    return {"labels": codes.reshape(array.shape)}, names.tolist()


def write_flat(file: BinaryIO, arrays: dict[str, Any], classes: Optional[list[str]] = None) -> None:
    """Writes the flat format."""
    import numpy

    file.write(bytes(64))
    entries = []
    for name, array in arrays.items():
        file.write(bytes(-file.tell() % 64))
        element = "bool" if array.dtype.kind == "b" else ELEMENTS[f"{array.dtype.kind}{array.dtype.itemsize}"]
        entries.append({"name": name, "element": element, "shape": array.shape, "offset": file.tell()})
        rows = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
        for first in range(0, len(array), rows):
            piece = array[first : first + rows]
            file.write(numpy.ascontiguousarray(piece, piece.dtype.newbyteorder("<")).view(numpy.uint8).data)
    start = file.tell()
    header = json.dumps({"arrays": entries, **({"classes": classes} if classes else {})}).encode()
    file.write(header)
    file.seek(0)
    file.write(b"DDPFLAT1" + struct.pack("<QQI", start, len(header), zlib.crc32(header)))


def frame_of(data: Any) -> Any:
    """`data` as a frame of pandas or polars, if it is a frame."""
    if isinstance(data, dict):
        return library().DataFrame(data)
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):
        return data.collect()
    if hasattr(data, "write_csv") or (hasattr(data, "to_csv") and hasattr(data, "columns")):
        return data
    if hasattr(data, "to_pandas") and (hasattr(data, "columns") or hasattr(data, "column_names")):
        return data.to_pandas()
    return None


def library() -> Any:
    """pandas; polars where pandas is not installed, or where it alone is imported."""
    is_polars = "pandas" not in sys.modules and (not has("pandas") or "polars" in sys.modules)
    return importlib.import_module("polars" if is_polars else "pandas")


def has(module: str) -> bool:
    """Whether a module is installed."""
    return importlib.util.find_spec(module) is not None


# Texts that the program takes for missing, in any case (words.rs in the data crate), beside NaN.
MISSING = ("na", "n/a", "#n/a", "nan", "null", "nil", "none", "?", "-")


def _warn_of_missing(name: str, frame: Any, labels: list[str]) -> None:
    """Warns of texts of features that are no longer told from missing cells, as the country NA."""
    for column, kind in zip(frame.columns, frame.dtypes):
        if str(kind).lower().startswith(("object", "str", "categor", "enum")) and column not in labels:
            texts = [it for it in frame[column].unique() if isinstance(it, str) and it.strip().lower() in MISSING]
            if texts:
                caution(f"{name}: column {column!r}: {', '.join(map(repr, texts))} counts as missing; help: if this is a value, give it another name")


def _write_frame(files: Files, name: str, frame: Any, labels: list[str]) -> tuple[str, dict[str, bool]]:
    """The path of a table, and which columns are of floats."""
    for column, kind in zip(frame.columns, frame.dtypes):
        if str(kind).startswith(("complex", "Sparse", "List", "Array", "Struct", "Object", "Binary", "list", "struct")):
            raise TypeError(f"{name}: expected numbers or texts in column {column!r}, got {kind}; help: make it dense, or several columns of numbers")
    _warn_of_missing(name, frame, labels)
    if hasattr(frame, "write_csv"):
        import polars

        frame = frame.cast({polars.Boolean: polars.Int8})
        is_float = {column: kind.is_float() for column, kind in frame.schema.items()}
        # Whole numbers are written as such, though other rows have gaps: categories are texts.
        whole = [it for it in frame.columns if is_float[it] and it not in labels and (frame[it].is_null() | ((frame[it].round() == frame[it]) & (frame[it].abs() < 2**53))).all()]
        frame = frame.with_columns(polars.col(whole).cast(polars.Int64))
        if all(kind.is_integer() or kind.is_float() for kind in frame.dtypes) and listed()["reads_parquet"]:
            return files.add(f"{name}.parquet", frame.write_parquet), is_float
        return files.add(f"{name}.tsv", lambda file: frame.write_csv(file, separator="\t")), is_float
    import pandas

    # Text would turn True into a word.
    frame = frame.astype({column: "Int8" for column, kind in frame.dtypes.items() if pandas.api.types.is_bool_dtype(kind)})
    is_float = {column: pandas.api.types.is_float_dtype(kind) for column, kind in frame.dtypes.items()}
    whole = [it for it in is_float if is_float[it] and it not in labels and (frame[it].isna() | ((frame[it].round() == frame[it]) & (frame[it].abs() < 2**53))).all()]
    frame = frame.astype({it: "Int64" for it in whole})
    if all(pandas.api.types.is_numeric_dtype(kind) for kind in frame.dtypes) and listed()["reads_parquet"] and has("pyarrow"):
        return files.add(f"{name}.parquet", lambda file: frame.to_parquet(file, index=False, engine="pyarrow")), is_float
    return files.add(f"{name}.tsv", lambda file: frame.to_csv(file, sep="\t", index=False)), is_float

