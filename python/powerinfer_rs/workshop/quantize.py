"""Model files in other types."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from .. import _engine
from .._engine import InvalidArgumentError, ModelFormatError
from .file_types import Mix, file_type
from .imatrix import load_importance
from .output import Key, Progress, Tensor, check_output, write_gguf

#: The key `general.quantization_version`: how blocks are laid out, unchanged since 2023.
_LAYOUT = 2


@dataclass(frozen=True)
class Quantized:
    """What became of a file.

    Attributes:
        path: The file written.
        bytes_before: Bytes of the tensors that were read.
        bytes_after: Bytes of the file written.
        types: How many tensors have each type.
        notices: What wasn't done as asked, and why, one sentence each.
    """

    path: Path
    bytes_before: int
    bytes_after: int
    types: dict[str, int]
    notices: list[str]


def quantize(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    type: str,
    *,
    predictor_type: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Write a model file, PowerInfer's or an ordinary one, with its matrices in another type.

    Norms, biases and learned positions stay as they are. Rows that don't divide into a type's blocks get the nearest
    type that they do divide into.

    Args:
        source: A GGUF file, or any part of a split one.
        output: The file to write, whole or not at all.
        type: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16", "f32", "q2_k", "q6_k", or one of llama.cpp's
            mixes: "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m".
        predictor_type: The type of predictors, where it isn't to be `type`'s.
        imatrix: An importance matrix of llama.cpp's, `.dat` or `.gguf`: errors weigh by it.
        threads: Threads to compute with; none for the physical cores.
        progress: Called with weights done and weights in all.

    Returns:
        What was written.

    Raises:
        InvalidArgumentError: There is no such type, or the output is the source.
        ModelFormatError: The source or the importance matrix is broken, or holds a value that is no number.
        ModelFileError: The output can't be written; nothing is left of it.
    """
    to = file_type(type)
    predictors = to if predictor_type is None else file_type(predictor_type, "predictor_type")
    check_output(output, source, *([] if imatrix is None else [imatrix]))
    reader = _engine.Reader(source)
    info = reader.header()
    keys = info["metadata"]
    arch = keys.get("general.architecture")
    if not isinstance(arch, str) or not isinstance(keys.get(f"{arch}.block_count"), int):
        raise ModelFormatError(f"{source}: key general.architecture: got {arch!r}, expected that of a model")
    importance = load_importance(imatrix) if imatrix is not None else {}
    names = {name for name, *_ in info["tensors"]}
    heads, kv_heads = (keys.get(f"{arch}.attention.head_count{end}") for end in ("", "_kv"))
    grouped = heads // kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 else 1
    mix = Mix(
        to,
        predictors,
        n_layers=keys[f"{arch}.block_count"],
        falcon=arch == "falcon",
        grouped=grouped,
        tied="output.weight" not in names,
        important=bool(importance),
    )
    notices, tensors = [], []
    for name, current, dims, _ in info["tensors"]:
        kind, wanted = mix.of(name, tuple(dims), current)
        if wanted is not None:
            notices.append(f"{name}: rows of {dims[0]} don't divide into blocks of {wanted}: {kind} instead")
        weights = importance.get(name)
        if weights is not None and weights.shape != (dims[0],):
            raise InvalidArgumentError(
                f"imatrix: got {weights.size} values for {name}, expected {dims[0]}: it is another model's"
            )
        read = functools.partial(reader.rows, name)
        tensors.append(Tensor(name, kind, tuple(dims), read, current, weights))
    if any(t.source.startswith("Q") and t.dtype not in (t.source, "F16", "F32", "BF16") for t in tensors):
        notices.append("some tensors were quantised before: what that lost is lost; better start from F16 or BF16")
    unknown = importance.keys() - names
    if importance and len(unknown) == len(importance):
        raise InvalidArgumentError("imatrix: got no tensor of this model, expected one made with it")
    new_keys: list[Key] = [("general.file_type", ("u32", to.number))]
    if any(t.dtype.startswith("Q") for t in tensors):
        new_keys.append(("general.quantization_version", ("u32", _LAYOUT)))
    # The output is one file, whatever the source was.
    new_keys += [(key, None) for key in ("split.no", "split.count", "split.tensors.count")]
    write_gguf(
        output,
        new_keys,
        tensors,
        source=reader,
        power_infer=info["magic"] == "PWRI",
        threads=threads,
        progress=progress,
    )
    kinds = sorted({t.dtype for t in tensors})
    return Quantized(
        Path(output),
        sum(n_bytes for *_, n_bytes in info["tensors"]),
        Path(output).stat().st_size,
        {kind: sum(t.dtype == kind for t in tensors) for kind in kinds},
        notices,
    )
