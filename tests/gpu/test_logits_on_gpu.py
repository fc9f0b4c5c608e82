"""Logits of host and GPUs together against the processor's: every split, mode, architecture, one device and two."""

from __future__ import annotations

import json

import numpy as np
import pytest
from powerinfer_rs import _engine

from tests.python.conftest import DATA
from tests.python.test_logits import SHAPES

GB = 2**30
NAMES = list(json.loads((DATA / "tiny" / "index.json").read_text()))
# Of the logits' spread: float types differ by the order of sums alone.
CLOSE = {"F16": 1e-4, "F32": 1e-4, "Q8_0": 2e-3, "Q4_0": 2e-3, "turned": 0.1}


def devices(n, budget=GB):
    """The first GPU `n` times: each is a device of its own to the engine."""
    return [(i % len(_engine.gpus()), budget, 0, 1) for i in range(n)]


def run(engine, tokens, at_once):
    """Logits of all tokens, the first of them in one step and the others each in its own."""
    sequence = engine.new_sequence()
    rows = [engine.step([(sequence, tokens[:at_once], at_once)])]
    rows += [engine.step([(sequence, token[None], 1)]) for token in tokens[at_once:]]
    engine.free(sequence)
    return np.concatenate(rows)


def splits(n_layers, n_ff, seed=0):
    """Hot neurons of each layer: none, all, at random, and layers of all kinds beside each other."""
    rng = np.random.default_rng(seed)
    some = lambda: np.sort(rng.choice(n_ff, rng.integers(1, n_ff), replace=False))  # noqa: E731
    kinds = [lambda: np.arange(0), lambda: np.arange(n_ff), some]
    yield "none", [np.arange(0)] * n_layers
    yield "all", [np.arange(n_ff)] * n_layers
    yield "random", [some() for _ in range(n_layers)]
    yield "mixed", [kinds[i % 3]() for i in range(n_layers)]


def neurons(path):
    keys = _engine.inspect(path)["metadata"]
    arch = keys["general.architecture"]
    return keys[f"{arch}.block_count"], keys[f"{arch}.feed_forward_length"]


