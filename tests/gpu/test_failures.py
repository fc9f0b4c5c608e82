"""A GPU that fails: a typed error wherever it does, nothing left behind, and the next run works."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from powerinfer_rs import DeviceError, Engine, _engine

from tests.python.conftest import DATA

from .test_logits_on_gpu import GB, devices, neurons, run

TOKENS = np.load(DATA / "tiny" / "llama-f16.npz")["tokens"].astype(np.uint32)[:12]


@pytest.fixture(params=[0, 5], ids=["handed over", "fed"])
def once(tiny, request):
    """Makes an engine with half the neurons on a GPU and runs it, prefill and decode."""
    path = tiny("llama-f16")
    n_layers, n_ff = neurons(path)
    hot = [np.arange(0, n_ff, 2, dtype=np.uint32)] * n_layers

    def go(n=1):
        engine = _engine.Engine(path, threads=1, gpus=devices(n), hot_neurons=hot, n_ctx=64, feed_from=request.param)
        return run(engine, TOKENS, 8)

    return go


KINDS = ("context", "stream", "module", "alloc", "host_alloc", "copy", "launch", "kernel", "event")


@pytest.mark.parametrize("kind", KINDS)
def test_at_every_call(emulator, once, kind):
    want = once()
    emulator.fail(kind, 0)
    once()
    n_calls = emulator.calls(kind)
    if not n_calls:
        pytest.skip(f"no call of {kind}")
    before = emulator.alive()
    n_raised = 0
    # All of the first, where a model is loaded, and then some of many alike, or all of them where somebody wants it so.
    step = 1 if os.environ.get("EVERY_CALL") else 17
    for n in [*range(1, min(n_calls, 120) + 1), *range(121, n_calls + 1, step)]:
        emulator.fail(kind, n)
        try:
            got = once()
        except DeviceError as error:
            said = str(error)
        else:
            # While a graph is recorded a failure only means that there won't be one, and of several GPUs that one isn't
            # told of.
            assert kind in ("copy", "launch") or (kind in ("context", "stream") and len(_engine.gpus()) > 1), n
            assert np.array_equal(got, want), n
            said = None
        if said is not None:
            assert "device cuda:" in said
            n_raised += 1
        emulator.fail(kind, 0)
        assert emulator.alive() == before, (kind, n)
    assert n_raised > n_calls / 40, n_calls
    assert np.array_equal(once(), want)


@pytest.mark.parametrize("kind", ["capture", "graph"])
def test_without_graphs(emulator, once, kind):
    """Launches take a graph's place, with the same bits."""
    want = once()
    emulator.fail(kind, 1)
    assert np.array_equal(once(), want)


def test_an_engine_goes_on_after_a_failed_launch(emulator, tiny):
    engine = _engine.Engine(tiny("llama-f16"), threads=1, gpus=devices(1), n_ctx=64)
    want = run(engine, TOKENS, 8)
    sequence = engine.new_sequence()
    engine.step([(sequence, TOKENS[:8], 1)])
    for n in range(1, 30):
        emulator.fail("launch", n)
        with pytest.raises(DeviceError):
            engine.step([(sequence, np.tile(TOKENS, 3), 1)])
    emulator.fail("launch", 0)
    assert engine.tokens(sequence) == TOKENS[:8].tolist()
    assert np.array_equal(engine.step([(sequence, TOKENS[8:9], 1)])[0], want[8])
    engine.free(sequence)
    assert np.array_equal(run(engine, TOKENS, 8), want)


def test_auto_falls_back_with_one_warning(emulator, tiny, caplog):
    emulator.fail("alloc", 3)
    with caplog.at_level(logging.WARNING):
        engine = Engine(tiny("llama-f16"), device="auto")
    assert engine.stats()["device"] == "cpu"
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "out of memory" in warning
    emulator.fail("alloc", 3)
    with pytest.raises(DeviceError, match="out of memory"):
        Engine(tiny("llama-f16"), device="cuda")


def test_no_memory_for_all(emulator, tiny):
    """A budget over what there is: an error, not a crash."""
    emulator.memory(1 << 20)
    with pytest.raises(DeviceError, match="out of memory"):
        _engine.Engine(tiny("llama-f16"), gpus=[(0, GB, 0, 1)])


