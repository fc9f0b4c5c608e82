"""Splits: activation counts from hostile and honest files, plans near the best, PowerInfer's .gpuidx."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from powerinfer_rs import Engine, InvalidArgumentError, ModelFormatError, ModelNotFoundError, _engine
from powerinfer_rs.workshop import load_counts, profile, split

from .conftest import DATA, ROOT, run_cli

INDEX = DATA / "tiny" / "llama-f16.powerinfer.gguf.generated.gpuidx"
N_LAYERS, N_FF = 3, 256
MIB = 2**20

HEAD = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\n"


def tensor_pickle(n, kind="LongStorage", key="0", tail=b""):
    """What torch.save pickles for a 1-D tensor of `n` values."""
    name = struct.pack("<I", len(key)) + key.encode()
    count = b"J" + struct.pack("<i", n)
    return (
        HEAD + kind.encode() + b"\nq\x02X" + name + b"q\x03X\x03\x00\x00\x00cpuq\x04" + count + b"tq\x05QK\x00"
        + count + b"\x85q\x06K\x01\x85q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b" + tail + b"."
    )  # fmt: skip


def write_pt(path, values, *, described=None, packed=zipfile.ZIP_STORED, kind="LongStorage", key="0"):
    with zipfile.ZipFile(path, "w", packed) as archive:
        archive.writestr("archive/data.pkl", described or tensor_pickle(len(values), kind))
        archive.writestr(f"archive/data/{key}", values.tobytes())


@pytest.fixture
def folder(tmp_path):
    """Counts of a tiny model's layers, as PowerInfer's tools write them."""
    counts = [np.random.default_rng(i).integers(0, 60, N_FF) for i in range(N_LAYERS)]
    for i, values in enumerate(counts):
        write_pt(tmp_path / f"activation_{i}.pt", values)
    return tmp_path, counts


def test_the_originals_index_is_read_and_written_alike(tmp_path):
    index = _engine.read_gpu_index(INDEX, N_LAYERS, N_FF)
    assert [len(hot) for hot in index["hot"]] == [64, 128, 96]
    _engine.write_gpu_index(tmp_path / "a b.gpuidx", index["hot"], N_FF, index["capacity"])
    assert (tmp_path / "a b.gpuidx").read_bytes() == INDEX.read_bytes()
    assert os.listdir(tmp_path) == ["a b.gpuidx"]


def test_empty_and_full_layers_come_back(tmp_path):
    hot = [np.arange(0, dtype=np.uint32), np.arange(N_FF, dtype=np.uint32), np.array([7], np.uint32)]
    _engine.write_gpu_index(tmp_path / "i", hot, N_FF, 5)
    back = _engine.read_gpu_index(tmp_path / "i", N_LAYERS, N_FF)
    assert back["capacity"] == 5
    assert all((a == b).all() for a, b in zip(back["hot"], hot, strict=True))


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [
        ("blk.0.gpu_idx", 2, "gpu_idx"),
        ("blk.0.gpu_bucket", 256, "gpu_bucket"),
        ("blk.0.gpu_bucket", -1, "gpu_bucket"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, offset, value, field):
    data = bytearray(INDEX.read_bytes())
    first = len(data) - 3 * 4 * N_FF - 4 * (64 + 128 + 96)
    at = first + (4 * N_FF if "bucket" in offset else 0)
    data[at : at + 4] = struct.pack("<i", value)
    (tmp_path / "i").write_bytes(data)
    with pytest.raises(ModelFormatError, match=field):
        _engine.read_gpu_index(tmp_path / "i", N_LAYERS, N_FF)


def test_duplicates_are_refused(tmp_path):
    data = bytearray(INDEX.read_bytes())
    at = len(data) - 3 * 4 * N_FF - 4 * (64 + 128 + 96) + 4 * N_FF
    data[at + 4 : at + 8] = data[at : at + 4]
    (tmp_path / "i").write_bytes(data)
    with pytest.raises(ModelFormatError, match="each neuron once"):
        _engine.read_gpu_index(tmp_path / "i", N_LAYERS, N_FF)


def test_another_models_index_is_refused(tiny):
    with pytest.raises(ModelFormatError, match="the model's 4 layers"):
        _engine.read_gpu_index(INDEX, 4, N_FF)
    with pytest.raises(ModelFormatError, match="one a neuron"):
        _engine.read_gpu_index(INDEX, N_LAYERS, 128)
    with pytest.raises(ModelFormatError, match=r"generic\.gpu_index"):
        _engine.read_gpu_index(tiny("llama-f16"), N_LAYERS, N_FF)
    for hot in ([3, 3], [4, 3], [N_FF]):
        with pytest.raises(InvalidArgumentError, match="hot"):
            _engine.write_gpu_index("unused", [np.array(hot, np.uint32)], N_FF, 0)


def test_counts_come_from_files(folder, tmp_path):
    path, counts = folder
    (path / "README").write_text("stray")
    (path / "activation_x.pt").write_text("stray")
    assert all((a == b).all() for a, b in zip(load_counts(path, N_LAYERS, N_FF), counts, strict=True))
    np.savez(tmp_path / "a.npz", **{f"activation_{i}": values for i, values in enumerate(counts)})
    assert all((a == b).all() for a, b in zip(load_counts(tmp_path / "a.npz", N_LAYERS, N_FF), counts, strict=True))


def test_fractions_are_scaled_alike(tmp_path):
    for i, top in enumerate((0.5, 1.0)):
        write_pt(tmp_path / f"activation_{i}.pt", np.linspace(0, top, N_FF).astype("<f4"), kind="FloatStorage")
    counts = load_counts(tmp_path, 2, N_FF)
    assert counts[1][-1] == 2**32
    assert counts[0][-1] == 2**31


def test_twelve_layers_land_on_their_own(tmp_path):
    for i in range(12):
        values = np.zeros(N_FF, np.int64)
        values[20 * i : 20 * i + 20] = 9
        write_pt(tmp_path / f"activation_{i}.pt", values)
    for i, counts in enumerate(load_counts(tmp_path, 12, N_FF)):
        assert counts.nonzero()[0].tolist() == list(range(20 * i, 20 * i + 20))


def test_a_layer_too_few_or_too_many_is_refused(folder):
    path, _ = folder
    with pytest.raises(ModelFormatError, match="layer 2"):
        load_counts(path, 2, N_FF)
    with pytest.raises(ModelFormatError, match="activation_3"):
        load_counts(path, 4, N_FF)
    shutil.copy(path / "activation_1.pt", path / "activation_01.pt")
    with pytest.raises(ModelFormatError, match="twice"):
        load_counts(path, N_LAYERS, N_FF)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


HOSTILE = {
    "a call": pickle.dumps(Evil(), 2),
    "a global": b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
    "another storage": tensor_pickle(N_FF, "BFloat16Storage"),
    "a great memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a great length": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "out of the archive": tensor_pickle(N_FF, key="../0"),
    "too many values": tensor_pickle(2**31 - 1),
    "a negative length": tensor_pickle(-1),
    "nothing": b"",
    "a loop": b"\x80\x02]q\x00h\x00a.",
    "an extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("described", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_does_nothing(tmp_path, monkeypatch, described):
    monkeypatch.chdir(tmp_path)
    write_pt(tmp_path / "activation_0.pt", np.zeros(N_FF, np.int64), described=described or b" ")
    with pytest.raises(ModelFormatError, match=r"activation_0\.pt"):
        load_counts(tmp_path, 1, N_FF)
    assert not (tmp_path / "executed").exists()


def test_hostile_archives_are_refused(folder):
    path, counts = folder
    file = path / "activation_0.pt"
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[:-40], b"\x80\x02K\x01."):
        file.write_bytes(content)
        with pytest.raises(ModelFormatError, match=r"activation_0\.pt"):
            load_counts(path, N_LAYERS, N_FF)
    write_pt(file, counts[0], packed=zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelFormatError, match="stored as it is"):
        load_counts(path, N_LAYERS, N_FF)
    write_pt(file, np.full(N_FF, -1, np.int64))
    with pytest.raises(ModelFormatError, match="below 0"):
        load_counts(path, N_LAYERS, N_FF)
    write_pt(file, counts[0][:100], described=tensor_pickle(N_FF))
    with pytest.raises(ModelFormatError, match="bytes of data"):
        load_counts(path, N_LAYERS, N_FF)
    for name, content in (("a.npz", b"PK\x05\x06"), ("b.npz", b"")):
        (path / name).write_bytes(content)
        with pytest.raises(ModelFormatError):
            load_counts(path / name, N_LAYERS, N_FF)
    np.savez(path / "c.npz", activation_0=np.array([object()] * N_FF))
    with pytest.raises(ModelFormatError, match="numbers of shape"):
        load_counts(path / "c.npz", 1, N_FF)


def total(device):
    return sum(device["bytes"].values())


@pytest.mark.parametrize("n_gpus", [1, 2])
@pytest.mark.parametrize("name", ["llama-f16", "bamboo-q4_0", "falcon40-f16", "opt-f16"])
def test_plans_fill_budgets_and_never_pass_them(tiny, name, n_gpus):
    info = _engine.inspect(tiny(name))
    arch = info["metadata"]["general.architecture"]
    n_layers, n_ff = (info["metadata"][f"{arch}.{key}"] for key in ("block_count", "feed_forward_length"))
    counts = [np.random.default_rng(i).zipf(1.5, n_ff).clip(0, 10**6).astype(np.uint64) for i in range(n_layers)]
    everything = {}
    for n_ctx in (1, 256, 4096):
        for budget in np.geomspace(1 * MIB, 64 * MIB, 40).astype(int).tolist():
            plans = _engine.plan(tiny(name), counts, [budget] * n_gpus, n_ctx=n_ctx, context_bytes=MIB // 2, least=8)
            everything = _engine.plan(tiny(name), counts, [2**40] * n_gpus, n_ctx=n_ctx, context_bytes=MIB // 2)
            for device, whole in zip(plans, everything, strict=True):
                assert total(device) <= budget
                assert sum(len(hot) for hot in device["hot"]) in range(n_ff * n_layers + 1)
                assert all(len(hot) == 0 or len(hot) >= 8 for hot in device["hot"])
                if device["bytes"]["overhead"] and total(device) < total(whole):
                    n_hot = sum(len(hot) for hot in device["hot"])
                    # More of the layers that are there; another layer's attention may be larger than what is left.
                    if n_hot < n_ff * device["n_predictors"]:
                        assert budget - total(device) < 0.03 * budget
    assert all(device["coverage"] == 1.0 for device in everything)


def best_by_highs(counts, capacity, least):
    """The most activation that `capacity` neurons hold, with none or at least `least` of a layer."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 0.0)
    chosen = []
    for values in counts:
        opened = model.addBinary()
        neurons = [model.addBinary() for _ in values]
        model.addConstr(sum(neurons) >= min(least, len(values)) * opened)
        model.addConstr(sum(neurons) <= len(values) * opened)
        chosen.append(neurons)
    everyone = [n for neurons in chosen for n in neurons]
    model.addConstr(sum(everyone) <= capacity)
    flat = [int(v) for values in counts for v in values]
    model.maximize(sum(v * n for v, n in zip(flat, everyone, strict=True)))
    return model.getInfo().objective_function_value


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 40, 100]), st.floats(0.01, 1.0), st.floats(1.1, 3.0))
def test_plans_are_as_good_as_an_exact_solvers(seed, least, share, skew):
    rng = np.random.default_rng(seed)
    scale = rng.integers(1, 20, N_LAYERS)
    counts = [(s * rng.zipf(skew, N_FF).clip(0, 1000)).astype(np.uint64) for s in scale]
    path = DATA / "tiny" / "llama-f16.powerinfer.gguf"
    (everything,) = _engine.plan(path, counts, [2**40], n_ctx=1)
    parts = everything["bytes"]
    capacity = int(share * N_LAYERS * N_FF)
    one = parts["neurons"] // (N_LAYERS * N_FF)
    budget = total(everything) - parts["neurons"] + capacity * one
    (plan,) = _engine.plan(path, counts, [budget], n_ctx=1, least=least)
    got = sum(int(counts[i][hot].sum()) for i, hot in enumerate(plan["hot"]))
    assert got >= 0.999 * best_by_highs(counts, capacity, least)


