"""Completions: what one is, and how one comes about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timings:
    """How long a completion took.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        prompt_seconds: Seconds until the first token was there.
        generated_tokens: Tokens generated.
        generated_seconds: Seconds that those after the first took.
        drafted: Tokens guessed by prompt lookup.
        accepted: How many of them were right.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_tokens: int = 0
    generated_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prefill speed."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed, from the second token on."""
        return (self.generated_tokens - 1) / self.generated_seconds if self.generated_seconds else 0.0


@dataclass(frozen=True)
class Completion:
    """A finished text; `str()` of it is the text.

    Attributes:
        text: What was generated, without the prompt and without the stop string.
        tokens: The generated token ids, that which ended the text left out.
        finish_reason: "stop" for an end token or stop string, "length" for `max_tokens`.
        timings: How long it took.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    timings: Timings

    def __str__(self) -> str:
        """Return the text."""
        return self.text


@dataclass
class Run:
    """A completion in the making."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = "length"
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    generated_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def completion(self) -> Completion:
        """What there is so far."""
        timings = Timings(
            prompt_tokens=self.prompt_tokens,
            prompt_seconds=self.prompt_seconds,
            generated_tokens=len(self.tokens),
            generated_seconds=self.generated_seconds,
            drafted=self.drafted,
            accepted=self.accepted,
        )
        return Completion("".join(self.pieces), list(self.tokens), self.finish_reason, timings)


class StopStrings:
    """Holds text back while it may still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what is free to go, and whether a stop string has come."""
        self._held += text
        found = [i for i in (self._held.find(s) for s in self._stops) if i >= 0]
        if found:
            free, self._held = self._held[: min(found)], ""
            return free, True
        keep = max((_overlap(self._held, s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        free, self._held = self._held[:cut], self._held[cut:]
        return free, False

    def finish(self) -> str:
        """Return what was held back for nothing."""
        return self._held


def _overlap(text: str, stop: str) -> int:
    """How much of the text's end is a beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
