"""The house: imports point one way, rooms say what they are, unsafe code says why it is safe."""

from __future__ import annotations

import ast
import re

import pytest

from .conftest import ROOT

RUST = sorted((ROOT / "src").rglob("*.rs"))
PYTHON = sorted((ROOT / "python").rglob("*.py"))
# Lowest first; a room may use those before it. `gguf` and `backend` stand side by side.
RUST_ROOMS = {
    "error": 0,
    "files": 1,
    "quant": 1,
    "gguf": 2,
    "backend": 2,
    "sparse": 3,
    "model": 4,
    "engine": 5,
    "python": 6,
}
PYTHON_ROOMS = {
    "_engine": 0,
    "pre_tokenizers": 0,
    "activations": 1,
    "arguments": 1,
    "completion": 1,
    "tokenizer": 1,
    "sampling": 1,
    "models": 1,
    "gpus": 2,
    "speculation": 2,
    "engine": 3,
    "workshop": 4,
    "cli": 5,
}


def rust_room(path):
    return path.relative_to(ROOT / "src").parts[0].removesuffix(".rs")


def test_rust_rooms_use_only_those_below():
    for path in RUST:
        own = rust_room(path)
        if own == "lib":
            continue
        for used in re.findall(r"crate::([a-z_]+)\b", path.read_text()):
            if used in RUST_ROOMS and used != own:
                assert RUST_ROOMS[used] < RUST_ROOMS[own], f"{path} uses {used}"


def test_python_rooms_use_only_those_below():
    package = ROOT / "python" / "powerinfer_rs"
    for path in PYTHON:
        own = path.relative_to(package).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        depth = len(path.relative_to(package).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == depth:
                names = [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
                for used in set(names) & set(PYTHON_ROOMS):
                    assert PYTHON_ROOMS[used] < PYTHON_ROOMS[own], f"{path} uses {used}"


def test_the_cpu_and_a_gpu_never_meet():
    for path in (ROOT / "src" / "backend").rglob("*.rs"):
        assert not ("cuda" in path.read_text() and "cpu" in path.parts), path


@pytest.mark.parametrize("path", RUST, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_every_rust_file_says_what_it_is(path):
    text = path.read_text()
    assert text.startswith("//! ")
    assert len(text.splitlines()) <= 600
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    if path.name == "lib.rs":
        return
    unsafe = len(re.findall(r"unsafe \{", text)) - text.count("`unsafe {`")
    assert text.count("// SAFETY:") >= unsafe * 0.9


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.stem)
def test_every_python_file_says_what_it_is(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 600
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)


def test_the_files_are_small_enough_to_carry():
    assert sum(p.stat().st_size for p in (ROOT / "tests" / "data").rglob("*") if p.is_file()) < 8 << 20


def test_kernels_and_their_launchers_agree():
    """What a kernel defines and Rust names alike is one number."""
    cuda = ROOT / "src" / "backend" / "cuda"
    kernels = "\n".join(p.read_text() for p in (cuda / "kernels").glob("*.cu*"))
    defined = dict(re.findall(r"^#define (\w+) (\d+)$", kernels, re.M))
    rust = "\n".join(p.read_text() for p in [cuda.parent / "mod.rs", *cuda.glob("*.rs")])
    named = dict(re.findall(r"const (\w+): usize = (\d+);", rust))
    both = defined.keys() & named.keys()
    assert {"KV_BLOCK", "SUM_PARTS", "TILE_TOKENS", "TILE_ROWS", "DOWN_TOKENS", "DOWN_COLUMNS"} <= both
    assert {name: defined[name] for name in both} == {name: named[name] for name in both}