def test_profiling_counts_what_fires(tiny):
    counts = profile(tiny("llama-f16"), max_tokens=40)
    assert len(counts) == N_LAYERS
    assert all(values.shape == (N_FF,) and values.max() <= 41 for values in counts)
    engine = Engine(tiny("llama-f16"), count_neurons=True)
    ids = list(range(5, 25))
    engine.logits(ids)
    fired, active = engine.native.fired(), engine.native.stats()["active"]
    assert [values.sum() / (len(ids) * N_FF) for values in fired] == pytest.approx(active)
    engine.native.reset_stats()
    assert not any(values.any() for values in engine.native.fired())
    with pytest.raises(InvalidArgumentError, match="count_neurons"):
        Engine(tiny("llama-f16")).native.fired()
    with pytest.raises(InvalidArgumentError, match="dense"):
        Engine(tiny("llama-f16"), sparsity="dense", count_neurons=True)


def test_a_split_is_checked(tiny):
    counts = [np.ones(N_FF, np.uint64)] * N_LAYERS
    path = tiny("llama-f16")
    plan = split(path, counts, [1.0], context_bytes=MIB)
    assert plan.devices[0]["coverage"] == 1.0
    for bad in ([], [-1.0], [float("nan")]):
        with pytest.raises(InvalidArgumentError, match="budgets_gb"):
            split(path, counts, bad)
    with pytest.raises(InvalidArgumentError, match="counts"):
        split(path, counts[:2], [1.0])
    with pytest.raises(InvalidArgumentError, match="counts"):
        split(path, [values[:9] for values in counts], [1.0])


