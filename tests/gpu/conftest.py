"""The emulator, or a real GPU: these tests want one of them."""

from __future__ import annotations

import ctypes
import gc

import pytest
from powerinfer_rs import _engine

from tests.python.conftest import demo, synthesize, tiny, vocab  # noqa: F401

GB = 2**30
#: What can be made to fail.
KINDS = ["alloc", "host_alloc", "launch", "kernel", "copy", "module", "stream", "context", "event", "capture", "graph"]


class Emulator:
    """The fake driver's own functions, through the library that is loaded already."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so")
        self.lib.emulator_peak.restype = ctypes.c_size_t
        for name in ("emulator_alive", "emulator_calls"):
            getattr(self.lib, name).restype = ctypes.c_long

    def fail(self, kind: str, n: int) -> None:
        """Let the `n`-th call of `kind` from now on fail; 0 lets none."""
        self.lib.emulator_fail(kind.encode(), ctypes.c_long(n))

    def calls(self, kind: str) -> int:
        """Calls of `kind` since `fail` was last told of it."""
        return self.lib.emulator_calls(kind.encode())

    def alive(self) -> int:
        """Allocations and handles that have not been given back."""
        gc.collect()
        return self.lib.emulator_alive()

    def peak(self, device: int = 0) -> int:
        """The most bytes of a device in use at once since the last call."""
        return self.lib.emulator_peak(device)

    def clock(self, rate: float) -> None:
        """Let the devices' clocks run so many times as fast as the host's."""
        self.lib.emulator_clock(ctypes.c_double(rate))

    def memory(self, n_bytes: int) -> None:
        """Give each device so much memory."""
        self.lib.emulator_memory(ctypes.c_size_t(n_bytes))


def pytest_sessionstart():
    if not _engine.gpus():
        pytest.exit("no GPU and no emulator: run these by `make test-gpu`", returncode=1)


@pytest.fixture
def emulator():
    if "emulated" not in _engine.gpus()[0]["name"]:
        pytest.skip("a real GPU does not fail to order")
    emulator = Emulator()
    before = emulator.alive()
    yield emulator
    for kind in KINDS:
        emulator.fail(kind, 0)
    emulator.memory(8 * GB)
    emulator.clock(1)
    assert emulator.alive() == before, "something was not given back"
