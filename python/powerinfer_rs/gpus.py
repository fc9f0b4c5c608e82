"""GPUs: which an engine uses, how much of their memory, and which neurons live there."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import _engine
from ._engine import DeviceError, InvalidArgumentError, ModelFormatError
from .activations import Counts, load_counts
from .arguments import check_number

_log = logging.getLogger("powerinfer_rs")

#: What a GPU takes for its own context before anything is placed on it.
CONTEXT_BYTES = 512 << 20
#: The fewest neurons of a layer that are worth handing over to a GPU.
LEAST = 64
#: Of a GPU's free memory, what is left to others where nobody sets a budget: so many bytes, or this share.
#: The driver rounds large allocations up to 2 MB and keeps the kernels' code: some hundred MB.
_RESERVE_BYTES, _RESERVE_SHARE = 768 << 20, 0.02
#: Positions whose cache GPUs have room for where nobody says how long texts get; the rest lies in the host's memory.
MOST_CACHED = 8192
#: A split made for this share of what fits, or more, is as good as a new one.
_SAME = 0.97


@dataclass(frozen=True)
class Use:
    """What an engine does with GPUs; without any it runs on the processor.

    Attributes:
        gpus: Of each its number, bytes of memory, bytes of them for its context, the fewest neurons worth handing over.
        neuron_counts: How often each neuron fired, a layer a vector; none where nobody knows.
        hot_neurons: The neurons for GPUs, where a file names them.
        context: Positions whose cache GPUs have room for; none for the engine's context.
    """

    gpus: list[tuple[int, int, int, int]] = field(default_factory=list)
    neuron_counts: Counts | None = None
    hot_neurons: list[NDArray[np.uint32]] | None = None
    context: int | None = None


def gpu_index_path(model: str | os.PathLike[str]) -> Path:
    """Where a model's split is kept: `MODEL.generated.gpuidx`."""
    return Path(f"{os.fspath(model)}.generated.gpuidx")


def shape(model: str | os.PathLike[str]) -> tuple[int, int, int]:
    """A model's layers, neurons of each, and the context it was trained for."""
    keys = _engine.inspect(model)["metadata"]
    arch = keys.get("general.architecture")
    numbers = [keys.get(f"{arch}.{name}") for name in ("block_count", "feed_forward_length", "context_length")]
    n_layers, n_ff, n_ctx = (n if isinstance(n, int) and n > 0 else 0 for n in numbers)
    if not n_layers or not n_ff:
        raise ModelFormatError(
            f"{model}: key {arch}.block_count: got {numbers[0]}, and {numbers[1]} for feed_forward_length, "
            "expected whole numbers above 0"
        )
    return n_layers, n_ff, n_ctx or 2048


def check_device(device: object, vram_budget: object) -> None:
    """Refuse devices and budgets that can't be."""
    if not isinstance(device, str) or (device not in ("auto", "cpu", "cuda") and _numbers(device) is None):
        raise InvalidArgumentError(
            f"device: got {device!r}, expected auto, cpu, cuda, or numbers as in cuda:0,1, each once"
        )
    if isinstance(vram_budget, (list, tuple)) and not vram_budget:
        raise InvalidArgumentError("vram_budget: got an empty list, expected one for all GPUs or one for each, or None")
    for budget in _budgets(vram_budget):
        check_number("vram_budget", budget)
        if not 0 <= budget < 2**20:
            raise InvalidArgumentError(f"vram_budget: got {budget}, expected GB from 0 to 2^20")


def _numbers(device: str) -> list[int] | None:
    """The numbers of `cuda:0,1`; none where that isn't what it says."""
    numbers = device.removeprefix("cuda:").split(",")
    if not device.startswith("cuda:") or not all(n.isascii() and n.isdigit() and len(n) < 4 for n in numbers):
        return None
    found = [int(n) for n in numbers]
    return found if len(set(found)) == len(found) else None


def _budgets(vram_budget: object) -> list[float]:
    if vram_budget is None:
        return []
    return list(vram_budget) if isinstance(vram_budget, (list, tuple)) else [vram_budget]  # type: ignore[list-item]


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Refuse to write a split where something else is: a model, say."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"output: {path.parent} is no folder")
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(256)
        if start and b"generic.gpu_index" not in start:
            raise InvalidArgumentError(f"output: {path} is there and is no GPU index; it stays as it is")
    elif path.exists():
        raise InvalidArgumentError(f"output: {path} is there and is no file")


def check_used(use: Use, info: _engine.Info, device: str) -> None:
    """Say which GPUs hold nothing of a loaded model, or less than they were to.

    Raises:
        DeviceError: None of those asked for by name holds anything.
    """
    unused = [
        f"cuda:{number}: a budget of {budget / 2**30:.3f} GB holds nothing of this model"
        + (f"; it takes {least / 2**30:.3f} at least, for the driver, buffers and one layer" if least else "")
        for number, budget, least in info["unused_gpus"]
    ]
    if unused and not info["gpus"] and device != "auto":
        raise DeviceError("; ".join(unused))
    for line in unused:
        _log.warning("%s", line)
    if use.hot_neurons is not None and info["gpus"]:
        n_asked = sum(len(hot) for hot in use.hot_neurons)
        n_placed = sum(len(hot) for gpu in info["gpus"] for hot in gpu["plan"]["hot"])
        if n_placed < n_asked:
            _log.warning("of %d neurons that the GPU index names %d fit", n_asked, n_placed)