def test_the_simulation_prints_a_row_for_each_published_figure():
    script = ROOT / "benches" / "simulate_hybrid.py"
    sparse, dense = (
        subprocess.run(
            [sys.executable, script, "--falcon-density", d, "--llama-density", d],
            capture_output=True,
            check=True,
            text=True,
        )
        .stdout.split("\n\n")[1]
        .splitlines()[-5:]
        for d in ("0.1", "0.9")
    )
    for fast, slow in zip(sparse, dense, strict=True):
        assert float(fast.split("|")[6]) >= float(fast.split("|")[7]) > float(slow.split("|")[7])


def test_the_command_writes_an_index(tiny, tmp_path, folder):
    model = tmp_path / "a model.gguf"
    shutil.copy(tiny("llama-f16"), model)
    done = run_cli("split", "-m", model, "--vram-budget", "1", "--activations", folder[0], "--json")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["path"] == f"{model}.generated.gpuidx"
    index = _engine.read_gpu_index(out["path"], N_LAYERS, N_FF)
    assert [hot.tolist() for hot in index["hot"]] == out["devices"][0]["hot"]
    assert index["capacity"] == out["devices"][0]["bytes"]["neurons"]
    done = run_cli(
        "split", "-m", model, "--vram-budget", "0.6", "--vram-budget", "0.6", "-n", "16", "-o", tmp_path / "o"
    )
    assert done.returncode == 0, done.stderr
    assert b"GPU 1" in done.stdout
    done = run_cli("split", "-m", model, "--vram-budget", "1", "--activations", tmp_path / "none.npz")
    assert done.returncode == 1
    assert b"none.npz" in done.stderr


