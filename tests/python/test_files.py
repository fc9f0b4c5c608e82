"""The reader against the `gguf` package, every weight type in use, split files."""

from __future__ import annotations

import os

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from powerinfer_rs import (
    Engine,
    ModelFormatError,
    ModelNotFoundError,
    PowerInferError,
    UnsupportedModelError,
    _engine,
)

from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter

from .conftest import DATA
from .oracle import Model, Runner

KINDS = [
    *(Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS),
]
# Where each quantised type has its half-precision scales.
HALVES = {
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q6_K: (208,),
}


def random_weights(kind, n_rows, n_cols, rng, scale=0.02):
    """Rows of random bytes whose scales are small, as (n_rows, row bytes), or float values."""
    if kind == Kind.F32:
        return (scale * rng.standard_normal((n_rows, n_cols))).astype(np.float32)
    if kind == Kind.F16:
        return (scale * rng.standard_normal((n_rows, n_cols))).astype(np.float16)
    if kind == Kind.BF16:
        bits = (scale * rng.standard_normal((n_rows, n_cols))).astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    length, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_rows * n_cols // length, size), dtype=np.uint8)
    largest = {Kind.Q8_0: 127, Kind.Q6_K: 4000, Kind.Q5_K: 1000, Kind.Q4_K: 500, Kind.Q3_K: 120, Kind.Q2_K: 40}
    largest |= {Kind.IQ4_NL: 127, Kind.IQ4_XS: 3000}
    for at in HALVES.get(kind, (0,)):
        d = rng.uniform(0.5, 1.5, len(blocks)) * scale * 2 / largest.get(kind, 10)
        blocks[:, at : at + 2] = d.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(n_rows, n_cols // length * size)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_decoding_is_bit_for_bit_that_of_the_gguf_package(kind, tmp_path):
    rng = np.random.default_rng(7)
    length, size = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (64, size * (40 if length == 1 else 1)), dtype=np.uint8)
    # Any bytes but scales that are no numbers: what a NaN's payload becomes is nobody's promise.
    for at in HALVES.get(kind, (0,)) if length > 1 else ():
        raw[:, at + 1] &= 0xBF
    if length == 1:
        raw.reshape(64, -1, size)[:, :, -1] &= 0xBF
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    if kind in (Kind.F32, Kind.F16):
        writer.add_tensor("x", raw.view(np.float32 if kind == Kind.F32 else np.float16))
    else:
        writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = _engine.decode_tensor(tmp_path / "x.gguf", "x")
    with np.errstate(all="ignore"):
        want = dequantize(raw, kind).astype(np.float32).ravel()
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def write_llama(path, kind, *, relu_file=True, width=256):
    """A llama of two layers, all its matrices of one type, predictors and `ffn_down_t` included."""
    rng = np.random.default_rng(int(kind))
    writer = GGUFWriter(path, "llama")
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)

    def matrix(name, n_out, n_in):
        data = random_weights(kind, n_out, n_in, rng, 0.06)
        writer.add_tensor(name + ".weight", data, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)

    matrix("token_embd", 32, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for i in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(width, np.float32))
        for name, n_out in (("attn_q", width), ("attn_k", width // 2), ("attn_v", width // 2), ("attn_output", width)):
            matrix(f"blk.{i}.{name}", n_out, width)
        names = ["ffn_gate", "ffn_up", *(("ffn_down_t", "fc1", "fc2") if relu_file else ("ffn_down",))]
        for name in names:
            matrix(f"blk.{i}.{name}", width, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_every_type_serves_for_every_weight(kind, tmp_path):
    tokens = [1, 5, 9, 2, 31, 7]
    path = write_llama(tmp_path / "m.gguf", kind)
    for mode in ("predicted", "exact"):
        runner = Runner(Model(path), mode)
        want = np.array([runner.step(t) for t in tokens])
        got = Engine(path, sparsity=mode, threads=2).logits(tokens)
        assert np.abs(got - want).max() < 2e-3 * want.std()
    dense = write_llama(tmp_path / "d.gguf", kind, relu_file=False)
    runner = Runner(Model(dense), "dense")
    want = np.array([runner.step(t) for t in tokens])
    assert np.abs(Engine(dense).logits(tokens) - want).max() < 2e-3 * want.std()
    exact = Engine(dense, activation="relu", sparsity="exact").logits(tokens)
    full = Engine(dense, activation="relu", sparsity="dense").logits(tokens)
    assert np.abs(exact - full).max() < 0.05 * full.std()


def split(source, folder, n):
    """The file in n parts, named and keyed as llama.cpp's gguf-split does."""
    reader = GGUFReader(source)
    parts = np.array_split(np.arange(len(reader.tensors)), n)
    paths = []
    for i, part in enumerate(parts):
        paths.append(folder / f"model-{i + 1:05}-of-{n:05}.gguf")
        writer = GGUFWriter(paths[-1], "llama")
        if i == 0:
            for key, f in reader.fields.items():
                value = f.contents()
                if key.startswith("llama.") and not isinstance(value, list):
                    writer.add_key_value(key, value, f.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for t in (reader.tensors[j] for j in part):
            floats = t.tensor_type in (Kind.F32, Kind.F16)
            writer.add_tensor(t.name, np.array(t.data), raw_dtype=None if floats else t.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_split_files(tmp_path):
    whole = write_llama(tmp_path / "whole.gguf", Kind.Q8_0)
    want = Engine(whole).logits([1, 2, 3])
    paths = split(whole, tmp_path, 3)
    for path in paths:
        assert np.array_equal(Engine(path).logits([1, 2, 3]), want)
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    with pytest.raises(ModelFormatError, match="file name.*NNNNN"):
        Engine(renamed)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFormatError, match=r"00002-of-00003.*split\.no"):
        Engine(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelNotFoundError, match="00002-of-00003"):
        Engine(paths[0])


def test_missing_and_wrong_files(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        Engine(tmp_path / "no such.gguf")
    assert isinstance(caught.value, PowerInferError)
    assert "no such.gguf" in str(caught.value)
    with pytest.raises(PowerInferError, match="not a regular file"):
        Engine(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFormatError, match="pipe.gguf.*not a regular file"):
        Engine(tmp_path / "pipe.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelFormatError, match="empty.gguf.*0 bytes"):
        Engine(tmp_path / "empty.gguf")
    (tmp_path / "text.gguf").write_text("hello, I am not a model")
    with pytest.raises(ModelFormatError, match="magic.*GGUF or PWRI"):
        Engine(tmp_path / "text.gguf")


def test_unknown_architectures_name_the_known(vocab):
    with pytest.raises(UnsupportedModelError, match="gpt2.*llama, bamboo, falcon, opt, qwen2, qwen3"):
        Engine(vocab("gpt-2"))
    with pytest.raises(ModelFormatError, match=r"token_embd\.weight: missing"):
        Engine(vocab("falcon"))


def test_inspect_tells_the_header():
    info = _engine.inspect(DATA / "tiny" / "llama-q4_0.powerinfer.gguf")
    assert (info["magic"], info["version"]) == ("PWRI", 3)
    assert info["metadata"]["llama.embedding_length"] == 64
    assert info["metadata"]["tokenizer.ggml.scores"][:3] == [0.0, 0.0, 0.0]
    shapes = {name: (kind, dims) for name, kind, dims, _ in info["tensors"]}
    assert shapes["blk.0.fc2.weight"] == ("Q4_0", [64, 256])
