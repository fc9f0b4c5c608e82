#!/usr/bin/env python3
"""Prefill and decode speed of this engine beside its peers', on the same files, in alternating runs.

    compare.py NAME=FILE.gguf[:MODE] … [--prompt 64] [--decode 16] [--repeats 3]
               [--llama-bench 'NAME=PATH ARGUMENTS'] … [--powerinfer PATH]

llama.cpp comes from PyPI's `llama-cpp-python`; without it the others are measured. `--llama-bench` adds any build of
llama.cpp's or ik_llama.cpp's program of that name, with arguments of its own (`'ik=…/llama-bench -rtr 1'`);
`--powerinfer` adds PowerInfer's `main`. Each runs the files that it can read. Prints one table of medians; a file that
llama.cpp can't read is held against llama.cpp's speed on the first one that it can.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import tempfile
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
        """Seconds of prefill, and of decode."""
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

    def bytes_per_token(self, ids, n_prompt):
        """Bytes of weights that a decoded token reads."""
        native = self.engine.native
        sequence = native.new_sequence()
        native.step([(sequence, ids[:n_prompt], 1)])
        before = native.stats()["bytes_read"]
        for i in range(n_prompt, len(ids)):
            native.step([(sequence, ids[i : i + 1], 1)])
        native.free(sequence)
        return (native.stats()["bytes_read"] - before) / (len(ids) - n_prompt)


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, path, threads, n_ctx):
        self.model = llama_cpp.Llama(
            str(path), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
        )

    def run(self, ids, n_prompt):
        self.model.reset()
        started = time.perf_counter()
        self.model.eval(ids[:n_prompt].tolist())
        between = time.perf_counter()
        for i in range(n_prompt, len(ids)):
            self.model.eval([int(ids[i])])
        return between - started, time.perf_counter() - between


class LlamaBench:
    """A llama-bench of one's own."""

    def __init__(self, name, command, path, threads):
        self.name = name
        self.command = [*command, "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json"]
        told = subprocess.run([command[0], "--help"], capture_output=True, text=True)
        self.has_gp = "-gp <" in told.stdout + told.stderr

    def run(self, ids, n_prompt):
        n_decode = len(ids) - n_prompt
        # Decoding begins where the prompt ends, as for the others; llama.cpp and ik_llama.cpp say it differently.
        if self.has_gp:
            decode = ["-p", "0", "-n", "0", "-gp", f"{n_prompt},{n_decode}"]
        else:
            decode = ["-p", "0", "-n", str(n_decode), "-d", str(n_prompt)]
        return (
            n_prompt / self.speed("-p", str(n_prompt), "-n", "0"),
            n_decode / self.speed(*decode),
        )

    def speed(self, *options):
        out = subprocess.run([*self.command, *options], check=True, capture_output=True, text=True)
        return json.loads(out.stdout[out.stdout.index("[") :])[-1]["avg_ts"]


class PowerInfer:
    """PowerInfer's `main`, which tells its own times."""

    name = "PowerInfer"

    def __init__(self, binary, path, threads):
        self.command = [
            os.path.abspath(binary),
            "-m",
            os.path.abspath(path),
            "-t",
            str(threads),
            "--temp",
            "0",
            "--ignore-eos",
        ]

    def run(self, ids, n_prompt):
        n_decode = len(ids) - n_prompt
        text = " ".join(["the"] * (n_prompt - 1))
        command = [*self.command, "-n", str(n_decode + 1), "-p", text]
        # It leaves a log where it runs.
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, check=True, capture_output=True, cwd=folder)
        told = done.stderr.decode(errors="replace")
        lines = re.findall(r"(prompt eval|  eval) time.*?([\d.]+) tokens per second", told)
        speed = {what.strip(): float(value) for what, value in lines}
        return n_prompt / speed["prompt eval"], n_decode / speed["eval"]


def magic_of(path):
    with open(path, "rb") as f:
        return f.read(4)


def peers_of(path, mode, a):
    """This engine, and whoever reads the file."""
    peers = [Ours(path, mode, a.threads)]
    if magic_of(path) == b"GGUF":
        if llama_cpp is not None:
            peers.append(LlamaCpp(path, a.threads, a.prompt + a.decode + 64))
        for item in a.llama_bench:
            name, _, command = item.partition("=")
            peers.append(LlamaBench(name, shlex.split(command), path, a.threads))
    elif a.powerinfer:
        peers.append(PowerInfer(a.powerinfer, path, a.threads))
    return peers


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE[:MODE]")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-bench", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--powerinfer", metavar="PATH")
    a = parser.parse_args()
    print("| model | engine | prefill, tokens/s | decode, tokens/s | prefill, decode / llama.cpp | of streaming read |")
    print("|---|---|---|---|---|---|")
    first = None
    for item in a.files:
        name, _, file = item.partition("=")
        path, _, mode = file.partition(":")
        peers = peers_of(path, mode, a)
        ids = np.random.default_rng(0).integers(5, 3000, a.prompt + a.decode).astype(np.uint32)
        n_bytes = peers[0].bytes_per_token(ids[:12], 8)
        times = {p.name: [] for p in peers}
        reads = []
        for p in peers:
            p.run(ids[:12], 8)
        for _ in range(a.repeats):
            reads.append(_engine.streaming_read(a.threads, repeats=3))
            for p in peers:
                times[p.name].append(p.run(ids, a.prompt))
        speed = {
            who: (a.prompt / statistics.median(t[0] for t in took), a.decode / statistics.median(t[1] for t in took))
            for who, took in times.items()
        }
        base = speed.get(LlamaCpp.name) or speed.get(PowerInfer.name) or first
        first = first or base
        for who, (prefill, decode) in speed.items():
            ratio = f"{prefill / base[0]:.2f}, {decode / base[1]:.2f}" if base else ""
            # What a peer reads is known where it is what we read: all of a dense file.
            known = who == Ours.name or magic_of(path) == b"GGUF"
            share = f"{100 * n_bytes * decode / statistics.median(reads):.0f} %" if known else ""
            print(f"| {name} | {who} | {prefill:.1f} | {decode:.2f} | {ratio} | {share} |", flush=True)


if __name__ == "__main__":
    main()
