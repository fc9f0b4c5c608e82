"""GGUF files written tensor by tensor: memory holds a few rows of one, and nothing half-written is left."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _engine
from .._engine import InvalidArgumentError

Progress = Callable[[int, int], object]
Key = tuple[str, tuple[str, Any] | None]

#: Values that are worked on at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Tensor:
    """A tensor to write.

    Attributes:
        name: GGUF's.
        dtype: The type to write.
        dims: Innermost first.
        read: Gives the bytes of the rows from one number up to another, in type `source`.
        source: The type of what `read` gives.
        importance: How much an error in each column weighs, (row length,).
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    read: Callable[[int, int], NDArray[np.uint8]]
    source: str
    importance: NDArray[np.float32] | None = None


def check_output(path: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Refuse to write over what is read.

    Raises:
        InvalidArgumentError: The output is one of the inputs.
    """
    for source in inputs:
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise InvalidArgumentError(f"output: {path} is what is read; expected another file")


def write_gguf(
    path: str | os.PathLike[str],
    keys: Sequence[Key],
    tensors: Sequence[Tensor],
    *,
    source: _engine.Reader | None = None,
    power_infer: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a file; `progress` is called with values done and values in all. See `_engine.Writer`."""
    specs = [(t.name, t.dtype, t.dims) for t in tensors]
    writer = _engine.Writer(path, keys, specs, source=source, power_infer=power_infer, threads=threads)
    total, done = sum(math.prod(t.dims) for t in tensors), 0
    try:
        for tensor in tensors:
            n_rows, step = math.prod(tensor.dims[1:]), max(1, _CHUNK // tensor.dims[0])
            for start in range(0, n_rows, step):
                end = min(start + step, n_rows)
                writer.write(tensor.read(start, end), tensor.source, tensor.importance)
                done += (end - start) * tensor.dims[0]
                if progress is not None:
                    progress(done, total)
        writer.finish()
    finally:
        writer.abandon()
