"""Engines shared and told apart: saved sequences, threads, forks, signals, neighbours in a batch."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from powerinfer_rs import Engine, ModelFormatError

from gguf import GGUFReader

from .test_logits import SHAPES


def tampered(path, out, change):
    """A copy of a file, one change made to its bytes."""
    data = bytearray(path.read_bytes())
    change(data)
    out.write_bytes(data)
    return out


def test_another_models_sequence_is_refused(tiny, tmp_path):
    path = tiny("llama-f16")
    engine = Engine(path, threads=1).native
    sequence = engine.new_sequence()
    engine.step([(sequence, np.arange(5, 15, dtype=np.uint32), 1)])
    engine.save(sequence, tmp_path / "saved")

    def other_eps(data):
        key = b"llama.attention.layer_norm_rms_epsilon"
        at = data.index(key) + len(key) + 4
        data[at : at + 4] = np.float32(1e-3).tobytes()

    def other_weights(data):
        data[-50_000:-40_000] = bytes(10_000)

    for change in (other_eps, other_weights):
        other = Engine(tampered(path, tmp_path / "m.gguf", change), threads=1).native
        with pytest.raises(ModelFormatError, match="another model"):
            other.restore(tmp_path / "saved")
    with pytest.raises(ModelFormatError, match="another model"):
        Engine(path, threads=1, activation="silu").native.restore(tmp_path / "saved")
    assert engine.tokens(engine.restore(tmp_path / "saved")) == list(range(5, 15))


def test_saving_from_two_engines_to_one_file(tiny, tmp_path):
    engines = [Engine(tiny("llama-f16"), threads=1).native for _ in range(2)]

    def work(i):
        engine = engines[i]
        sequence = engine.new_sequence()
        engine.step([(sequence, np.arange(5, 25 + 9 * i, dtype=np.uint32), 1)])
        for _ in range(40):
            engine.save(sequence, tmp_path / "s")
            assert len(engine.tokens(engine.restore(tmp_path / "s"))) in (20, 29)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("sparsity", ["predicted", "exact"])
def test_a_broken_neuron_that_is_off_harms_no_neighbour(synthesize, tmp_path, sparsity):
    stem = synthesize("llama", "F16", "--layers", "2", *SHAPES["llama"])
    path = Path(f"{stem}.powerinfer.gguf")
    data = bytearray(path.read_bytes())
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + data[4:])
    up = next(t for t in GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.0.ffn_up.weight")
    row_bytes = 2 * int(up.shape[0])
    for neuron in range(0, int(up.shape[1]), 9):
        at = up.data_offset + neuron * row_bytes
        data[at : at + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    engine = Engine(tmp_path / "m.gguf", threads=1, sparsity=sparsity)
    ids = np.arange(5, 29, dtype=np.uint32)
    together = engine.logits(ids)
    native = engine.native
    sequence = native.new_sequence()
    alone = np.concatenate([native.step([(sequence, ids[i : i + 1], 1)]) for i in range(len(ids))])
    assert np.array_equal(alone, together, equal_nan=True)
    assert np.isnan(together).any()


def test_signals_are_seen_while_another_thread_is_at_work():
    code = """
        import signal, threading, time, numpy as np
        from powerinfer_rs import Engine
        class Late(Exception): pass
        def late(*_): raise Late
        signal.signal(signal.SIGALRM, late)
        e = Engine().native
        s = e.new_sequence()
        t = threading.Thread(target=lambda: e.step([(s, np.arange(4000, dtype=np.uint32) + 5, 1)]), daemon=True)
        t.start()
        time.sleep(0.3)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        started = time.time()
        try:
            e.stats()
        except Late:
            print("seen", time.time() - started < 1.5, t.is_alive())
        t.join()
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=120)
    assert out.stdout == b"seen True True\n", out.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fork_while_a_thread_is_at_work_does_not_hang(threads):
    code = f"""
        import os, threading, time, numpy as np
        from powerinfer_rs import DeviceError, Engine
        e = Engine(threads={threads}).native
        s = e.new_sequence()
        t = threading.Thread(target=lambda: e.step([(s, np.arange(4000, dtype=np.uint32) + 5, 1)]), daemon=True)
        t.start()
        time.sleep(0.5)
        child = os.fork()
        if not child:
            try:
                e.stats()
            except DeviceError as error:
                os.write(1, b"refused")
            os._exit(0)
        os.waitpid(child, 0)
        t.join()
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, timeout=120)
    assert out.stdout == b"refused", out.stderr
