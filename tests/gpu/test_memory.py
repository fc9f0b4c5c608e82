"""What goes to a GPU of so much memory: never more than that, and where it goes."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest
from powerinfer_rs import DeviceError, Engine, InvalidArgumentError, ModelFormatError, _engine

from tests.python.test_split import write_pt

from .test_logits_on_gpu import neurons

MIB = 2**20


@pytest.mark.parametrize("name", ["llama-f16", "bamboo-q4_0", "falcon40-f16", "opt-f16"])
def test_budgets_are_never_passed_and_little_is_left_idle(emulator, tiny, name):
    """The device has exactly the budget, and counts every byte."""
    path = tiny(name)
    n_layers, n_ff = neurons(path)
    counts = [np.random.default_rng(i).zipf(1.5, n_ff).clip(0, 10**6).astype(np.uint64) for i in range(n_layers)]
    n_placed = 0
    for n_ctx in (32, 256):
        for batch in (1, 16, 512):
            for budget in np.geomspace(MIB // 2, 16 * MIB, 12).astype(int).tolist():
                emulator.memory(budget)
                emulator.peak()
                gpus = [(0, budget, 0, 1)]
                e = _engine.Engine(path, threads=1, n_ctx=n_ctx, batch=batch, gpus=gpus, neuron_counts=counts)
                sequence = e.new_sequence()
                e.step([(sequence, np.arange(3, 19, dtype=np.uint32), 1)])
                (info,) = e.info()["gpus"] or [None]
                del e
                peak = emulator.peak()
                assert peak <= budget
                if info is None:
                    assert peak == 0
                    continue
                n_placed += 1
                plan = info["plan"]
                planned = sum(plan["bytes"].values())
                assert info["used"] <= planned <= budget
                # More of the layers that are there; another layer's attention may be larger than what is left.
                if sum(len(hot) for hot in plan["hot"]) < n_ff * plan["n_predictors"]:
                    assert budget - planned < 0.03 * budget
                    assert budget - peak < 0.03 * budget + 64 * 1024 * n_layers
    assert n_placed > 20


def test_splits_come_from_the_index_and_from_counts(tiny, tmp_path):
    model = tmp_path / "a model.gguf"
    shutil.copy(tiny("llama-f16"), model)
    index = tmp_path / "a model.gguf.generated.gpuidx"
    n_layers, n_ff = neurons(model)
    hot = [np.arange(i, n_ff, 5, dtype=np.uint32) for i in range(n_layers)]
    _engine.write_gpu_index(tmp_path / "given.gpuidx", hot, n_ff, 1 << 20)

    def placed(**options):
        (gpu,) = Engine(model, threads=1, n_ctx=64, device="cuda:0", **options).stats()["gpus"]
        return [h.tolist() for h in gpu["plan"]["hot"]]

    everything = [list(range(n_ff))] * n_layers
    assert placed(gpu_index=tmp_path / "given.gpuidx") == [h.tolist() for h in hot]
    # A cached split smaller than memory allows is made anew; without counts nothing is written.
    shutil.copy(tmp_path / "given.gpuidx", index)
    before = index.read_bytes()
    assert placed() == everything
    assert index.read_bytes() == before
    # With counts it is, and then taken as it is.
    (tmp_path / "activation").mkdir()
    for i in range(n_layers):
        write_pt(tmp_path / "activation" / f"activation_{i}.pt", np.arange(n_ff))
    assert placed() == everything
    kept = index.read_bytes()
    assert kept != before
    assert placed() == everything
    assert index.read_bytes() == kept
    # Another model's, or a broken one: said so, unless it isn't wanted.
    _engine.write_gpu_index(index, [h[:3] for h in hot[:2]], n_ff, 100)
    with pytest.raises(ModelFormatError, match="reset"):
        placed()
    assert placed(gpu_index="off") == placed(gpu_index="reset") == everything
    index.write_bytes(kept[:100])
    with pytest.raises(ModelFormatError, match="reset"):
        placed()


def test_twelve_layers_get_their_own_neurons(synthesize, tmp_path):
    """`activation_10` comes after `activation_9`, not after `activation_1`."""
    small = ["--embd", "32", "--ff", "64", "--layers", "12", "--heads", "2", "--kv-heads", "2", "--rank", "32"]
    path = f"{synthesize('llama', 'F32', '--seed', '9', *small)}.powerinfer.gguf"
    folder = tmp_path / "activation"
    folder.mkdir()
    shutil.copy(path, tmp_path / "model.gguf")
    want = []
    for layer in range(12):
        counts = np.zeros(64, np.int64)
        own = np.arange(layer, layer + 40) % 64
        counts[own] = 9
        write_pt(folder / f"activation_{layer}.pt", counts)
        want.append(sorted(own.tolist()))
    from powerinfer_rs.activations import load_counts

    counts = load_counts(folder, 12, 64)
    whole = _engine.Engine(path, threads=1, n_ctx=32, gpus=[(0, 1 << 30, 0, 1)])
    bytes_of = whole.info()["gpus"][0]["plan"]["bytes"]
    spare = bytes_of["neurons"] * 24 // 64
    budget = sum(bytes_of.values()) - spare
    engine = _engine.Engine(path, threads=1, n_ctx=32, gpus=[(0, budget, 0, 1)], neuron_counts=counts)
    (gpu,) = engine.info()["gpus"]
    assert [h.tolist() for h in gpu["plan"]["hot"]] == want


def test_a_named_gpu_that_holds_nothing_is_an_error(tiny, caplog):
    with pytest.raises(DeviceError, match=r"cuda:0: a budget of 0\.100 GB holds nothing.* takes 0\.50\d at least"):
        Engine(tiny("llama-f16"), device="cuda:0", vram_budget=0.1)
    with pytest.raises(InvalidArgumentError, match="vram_budget: got 0 for device cuda"):
        Engine(tiny("llama-f16"), device="cuda", vram_budget=0)
    with caplog.at_level(logging.WARNING):
        engine = Engine(tiny("llama-f16"), vram_budget=0.1)
    assert engine.stats()["device"] == "cpu"
    assert "holds nothing" in caplog.text


def test_more_than_there_is_is_what_is_free(tiny):
    one, other = (Engine(tiny("llama-f16"), device="cuda:0", vram_budget=b).stats()["gpus"] for b in (1000, None))
    assert one[0]["plan"]["bytes"] == other[0]["plan"]["bytes"]


def test_a_named_index_that_does_not_fit_is_said(tiny, tmp_path, caplog):
    n_layers, n_ff = neurons(tiny("llama-f16"))
    _engine.write_gpu_index(tmp_path / "all.gpuidx", [np.arange(n_ff, dtype=np.uint32)] * n_layers, n_ff, 1 << 20)
    options = {"device": "cuda:0", "n_ctx": 64}
    placed = Engine(tiny("llama-f16"), vram_budget=1, **options).stats()["gpus"][0]["plan"]["bytes"]
    budget = (sum(placed.values()) - placed["neurons"] / 2) / 2**30
    with caplog.at_level(logging.WARNING):
        Engine(tiny("llama-f16"), **options, vram_budget=budget, gpu_index=tmp_path / "all.gpuidx")
    assert "neurons that the GPU index names" in caplog.text


def test_json_of_a_model_on_a_gpu(tiny):
    model = ["-m", tiny("llama-f16"), "--json", "--device", "cuda:0"]
    for command in (["generate", "-p", "hello", "-n", "2"], ["bench", "-p", "4", "-n", "2", "-r", "1"]):
        done = subprocess.run([sys.executable, "-m", "powerinfer_rs", *command, *model], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["stats"]["gpus"][0]["plan"]["hot"]
