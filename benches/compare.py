#!/usr/bin/env python3
"""Decode and prefill speed of this engine beside llama.cpp's, on the same files, in alternating runs.

    compare.py NAME=FILE.gguf[:MODE] … [--prompt 64] [--decode 16] [--repeats 3]

llama.cpp comes from PyPI's `llama-cpp-python`; without it only this engine is measured. PowerInfer's own files, which
llama.cpp can't read, are measured here only. Prints one table of medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
from powerinfer_rs import Engine, _engine

try:
    import llama_cpp
except ImportError:
    llama_cpp = None


class Ours:
    name = "powerinfer-rs"

    def __init__(self, path, mode, threads):
        self.engine = Engine(path, sparsity=mode or "auto", threads=threads)

    def run(self, ids, n_prompt):
        native = self.engine.native
        sequence = native.new_sequence()
        started = time.perf_counter()
        native.step([(sequence, ids[:n_prompt], 1)])
        between = time.perf_counter()
        for i in range(n_prompt, len(ids)):
            native.step([(sequence, ids[i : i + 1], 1)])
        ended = time.perf_counter()
        native.free(sequence)
        return between - started, ended - between


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path, threads):
        self.model = llama_cpp.Llama(
            str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
        )

    def run(self, ids, n_prompt):
        self.model.reset()
        started = time.perf_counter()
        self.model.eval(ids[:n_prompt].tolist())
        between = time.perf_counter()
        for i in range(n_prompt, len(ids)):
            self.model.eval([int(ids[i])])
        return between - started, time.perf_counter() - between


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE[:MODE]")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a = parser.parse_args()
    print("| model | engine | prefill, tokens/s | decode, tokens/s | decode / llama.cpp | share of streaming read |")
    print("|---|---|---|---|---|---|")
    base = {}
    for item in a.files:
        name, _, file = item.partition("=")
        path, _, mode = file.partition(":")
        peers = [Ours(path, mode, a.threads)]
        with open(path, "rb") as f:
            if llama_cpp is not None and f.read(4) == b"GGUF":
                peers.append(LlamaCpp(path, a.threads))
        ids = np.random.default_rng(0).integers(5, 3000, a.prompt + a.decode).astype(np.uint32)
        times = {p.name: [] for p in peers}
        reads = []
        for p in peers:
            p.run(ids[:12], 8)
        peers[0].engine.reset_stats()
        for _ in range(a.repeats):
            reads.append(_engine.streaming_read(a.threads, repeats=3))
            for p in peers:
                times[p.name].append(p.run(ids, a.prompt))
        speed = {
            who: (a.prompt / statistics.median(t[0] for t in all), a.decode / statistics.median(t[1] for t in all))
            for who, all in times.items()
        }
        base |= {name: speed["llama.cpp"][1]} if "llama.cpp" in speed else {}
        native = peers[0].engine.native
        sequence = native.new_sequence()
        before = native.stats()["bytes_read"]
        native.step([(sequence, ids[:1], 1)])
        n_bytes = native.stats()["bytes_read"] - before
        for who, (prefill, decode) in speed.items():
            # A sparse file is held against llama.cpp's speed on the first dense one.
            peer = base.get(name) or next(iter(base.values()), None)
            ratio = f"{decode / peer:.2f}" if peer else ""
            share = f"{100 * n_bytes * decode / statistics.median(reads):.0f} %" if who == Ours.name else ""
            print(f"| {name} | {who} | {prefill:.1f} | {decode:.2f} | {ratio} | {share} |", flush=True)


if __name__ == "__main__":
    main()
