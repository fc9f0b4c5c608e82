"""Splits: which neurons of a model live on a GPU of so much memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .. import _engine
from .._engine import InvalidArgumentError
from ..activations import Counts
from ..arguments import check_number, check_whole
from ..gpus import CONTEXT_BYTES, LEAST, MOST_CACHED, check_replaceable, shape

if TYPE_CHECKING:
    from .._engine import DevicePlan


@dataclass(frozen=True)
class Split:
    """A plan for each GPU, and what it was made for.

    Attributes:
        devices: One plan a GPU.
        budgets: Bytes of each GPU's memory.
        n_ff: Neurons of a layer.
    """

    devices: list[DevicePlan]
    budgets: list[int]
    n_ff: int

    @property
    def hot(self) -> list[NDArray[np.uint32]]:
        """The numbers of the neurons on a GPU, ascending, (hot,) a layer."""
        return [hot for device in self.devices for hot in device["hot"]]

    @property
    def neuron_bytes(self) -> int:
        """Bytes of the neurons on GPUs: what a `.gpuidx` calls its capacity."""
        return sum(device["bytes"]["neurons"] for device in self.devices)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write PowerInfer's `.gpuidx`; one that is there is replaced once the new one is whole.

        Raises:
            InvalidArgumentError: Something else is there.
        """
        check_replaceable(path)
        _engine.write_gpu_index(path, self.hot, self.n_ff, self.neuron_bytes)


def check_budgets(budgets_gb: float | Sequence[float]) -> list[float]:
    """The budgets as a list; refuses what is none."""
    several = isinstance(budgets_gb, (list, tuple, np.ndarray))
    budgets: list[float] = list(budgets_gb) if several else [budgets_gb]  # type: ignore[arg-type, list-item]
    if not budgets:
        raise InvalidArgumentError("budgets_gb: got none, expected the memory of one GPU at least")
    for budget in budgets:
        check_number("budgets_gb", budget)
        if not 0 <= budget < 2**20:
            raise InvalidArgumentError(f"budgets_gb: got {budget}, expected GB from 0 to 2^20")
    return budgets


def split(
    model: str | os.PathLike[str],
    counts: Counts,
    budgets_gb: float | Sequence[float],
    *,
    n_ctx: int | None = None,
    kv_type: str = "f16",
    context_bytes: int = CONTEXT_BYTES,
    least: int = LEAST,
) -> Split:
    """Choose what of a model goes to GPUs of so much memory; nothing is loaded.

    First attention with its cache, then predictors, then the head; the rest goes to the neurons that fire most.

    Args:
        model: A GGUF file.
        counts: How often each neuron fired, (n_ff,) a layer: of `load_counts` or `profile`.
        budgets_gb: Memory of the GPU in GB (2^30 bytes), or of each of several.
        n_ctx: Positions of the cache; none for what `Engine` takes: the model's own, 8192 at most.
        kv_type: "f16", "q8_0" or "f32".
        context_bytes: What a GPU takes for its own context.
        least: The fewest neurons of a layer that are worth handing over; a layer has none on a GPU, or so many.

    Returns:
        The plan.

    Raises:
        InvalidArgumentError: A budget is no number from 0 on, or counts don't fit the model.
    """
    budgets_gb = check_budgets(budgets_gb)
    check_whole("context_bytes", context_bytes, 0, 2**50)
    check_whole("least", least, 1, 2**24)
    if n_ctx is not None:
        check_whole("n_ctx", n_ctx, 1, 2**31 - 1)
    _, n_ff, n_ctx_train = shape(model)
    budgets = [int(budget * 2**30) for budget in budgets_gb]
    devices = _engine.plan(
        model,
        [np.asarray(layer, np.uint64) for layer in counts],
        budgets,
        n_ctx=n_ctx or min(n_ctx_train, MOST_CACHED),
        kv_type=kv_type,
        context_bytes=context_bytes,
        least=least,
    )
    return Split(devices, budgets, n_ff)
