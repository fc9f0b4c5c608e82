"""Quantising: bits as the `gguf` package's, errors as small as ggml's, and no file that isn't whole."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from powerinfer_rs import Engine, InvalidArgumentError, ModelFileError, ModelFormatError, _engine
from powerinfer_rs.workshop import quantize
from powerinfer_rs.workshop.file_types import FILE_TYPES, Mix, file_type

import gguf

from .conftest import run_cli

SAME = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# Root mean square errors of ggml 0.13.1's own encoders for the weights of the test below.
K_ERRORS = {"Q2_K": 0.29628, "Q3_K": 0.15076, "Q4_K": 0.07126, "Q5_K": 0.03608, "Q6_K": 0.01772}


def encode(rows, kind, *, tmp, importance=None, threads=None):
    """The bytes of float32 rows in a format, by way of a file."""
    path = tmp / "encoded.gguf"
    writer = _engine.Writer(path, [], [("x", kind, rows.shape[::-1])], threads=threads)
    writer.write(np.ascontiguousarray(rows, np.float32).view(np.uint8).ravel(), "F32", importance)
    writer.finish()
    return _engine.Reader(path).rows("x", 0, len(rows))


def rows_of(kind, seed=0):
    """Rows of all sorts: normal, heavy-tailed, tiny, zero, of one value, with zero blocks."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((16, 512)).astype(np.float32)
    rows[1] *= rng.standard_normal(512) ** 3
    rows[2] *= 1e-6
    rows[3] = 0
    rows[4] = -1.5
    rows[5, 64:320] = 0
    rows[6] = np.abs(rows[6])
    rows[7] = -np.abs(rows[7])
    rows[8] = np.round(rows[8] * 2) / 2
    rows[9] *= 1e4
    return rows


@pytest.mark.parametrize("kind", SAME)
def test_bits_are_those_of_the_gguf_package(kind, tmp_path):
    rows = rows_of(kind)
    expected = gguf_quantize(rows, Kind[kind])
    assert np.array_equal(encode(rows, kind, tmp=tmp_path), expected.view(np.uint8).ravel())


@pytest.mark.parametrize("kind", SAME)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_bits_are_those_of_the_gguf_package_for_any_numbers(kind, data, tmp_path_factory):
    # Below 1e-30 the package divides by subnormal scales, and what NumPy makes of that differs by machine.
    finite = st.floats(-6e4, 6e4, width=32).map(lambda v: v if abs(v) > 1e-30 else 0.0)
    rows = np.array(data.draw(st.lists(finite, min_size=64, max_size=64)), np.float32).reshape(2, 32)
    with np.errstate(over="ignore"):
        expected = gguf_quantize(rows, Kind[kind])
    got = encode(rows, kind, tmp=tmp_path_factory.mktemp("any"))
    assert np.array_equal(got, expected.view(np.uint8).ravel())


@pytest.mark.parametrize("kind", K_ERRORS)
def test_k_quants_lose_no_more_than_ggmls(kind, tmp_path):
    rows = np.random.default_rng(1).standard_normal((256, 4096)).astype(np.float32)
    got = encode(rows, kind, tmp=tmp_path).reshape(256, -1)
    error = np.sqrt(np.square(dequantize(got, Kind[kind]) - rows).mean())
    assert error == pytest.approx(K_ERRORS[kind], rel=1e-3)
    # What is all sorts: never far off where the largest of a block is.
    rows = rows_of(kind)
    blocks = dequantize(encode(rows, kind, tmp=tmp_path).reshape(16, -1), Kind[kind])
    off = np.abs(blocks - rows).reshape(16, -1, 256).max(-1)
    # Row 2 is so small that F16 holds its scales badly.
    assert (off <= 0.6 * np.abs(rows).reshape(16, -1, 256).max(-1))[np.arange(16) != 2].all()
    assert not blocks[3].any()


