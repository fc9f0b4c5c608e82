#!/usr/bin/env python3
"""The arithmetic of a PowerInfer GGUF model, in plain NumPy: slow, small, meant to be read.

    reference.py MODEL.gguf 1,17,300 [--mode predicted|exact|dense] [--greedy N] [--save logits.npy]

Weights are decoded to float32 and nothing is quantised on the way, so a production engine differs from
it by its own rounding only.  Checked against PowerInfer's logits on the models under golden/.
"""

import argparse
import mmap
import struct

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from gguf import GGMLQuantizationType

SCALAR = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class Model:
    """A GGUF (magic GGUF or PWRI) read whole: `kv` holds the metadata, `model[name]` a float32 tensor.

    A tensor's NumPy shape is the reverse of its GGUF dimensions, so a [in, out] weight is (out, in): one row a neuron.
    """

    def __init__(self, path):
        with open(path, "rb") as f:
            self.buf = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 0
        self.magic = self.buf[:4]
        assert self.magic in (b"GGUF", b"PWRI"), self.magic
        self.at = 4
        version, n_tensors, n_kv = self.take("<I"), self.take("<Q"), self.take("<Q")
        assert version in (2, 3), version
        self.kv = {}
        for _ in range(n_kv):
            key = self.string()
            self.kv[key] = self.value(self.take("<I"))
        infos = {}
        for _ in range(n_tensors):
            name = self.string()
            dims = [self.take("<Q") for _ in range(self.take("<I"))]
            infos[name] = (dims, GGMLQuantizationType(self.take("<I")), self.take("<Q"))
        align = self.kv.get("general.alignment", 32)
        base = -(-self.at // align) * align
        self.t = {}
        for name, (dims, kind, offset) in infos.items():
            block, size = GGML_QUANT_SIZES[kind]
            n = int(np.prod(dims)) // block * size
            raw = np.frombuffer(self.buf, np.uint8, n, base + offset)
            rows = raw.reshape(*dims[:0:-1], dims[0] // block * size)
            self.t[name] = dequantize(rows, kind).astype(np.float32).reshape(dims[::-1])
        self.arch = self.kv["general.architecture"]

    def take(self, fmt):
        v = struct.unpack_from(fmt, self.buf, self.at)[0]
        self.at += struct.calcsize(fmt)
        return v

    def string(self):
        n = self.take("<Q")
        self.at += n
        return self.buf[self.at - n : self.at].decode("utf-8", "surrogateescape")

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, n = self.take("<I"), self.take("<Q")
            return [self.value(inner) for _ in range(n)]
        return self.take(SCALAR[kind])

    def __getitem__(self, name):
        return self.t[name]

    def get(self, name):
        return self.t.get(name)

    def key(self, name, default=None):
        return self.kv.get(f"{self.arch}.{name}", default)


relu = lambda x: np.maximum(x, 0)
silu = lambda x: x / (1 + np.exp(-x))


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean() + eps) * w


def layer_norm(x, w, b, eps):
    return (x - x.mean()) / np.sqrt(x.var() + eps) * w + b


def rope(x, pos, neox, base):
    """x: (heads, head_dim).  Pairs are (2i, 2i+1), or (i, i + head_dim/2) in the NeoX form."""
    d = x.shape[-1]
    theta = pos * base ** (-np.arange(0, d, 2) / d)
    c, s = np.cos(theta), np.sin(theta)
    a, b = (x[:, : d // 2], x[:, d // 2 :]) if neox else (x[:, 0::2], x[:, 1::2])
    y = np.empty_like(x)
    if neox:
        y[:, : d // 2], y[:, d // 2 :] = a * c - b * s, a * s + b * c
    else:
        y[:, 0::2], y[:, 1::2] = a * c - b * s, a * s + b * c
    return y


class Runner:
    def __init__(self, m, mode="predicted"):
        self.m, self.mode, self.pos = m, mode, 0
        self.heads = m.key("attention.head_count")
        self.kv_heads = m.key("attention.head_count_kv", self.heads)
        self.layers = m.key("block_count")
        self.eps = m.key("attention.layer_norm_rms_epsilon") or m.key("attention.layer_norm_epsilon") or 1e-5
        self.base = m.key("rope.freq_base", 10000.0)
        self.threshold = m.kv.get("powerinfer.sparse_threshold", 0.0)
        self.cache = [([], []) for _ in range(self.layers)]
        self.active = np.zeros((self.layers, m.key("feed_forward_length")), np.int64)  # how often each neuron ran

    def linear(self, name, x):
        y = self.m[name + ".weight"] @ x
        b = self.m.get(name + ".bias")
        return y if b is None else y + b

    def attention(self, i, q, k, v):
        """q: (heads, head_dim), k and v: (kv_heads, head_dim); causal, over everything cached so far."""
        ks, vs = self.cache[i]
        ks.append(k)
        vs.append(v)
        group = self.heads // self.kv_heads
        out = np.empty_like(q)
        for h in range(self.heads):
            K = np.array([row[h // group] for row in ks])
            V = np.array([row[h // group] for row in vs])
            s = K @ q[h] / np.sqrt(q.shape[1])
            p = np.exp(s - s.max())
            out[h] = (p / p.sum()) @ V
        return out.ravel()

    def ffn(self, i, x, pred_x):
        """One FFN.  x: its normalised input; pred_x: what the predictor reads."""
        m, b = self.m, f"blk.{i}."
        down = m.get(b + "ffn_down_t.weight")  # (ff, embd): one row a neuron
        if down is None:
            down = m[b + "ffn_down.weight"].T
        gated = m.get(b + "ffn_gate.weight") is not None
        sparse = m.get(b + "fc1.weight") is not None
        on = np.ones(len(down), bool)
        if self.mode == "predicted" and sparse:
            on = m[b + "fc2.weight"] @ relu(m[b + "fc1.weight"] @ pred_x) >= self.threshold
        up = self.linear(b + "ffn_up", x)
        if not gated:
            h = relu(up)
        else:
            gate = self.linear(b + "ffn_gate", x)
            if not sparse and m.arch == "llama":
                h = silu(gate) * up
            elif m.arch == "bamboo":
                h = relu(gate) * relu(up)
            else:
                h = relu(gate) * up
        if self.mode == "exact":
            on = h != 0
        self.active[i] += on
        y = np.where(on, h, 0) @ down
        for name in ("ffn_down_t.bias", "ffn_down.bias"):
            if m.get(b + name) is not None:
                y = y + m[b + name]
        return y

    def step(self, token):
        """Feed one token; its logits, (vocab,)."""
        m = self.m
        x = m["token_embd.weight"][token].astype(np.float32)
        if m.arch == "opt":
            x = x + m["position_embd.weight"][self.pos + 2]
        hd = len(x) // self.heads
        for i in range(self.layers):
            b = f"blk.{i}."
            if m.arch in ("llama", "bamboo"):
                n = rms_norm(x, m[b + "attn_norm.weight"], self.eps)
            else:
                n = layer_norm(x, m[b + "attn_norm.weight"], m[b + "attn_norm.bias"], self.eps)
            ffn_in = n
            if m.arch == "falcon":
                if m.get(b + "attn_norm_2.weight") is not None:  # 40B: this one feeds attention, attn_norm the FFN
                    n = layer_norm(x, m[b + "attn_norm_2.weight"], m[b + "attn_norm_2.bias"], self.eps)
                qkv = m[b + "attn_qkv.weight"] @ n
                q, k, v = np.split(qkv, [self.heads * hd, (self.heads + self.kv_heads) * hd])
            else:
                q, k, v = (self.linear(b + "attn_" + c, n) for c in "qkv")
            q, k, v = q.reshape(-1, hd), k.reshape(-1, hd), v.reshape(-1, hd)
            if m.arch != "opt":
                q, k = (rope(t, self.pos, m.arch == "falcon", self.base) for t in (q, k))
            att = self.linear(b + "attn_output", self.attention(i, q, k, v))
            if m.arch == "falcon":  # attention and FFN side by side
                x = x + att + self.ffn(i, ffn_in, x)
            else:
                x = x + att
                if m.arch == "opt":
                    n = layer_norm(x, m[b + "ffn_norm.weight"], m[b + "ffn_norm.bias"], self.eps)
                else:
                    n = rms_norm(x, m[b + "ffn_norm.weight"], self.eps)
                x = x + self.ffn(i, n, x)
        self.pos += 1
        if m.arch in ("llama", "bamboo"):
            x = rms_norm(x, m["output_norm.weight"], self.eps)
        else:
            x = layer_norm(x, m["output_norm.weight"], m["output_norm.bias"], self.eps)
        head = m.get("output.weight")
        return (m["token_embd.weight"] if head is None else head) @ x


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("tokens", type=lambda s: [int(t) for t in s.split(",")])
    p.add_argument("--mode", choices=["predicted", "exact", "dense"], default="predicted")
    p.add_argument("--greedy", type=int, default=0, metavar="N")
    p.add_argument("--save", metavar="FILE.npy")
    a = p.parse_args()
    run = Runner(Model(a.model), a.mode)
    logits = [run.step(t) for t in a.tokens]
    out = []
    for _ in range(a.greedy):
        out.append(int(logits[-1].argmax()))
        if len(out) < a.greedy:
            logits.append(run.step(out[-1]))
    print(",".join(map(str, out)))
    print(f"active neurons: {run.active.sum() / run.pos / run.active.size:.3f}")
    if a.save:
        np.save(a.save, np.array(logits, np.float32))


if __name__ == "__main__":
    main()
