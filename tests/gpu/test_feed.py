"""Prompts whose cold neurons are brought to the GPU in pieces: the processor's logits, and its own work spared."""

from __future__ import annotations

import numpy as np
import pytest
from powerinfer_rs import InvalidArgumentError, _engine

from tests.python.conftest import DATA
from tests.python.test_logits import SHAPES

from .test_logits_on_gpu import CLOSE, NAMES, devices, neurons, run, splits


def check(path, kind, tokens, mode, at_once, **options):
    cpu = _engine.Engine(path, threads=1, sparsity=mode, **options)
    want = run(cpu, tokens, at_once)
    for name, hot in splits(*neurons(path), seed=1):
        for n_devices in (1, 2):
            spared = []
            # Handing over is for the other tests; here it is what there is to spare.
            for feed_from in (0, 5) if name == "random" else (5,):
                gpus = devices(n_devices)
                hot_neurons = [h.astype(np.uint32) for h in hot]
                options |= {"gpus": gpus, "hot_neurons": hot_neurons, "feed_from": feed_from}
                e = _engine.Engine(path, threads=2, sparsity=mode, **options)
                case = (mode, name, n_devices, feed_from)
                got = run(e, tokens, at_once)
                assert np.abs(got - want).max() < CLOSE[kind] * want.std(), case
                assert np.allclose(e.stats()["density"], cpu.stats()["density"], atol=1e-3), case
                assert np.allclose(e.stats()["active"], cpu.stats()["active"], atol=1e-3), case
                spared.append(e.stats()["bytes_read"])
            # The processor reads nothing for the prompt but its own layers.
            if name == "random":
                assert spared[1] < spared[0], (mode, name, n_devices)


@pytest.mark.parametrize("name", NAMES)
def test_golden_models(tiny, name):
    tokens = np.load(DATA / "tiny" / f"{name}.npz")["tokens"].astype(np.uint32)[:14]
    for mode in ("predicted", "exact", "dense"):
        check(tiny(name), name.split("-")[1].upper(), tokens, mode, 12)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "bamboo"])
def test_dense_files(synthesize, arch, kind):
    """What is turned at load, for a share of the neurons or all of them."""
    path = f"{synthesize(arch, kind, '--seed', '21', *SHAPES[arch])}.gguf"
    tokens = np.random.default_rng(3).integers(0, 384, 12).astype(np.uint32)
    check(path, {"Q8_0": "turned"}.get(kind, kind), tokens, "exact", 11, activation="relu")


def test_several_pieces(synthesize):
    """A layer of more bytes than go at a time."""
    wide = ["--embd", "256", "--ff", "12288", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--rank", "32"]
    path = f"{synthesize('llama', 'F32', '--seed', '5', *wide)}.powerinfer.gguf"
    tokens = np.random.default_rng(6).integers(0, 384, 8).astype(np.uint32)
    hot = [np.arange(100, dtype=np.uint32), np.arange(0, dtype=np.uint32)]
    want = run(_engine.Engine(path, threads=2, n_ctx=64), tokens, 7)
    runs = []
    for _ in range(2):
        e = _engine.Engine(path, threads=2, n_ctx=64, gpus=devices(1), hot_neurons=hot, feed_from=5)
        runs += [run(e, tokens, 7), run(e, tokens, 7)]
    assert np.abs(runs[0] - want).max() < CLOSE["F32"] * want.std()
    assert all(np.array_equal(runs[0], other) for other in runs[1:])


def test_steps_that_are_graphs_can_not_be_fed(tiny):
    with pytest.raises(InvalidArgumentError, match="feed_from: got 4"):
        _engine.Engine(tiny("llama-f16"), gpus=devices(1), feed_from=4)
