#!/usr/bin/env python3
"""Write a Llama-shaped ReLU model with engineered power-law sparsity, twice over:
NAME.powerinfer.gguf (PowerInfer GGUF: transposed down projection and activation predictors)
and NAME.gguf (the same weights as a plain dense GGUF).

The gate matrix is low rank plus a bias channel, so the predictor that goes with it is exact
up to quantisation: sparse and dense runs must agree.  Weights are random; the text is noise,
the work per token is that of the real shape.
"""

import argparse

import numpy as np
from gguf.quants import quantize

from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFWriter


def norm_ppf(p):
    from statistics import NormalDist

    q = np.linspace(1e-6, 1 - 1e-6, 20001)
    z = np.array([NormalDist().inv_cdf(v) for v in q])
    return np.interp(p, q, z)


def power_law(n, density, alpha):
    """Activation probability of each neuron, hottest first, averaging `density`."""
    r = (np.arange(n) + 1.0) / n
    lo, hi = 1e-9, 1e9
    for _ in range(200):
        c = (lo * hi) ** 0.5
        if np.minimum(0.999, c * r**-alpha).mean() < density:
            lo = c
        else:
            hi = c
    return np.minimum(0.999, c * r**-alpha)


def carry_tokenizer(voc, w, n):
    """Copy the tokenizer's keys, cut to the first n tokens and the merges that stay inside them."""
    tokens = voc.fields["tokenizer.ggml.tokens"].contents()[:n]
    kept = set(tokens)
    for k, f in voc.fields.items():
        if not k.startswith("tokenizer."):
            continue
        v = f.contents()
        if k == "tokenizer.ggml.merges":
            v = [m for m in v if m.replace(" ", "", 1) in kept] or v[:1]
        elif isinstance(v, list):
            v = v[:n]
        elif k.endswith("_token_id") and v >= n:
            v = 0
        if isinstance(v, list):
            w.add_array(k, v)
        else:
            w.add_key_value(k, v, f.types[0])


