"""What "Q4_K_M" means: which type each tensor of a file gets. The rules for mixes are llama.cpp's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from .._engine import InvalidArgumentError

#: Weights in a block of each type that can be written.
BLOCK = {
    **dict.fromkeys(("F32", "F16", "BF16"), 1),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), 32),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 256),
}
#: What takes the place of a type whose blocks are longer than a row divides into.
_SHORTER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True)
class Where:
    """Where a tensor stands.

    Attributes:
        layer: Its layer.
        n_layers: How many there are.
        falcon: Whether the architecture is falcon.
        grouped: How many query heads share a key head.
        important: Whether there is an importance matrix.
    """

    layer: int
    n_layers: int
    falcon: bool
    grouped: int
    important: bool

    @property
    def more_bits(self) -> bool:
        """Whether it is in the first or last eighth of the layers, or each third of those between."""
        n, i = self.n_layers, self.layer
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2

    def within(self, parts: int) -> bool:
        """Whether it is in the first of so many parts of the layers."""
        return self.layer < self.n_layers // parts


Rule = Callable[[Where], str | None]


def _with_more(better: str) -> Rule:
    return lambda at: better if at.more_bits else None


def _fixed(better: str) -> Rule:
    return lambda _: better


def _except_falcon(better: str, falcon: str | None = None) -> Rule:
    return lambda at: falcon if at.falcon else better


def _down_q3_k_m(at: Where) -> str | None:
    if at.within(16):
        return "Q5_K"
    return "Q4_K" if not at.falcon or at.more_bits else "Q3_K"


def _down_q4_k_m(at: Where) -> str | None:
    if not at.falcon:
        return "Q6_K" if at.more_bits else None
    return "Q6_K" if at.within(16) else "Q5_K" if at.more_bits else None


def _value_of(rule: Rule, base: str) -> Rule:
    """The value matrix of a model of 80 layers is shared by eight query heads: it gets more than the small types."""
    return lambda at: rule(at) or ("Q5_K" if at.n_layers == 80 and base in ("Q3_K", "Q4_K") else None)


@dataclass(frozen=True)
class FileType:
    """One choice of `--type`.

    Attributes:
        name: As users write it.
        number: The key `general.file_type`.
        base: What a matrix gets that no rule is for.
        rules: For tensors of a layer by their short names.
    """

    name: str
    number: int
    base: str
    rules: dict[str, Rule]


def _legacy(better: str) -> dict[str, Rule]:
    return {"ffn_down": lambda at: better if at.important and at.within(8) else None}


_TYPES = [
    FileType("F32", 0, "F32", {}),
    FileType("F16", 1, "F16", {}),
    FileType("BF16", 32, "BF16", {}),
    FileType("Q4_0", 2, "Q4_0", _legacy("Q4_1")),
    FileType("Q4_1", 3, "Q4_1", {}),
    FileType("Q5_0", 8, "Q5_0", _legacy("Q5_1")),
    FileType("Q5_1", 9, "Q5_1", {}),
    FileType("Q8_0", 7, "Q8_0", {}),
    FileType(
        "Q2_K",
        10,
        "Q2_K",
        {
            "attn_v": lambda at: "Q4_K" if at.grouped >= 4 else "Q3_K",
            "ffn_down": _fixed("Q3_K"),
            "attn_output": _except_falcon("Q3_K"),
        },
    ),
    FileType("Q3_K_S", 11, "Q3_K", {"attn_v": _value_of(lambda _: None, "Q3_K")}),
    FileType(
        "Q3_K_M",
        12,
        "Q3_K",
        {
            "attn_v": lambda at: "Q5_K" if at.layer < 2 else "Q4_K",
            "ffn_down": _down_q3_k_m,
            "attn_output": _except_falcon("Q4_K"),
            "attn_qkv": _fixed("Q4_K"),
        },
    ),
    FileType(
        "Q3_K_L",
        13,
        "Q3_K",
        {
            "attn_v": _fixed("Q5_K"),
            "ffn_down": _except_falcon("Q5_K", "Q4_K"),
            "attn_output": _except_falcon("Q5_K", "Q4_K"),
            "attn_qkv": _fixed("Q4_K"),
        },
    ),
    FileType(
        "Q4_K_S",
        14,
        "Q4_K",
        {
            "attn_v": _value_of(lambda at: "Q5_K" if at.layer < 4 else None, "Q4_K"),
            "ffn_down": lambda at: "Q5_K" if not at.falcon and at.within(8) else None,
        },
    ),
    FileType(
        "Q4_K_M",
        15,
        "Q4_K",
        {"attn_v": _value_of(_with_more("Q6_K"), "Q4_K"), "ffn_down": _down_q4_k_m, "attn_qkv": _fixed("Q5_K")},
    ),
    FileType("Q5_K_S", 16, "Q5_K", {}),
    FileType(
        "Q5_K_M",
        17,
        "Q5_K",
        {"attn_v": _with_more("Q6_K"), "ffn_down": _with_more("Q6_K"), "attn_qkv": _fixed("Q6_K")},
    ),
    FileType("Q6_K", 18, "Q6_K", {}),
]
FILE_TYPES = {t.name: t for t in _TYPES}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


def file_type(name: str, argument: str = "type") -> FileType:
    """The choice of this name, in any case of letters.

    Raises:
        InvalidArgumentError: There is none.
    """
    upper = str(name).upper()
    found = FILE_TYPES.get(_ALIASES.get(upper, upper))
    if found is None:
        raise InvalidArgumentError(f"{argument}: got {name!r}, expected one of {', '.join(FILE_TYPES).lower()}")
    return found


def _is_matrix(name: str, dims: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix that is multiplied with or looked up in."""
    return len(dims) >= 2 and name.endswith(".weight") and "norm" not in name and name != "position_embd.weight"


@dataclass(frozen=True)
class Mix:
    """How a file's tensors are to be written.

    Attributes:
        to: The choice.
        predictors: The choice for `fc1` and `fc2`.
        n_layers: Layers of the model.
        falcon: Whether the architecture is falcon.
        grouped: How many query heads share a key head.
        tied: Whether the head is the embedding.
        important: Whether there is an importance matrix.
    """

    to: FileType
    predictors: FileType
    n_layers: int
    falcon: bool
    grouped: int
    tied: bool
    important: bool = False

    def wanted(self, name: str) -> str:
        """The type that a matrix would have if its rows were long enough."""
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            # The head is worth more bits; whole-number formats of eight and floats have enough.
            return self.to.base if BLOCK[self.to.base] == 1 or self.to.base == "Q8_0" else self._head()
        place = _LAYER.fullmatch(name)
        if place is None:
            return self.to.base
        short = place[2].removesuffix("_t")
        if short in ("fc1", "fc2"):
            return self.predictors.base
        rule = self.to.rules.get(short)
        at = Where(int(place[1]), self.n_layers, self.falcon, self.grouped, self.important)
        return (rule(at) if rule else None) or self.to.base

    def _head(self) -> str:
        return "Q8_0" if self.falcon else "Q6_K"

    def of(self, name: str, dims: tuple[int, ...], current: str) -> tuple[str, str | None]:
        """A tensor's type.

        Args:
            name: The tensor's.
            dims: Innermost first.
            current: The type it has: vectors keep theirs.

        Returns:
            The type, and which one it would have had, where rows are too short for that.
        """
        if not _is_matrix(name, dims):
            return current, None
        wanted = self.wanted(name)
        got = wanted
        if dims[0] % BLOCK[got]:
            got = _SHORTER.get(got, "F16")
        if dims[0] % BLOCK[got]:
            got = "F16"
        return got, wanted if got != wanted else None
