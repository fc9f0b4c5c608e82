"""`powerinfer inspect`: what is in a model file."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import _engine
from ..models import resolve
from . import options


def _short(value: Any) -> str:
    if isinstance(value, list):
        head = ", ".join(str(v) for v in value[:4])
        return f"[{head}{', …' if len(value) > 4 else ''}] ({len(value)})"
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 80 else text[:79] + "…"


def _memory(info: _engine.FileInfo) -> dict[str, int]:
    """Bytes that running the file takes: weights, and the cache at full context."""
    keys, arch = info["metadata"], info["metadata"].get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        value = keys.get(f"{arch}.{name}", default)
        return value if isinstance(value, int) else default

    heads = max(1, number("attention.head_count", 1))
    head_dim = number("attention.key_length", number("embedding_length") // heads)
    n_kv = number("attention.head_count_kv", heads)
    per_token = 2 * 2 * number("block_count") * n_kv * head_dim
    return {
        "weights": sum(t[3] for t in info["tensors"]),
        "kv_cache_per_token": per_token,
        "kv_cache_at_full_context": per_token * number("context_length"),
    }


def inspect(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A GGUF file; the demo model if left out.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show a file's keys, tensors, types and sizes, whether it has predictors, and the memory it needs."""
    file = resolve(file)
    info = _engine.inspect(file)
    predictors = any(name.endswith(".fc1.weight") for name, *_ in info["tensors"])
    memory = _memory(info)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for _, kind, _, n_bytes in info["tensors"]:
        sizes[kind] += n_bytes
        counts[kind] += 1
    if as_json:
        print(json.dumps({**info, "predictors": predictors, "memory": memory}))
        return
    console = Console(highlight=False)
    keys = Table("key", "value", title=Text(str(file)), title_justify="left")
    for name, value in info["metadata"].items():
        keys.add_row(Text(name), Text(_short(value)))
    console.print(keys)
    types = Table("type", "tensors", "size")
    for kind, n_bytes in sizes.most_common():
        types.add_row(kind, str(counts[kind]), options.size(n_bytes))
    console.print(types)
    if tensors:
        table = Table("tensor", "type", "shape", "size")
        for name, kind, dims, n_bytes in info["tensors"]:
            table.add_row(Text(name), kind, " x ".join(map(str, dims)), options.size(n_bytes))
        console.print(table)
    n_weights = sum(math.prod(dims) for _, _, dims, _ in info["tensors"])
    lines = [
        f"format: {info['magic']} version {info['version']}, {options.size(info['file_bytes'])}",
        f"architecture: {info['metadata'].get('general.architecture', 'none')}, {n_weights / 1e6:.1f} M weights",
        f"activation predictors: {'yes' if predictors else 'no'}",
        f"memory: weights {options.size(memory['weights'])}, "
        f"f16 cache {options.size(memory['kv_cache_per_token'])} a token, "
        f"{options.size(memory['kv_cache_at_full_context'])} at full context",
    ]
    console.print(Text("\n".join(lines)), soft_wrap=True)