def check(path, kind, tokens, modes, **options):
    n_layers, n_ff = neurons(path)
    for mode in modes:
        cpu = _engine.Engine(path, threads=1, sparsity=mode, **options)
        want = run(cpu, tokens, len(tokens) // 2)
        for name, hot in splits(n_layers, n_ff):
            for n_devices in (1, 2):
                hot_neurons = [h.astype(np.uint32) for h in hot]
                gpus = devices(n_devices)
                e = _engine.Engine(path, threads=1, sparsity=mode, gpus=gpus, hot_neurons=hot_neurons, **options)
                case = (mode, name, n_devices)
                placed = [h for gpu in e.info()["gpus"] for h in gpu["plan"]["hot"]]
                assert [h.tolist() for h in placed] == [h.tolist() for h in hot], case
                got = run(e, tokens, len(tokens) // 2)
                assert np.abs(got - want).max() < CLOSE[kind] * want.std(), case
                assert np.allclose(e.stats()["density"], cpu.stats()["density"], atol=1e-3), case
                assert np.allclose(e.stats()["active"], cpu.stats()["active"], atol=1e-3), case


@pytest.mark.parametrize("name", NAMES)
def test_golden_models(tiny, name):
    tokens = np.load(DATA / "tiny" / f"{name}.npz")["tokens"].astype(np.uint32)[:24]
    check(tiny(name), name.split("-")[1].upper(), tokens, ["predicted", "exact", "dense"])


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "bamboo"])
def test_dense_files(synthesize, arch, kind):
    """Files with `ffn_down`, which is turned where host and GPU share a layer."""
    stem = synthesize(arch, kind, "--seed", "21", *SHAPES[arch])
    tokens = np.random.default_rng(3).integers(0, 384, 16).astype(np.uint32)
    # What is turned from a quantised type is rounded anew: see test_logits.
    turned = {"Q8_0": "turned"}.get(kind, kind)
    check(f"{stem}.gguf", turned, tokens, ["exact", "dense"], activation="relu")
    check(f"{stem}.gguf", turned, tokens, ["dense"], activation="silu")
    check(f"{stem}.gguf", turned, tokens, ["dense"], activation="gelu")


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "f32"])
def test_a_long_text(synthesize, kv_type):
    """Past the first 256 positions, and past what the GPU has room for."""
    small = ["--embd", "64", "--ff", "96", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--rank", "32"]
    path = f"{synthesize('llama', 'F32', '--seed', '4', *small)}.powerinfer.gguf"
    tokens = np.random.default_rng(5).integers(0, 384, 420).astype(np.uint32)
    options = {"threads": 1, "kv_type": kv_type, "n_ctx": 512, "sparsity": "dense"}
    want = run(_engine.Engine(path, **options), tokens, 400)
    for context in (512, 96):
        engine = _engine.Engine(path, gpus=devices(1), gpu_context=context, **options)
        # The types round alike but for numbers on the edge.
        assert np.abs(run(engine, tokens, 400) - want).max() < (5e-3 if kv_type == "q8_0" else 1e-3) * want.std()


def test_several_sequences_at_once(tiny):
    """Batches of sequences of other lengths, forks and cut ones, as on the processor."""
    rng = np.random.default_rng(7)
    texts = [rng.integers(0, 300, n).astype(np.uint32) for n in (40, 3, 17)]
    rows = []
    for gpus in ([], devices(1), devices(2)):
        e = _engine.Engine(tiny("llama-f16"), threads=1, gpus=gpus)
        ids = [e.new_sequence() for _ in texts]
        out = [e.step([(i, t, 1) for i, t in zip(ids, texts, strict=True)])]
        fork = e.fork(ids[0])
        e.truncate(fork, 35)
        out.append(e.step([(fork, texts[1], 2), (ids[1], texts[2][:1], 1), (ids[0], texts[2][:2], 1)]))
        for token in texts[2][:5]:
            out.append(e.step([(i, token[None], 1) for i in [*ids, fork]]))
        rows.append(np.concatenate(out))
        if gpus:
            assert e.info()["device"].startswith("cuda")
    for got in rows[1:]:
        assert np.abs(got - rows[0]).max() < 1e-4 * rows[0].std()


def test_a_sequence_goes_from_gpu_to_processor_and_back(tiny, tmp_path):
    tokens = np.load(DATA / "tiny" / "llama-q4_0.npz")["tokens"].astype(np.uint32)
    path = tiny("llama-q4_0")
    cpu = _engine.Engine(path, threads=1)
    gpu = _engine.Engine(path, threads=1, gpus=devices(2))
    want = run(cpu, tokens, len(tokens))[-1]
    for here, there in ((cpu, gpu), (gpu, cpu), (gpu, gpu)):
        sequence = here.new_sequence()
        here.step([(sequence, tokens[:-1], 1)])
        here.save(sequence, tmp_path / "saved")
        restored = there.restore(tmp_path / "saved")
        assert np.abs(there.step([(restored, tokens[-1:], 1)])[0] - want).max() < 2e-3 * want.std()


def test_bits_are_the_same_each_time(tiny):
    """No sum depends on who was first; graphs and plain launches give the same."""
    tokens = np.load(DATA / "tiny" / "falcon40-q4_0.npz")["tokens"].astype(np.uint32)
    n_layers, n_ff = neurons(tiny("falcon40-q4_0"))
    hot = [np.arange(0, n_ff, 2, dtype=np.uint32)] * n_layers
    runs = []
    for threads in (1, 2):
        engine = _engine.Engine(tiny("falcon40-q4_0"), threads=threads, gpus=devices(1), hot_neurons=hot)
        runs += [run(engine, tokens, 20) for _ in range(2)]
    assert all(np.array_equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_tiles_have_the_bits_of_single_tokens(synthesize, kind):
    """Rows of more groups of weights than a warp has lanes."""
    wide = ["--embd", "1056", "--ff", "160", "--layers", "1", "--heads", "8", "--kv-heads", "2", "--rank", "32"]
    path = f"{synthesize('llama', kind, '--seed', '8', *wide)}.powerinfer.gguf"
    tokens = np.random.default_rng(9).integers(0, 384, 20).astype(np.uint32)
    engine = _engine.Engine(path, threads=1, n_ctx=32, gpus=devices(1))
    assert np.array_equal(run(engine, tokens, 19), run(engine, tokens, 1))


@pytest.mark.parametrize("name", NAMES)
def test_planned_splits(tiny, name):
    """What the planner makes of counts and of memory for a third and two thirds of the neurons, on one GPU and two."""
    path, kind = tiny(name), name.split("-")[1].upper()
    n_layers, n_ff = neurons(path)
    counts = [np.random.default_rng(i).zipf(1.5, n_ff).clip(0, 10**6).astype(np.uint64) for i in range(n_layers)]
    tokens = np.load(DATA / "tiny" / f"{name}.npz")["tokens"].astype(np.uint32)[:16]
    want = run(_engine.Engine(path, threads=1, n_ctx=64), tokens, 12)
    options = {"threads": 1, "n_ctx": 64, "neuron_counts": counts, "feed_from": 5}
    for n_devices in (1, 2):
        whole = _engine.Engine(path, gpus=devices(n_devices), **options).info()["gpus"]
        for share in (1 / 3, 2 / 3):
            bytes_of = [gpu["plan"]["bytes"] for gpu in whole]
            budgets = [int(sum(b.values()) - (1 - share) * b["neurons"]) for b in bytes_of]
            gpus = [(n, budget, 0, 1) for (n, *_), budget in zip(devices(n_devices), budgets, strict=True)]
            engine = _engine.Engine(path, gpus=gpus, **options)
            n_hot = sum(len(hot) for gpu in engine.info()["gpus"] for hot in gpu["plan"]["hot"])
            assert 0 < n_hot < n_layers * n_ff, (n_devices, share)
            got = run(engine, tokens, 12)
            assert np.abs(got - want).max() < CLOSE[kind] * want.std(), (n_devices, share)