class Maker:
    def __init__(self, a):
        self.a = a
        self.rng = np.random.default_rng(a.seed)
        self.t = T[a.type]
        self.cache = {}

    def rand(self, out, inp, scale, key):
        """Random weight in the target type, std = scale / sqrt(inp)."""
        k = (out, inp, scale, key)
        if k not in self.cache:
            std = scale / inp**0.5
            if self.t == T.Q4_0 and not self.a.small:
                nb = out * inp // 32
                b = np.empty((nb, 18), np.uint8)
                b[:, 2:] = self.rng.integers(0, 256, (nb, 16), dtype=np.uint8)
                b[:, :2] = np.full((nb, 1), std / 4.64, np.float16).view(np.uint8)
                self.cache[k] = b.reshape(out, inp // 32 * 18)
            else:
                self.cache[k] = self.enc(self.rng.standard_normal((out, inp), dtype=np.float32) * std)
        return self.cache[k]

    def enc(self, w):
        w = np.ascontiguousarray(w, dtype=np.float32)
        if self.t == T.F32:
            return w
        if self.t == T.F16:
            return w.astype(np.float16)
        return quantize(w, self.t)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--vocab", required=True, help="a GGUF whose tokenizer to carry over")
    p.add_argument("--arch", default="llama", choices=["llama", "bamboo", "falcon", "opt"])
    p.add_argument("--embd", type=int, default=4096)
    p.add_argument("--ff", type=int, default=11008)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=32)
    p.add_argument("--rank", type=int, default=1024)
    p.add_argument("--type", default="Q4_0")
    p.add_argument("--density", type=float, default=0.1)
    p.add_argument("--alpha", type=float, default=0.7)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--distinct", type=int, default=1)
    p.add_argument("--small", action="store_true", help="every layer distinct, normal weights")
    p.add_argument("--only", choices=["sparse", "dense"])
    p.add_argument("--vocab-size", type=int, help="keep only the first N tokens")
    p.add_argument("--two-norms", action="store_true", help="falcon: the 40B form, a norm each for attention and FFN")
    a = p.parse_args()
    m = Maker(a)
    rng = m.rng
    if a.arch in ("falcon", "opt"):
        return layernorm_model(a, m)
    D, F, L = a.embd, a.ff, a.layers
    hd = D // a.heads
    KV = hd * a.kv_heads
    NB = 32  # bias channels
    voc = GGUFReader(a.vocab)
    n_vocab = a.vocab_size or len(voc.fields["tokenizer.ggml.tokens"].data)
    ws = {}
    if a.only != "dense":
        ws["sparse"] = GGUFWriter(a.out + ".powerinfer.gguf", a.arch)
    if a.only != "sparse":
        ws["dense"] = GGUFWriter(a.out + ".gguf", a.arch)
    for w in ws.values():
        w.add_name("synthetic")
        w.add_context_length(a.ctx)
        w.add_embedding_length(D)
        w.add_block_count(L)
        w.add_feed_forward_length(F)
        w.add_head_count(a.heads)
        w.add_head_count_kv(a.kv_heads)
        w.add_rope_dimension_count(hd)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_vocab_size(n_vocab)
        w.add_file_type({"Q4_0": 2, "F16": 1, "F32": 0, "Q8_0": 7}[a.type])
        if a.type.startswith("Q"):
            w.add_quantization_version(2)
        carry_tokenizer(voc, w, n_vocab)
    if "sparse" in ws:
        ws["sparse"].add_float32("powerinfer.sparse_threshold", 0.0)

    def add(name, data, which=None, f32=False):
        for k, w in ws.items():
            if which and k != which:
                continue
            if f32 or m.t in (T.F32, T.F16):
                w.add_tensor(name, data)
            else:
                w.add_tensor(name, data, raw_dtype=m.t)

    emb = rng.standard_normal((n_vocab, D)).astype(np.float32)
    emb[:, :NB] = 1.0
    add("token_embd.weight", m.enc(emb))
    add("output_norm.weight", np.ones(D, np.float32), f32=True)
    add("output.weight", m.rand(n_vocab, D, 4.0, "out"))

    def gate(seed):
        r = (a.rank - 2) // 2
        B = rng.standard_normal((r, D)).astype(np.float32) / D**0.5
        B[:, :NB] = 0
        A = rng.standard_normal((F, r)).astype(np.float32) / r**0.5
        pj = rng.permutation(power_law(F, a.density, a.alpha))
        bias = norm_ppf(1 - pj).astype(np.float32)  # pre-activation = N(0,1) - bias
        G = A @ B
        G[:, :NB] = -bias[:, None] / NB
        fc1 = np.zeros((a.rank, D), np.float32)
        fc1[0 : 2 * r : 2] = B
        fc1[1 : 2 * r : 2] = -B
        fc1[-2, :NB] = 1.0 / NB
        fc2 = np.zeros((F, a.rank), np.float32)
        fc2[:, 0 : 2 * r : 2] = A
        fc2[:, 1 : 2 * r : 2] = -A
        fc2[:, -2] = -bias
        return m.enc(G), m.enc(fc1), m.enc(fc2), pj

    gates = {}
    prob = []
    res = 0.3 / (2 * L) ** 0.5 if not a.small else 1.0 / (2 * L) ** 0.5
    one = np.ones(D, np.float32)
    for i in range(L):
        key = i if a.small else i % a.distinct
        if key not in gates:
            gates[key] = gate(key)
        G, f1, f2, pj = gates[key]
        prob.append(pj)
        b = f"blk.{i}."
        add(b + "attn_norm.weight", one, f32=True)
        add(b + "ffn_norm.weight", one, f32=True)
        add(b + "attn_q.weight", m.rand(D, D, 1.5, ("q", key)))
        add(b + "attn_k.weight", m.rand(KV, D, 1.5, ("k", key)))
        add(b + "attn_v.weight", m.rand(KV, D, 1.0, ("v", key)))
        if a.small:
            wo = rng.standard_normal((D, D)).astype(np.float32) * res / D**0.5
            wo[:NB] = 0
            dn = rng.standard_normal((F, D)).astype(np.float32) * res / (F * a.density) ** 0.5
            dn[:, :NB] = 0
            add(b + "attn_output.weight", m.enc(wo))
            add(b + "ffn_down_t.weight", m.enc(dn), "sparse")
            add(b + "ffn_down.weight", m.enc(dn.T), "dense")
        else:
            add(b + "attn_output.weight", m.rand(D, D, res, ("o", key)))
            if "sparse" in ws:
                add(b + "ffn_down_t.weight", m.rand(F, D, res * (D / (F * a.density)) ** 0.5, ("dt", key)), "sparse")
            if "dense" in ws:
                add(b + "ffn_down.weight", m.rand(D, F, res, ("d", key)), "dense")
        add(b + "ffn_up.weight", m.rand(F, D, 1.0, ("u", key)))
        add(b + "ffn_gate.weight", G)
        add(b + "fc1.weight", f1, "sparse")
        add(b + "fc2.weight", f2, "sparse")
    for w in ws.values():
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    if "sparse" in ws:
        with open(a.out + ".powerinfer.gguf", "r+b") as f:
            f.write(b"PWRI")
    np.save(a.out + ".prob.npy", np.array(prob, np.float32))


