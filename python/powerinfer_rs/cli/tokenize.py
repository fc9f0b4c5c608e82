"""`powerinfer tokenize`: what a model sees of a text."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .. import _engine
from ..models import resolve
from ..tokenizer import Tokenizer
from . import options


def tokenize(
    text: Annotated[str | None, typer.Argument(help="The text; standard input if left out.")] = None,
    model: options.Model = None,
    special: Annotated[bool, typer.Option("--special", help="Turn control tokens' texts into those tokens.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Add nothing at the text's beginning and end.")] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Print the tokens of a text, one a line: its id and what it stands for."""
    tokenizer = Tokenizer(_engine.inspect(resolve(model))["metadata"])
    if text is None:
        text = sys.stdin.buffer.read().decode("utf-8")
    ids = tokenizer.encode(text, add_special=not no_bos, parse_special=special)
    if as_json:
        print(json.dumps({"ids": ids}))
        return
    for token in ids:
        print(f"{token:>7}  {_shown(tokenizer.token_bytes(token, special=True))}")


def _shown(data: bytes) -> str:
    """The token's text, quoted; its bytes where they are only part of a character."""
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)