def test_what_can_not_be_is_said_before_a_model_runs(tiny, tmp_path):
    model = tmp_path / "model.gguf"
    shutil.copy(tiny("llama-f16"), model)
    before = model.read_bytes()
    for arguments, expected in [
        (["--vram-budget", "1", "-o", model], "is no GPU index"),
        (["--vram-budget", "1", "-o", tmp_path / "no" / "folder"], "is no folder"),
        (["--vram-budget", "inf"], "budgets_gb: got inf"),
        (["--vram-budget", "0.1"], "expected 0.50"),
        (["--vram-budget", "1", "-f", os.devnull], "text: got none"),
    ]:
        done = run_cli("split", "-m", model, *arguments)
        assert done.returncode == 1
        assert expected in done.stderr.decode().replace("\n", " "), done.stderr
    assert model.read_bytes() == before
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])
def test_counts_of_every_type(tmp_path, dtype):
    np.savez(tmp_path / "counts.npz", **{f"activation_{i}": np.arange(8, dtype=dtype) for i in range(2)})
    assert [c.tolist() for c in load_counts(tmp_path / "counts.npz", 2, 8)] == [list(range(8))] * 2


def test_tiny_fractions_keep_their_order(tmp_path):
    np.savez(tmp_path / "counts.npz", activation_0=np.array([0, 5e-324]))
    assert load_counts(tmp_path / "counts.npz", 1, 2)[0].tolist() == [0, 2**32]


