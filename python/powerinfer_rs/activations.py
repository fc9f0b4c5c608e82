"""Activation counts: how often each FFN neuron fired, a layer a vector.

They come from PowerInfer's `activation_N.pt` (read without PyTorch, by an unpickler that runs nothing) or from an
`.npz` with arrays of the same names.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._engine import ModelFormatError

Counts = list[NDArray[np.uint64]]

_NAME = re.compile(r"activation_\d+")
#: The most bytes of a pickle that describes one tensor; real ones have a few hundred.
_MAX_PICKLE = 1 << 16
#: What counts given as fractions become, at most.
_LARGEST = 2.0**32

_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
}


def _bad(file: object, field: str, got: object, expected: str) -> ModelFormatError:
    return ModelFormatError(f"{file}: {field}: got {got}, expected {expected}")


class _TensorUnpickler(pickle._Unpickler):
    """Reads the pickle of one tensor. It finds no class but those below, and none of them does anything.

    It is the one written in Python: the other takes memory by what a pickle claims.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: ("tensor", arguments)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}, which no tensor of counts has")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _read_stored(archive: zipfile.ZipFile, file: Path, ending: str, most: int) -> bytes:
    """The one entry of an archive with this ending: neither packed nor longer than `most`."""
    found = [info for info in archive.infolist() if info.filename.endswith(ending)]
    if len(found) != 1:
        raise _bad(file, f"entry {ending}", f"{len(found)} of them", "one")
    info = found[0]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _bad(file, f"entry {info.filename}", "packed", "stored as it is")
    if info.file_size > most:
        raise _bad(file, f"entry {info.filename}", f"{info.file_size} bytes", f"at most {most}")
    return archive.read(info)


def _read_pt(file: Path, n: int) -> NDArray[Any]:
    """The 1-D tensor of `n` values in a file of PyTorch's."""
    try:
        with zipfile.ZipFile(file) as archive:
            described = _TensorUnpickler(io.BytesIO(_read_stored(archive, file, "/data.pkl", _MAX_PICKLE))).load()
            kind, (storage, offset, shape, stride, *_) = described
            word, dtype, key, _, _ = storage
            if kind != "tensor" or word != "storage" or dtype not in _STORAGES.values():
                raise ValueError("no tensor of numbers")
            if not re.fullmatch(r"\w+", key):
                raise ValueError(f"a storage called {key!r}")
            if tuple(shape) != (n,) or tuple(stride) != (1,) or type(offset) is not int or offset < 0:
                raise _bad(file, "tensor", f"shape {shape} in steps of {stride}", f"shape ({n},), one a neuron")
            size = np.dtype(dtype).itemsize
            data = _read_stored(archive, file, f"/data/{key}", file.stat().st_size)
            if len(data) < (offset + n) * size:
                raise _bad(file, "tensor", f"{len(data)} bytes of data", f"at least {(offset + n) * size}")
            return np.frombuffer(data, dtype, n, offset * size)
    except (ModelFormatError, OSError):
        raise
    except zipfile.BadZipFile:
        raise _bad(file, "file", "no zip archive", "what torch.save writes since PyTorch 1.6") from None
    # A hostile pickle can fail in any way that Python code can.
    except Exception as error:
        raise _bad(file, "data.pkl", f"{type(error).__name__}: {error}", "a 1-D tensor of numbers") from None


def _read_folder(folder: Path, n_ff: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a folder's files `activation_N.pt`."""
    for file in sorted(folder.glob("*.pt")):
        if _NAME.fullmatch(file.stem):
            yield file.stem, _read_pt(file, n_ff)


def _read_npz(file: Path, n_ff: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of an .npz, each held against its length before any memory is taken for it."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                if not _NAME.fullmatch(name):
                    continue
                with archive.open(info) as entry:
                    version = np.lib.format.read_magic(entry)
                    if version != (1, 0):
                        raise _bad(file, f"array {name}", f"format {version}", "(1, 0)")
                    shape, _, dtype = np.lib.format.read_array_header_1_0(entry)
                    if shape != (n_ff,) or dtype.kind not in "iuf":
                        raise _bad(file, f"array {name}", f"{dtype} {shape}", f"numbers of shape ({n_ff},)")
                    data = entry.read(n_ff * dtype.itemsize)
                if len(data) != n_ff * dtype.itemsize:
                    raise _bad(file, f"array {name}", f"{len(data)} bytes", f"{n_ff * dtype.itemsize}")
                yield name, np.frombuffer(data, dtype)
    except (ValueError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise _bad(file, "file", error, "an .npz with arrays activation_0, activation_1, …") from None


def _as_counts(file: object, layers: list[NDArray[Any]]) -> Counts:
    """Whole numbers; fractions are scaled, all layers alike."""
    for i, values in enumerate(layers):
        if not np.isfinite(values).all() or (values < 0).any():
            raise _bad(file, f"activation_{i}", "a value below 0, or none", "counts")
    if all(values.dtype.kind != "f" or (values == np.floor(values)).all() for values in layers):
        return [np.minimum(values, 2**48).astype(np.uint64) for values in layers]
    largest = max(float(values.max()) for values in layers)
    return [np.rint(values.astype(np.float64) * (_LARGEST / largest)).astype(np.uint64) for values in layers]


def load_counts(path: str | os.PathLike[str], n_layers: int, n_ff: int) -> Counts:
    """Read activation counts.

    Args:
        path: A folder with `activation_0.pt`, `activation_1.pt`, … (numbers count, not the order of names; other files
            are ignored), or an `.npz` with arrays of these names.
        n_layers: Layers of the model.
        n_ff: Neurons of each.

    Returns:
        uint64 of shape (n_ff,), one a layer. Fractions are scaled, all layers alike.

    Raises:
        ModelFormatError: A layer lacks, is there twice or one too many; a file is broken or of another shape.
    """
    path = Path(path)
    found: dict[int, NDArray[Any]] = {}
    for name, values in (_read_folder if path.is_dir() else _read_npz)(path, n_ff):
        layer = int(name.removeprefix("activation_"))
        if layer in found:
            raise _bad(path, name, f"layer {layer} twice", "each layer once")
        if layer >= n_layers:
            raise _bad(path, name, f"layer {layer}", f"0 to {n_layers - 1}, the model's layers")
        found[layer] = values
    for layer in range(n_layers):
        if layer not in found:
            raise _bad(path, f"activation_{layer}", "nothing", f"one of {n_layers} layers")
    return _as_counts(path, [found[layer] for layer in range(n_layers)])
