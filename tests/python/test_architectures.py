"""Architectures and rope scalings that the oracle doesn't know, against a NumPy pass of their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from powerinfer_rs import Engine, InvalidArgumentError, UnsupportedModelError

from gguf import GGUFWriter

WIDTH, FF, HEADS, KV_HEADS, VOCAB, LAYERS = 64, 96, 4, 2, 40, 2
TOKENS = [3, 17, 39, 0, 8, 8, 21]


def write(
    path, arch, *, head_dim=16, keys=(), biases=False, qk_norm=False, tied=False, factors=None, fused=False, extra=()
):
    """Write a random F32 model; returns its tensors by name, as (out, in)."""
    rng = np.random.default_rng(4)
    writer = GGUFWriter(path, arch)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FF)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_context_length(128)
    if arch == "falcon":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-6)
    for add in keys:
        add(writer)
    tensors = {}

    def put(name, *shape, around=0.0, scale=None):
        scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
        tensors[name] = (around + scale * rng.standard_normal(shape)).astype(np.float32)
        writer.add_tensor(name, tensors[name])

    def linear(name, n_out, n_in):
        put(name + ".weight", n_out, n_in)
        if biases:
            put(name + ".bias", n_out, scale=0.1)

    def norm(name, n=WIDTH):
        put(name + ".weight", n, around=1.0, scale=0.1)
        if arch == "falcon":
            put(name + ".bias", n, scale=0.1)

    put("token_embd.weight", VOCAB, WIDTH, scale=1.0)
    norm("output_norm")
    if not tied:
        put("output.weight", VOCAB, WIDTH)
    if factors is not None:
        tensors["rope_freqs.weight"] = np.asarray(factors, np.float32)
        writer.add_tensor("rope_freqs.weight", tensors["rope_freqs.weight"])
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    for i in range(LAYERS):
        b = f"blk.{i}."
        norm(b + "attn_norm")
        if fused:
            linear(b + "attn_qkv", q + 2 * kv, WIDTH)
        else:
            norm(b + "ffn_norm")
            for name, n in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
                linear(b + name, n, WIDTH)
            linear(b + "ffn_gate", FF, WIDTH)
        if qk_norm:
            norm(b + "attn_q_norm", head_dim)
            norm(b + "attn_k_norm", head_dim)
        put(b + "attn_output.weight", WIDTH, q)
        put(b + "ffn_up.weight", FF, WIDTH)
        put(b + "ffn_down.weight", WIDTH, FF)
    for name in extra:
        put(name, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def run(t, *, head_dim=16, halves, speeds=None, magnitude=1.0, eps=1e-6, act=None, parallel=False):
    """Logits of TOKENS by plain NumPy."""
    act = act or (lambda x: x / (1 + np.exp(-x)))
    if speeds is None:
        speeds = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    lin = lambda name, x: x @ t[name + ".weight"].T + t.get(name + ".bias", 0)  # noqa: E731

    def norm(name, x):
        if parallel:
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * t[name + ".weight"] + t.get(name + ".bias", 0)

    def turn(x):
        angle = np.arange(len(x))[:, None] * speeds
        c, s = (np.cos(angle) * magnitude)[:, None], (np.sin(angle) * magnitude)[:, None]
        half = head_dim // 2
        first, second = (slice(half), slice(half, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
        a, b = x[..., first], x[..., second]
        out = np.empty_like(x)
        out[..., first], out[..., second] = a * c - b * s, a * s + b * c
        return out

    x = t["token_embd.weight"][TOKENS].astype(np.float64)
    for i in range(LAYERS):
        b = f"blk.{i}."
        n = norm(b + "attn_norm", x)
        if b + "attn_qkv.weight" in t:
            at = HEADS * head_dim
            q, k, v = np.split(lin(b + "attn_qkv", n), [at, at + KV_HEADS * head_dim], axis=1)
        else:
            q, k, v = (lin(b + f"attn_{c}", n) for c in "qkv")
        q, k, v = (y.reshape(len(TOKENS), -1, head_dim) for y in (q, k, v))
        if b + "attn_q_norm.weight" in t:
            q, k = norm(b + "attn_q_norm", q), norm(b + "attn_k_norm", k)
        q, k = turn(q), turn(k)
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        att = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(len(TOKENS), -1)
        att = lin(b + "attn_output", att)
        if parallel:
            x = x + att + lin(b + "ffn_down", act(lin(b + "ffn_up", n)))
        else:
            x = x + att
            n = norm(b + "ffn_norm", x)
            x = x + lin(b + "ffn_down", act(lin(b + "ffn_gate", n)) * lin(b + "ffn_up", n))
    return norm("output_norm", x) @ t.get("output.weight", t["token_embd.weight"]).T


def same(path, want, **options):
    got = Engine(path, threads=2, **options).logits(TOKENS)
    assert np.abs(got - want).max() < 2e-4


def test_qwen2(tmp_path):
    t = write(tmp_path / "m.gguf", "qwen2", biases=True, tied=True)
    same(tmp_path / "m.gguf", run(t, halves=True))


def test_qwen3(tmp_path):
    t = write(tmp_path / "m.gguf", "qwen3", head_dim=32, qk_norm=True)
    same(tmp_path / "m.gguf", run(t, head_dim=32, halves=True))


def test_llama_with_biases(tmp_path):
    t = write(tmp_path / "m.gguf", "llama", biases=True)
    same(tmp_path / "m.gguf", run(t, halves=False))


def test_linear_scaling_and_base(tmp_path):
    keys = [lambda w: w.add_rope_freq_base(5e4), lambda w: w.add_rope_scaling_factor(4.0)]
    t = write(tmp_path / "m.gguf", "llama", keys=[*keys, lambda w: w.add_string("llama.rope.scaling.type", "linear")])
    same(tmp_path / "m.gguf", run(t, halves=False, speeds=5e4 ** (-np.arange(0, 16, 2) / 16) / 4))


def test_llama_3_factors(tmp_path):
    factors = [1, 1, 1, 1.5, 2, 4, 8, 8]
    t = write(tmp_path / "m.gguf", "llama", factors=factors)
    same(tmp_path / "m.gguf", run(t, halves=False, speeds=1e4 ** (-np.arange(0, 16, 2) / 16) / factors))


def test_yarn(tmp_path):
    """The formulas of the paper: fast pairs stay, slow ones are divided, a ramp between."""
    factor, context, base, dim = 4.0, 32, 1e4, 16
    keys = [
        lambda w: w.add_string("qwen2.rope.scaling.type", "yarn"),
        lambda w: w.add_rope_scaling_factor(factor),
        lambda w: w.add_rope_scaling_orig_ctx_len(context),
    ]
    t = write(tmp_path / "m.gguf", "qwen2", keys=keys)
    speeds = base ** (-np.arange(0, dim, 2) / dim)
    pair = lambda turns: dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))  # noqa: E731
    low, high = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    mixed = speeds / factor * ramp + speeds * (1 - ramp)
    assert 0 < ramp[0] + ramp[1] < 2
    same(tmp_path / "m.gguf", run(t, halves=True, speeds=mixed, magnitude=1 + 0.1 * math.log(factor)))


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_plain_dense_falcon(tmp_path, name):
    t = write(tmp_path / "m.gguf", "falcon", fused=True)
    gelu = lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))  # noqa: E731
    act = {"relu": lambda x: np.maximum(x, 0), "gelu": gelu}[name]
    want = run(t, halves=True, eps=1e-5, act=act, parallel=True)
    same(tmp_path / "m.gguf", want, activation=name, sparsity="dense")
    if name == "relu":
        same(tmp_path / "m.gguf", want)
        same(tmp_path / "m.gguf", want, sparsity="exact")


def test_modes_that_a_file_does_not_allow(tmp_path):
    write(tmp_path / "m.gguf", "qwen2")
    for options in ({"sparsity": "predicted"}, {"sparsity": "exact"}, {"sparsity": "half"}, {"activation": "tanh"}):
        with pytest.raises(InvalidArgumentError):
            Engine(tmp_path / "m.gguf", **options)


def test_a_tensor_that_nothing_reads_is_refused(tmp_path):
    """An RMS norm's bias, say: computing without it would be silently wrong."""
    path = tmp_path / "m.gguf"
    for name in ("output_norm.bias", "blk.0.ffn_norm.bias", "token_embd_norm.weight"):
        write(path, "llama", extra=(name,))
        with pytest.raises(UnsupportedModelError, match=f"{name}.*unknown use"):
            Engine(path)
