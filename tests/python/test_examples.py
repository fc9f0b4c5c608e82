"""The examples in docstrings and in the README run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import subprocess
import sys

import pytest

from .conftest import ROOT, run_cli

MODULES = ["powerinfer_rs", "powerinfer_rs.engine", "powerinfer_rs.tokenizer", "powerinfer_rs.sampling"]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_readme_python():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-c", block], check=True, capture_output=True, timeout=120)


def test_readme_commands():
    """Every `powerinfer` line of the README that needs no file of the reader's."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("powerinfer ")]
    ran = 0
    for command in commands:
        if not any(word.endswith(".gguf") and not (ROOT / word).exists() for word in command):
            out = run_cli(*command[1:])
            assert out.returncode == 0, (command, out.stderr)
            ran += 1
    assert ran >= 5


def test_readme_names_every_room():
    for folder in (ROOT / "src").iterdir():
        name = folder.name.removesuffix(".rs")
        assert re.search(rf"\b{name}\b", README), name