def test_devices_that_are_not_there(tiny):
    with pytest.raises(DeviceError, match="cuda:7"):
        Engine(tiny("llama-f16"), device="cuda:7")
    with pytest.raises(DeviceError, match="cuda:9"):
        _engine.Engine(tiny("llama-f16"), gpus=[(9, GB, 0, 1)])


def again_and_again(engine, sequence):
    while True:
        engine.step([(sequence, np.tile(TOKENS, 40), 1)])
        engine.truncate(sequence, 0)


def test_ctrl_c_stops_a_step(emulator, tiny, once):
    """The step ends, the sequence is as it was, and the engine works."""
    path = tiny("llama-f16")
    n_layers, n_ff = neurons(path)
    hot = [np.arange(0, n_ff, 2, dtype=np.uint32)] * n_layers
    engine = _engine.Engine(path, threads=1, gpus=devices(1), hot_neurons=hot, n_ctx=512)
    want = run(engine, TOKENS, 8)
    sequence = engine.new_sequence()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        again_and_again(engine, sequence)
    assert time.monotonic() - start < 60
    assert engine.tokens(sequence) == []
    assert np.array_equal(run(engine, TOKENS, 8), want)


def test_a_device_waits_for_a_minute_and_no_longer(emulator, tiny):
    """A host that doesn't answer is an error, and not the end of the engine."""
    path = tiny("llama-f16")
    n_layers, _ = neurons(path)
    # The device has next to nothing to do, and waits for the host.
    hot = [np.arange(1, dtype=np.uint32)] * n_layers
    engine = _engine.Engine(path, threads=1, gpus=devices(1), hot_neurons=hot, n_ctx=64)
    want = run(engine, TOKENS, 8)
    sequence = engine.new_sequence()
    emulator.clock(1e7)
    steps = lambda: [engine.step([(sequence, TOKENS[:1], 1)]) for _ in range(50)]  # noqa: E731
    with pytest.raises(DeviceError, match="waited 60s for the host's answer"):
        steps()
    emulator.clock(1)
    engine.free(sequence)
    assert np.array_equal(run(engine, TOKENS, 8), want)


def test_measures(emulator):
    measures = _engine.measure_gpu(0, 1 << 14)
    assert len(measures) > 20
    assert all(value > 0 for _, value, _ in measures)
    emulator.memory(1 << 20)
    with pytest.raises(DeviceError, match="out of memory"):
        _engine.measure_gpu(0, 1 << 22)


FORKED = """
import os, signal, sys
from powerinfer_rs import DeviceError, Engine
engine = Engine(sys.argv[1], device="cuda:0", threads=1, gpu_index="off")
engine.generate("hello", max_tokens=2)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(20)
try:
    engine.generate("hello", max_tokens=2)
except DeviceError:
    del engine
    sys.exit(7)
"""


def test_a_forked_process_is_told_so(tiny):
    done = subprocess.run([sys.executable, "-c", FORKED, tiny("llama-f16")], timeout=100)
    assert done.returncode == 7


def test_a_driver_without_its_functions(tmp_path, tiny):
    """A library of that name that lacks what is called: no GPU, and the processor where that will do."""
    (tmp_path / "empty.c").write_text("int x;")
    subprocess.run(["gcc", "-shared", "-fPIC", tmp_path / "empty.c", "-o", tmp_path / "libcuda.so"], check=True)
    model = ["-m", tiny("llama-f16"), "-p", "hello", "-n", "2"]
    for device, code in (("auto", 0), ("cuda:0", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "powerinfer_rs", "generate", *model, "--device", device],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert "libcuda.so) is too old or none" in done.stderr


def test_a_driver_without_a_device(tiny):
    """As where all devices are hidden: the processor, or an error where a GPU was named."""
    model = ["-m", tiny("llama-f16"), "-p", "hello", "-n", "2"]
    for device, code in (("auto", 0), ("cuda:0", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "powerinfer_rs", "generate", *model, "--device", device],
            env={**os.environ, "EMULATOR_FAIL": "init:1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        assert ("this machine has no NVIDIA GPU" in done.stderr) == bool(code)