def layernorm_model(a, m):
    """Falcon (fused QKV, parallel FFN, NEOX rope) or OPT (learned positions, biases, tied output), sparse file only."""
    rng, D, F, L = m.rng, a.embd, a.ff, a.layers
    hd = D // a.heads
    KV = hd * a.kv_heads
    voc = GGUFReader(a.vocab)
    n_vocab = a.vocab_size or len(voc.fields["tokenizer.ggml.tokens"].data)
    w = GGUFWriter(a.out + ".powerinfer.gguf", a.arch)
    w.add_name("synthetic")
    w.add_context_length(a.ctx)
    w.add_embedding_length(D)
    w.add_block_count(L)
    w.add_feed_forward_length(F)
    w.add_head_count(a.heads)
    w.add_head_count_kv(a.kv_heads)
    w.add_layer_norm_eps(1e-5)
    w.add_file_type({"Q4_0": 2, "F16": 1, "F32": 0, "Q8_0": 7}[a.type])
    if a.type.startswith("Q"):
        w.add_quantization_version(2)
    carry_tokenizer(voc, w, n_vocab)
    w.add_float32("powerinfer.sparse_threshold", 0.0)

    def mat(name, out, inp, scale):
        w.add_tensor(
            name + ".weight",
            m.enc(rng.standard_normal((out, inp)).astype(np.float32) * scale / inp**0.5),
            raw_dtype=None if m.t in (T.F32, T.F16) else m.t,
        )

    def vec(name, n, mean, std):
        w.add_tensor(name, (mean + std * rng.standard_normal(n)).astype(np.float32))

    def norm(name):
        vec(name + ".weight", D, 1.0, 0.1)
        vec(name + ".bias", D, 0.0, 0.1)

    mat("token_embd", n_vocab, D, D**0.5)
    norm("output_norm")
    if a.arch == "falcon":
        mat("output", n_vocab, D, 4.0)
    else:
        mat("position_embd", 2050, D, 0.3 * D**0.5)
    for i in range(L):
        b = f"blk.{i}."
        norm(b + "attn_norm")
        if a.arch == "falcon":
            if a.two_norms:
                norm(b + "attn_norm_2")
            mat(b + "attn_qkv", D + 2 * KV, D, 1.5)
            mat(b + "attn_output", D, D, 1.0)
        else:
            norm(b + "ffn_norm")
            for n, o in (("attn_q", D), ("attn_k", KV), ("attn_v", KV), ("attn_output", D)):
                mat(b + n, o, D, 1.0)
                vec(b + n + ".bias", o, 0.0, 0.1)
            vec(b + "ffn_up.bias", F, -0.5, 0.3)
            vec(b + "ffn_down_t.bias", D, 0.0, 0.1)
        mat(b + "ffn_up", F, D, 1.0)
        w.add_tensor(
            b + "ffn_down_t.weight",
            m.enc(rng.standard_normal((F, D)).astype(np.float32) * (F * a.density) ** -0.5),
            raw_dtype=None if m.t in (T.F32, T.F16) else m.t,
        )
        mat(b + "fc1", a.rank, D, 1.0)
        pj = power_law(F, a.density, a.alpha)
        f2 = rng.standard_normal((F, a.rank)).astype(np.float32) / a.rank**0.5
        f2 -= (norm_ppf(1 - rng.permutation(pj)).astype(np.float32) * 0.9 / (a.rank * 0.4))[:, None]
        w.add_tensor(b + "fc2.weight", m.enc(f2), raw_dtype=None if m.t in (T.F32, T.F16) else m.t)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with open(a.out + ".powerinfer.gguf", "r+b") as f:
        f.write(b"PWRI")


main()
