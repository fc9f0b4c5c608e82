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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ._engine import ModelFormatError, ModelNotFoundError

Counts = list[NDArray[np.uint64]]

_NAME = re.compile(r"activation_[0-9]{1,6}")
#: The most bytes of a pickle that describes one tensor; real ones have a few hundred.
_MAX_PICKLE = 1 << 16
#: What counts given as fractions become, at most.
_LARGEST = 2.0**32

#: All that the pickle of a tensor does. No tuple is a key and nothing is doubled, so that a short one can't stand for
#: a long time or much memory.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.BINPERSID, pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.LONG1, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.NEWTRUE, pickle.NEWFALSE, pickle.NONE, pickle.EMPTY_DICT, pickle.BUILD),
)

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

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: ("tensor", arguments)
        if (module, name) == ("collections", "OrderedDict"):
            return lambda *_: None
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}, which no tensor of counts has")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _is_vector(shape: object, stride: object, n: int) -> bool:
    """Whether both are tuples of one number, as a tensor of `n` values in a row has them."""
    for values, expected in ((shape, n), (stride, 1)):
        if type(values) is not tuple or len(values) != 1 or type(values[0]) is not int or values[0] != expected:
            return False
    return True


def _read_stored(archive: zipfile.ZipFile, file: Path, ending: str, n_bytes: int, most: int | None = None) -> bytes:
    """The first bytes of the one entry of an archive with this ending, which isn't packed, nor longer than `most`."""
    found = [info for info in archive.infolist() if info.filename.endswith(ending)]
    if len(found) != 1:
        raise _bad(file, f"entry {ending}", f"{len(found)} of them", "one")
    info = found[0]
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise _bad(file, f"entry {info.filename}", "packed", "stored as it is")
    if most is not None and info.file_size > most:
        raise _bad(file, f"entry {info.filename}", f"{info.file_size} bytes", f"at most {most}")
    with archive.open(info) as entry:
        return entry.read(n_bytes)


def _check_regular(file: Path) -> None:
    """Refuse what isn't an ordinary file: reading a pipe would wait for ever."""
    if not file.is_file():
        raise _bad(file, "file", "no regular file", "one")


def _told(error: Exception) -> str:
    """An error in few words: what a hostile file makes Python say can be long."""
    return f"{type(error).__name__}: {str(error)[:200]}"


def _read_pt(file: Path, n: int) -> NDArray[Any]:
    """The 1-D tensor of `n` values in a file of PyTorch's."""
    try:
        with zipfile.ZipFile(file) as archive:
            described = _TensorUnpickler(
                io.BytesIO(_read_stored(archive, file, "/data.pkl", _MAX_PICKLE, _MAX_PICKLE))
            ).load()
            kind, (storage, offset, shape, stride, *_) = described
            word, dtype, key, _, _ = storage
            if kind != "tensor" or word != "storage" or dtype not in _STORAGES.values():
                raise ValueError("no tensor of numbers")
            if type(key) is not str or not re.fullmatch(r"\w{1,64}", key):
                raise ValueError("a storage without a plain name")
            if not _is_vector(shape, stride, n) or type(offset) is not int or not 0 <= offset < 2**48:
                raise _bad(file, "tensor", "another shape", f"shape ({n},), one a neuron")
            size = np.dtype(dtype).itemsize
            data = _read_stored(archive, file, f"/data/{key}", (offset + n) * size)
            if len(data) < (offset + n) * size:
                raise _bad(file, "tensor", f"{len(data)} bytes of data", f"at least {(offset + n) * size}")
            return np.frombuffer(data, dtype, n, offset * size)
    except ModelFormatError:
        raise
    except zipfile.BadZipFile:
        raise _bad(file, "file", "no sound zip archive", "what torch.save writes since PyTorch 1.6") from None
    # A hostile file can fail in any way that Python code can.
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise _bad(file, "data.pkl", _told(error), "a 1-D tensor of numbers") from None


def _read_folder(folder: Path, n_ff: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a folder's files `activation_N.pt`."""
    for file in sorted(folder.glob("*.pt")):
        if _NAME.fullmatch(file.stem):
            _check_regular(file)
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
                    if shape != (n_ff,) or dtype.kind not in "iuf" or dtype.itemsize > 8:
                        got = f"{str(dtype)[:40]} {str(shape)[:40]}"
                        raise _bad(file, f"array {name}", got, f"numbers of shape ({n_ff},)")
                    data = entry.read(n_ff * dtype.itemsize)
                if len(data) != n_ff * dtype.itemsize:
                    raise _bad(file, f"array {name}", f"{len(data)} bytes", f"{n_ff * dtype.itemsize}")
                yield name, np.frombuffer(data, dtype)
    except ModelFormatError:
        raise
    # What is packed can fail in any way that its packer can.
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise _bad(file, "file", _told(error), "an .npz with arrays activation_0, activation_1, …") from None


def _as_counts(file: object, layers: list[NDArray[Any]]) -> Counts:
    """Whole numbers; fractions are scaled, all layers alike."""
    for i, values in enumerate(layers):
        if not np.isfinite(values).all() or (values < 0).any():
            raise _bad(file, f"activation_{i}", "a value below 0, or none", "counts")
    if all(values.dtype.kind != "f" or (values == np.floor(values)).all() for values in layers):
        wide = [values.astype(np.float64 if values.dtype.kind == "f" else np.uint64) for values in layers]
        return [np.minimum(values, 2**48).astype(np.uint64) for values in wide]
    largest = max(float(values.max()) for values in layers)
    return [np.rint(values.astype(np.float64) / largest * _LARGEST).astype(np.uint64) for values in layers]


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
        ModelNotFoundError: The path isn't there.
        ModelFormatError: A layer lacks, is there twice or one too many; a file is broken or of another shape.
    """
    path = Path(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: No such file or directory")
    if not path.is_dir():
        _check_regular(path)
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
