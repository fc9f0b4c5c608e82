"""Checks of what callers pass: each names the argument, what was given and what would be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ._engine import InvalidArgumentError

#: What `**more` of `generate` and `stream` may hold.
_MORE = {
    *("typical_p", "frequency_penalty", "presence_penalty", "penalty_last_n", "logit_bias"),
    *("parse_special", "ignore_eos", "overflow", "keep", "prompt_lookup"),
}


def check_known(method: str, more: Mapping[str, object]) -> None:
    """Refuse options that `generate` and `stream` don't have."""
    for name in more.keys() - _MORE:
        raise TypeError(f"Engine.{method}() got an unexpected keyword argument {name!r}")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuse what is no whole number from `least` to `most`."""
    good = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not good or value < least or (most is not None and value > most):  # type: ignore[operator]
        expected = f"a whole number from {least} {'on' if most is None else f'to {most}'}"
        raise InvalidArgumentError(f"{name}: got {value!r}, expected {expected}")


def check_number(name: str, value: object) -> None:
    """Refuse what is no number, NaN included."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool) or value != value:
        raise InvalidArgumentError(f"{name}: got {value!r}, expected a number")


def stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """The stop strings as a list; refuses empty ones and other kinds."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidArgumentError(f"stop: got {stop!r}, expected a string or several, none of them empty")
    return list(stops)