@pytest.mark.parametrize("kind", [*SAME[2:], *K_ERRORS])
def test_importance_makes_what_is_important_better(kind, tmp_path):
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((32, 1024)).astype(np.float32)
    importance = np.where(np.arange(1024) % 4 == 0, 25, 0.25).astype(np.float32)

    def weighted_error(importance_of):
        coded = encode(rows, kind, tmp=tmp_path, importance=importance_of).reshape(32, -1)
        return float((importance * np.square(dequantize(coded, Kind[kind]) - rows)).mean())

    if kind == "Q8_0":
        assert weighted_error(importance) == weighted_error(None)
    else:
        assert weighted_error(importance) < 0.95 * weighted_error(None)


@pytest.mark.parametrize("kind", ["Q4_0", "Q2_K", "Q6_K"])
def test_any_number_of_threads_gives_the_same_bits(kind, tmp_path):
    rows = np.random.default_rng(3).standard_normal((37, 512)).astype(np.float32)
    one = encode(rows, kind, tmp=tmp_path, threads=1)
    assert np.array_equal(one, encode(rows, kind, tmp=tmp_path, threads=5))


def test_a_model_keeps_its_keys_and_vectors_and_runs(tiny, tmp_path):
    source, out = tiny("llama-f16"), tmp_path / "out.gguf"
    done = quantize(source, out, "q8_0")
    assert done.types["Q8_0"] > 10
    assert done.bytes_after < done.bytes_before
    was, now = _engine.inspect(source), _engine.inspect(out)
    assert now["magic"] == "PWRI"
    assert {k: v for k, v in was["metadata"].items() if k != "general.file_type"} == {
        k: v for k, v in now["metadata"].items() if k not in ("general.file_type", "general.quantization_version")
    } | ({"general.quantization_version": 2} if "general.quantization_version" in was["metadata"] else {})
    assert [(n, d) for n, _, d, _ in was["tensors"]] == [(n, d) for n, _, d, _ in now["tensors"]]
    ids = list(range(3, 20))
    for mode in ("dense", "predicted"):
        exact, close = (Engine(p, sparsity=mode, device="cpu").logits(ids) for p in (source, out))
        assert np.corrcoef(exact.ravel(), close.ravel())[0, 1] > (0.999 if mode == "dense" else 0.97)


@pytest.mark.parametrize("type", list(FILE_TYPES))
def test_every_choice_writes_a_file_that_the_gguf_package_reads(type, demo, tmp_path):
    small = tmp_path / "in.gguf"
    _write_model(small)
    out = tmp_path / "out.gguf"
    done = quantize(small, out, type.lower())
    reader = gguf.GGUFReader(out)
    assert {t.name: t.tensor_type.name for t in reader.tensors}["output_norm.weight"] == "F32"
    assert {kind: sum(t.tensor_type.name == kind for t in reader.tensors) for kind in done.types} == done.types
    assert int(reader.fields["general.file_type"].parts[-1][0]) == gguf.LlamaFileType[_ftype_name(type)]
    for t in reader.tensors:
        assert np.isfinite(dequantize(t.data, t.tensor_type)).all()


def _ftype_name(type):
    if type == "F32":
        return "ALL_F32"
    return f"MOSTLY_{type}"


