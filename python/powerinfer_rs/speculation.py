"""Drafts: what may come next, guessed from what has been there before."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import check_whole

#: The most tokens of a draft.
MOST = 64
_LONGEST = 3


class PromptLookup:
    """Guesses that what followed the last tokens' latest earlier occurrence follows again.

    The model then checks a whole draft in one step, and text goes on as if there were none: a draft costs time where it
    is wrong, and never changes a token (Saxena, "Prompt Lookup Decoding", 2023; the check is that of Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023, whose sampling is exact here since the draft is a
    single guess).

    Args:
        n: The most tokens of a draft; 0 drafts none.

    Raises:
        InvalidArgumentError: `n` isn't a whole number from 0 to 64.
    """

    def __init__(self, n: int) -> None:
        check_whole("prompt_lookup", n, 0, MOST)
        self._n = int(n)
        self._tokens: list[int] = []
        #: Where a run of one to three tokens was followed by another, last.
        self._followed: dict[tuple[int, ...], int] = {}

    def reset(self, tokens: Sequence[int]) -> None:
        """Begin anew with a text."""
        self._tokens.clear()
        self._followed.clear()
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Take the text's next token."""
        if not self._n:
            return
        at = len(self._tokens)
        for length in range(1, min(_LONGEST, at) + 1):
            self._followed[tuple(self._tokens[at - length :])] = at
        self._tokens.append(token)

    def draft(self, room: int) -> list[int]:
        """Guess the next tokens, at most `room`; none where the last token is new to the text."""
        n = min(self._n, room)
        for length in range(min(_LONGEST, len(self._tokens)), 0, -1):
            at = self._followed.get(tuple(self._tokens[-length:])) if n > 0 else None
            if at is not None:
                return self._tokens[at : at + n]
        return []
