"""Times on a GPU, as tables.

Without a model launches, hand-overs, copies and products; with one tokens a second at several budgets, and for which
prompts cold neurons are better brought to the GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
from powerinfer_rs import _engine

TINY = Path(__file__).parents[1] / "tests" / "data" / "tiny" / "llama-f16.powerinfer.gguf"


def decode_seconds(engine: _engine.Engine, n: int, batch: int = 1) -> float:
    """The median of `n` steps of `batch` tokens."""
    sequence = engine.new_sequence()
    tokens = np.arange(batch, dtype=np.uint32) + 3
    times = []
    for _ in range(n):
        start = time.perf_counter()
        engine.step([(sequence, tokens, 1)])
        times.append(time.perf_counter() - start)
    engine.free(sequence)
    return statistics.median(times[n // 4 :])


def measures() -> None:
    """Launches, hand-overs, copies and products."""
    print("| | |\n|---|---|")
    for what, value, unit in _engine.measure_gpu(0):
        print(f"| {what} | {value:.3g} {unit} |")
    print()


def hand_overs() -> None:
    """What a hand-over costs: layers that are the GPU's alone against layers that host and GPU share."""
    keys = _engine.inspect(TINY)["metadata"]
    n_layers, n_ff = keys["llama.block_count"], keys["llama.feed_forward_length"]
    print("| | us a token |\n|---|---|")
    seconds = {}
    for name, hot in (("all on the GPU", n_ff), ("shared", n_ff // 2)):
        neurons = [np.arange(hot, dtype=np.uint32)] * n_layers
        engine = _engine.Engine(TINY, threads=1, n_ctx=256, gpus=[(0, 1 << 30, 0, 1)], hot_neurons=neurons)
        # Four tokens at a time are recorded as a graph, five are launched one by one.
        for how, batch in (("graph", 1), ("graph of 4 tokens", 4), ("launches, 5 tokens", 5)):
            seconds[name, how] = decode_seconds(engine, 40, batch)
            print(f"| {name}, {how} | {1e6 * seconds[name, how]:.0f} |")
    one = (seconds["shared", "graph"] - seconds["all on the GPU", "graph"]) / n_layers
    print(f"| a hand-over there and back, with the host's share | {1e6 * one:.1f} |")


def prefill_rate(engine: _engine.Engine, n: int) -> float:
    """Tokens a second of a prompt of `n`; the second of two."""
    for _ in range(2):
        sequence = engine.new_sequence()
        start = time.perf_counter()
        engine.step([(sequence, np.arange(n, dtype=np.uint32) % 400 + 3, 1)])
        seconds = time.perf_counter() - start
        engine.free(sequence)
    return n / seconds


def crossover(path: Path, n_layers: int, n_ff: int, free: int) -> None:
    """From how many tokens on it pays to bring cold neurons to the GPU: what `feed_from` should be here."""
    hot = [np.arange(n_ff // 4, dtype=np.uint32)] * n_layers
    print("\n| tokens of a prompt, 25 % of the neurons on the GPU | others run by the host | brought to the GPU |")
    print("|---|---|---|")
    engines = [
        _engine.Engine(path, n_ctx=1024, gpus=[(0, free, 0, 1)], hot_neurons=hot, feed_from=feed_from)
        for feed_from in (0, 5)
    ]
    for n in (8, 32, 128, 512):
        rates = [prefill_rate(engine, n) for engine in engines]
        print(f"| {n} | {rates[0]:.1f} tokens/s | {rates[1]:.1f} tokens/s |", flush=True)


def end_to_end(path: Path) -> None:
    """Tokens a second with none, parts and all of the model on the GPU."""
    keys = _engine.inspect(path)["metadata"]
    arch = keys["general.architecture"]
    n_layers, n_ff = keys[f"{arch}.block_count"], keys[f"{arch}.feed_forward_length"]
    free = _engine.gpus()[0]["free"] - (256 << 20)
    print("| neurons on the GPU | MB there | prefill 512, tokens/s | decode, tokens/s | GB/s of weights there |")
    print("|---|---|---|---|---|")
    for share in (None, 0.0, 0.25, 0.5, 1.0):
        if share is None:
            engine = _engine.Engine(path, n_ctx=1024)
        else:
            hot = [np.arange(int(share * n_ff), dtype=np.uint32)] * n_layers
            engine = _engine.Engine(path, n_ctx=1024, gpus=[(0, free, 0, 1)], hot_neurons=hot)
        prefill = prefill_rate(engine, 512)
        step = decode_seconds(engine, 24)
        used = sum(gpu["used"] for gpu in engine.info()["gpus"])
        name = "none: processor alone" if share is None else f"{100 * share:.0f} %"
        print(f"| {name} | {used / 1e6:.0f} | {prefill:.1f} | {1 / step:.1f} | {used / step / 1e9:.0f} |", flush=True)
        del engine
    crossover(path, n_layers, n_ff, free // 2)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        end_to_end(Path(sys.argv[1]))
    else:
        measures()
        hand_overs()
