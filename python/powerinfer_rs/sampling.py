"""From logits to the next token.

The order is llama.cpp's: logit bias, penalties, then top-k, typical, top-p and min-p, each on what the one before has
left, then the temperature, then a draw. Greedy (temperature 0) takes the largest logit after bias and penalties, the
lowest id among equals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ._engine import InvalidArgumentError, PowerInferError

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_BLOCK = 64
_FEW = 1024


class SamplingError(PowerInferError):
    """Logits that no token can be chosen from: one is NaN, or none is left."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the fewest most likely tokens that together reach this probability; 1 keeps all (Holtzman et al.,
            "The Curious Case of Neural Text Degeneration", 2019).
        min_p: Keep tokens at least this likely, relative to the most likely one; 0 keeps all (Nguyen et al., "Turning
            Up the Heat", 2024).
        typical_p: Keep the tokens whose surprise is nearest to the expected, until they reach this probability; 1
            keeps all (Meister et al., "Locally Typical Sampling", 2022).
        repeat_penalty: Divides positive and multiplies negative logits of recent tokens; 1 is off.
        frequency_penalty: Taken off the logit of a recent token for each time it occurs.
        presence_penalty: Taken off the logit of a recent token once.
        penalty_last_n: How many tokens are recent; -1 is all.
        logit_bias: Added to single tokens' logits; minus infinity forbids one.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise InvalidArgumentError(f"{name}: got {getattr(self, name)!r}, expected {expected}")

        for name in ("top_k", "penalty_last_n"):
            value = getattr(self, name)
            check(name, isinstance(value, (int, np.integer)) and not isinstance(value, bool), "a whole number")
        names = "temperature top_p min_p typical_p repeat_penalty frequency_penalty presence_penalty"
        for name in names.split():
            check(name, isinstance(getattr(self, name), (int, float, np.integer, np.floating)), "a number")
        check("logit_bias", isinstance(self.logit_bias, Mapping), "numbers by token id")
        check("temperature", 0 <= self.temperature < math.inf, "a number from 0 on")
        check("top_k", self.top_k >= 0, "a whole number from 0 on")
        for name in ("top_p", "min_p", "typical_p"):
            check(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        check("repeat_penalty", 0 < self.repeat_penalty < math.inf, "a number above 0")
        check("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number")
        check("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        check("penalty_last_n", self.penalty_last_n >= -1, "a whole number from -1 on")
        pairs = self.logit_bias.items()
        sound = all(isinstance(k, (int, np.integer)) and isinstance(v, (int, float, np.floating)) for k, v in pairs)
        check("logit_bias", sound and all(v < math.inf for _, v in pairs), "numbers or minus infinity, by token id")


class Sampler:
    """Chooses tokens one after the other.

    Args:
        params: How to choose.
        seed: Makes the draws repeatable, in this process and any other.
    """

    def __init__(self, params: SamplingParams, seed: int | None = None) -> None:
        if seed is not None and (not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0):
            raise InvalidArgumentError(f"seed: got {seed!r}, expected a whole number from 0 on")
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(seed))

    def sample(self, logits: Floats, recent: Sequence[int] = ()) -> int:
        """Choose a token.

        Args:
            logits: float32 of shape (n_vocab,); left as they are.
            recent: The tokens so far, for the penalties.

        Returns:
            The token's id.

        Raises:
            SamplingError: A logit is NaN or plus infinity, or all are minus infinity.
        """
        p = self.params
        if logits.ndim != 1 or not len(logits):
            raise SamplingError(f"logits: got shape {logits.shape}, expected (n_vocab,)")
        logits = self._adjusted(logits, recent)
        best = logits.max()
        if not np.isfinite(best):
            what = "NaN" if np.isnan(best) else f"a largest logit of {best}"
            raise SamplingError(f"logits: got {what}, expected finite numbers")
        if p.temperature == 0:
            return int(logits.argmax())
        ids, values = self._candidates(logits)
        if p.typical_p < 1:
            ids, values = _typical(ids, values, p.typical_p)
        if p.top_p < 1:
            ids, values = _nucleus(ids, values, p.top_p)
        if p.min_p > 0:
            keep = values >= values.max() + math.log(p.min_p)
            ids, values = ids[keep], values[keep]
        # In float64: the smallest temperatures would overflow float32, and the draw go astray.
        scaled = (values.astype(np.float64) - float(values.max())) / p.temperature
        total = np.cumsum(np.exp(scaled))
        draw = self._random.random() * total[-1]
        return int(ids[min(int(np.searchsorted(total, draw, side="right")), len(ids) - 1)])

    def _adjusted(self, logits: Floats, recent: Sequence[int]) -> Floats:
        """The logits with bias and penalties, as a copy where there are any."""
        p = self.params
        penalised = p.repeat_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        window = recent if p.penalty_last_n < 0 else recent[max(0, len(recent) - p.penalty_last_n) :]
        if not p.logit_bias and not (penalised and len(window)):
            return logits
        logits = logits.copy()
        for token, bias in p.logit_bias.items():
            if not 0 <= token < len(logits):
                raise InvalidArgumentError(f"logit_bias: got id {token}, expected 0 to {len(logits) - 1}")
            logits[token] += bias
        if penalised and len(window):
            ids, counts = np.unique(np.asarray(window, dtype=np.intp), return_counts=True)
            values = logits[ids]
            values = np.where(values > 0, values / p.repeat_penalty, values * p.repeat_penalty)
            logits[ids] = values - counts * p.frequency_penalty - p.presence_penalty
        return logits

    def _candidates(self, logits: Floats) -> tuple[Ids, Floats]:
        """The tokens that top-k leaves, the likeliest first; without it all, by id."""
        if 0 < self.params.top_k < len(logits):
            return _largest(logits, self.params.top_k)
        return np.arange(len(logits)), logits


def _softmax(values: Floats) -> Floats:
    scaled = np.exp(values - values.max())
    normalised: Floats = scaled / scaled.sum()
    return normalised


def _sorted(ids: Ids, logits: Floats) -> tuple[Ids, Floats]:
    order = np.argsort(-logits[ids], kind="stable")
    ids = ids[order]
    return ids, logits[ids]


def _largest(logits: Floats, k: int) -> tuple[Ids, Floats]:
    """The k largest, sorted. The k-th largest of the blocks' maxima bounds them from below, which spares a sort."""
    n_blocks = len(logits) // _BLOCK
    if n_blocks <= k:
        ids, values = _sorted(np.arange(len(logits)), logits)
        return ids[:k], values[:k]
    maxima = logits[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
    bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
    ids, values = _sorted(np.flatnonzero(logits >= bound), logits)
    return ids[:k], values[:k]


def _nucleus(ids: Ids, values: Floats, top_p: float) -> tuple[Ids, Floats]:
    """The fewest most likely that together reach `top_p`. Many are counted into bins first: only one is sorted."""
    scaled = np.exp(values - values.max())
    whole = float(scaled.sum(dtype=np.float64)) * top_p
    if len(ids) <= _FEW:
        order = np.argsort(-values, kind="stable")
        n = int(np.searchsorted(np.cumsum(scaled[order], dtype=np.float64), whole)) + 1
        return ids[order[:n]], values[order[:n]]
    bins = np.minimum((values.max() - values) * 32, 2047).astype(np.intp)
    reached = np.cumsum(np.bincount(bins, weights=scaled))
    last = min(int(np.searchsorted(reached, whole)), len(reached) - 1)
    inside, edge = np.flatnonzero(bins < last), np.flatnonzero(bins == last)
    edge = edge[np.argsort(-values[edge], kind="stable")]
    missing = whole - (float(reached[last - 1]) if last else 0.0)
    n = int(np.searchsorted(np.cumsum(scaled[edge], dtype=np.float64), missing)) + 1
    kept = np.concatenate([inside, edge[:n]])
    return ids[kept], values[kept]


def _typical(ids: Ids, values: Floats, typical_p: float) -> tuple[Ids, Floats]:
    p = _softmax(values)
    surprise = -np.log(np.maximum(p, np.finfo(np.float32).tiny))
    order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
    n = int(np.searchsorted(np.cumsum(p[order]), typical_p)) + 1
    kept = np.sort(order[:n])
    return ids[kept], values[kept]
