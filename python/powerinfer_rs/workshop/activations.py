"""Activation counts from running a model."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .. import _engine
from .._engine import InvalidArgumentError
from ..activations import Counts
from ..arguments import check_whole
from ..engine import Engine


def profile(
    path: str | os.PathLike[str],
    *,
    text: str | None = None,
    max_tokens: int = 512,
    threads: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Counts:
    """Count how often each neuron fires while a sparse model runs.

    Args:
        path: A model whose FFN is ReLU.
        text: What to run it over; none for a text of its own making, drawn with a fixed seed.
        max_tokens: The most tokens of it.
        threads: As for `Engine`.
        progress: Called with tokens done and tokens in all.

    Returns:
        uint64 of shape (n_ff,), one a layer.

    Raises:
        InvalidArgumentError: No neuron of the model is ever off, or there is no text.
    """
    check_whole("max_tokens", max_tokens, 1)
    # On the processor: where neurons live isn't known yet.
    engine = Engine(path, threads=threads, count_neurons=True, device="cpu")
    if text is None:
        bos = engine.metadata.get("tokenizer.ggml.bos_token_id", 0)
        for done, _ in enumerate(
            engine.stream([bos], max_tokens=min(max_tokens, engine.n_ctx - 1), seed=0, ignore_eos=True)
        ):
            if progress is not None:
                progress(done, max_tokens)
    else:
        ids = np.array(engine.tokenize(text)[:max_tokens], np.uint32)
        if not text or not len(ids):
            raise InvalidArgumentError("text: got none, expected some to count activations over")
        _run(engine.native, ids, min(engine.n_ctx, 512), progress)
    return engine.native.fired()


def _run(
    native: _engine.Engine, ids: NDArray[np.uint32], n: int, progress: Callable[[int, int], object] | None
) -> None:
    """Run tokens through a model, `n` at a time, each time from an empty sequence."""
    for start in range(0, len(ids), n):
        sequence = native.new_sequence()
        try:
            native.step([(sequence, ids[start : start + n], 1)])
        finally:
            native.free(sequence)
        if progress is not None:
            progress(min(start + n, len(ids)), len(ids))