@pytest.mark.parametrize(
    "described",
    [
        b"\x80\x02})" + b"2\x86" * 40 + b"Ns.",
        b"\x80\x02)" + b"q\x01h\x01\x86" * 60 + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 2**31) + b".",
        HEAD
        + b"LongStorage\nq\x02X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQK\x00)"
        + b"q\x09h\x09\x86" * 40
        + b"\x85K\x01\x85\x89tR.",
    ],
    ids=["a tuple as a key", "a long tuple", "bytes that aren't there", "a deep shape"],
)
def test_a_short_pickle_stands_for_no_long_time(tmp_path, described):
    write_pt(tmp_path / "activation_0.pt", np.arange(3), described=described)
    with pytest.raises(ModelFormatError) as caught:
        load_counts(tmp_path, 1, 3)
    assert len(str(caught.value)) < 1000


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "activation_0.pt")
    with pytest.raises(ModelFormatError, match="no regular file"):
        load_counts(tmp_path, 1, 3)
    with pytest.raises(ModelFormatError, match="no regular file"):
        load_counts(os.devnull, 1, 3)
    with pytest.raises(ModelNotFoundError):
        load_counts(tmp_path / "nothing", 1, 3)
    with pytest.raises(InvalidArgumentError, match="no regular file"):
        _engine.write_gpu_index(tmp_path / "activation_0.pt", [np.arange(2, dtype=np.uint32)], 3, 1)
    with pytest.raises(InvalidArgumentError, match="n_ff"):
        _engine.write_gpu_index(tmp_path / "new", [np.arange(2, dtype=np.uint32)], 2**33, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["activation_0.pt"]


def test_damaged_archives_are_refused_or_read(tmp_path):
    """Packed or not, whatever byte is another."""
    rng = np.random.default_rng(11)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "counts.npz", **{f"activation_{i}": np.arange(64, dtype="i4") for i in range(2)})
        sound = (tmp_path / "counts.npz").read_bytes()
        for _ in range(300):
            broken = bytearray(sound)
            for at in rng.integers(0, len(sound), rng.integers(1, 4)):
                broken[at] = rng.integers(0, 256)
            (tmp_path / "broken.npz").write_bytes(broken)
            with contextlib.suppress(ModelFormatError):
                load_counts(tmp_path / "broken.npz", 2, 64)
