"""Importance matrices: llama.cpp's files of how large the inputs of each matrix's columns are."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .. import _engine
from .._engine import ModelFormatError, ModelNotFoundError

Importance = dict[str, NDArray[np.float32]]


def _bad(file: Path, field: str, got: object, expected: str) -> ModelFormatError:
    return ModelFormatError(f"{file}: {field}: got {got}, expected {expected}")


def _load_gguf(file: Path) -> Importance:
    """The newer form: two tensors for each matrix, sums of squares and how many they are of."""
    sizes = {name: dims for name, _, dims, _ in _engine.inspect(file)["tensors"]}
    found: Importance = {}
    for name, dims in sizes.items():
        if not name.endswith(".in_sum2"):
            continue
        matrix = name.removesuffix(".in_sum2")
        if f"{matrix}.counts" not in sizes or any(d != 1 for d in dims[1:]):
            raise _bad(file, f"tensor {name}", f"shape {dims}", f"one row, with {matrix}.counts beside it")
        count = float(_engine.decode_tensor(file, f"{matrix}.counts").sum())
        found[matrix] = _engine.decode_tensor(file, name) / np.float32(max(count, 1.0))
    return found


def _load_legacy(file: Path) -> Importance:
    """The older form: counts, names and sums, one after the other."""
    found: Importance = {}
    left = file.stat().st_size
    with file.open("rb") as data:

        def take(n: int, field: str) -> bytes:
            nonlocal left
            if not 0 <= n <= left:
                raise _bad(file, field, f"{n} bytes", f"at most the {left} that are left")
            left -= n
            return data.read(n)

        def number(field: str) -> int:
            return int(struct.unpack("<i", take(4, field))[0])

        n_entries = number("entries")
        if not 0 < n_entries < 1 << 20:
            raise _bad(file, "entries", n_entries, "an importance matrix, of 1 to a million tensors")
        for i in range(n_entries):
            try:
                name = take(number(f"entry {i}"), f"entry {i} (name)").decode()
            except UnicodeDecodeError:
                raise _bad(file, f"entry {i} (name)", "other bytes", "UTF-8") from None
            count = number(f"{name[:200]} (count)")
            n_values = number(f"{name[:200]} (values)")
            values = np.frombuffer(take(4 * n_values, f"{name[:200]} (values)"), "<f4")
            found[name] = (values / max(count, 1)).astype(np.float32)
    return found


def load_importance(path: str | os.PathLike[str]) -> Importance:
    """Read an importance matrix, `.dat` or `.gguf`.

    Args:
        path: What `llama-imatrix` writes.

    Returns:
        The mean square of the input that each column meets, float32 of shape (row length,), by tensor.

    Raises:
        ModelNotFoundError: The file isn't there.
        ModelFormatError: It is broken.
    """
    file = Path(path)
    if not file.exists():
        raise ModelNotFoundError(f"{file}: not there; expected an importance matrix")
    if not file.is_file():
        raise _bad(file, "file", "no regular file", "an importance matrix")
    with file.open("rb") as data:
        is_gguf = data.read(4) == b"GGUF"
    found = _load_gguf(file) if is_gguf else _load_legacy(file)
    for name, values in found.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise _bad(file, f"values of {name[:200]}", "one below 0, or no number", "means of squares")
    return found
