"""Text to token ids and back, built from a GGUF's own keys on the `tokenizers` library."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from ._engine import UnsupportedModelError
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_SPACE = "\u2581"
_BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Control tokens that end a text even where no key says so.
_END_TEXTS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "</s>",
    ]
)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, by character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """The tokenizer of one model file.

    Args:
        metadata: The file's keys and values.

    Raises:
        UnsupportedModelError: The tokenizer is of an unknown kind, or not in the file.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        def key(name: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.ggml.{name}", default)

        def array(name: str, kind: type) -> list[Any]:
            values = key(name) or []
            if not isinstance(values, list) or not set(map(type, values)) <= {kind}:
                raise UnsupportedModelError(f"key tokenizer.ggml.{name}: expected a list of {kind.__name__}")
            return values

        self.kind: str = key("model", "none")
        if self.kind not in ("llama", "gpt2"):
            raise UnsupportedModelError(
                f"key tokenizer.ggml.model: {self.kind!r} is not supported; expected llama or gpt2"
            )
        self._texts: list[str] = array("tokens", str)
        if not self._texts:
            raise UnsupportedModelError("key tokenizer.ggml.tokens: got nothing, expected the tokens' texts")
        n = len(self._texts)
        self._types: list[int] = (array("token_type", int) + [TokenType.NORMAL] * n)[:n]
        #: The tokens that are more than text, and their types.
        self._others = [(i, kind) for i, kind in enumerate(self._types) if kind != TokenType.NORMAL]
        self._ids = dict(zip(self._texts, range(n), strict=True))
        self._pre = self._pre_tokenizer(key("pre"))
        self._space_prefix = bool(key("add_space_prefix", self.kind == "llama"))
        self._bos: int | None = self._id(key("bos_token_id", 1 if self.kind == "llama" else None))
        self._eos: int | None = self._id(key("eos_token_id", 2 if self.kind == "llama" else None))
        self._add_bos = bool(key("add_bos_token", self.kind == "llama" or self._pre.add_bos))
        self._add_eos = bool(key("add_eos_token", False))
        self._end_ids = self._find_end_ids([self._eos, self._id(key("eot_token_id")), self._id(key("eom_token_id"))])
        if self.kind == "llama":
            self._backend = self._sentencepiece(array("scores", float))
        else:
            self._backend = self._byte_pairs(array("merges", str))
        self._rstrip = self._stripping_ids(str(metadata.get("general.name", "")))
        self._always = self._splitter({TokenType.USER_DEFINED})
        self._all = self._splitter({TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN})
        self._bytes: dict[int, bytes] = {}

    def _pre_tokenizer(self, name: str | None) -> PreTokenizer:
        if self.kind == "llama":
            return PreTokenizer(())
        try:
            return PRE_TOKENIZERS[name or "default"]
        except (KeyError, TypeError):
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise UnsupportedModelError(
                f"key tokenizer.ggml.pre: {name!r} is not supported; expected one of {known}"
            ) from None

    def _id(self, value: Any) -> int | None:
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(self._texts)
        return value if good else None

    def _find_end_ids(self, named: Iterable[int | None]) -> frozenset[int]:
        special = (TokenType.CONTROL, TokenType.USER_DEFINED)
        known = (self._ids[t] for t in _END_TEXTS if t in self._ids)
        return frozenset([i for i in named if i is not None] + [i for i in known if self._types[i] in special])

    def _stripping_ids(self, model_name: str) -> frozenset[int]:
        """Special tokens that swallow the white space after them: Phi-3's, whose files don't say so."""
        name = model_name.lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        special = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        keep = {self._ids.get(t) for t in ("<unk>", "<s>", "<|endoftext|>")}
        ids = {i for i, kind in self._others if kind in special} - keep
        return frozenset(ids | ({self._ids["</s>"]} if "</s>" in self._ids else set()))

    def _splitter(self, types: set[TokenType]) -> re.Pattern[str] | None:
        """A pattern that finds the texts of tokens of `types`, the longest first."""
        texts = {self._texts[i] for i, kind in self._others if kind in types} - {""}
        if not texts:
            return None
        return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)))

    def _sentencepiece(self, scores: list[float]) -> Backend:
        """SentencePiece's BPE: the pair whose joined token has the best score is joined first."""
        # Control and byte tokens are never made of characters: text can't forge them.
        vocab = {
            t: i
            for t, i in self._ids.items()
            if t and self._types[i] not in (TokenType.CONTROL, TokenType.BYTE, TokenType.UNKNOWN)
        }
        merges: list[tuple[float, int, str, str]] = []
        for text, i in vocab.items():
            score = scores[i] if i < len(scores) else 0.0
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in vocab and right in vocab:
                    merges.append((-score, i, left, right))
        merges.sort()
        unknown = next((t for t, i in self._ids.items() if self._types[i] == TokenType.UNKNOWN), None)
        everything = vocab | {t: i for t, i in self._ids.items() if t not in vocab}
        pairs = [(left, right) for _, _, left, right in merges]
        return Backend(BPE(everything, pairs, byte_fallback=True, unk_token=unknown, fuse_unk=False))

    def _byte_pairs(self, merges: list[str]) -> Backend:
        """GPT-2's BPE over bytes."""
        # The first space parts the two; a byte-level token has none inside.
        pairs = [(m[:1] + left, right) for m in merges for left, _, right in [m[1:].partition(" ")]]
        # Where a vocabulary was cut, merges of lost tokens are left, at which the library fails or panics.
        known = self._ids
        pairs = [p for p in pairs if p[0] in known and p[1] in known and p[0] + p[1] in known]
        backend = Backend(BPE(known, pairs, ignore_merges=self._pre.ignore_merges))
        splits = [Split(Regex(p), "isolated") for p in self._pre.patterns]
        backend.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
        return backend

    def __len__(self) -> int:
        """Tokens in the vocabulary."""
        return len(self._texts)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self._bos

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text."""
        return self._eos

    @property
    def end_ids(self) -> frozenset[int]:
        """All tokens at which generation stops."""
        return self._end_ids

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: Any text. Lone surrogates become question marks.
            add_special: Add what the model wants at a text's beginning and end (BOS, EOS).
            parse_special: Turn the texts of control tokens into those tokens. Leave it off for text that a user
                wrote: then it can't forge them.

        Returns:
            Token ids.
        """
        text = text.encode("utf-8", "replace").decode() if not text.isascii() else text
        ids = [self._bos] if add_special and self._add_bos and self._bos is not None else []
        after_special = True
        for special, piece in self._split(text, self._all if parse_special else self._always):
            if special is not None:
                ids.append(special)
            else:
                ids += self._encode_plain(piece, after_special)
            after_special = special is not None
        if add_special and self._add_eos and self._eos is not None:
            ids.append(self._eos)
        return ids

    def _split(self, text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[int | None, str]]:
        """The text's special tokens and what lies between them."""
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() < start:
                continue
            if match.start() > start:
                yield None, text[start : match.start()]
            special = self._ids[match.group()]
            yield special, match.group()
            start = match.end()
            if special in self._rstrip:
                start += len(text[start:]) - len(text[start:].lstrip())
        if start < len(text):
            yield None, text[start:]

    def _encode_plain(self, text: str, at_start: bool) -> list[int]:
        if self.kind == "llama":
            text = text.replace(" ", _SPACE)
            if at_start and self._space_prefix:
                text = _SPACE + text
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; none for a control token, unless `special` asks for its text."""
        if not 0 <= token < len(self._texts):
            return b""
        kind = self._types[token]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and not special:
            return b""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._decode_token(self._texts[token], kind)
        return known

    def _decode_token(self, text: str, kind: int) -> bytes:
        if kind == TokenType.BYTE:
            code = _BYTE_TEXT.fullmatch(text)
            return bytes.fromhex(code.group(1)) if code else text.encode("utf-8", "replace")
        if kind != TokenType.NORMAL:
            return text.encode("utf-8", "replace")
        if self.kind == "llama":
            return text.replace(_SPACE, " ").encode("utf-8", "replace")
        if all(c in _BYTE_OF for c in text):
            return bytes(_BYTE_OF[c] for c in text)
        return text.encode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Turn token ids into text.

        Args:
            ids: Token ids; control tokens leave no text.
            special: Write control tokens as their texts.

        Returns:
            The text. Bytes that are no UTF-8 become U+FFFD.
        """
        decoder = StreamDecoder(self, at_start=True, special=special)
        return "".join([decoder.push(int(i)) for i in ids]) + decoder.finish()


class StreamDecoder:
    """Text as its tokens arrive: what it has returned so far, joined, is always a prefix of the whole text.

    Args:
        tokenizer: Whose tokens they are.
        at_start: Whether the tokens begin a text, so that the space which encoding puts in front goes away again.
        special: Write control tokens as their texts.
    """

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._strip = at_start and tokenizer.kind == "llama" and tokenizer._space_prefix
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain, maybe none."""
        data = self._tokenizer.token_bytes(token, special=self._special)
        if data and self._strip:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", True)