def choose(
    model: str | os.PathLike[str],
    device: str,
    vram_budget: float | Sequence[float] | None,
    *,
    n_ctx: int | None,
    kv_type: str,
    gpu_index: str | os.PathLike[str],
) -> Use:
    """Choose GPUs for a model, as `Engine` is asked to; nothing is loaded.

    Raises:
        DeviceError: There is no such GPU.
        InvalidArgumentError: Budgets are more than GPUs.
        ModelFormatError: The split's file is broken, or another model's.
    """
    budgets = _budgets(vram_budget)
    if device != "cpu" and device != "auto" and budgets and not any(budgets):
        raise InvalidArgumentError(
            f"vram_budget: got 0 for device {device}, expected some; device='cpu' is without GPUs"
        )
    if device == "cpu" or (budgets and not any(budgets)):
        return Use()
    found = {gpu["number"]: gpu for gpu in _engine.gpus()}
    numbers = _numbers(device) or sorted(found)
    if not found or not set(numbers) <= found.keys():
        if device == "auto":
            if budgets:
                _log.warning("vram_budget: there is no NVIDIA GPU with its driver: running on the processor")
            return Use()
        there = ", ".join(f"cuda:{n}" for n in found) or "no NVIDIA GPU with its driver"
        raise DeviceError(f"device {device}: this machine has {there}; device='cpu' runs without")
    if budgets and len(budgets) not in (1, len(numbers)):
        raise InvalidArgumentError(
            f"vram_budget: got {len(budgets)} for {len(numbers)} GPUs, expected one for all or one for each"
        )
    gpus = []
    for i, number in enumerate(numbers):
        total, free = found[number]["total"], found[number]["free"]
        if not budgets:
            gpus.append((number, max(0, free - int(max(_RESERVE_BYTES, total * _RESERVE_SHARE))), 0, LEAST))
            continue
        budget = int(budgets[i % len(budgets)] * 2**30)
        if budget > free + CONTEXT_BYTES:
            _log.warning(
                "vram_budget: %.2f GB are more than the %.2f GB free on cuda:%d: using those",
                *(budget / 2**30, free / 2**30, number),
            )
            # What the driver takes is gone already.
            gpus.append((number, free, 0, LEAST))
            continue
        gpus.append((number, budget, CONTEXT_BYTES, LEAST))
    n_layers, n_ff, trained = shape(model)
    context = min(trained, MOST_CACHED) if n_ctx is None else None
    use = Use(gpus, context=context)
    if gpu_index == "off":
        return use
    if gpu_index not in ("auto", "reset"):
        return Use(gpus, None, _engine.read_gpu_index(gpu_index, n_layers, n_ff)["hot"], context)
    return _with_split(use, model, n_layers, n_ff, n_ctx or min(trained, MOST_CACHED), kv_type, gpu_index == "reset")


def _with_split(
    use: Use, model: str | os.PathLike[str], n_layers: int, n_ff: int, n_ctx: int, kv_type: str, reset: bool
) -> Use:
    """The cached split where it is as large as memory allows; otherwise counts to make one by, and a new file."""
    path = gpu_index_path(model)
    folder = Path(model).parent / "activation"
    try:
        counts = load_counts(folder, n_layers, n_ff) if folder.is_dir() else None
    except ModelFormatError as error:
        raise ModelFormatError(f"{error}; --disable-gpu-index (gpu_index='off') goes without such files") from None
    cached = None
    if path.exists() and not reset:
        try:
            cached = _engine.read_gpu_index(path, n_layers, n_ff)
        except ModelFormatError as error:
            raise ModelFormatError(f"{error}; --reset-gpu-index (gpu_index='reset') makes a new one") from None
    if counts is None and cached is None:
        return use
    if counts is None:
        assert cached is not None
        # The file says which neurons fire most, not how often.
        counts = [np.ones(n_ff, np.uint64) for _ in range(n_layers)]
        for layer, listed in zip(counts, cached["hot"], strict=True):
            layer[listed] = 2
    else:
        _log.debug("activation counts from %s", folder)
    plans = _engine.plan(
        model,
        counts,
        [budget for _, budget, _, _ in use.gpus],
        n_ctx=n_ctx,
        kv_type=kv_type,
        context_bytes=use.gpus[0][2],
        least=LEAST,
    )
    fits = sum(plan["bytes"]["neurons"] for plan in plans)
    if cached is not None and _SAME * fits <= cached["capacity"] <= fits:
        return Use(use.gpus, None, cached["hot"], use.context)
    hot = [neurons for plan in plans for neurons in plan["hot"]]
    if folder.is_dir() and len(hot) == n_layers:
        check_replaceable(path)
        try:
            _engine.write_gpu_index(path, hot, n_ff, fits)
            _log.info("%s written, by the counts in %s", path, folder)
        except OSError as error:
            _log.info("the split isn't kept: %s", error)
    return Use(use.gpus, counts, None, use.context)
