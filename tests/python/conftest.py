"""Models and vocabularies for all tests."""

from __future__ import annotations

import gzip
import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from powerinfer_rs import Engine, _engine
from powerinfer_rs.models import demo_path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
VOCABULARIES = ("llama-spm", "falcon", "gpt-2")


def pytest_collection_modifyitems(config, items):
    """On an emulated GPU the demo model takes a second a token: its tests are left to the processor."""
    if not any("emulated" in gpu["name"] for gpu in _engine.gpus()):
        return
    slow = [
        i
        for i in items
        if "demo" in i.fixturenames or re.search(r"Engine\((\)|n_ctx|threads)|demo", inspect.getsource(i.function))
    ]
    config.hook.pytest_deselected(items=slow)
    items[:] = [i for i in items if i not in slow]


@pytest.fixture(scope="session")
def vocab(tmp_path_factory):
    """The path of a vocabulary by name, as a GGUF file."""
    folder = tmp_path_factory.mktemp("vocab")
    for name in VOCABULARIES:
        (folder / f"{name}.gguf").write_bytes(gzip.decompress((DATA / "vocab" / f"{name}.gguf.gz").read_bytes()))
    return lambda name: demo_path() if name == "smollm2" else folder / f"{name}.gguf"


@pytest.fixture(scope="session")
def demo():
    return Engine(threads=2)


@pytest.fixture
def tiny():
    """A tiny model by name."""
    return lambda name: DATA / "tiny" / f"{name}.powerinfer.gguf"


@pytest.fixture(scope="session")
def synthesize(vocab, tmp_path_factory):
    """Write a small model with `benches/synth_model.py`; returns the stem of its files."""

    def write(arch: str, kind: str, *options: str) -> Path:
        out = tmp_path_factory.mktemp("synth") / "model"
        name = {"llama": "llama-spm", "bamboo": "llama-spm", "falcon": "falcon", "opt": "gpt-2"}[arch]
        command = [sys.executable, ROOT / "benches/synth_model.py", out, "--vocab", vocab(name), "--arch", arch]
        command += ["--type", kind, "--small", "--ctx", "256", "--vocab-size", "384", *options]
        subprocess.run([str(c) for c in command], check=True, capture_output=True)
        return out

    return write


def heed_ctrl_c() -> None:
    """For a child: heed Ctrl-C, also where the tests run in the background and don't."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_cli(*args: object, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "powerinfer_rs", *map(str, args)],
        input=stdin,
        capture_output=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", **(env or {})},
        check=False,
    )