def _write_model(path, *, n_layers=8, dim=256, n_ff=512, value=None, arch="llama", rows=64):
    """A file with the tensors of a model, which needn't run."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(n_layers)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    rng = np.random.default_rng(0)

    def matrix(name, n, m):
        data = rng.standard_normal((n, m)).astype(np.float32)
        if value is not None:
            data.flat[5] = value
        writer.add_tensor(f"{name}.weight", data)

    matrix("token_embd", rows, dim)
    matrix("output", rows, dim)
    writer.add_tensor("output_norm.weight", np.ones(dim, np.float32))
    for i in range(n_layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{i}.{name}", dim, dim)
        matrix(f"blk.{i}.ffn_gate", n_ff, dim)
        matrix(f"blk.{i}.ffn_up", n_ff, dim)
        matrix(f"blk.{i}.ffn_down", dim, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _types(out):
    return {name: kind for name, kind, _, _ in _engine.inspect(out)["tensors"]}


def test_mixes_are_llama_cpps(tmp_path):
    _write_model(tmp_path / "in.gguf", n_layers=8)
    quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_k_m")
    types = _types(tmp_path / "out.gguf")
    # Eight layers: the first, the last, and each third of those between get more bits.
    more = [i for i in range(8) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert more == [i for i in range(8) if types[f"blk.{i}.attn_v.weight"] == "Q6_K"] == [0, 3, 6, 7]
    assert types["output.weight"] == "Q6_K"
    assert types["blk.1.ffn_up.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q4_K"

    def of(type, name, **options):
        sizes = {"n_layers": 32, "falcon": False, "grouped": 1, "tied": False} | options
        return Mix(file_type(type), file_type("q8_0"), **sizes).of(name, (4096, 4096), "F16")[0]

    assert of("q2_k", "blk.9.attn_v.weight", grouped=8) == "Q4_K"
    assert of("q4_k_m", "blk.11.attn_v.weight", n_layers=80) == "Q5_K"
    assert of("q4_0", "token_embd.weight", tied=True) == "Q6_K"
    assert of("q5_k_m", "output.weight", falcon=True) == "Q8_0"
    assert of("q4_k_m", "blk.3.fc1.weight") == "Q8_0"
    assert of("q3_k_l", "blk.3.ffn_down_t.weight") == "Q5_K"
    assert of("q8_0", "blk.3.attn_norm.weight") == "F16"


def test_rows_that_do_not_divide_fall_back_and_are_told(tmp_path):
    _write_model(tmp_path / "in.gguf", n_layers=1, dim=96, n_ff=80)
    done = quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_k_s")
    types = _types(tmp_path / "out.gguf")
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert any("blk.0.ffn_down.weight: rows of 80 don't divide into blocks of Q4_K: F16" in n for n in done.notices)


def legacy_imatrix(entries, path):
    data = struct.pack("<i", len(entries))
    for name, (count, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", count, len(values))
        data += np.asarray(values, "<f4").tobytes()
    path.write_bytes(data)
    return path


def test_both_forms_of_importance_matrices_are_read_alike(tmp_path):
    source = tmp_path / "in.gguf"
    _write_model(source, n_layers=1)
    squares = np.random.default_rng(4).random(256).astype(np.float32) * 64
    old = legacy_imatrix({"blk.0.attn_q.weight": (16, squares)}, tmp_path / "old.dat")
    writer = gguf.GGUFWriter(tmp_path / "new.gguf", "")
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", squares.reshape(1, -1))
    writer.add_tensor("blk.0.attn_q.weight.counts", np.array([[16]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    outs = []
    for matrix in (old, tmp_path / "new.gguf", None):
        out = tmp_path / "out.gguf"
        quantize(source, out, "q4_0", imatrix=matrix)
        outs.append(_engine.Reader(out).rows("blk.0.attn_q.weight", 0, 256))
    assert np.array_equal(outs[0], outs[1])
    assert not np.array_equal(outs[0], outs[2])


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "entries"),
        (b"\xff\xff\xff\x7f", "entries"),
        (struct.pack("<ii", 1, 1 << 30), "entry 0"),
        (struct.pack("<ii", 1, -5), "entry 0"),
        (struct.pack("<ii2s", 1, 2, b"\xff\xfe"), "entry 0"),
        (struct.pack("<ii1sii", 1, 1, b"x", 1, 1 << 30), "x (values)"),
        (struct.pack("<ii1sii", 1, 1, b"x", 1, -1), "x (values)"),
        (struct.pack("<ii1siif", 1, 1, b"x", 1, 1, float("nan")), "values of x"),
        (struct.pack("<ii1siif", 1, 1, b"x", 1, 1, -1.0), "values of x"),
        (b"GGUF\3\0\0\0", ""),
    ],
)
def test_broken_importance_matrices_are_refused(data, field, tmp_path):
    _write_model(tmp_path / "in.gguf", n_layers=1)
    matrix = tmp_path / "broken.dat"
    matrix.write_bytes(data)
    with pytest.raises(ModelFormatError) as error:
        quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_0", imatrix=matrix)
    assert "broken.dat" in str(error.value)
    assert field in str(error.value)
    assert not (tmp_path / "out.gguf").exists()


def test_an_importance_matrix_of_another_model_is_refused(tmp_path):
    _write_model(tmp_path / "in.gguf", n_layers=1)
    for name, n in (("blk.0.attn_q.weight", 64), ("another", 256)):
        matrix = legacy_imatrix({name: (1, np.ones(n))}, tmp_path / "other.dat")
        with pytest.raises(InvalidArgumentError, match="imatrix"):
            quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_0", imatrix=matrix)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 7e4])
def test_what_a_type_cannot_hold_is_refused(value, tmp_path):
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    _write_model(source, n_layers=1, value=value)
    out.write_bytes(b"was here")
    with pytest.raises(ModelFormatError, match="token_embd"):
        quantize(source, out, "f16")
    assert out.read_bytes() == b"was here"
    assert sorted(os.listdir(tmp_path)) == ["in.gguf", "out.gguf"]


def test_what_cannot_be_is_refused_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(InvalidArgumentError, match="type"):
        quantize(tiny("llama-f16"), tmp_path / "out.gguf", "q7_0")
    with pytest.raises(InvalidArgumentError, match="predictor_type"):
        quantize(tiny("llama-f16"), tmp_path / "out.gguf", "q4_0", predictor_type="q7_0")
    copy = tmp_path / "in.gguf"
    copy.write_bytes(tiny("llama-f16").read_bytes())
    (tmp_path / "link.gguf").symlink_to(copy)
    for out in (copy, tmp_path / "link.gguf"):
        with pytest.raises(InvalidArgumentError, match="output"):
            quantize(copy, out, "q4_0")
    with pytest.raises(FileNotFoundError, match="out.gguf"):
        quantize(copy, tmp_path / "no" / "out.gguf", "q4_0")
    with pytest.raises((InvalidArgumentError, ModelFileError)):
        quantize(copy, tmp_path, "q4_0")
    assert copy.read_bytes() == tiny("llama-f16").read_bytes()


def test_a_full_disk_leaves_nothing(tiny, tmp_path):
    def no_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    command = [sys.executable, "-m", "powerinfer_rs", "quantize", tiny("llama-f16"), tmp_path / "out.gguf"]
    done = subprocess.run([*map(str, command), "--type", "q8_0"], capture_output=True, preexec_fn=no_room, timeout=60)
    assert done.returncode == 1
    assert b"out.gguf" in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert os.listdir(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    source = tmp_path / "in.gguf"
    _write_model(source, n_layers=8, dim=1024, n_ff=4096)
    folder = tmp_path / "out"
    folder.mkdir()
    for delay in (0.0, 0.3):
        child = subprocess.Popen(
            [sys.executable, "-m", "powerinfer_rs", "quantize", str(source), str(folder / "o.gguf"), "--type", "q2_k"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        while not os.listdir(folder) and child.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=30)
        assert child.returncode == 130, told
        assert os.listdir(folder) == []


def test_the_command_line(tiny, tmp_path):
    out = tmp_path / "out.gguf"
    done = run_cli("quantize", tiny("llama-f16"), out, "--type", "Q4_0", "--json")
    result = json.loads(done.stdout)
    assert Path(result["path"]) == out
    assert result["types"]["Q4_0"] > 1
    assert result["bytes_after"] == out.stat().st_size
    assert "Example: powerinfer quantize" in " ".join(run_cli("quantize", "--help").stdout.decode().split())
    done = run_cli("quantize", tiny("llama-f16"), out, "--type", "q9")
    assert done.returncode == 1
    assert b"q9" in done.stderr
    assert done.stderr.count(b"\n") == 1
