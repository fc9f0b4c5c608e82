"""`powerinfer bench`: how fast a model runs here, and how fast memory would let it."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import _engine
from ..engine import Engine
from . import options


def _measure(engine: Engine, n_prompt: int, n_decode: int, seed: int) -> dict[str, float]:
    """One repeat: tokens a second of prefill and decode, bytes of weights a decoded token reads."""
    native = engine.native
    ids = np.random.default_rng(seed).integers(0, engine.n_vocab, n_prompt + n_decode).astype(np.uint32)
    sequence = native.new_sequence()
    out: dict[str, float] = {}
    try:
        if n_prompt:
            started = time.perf_counter()
            native.step([(sequence, ids[:n_prompt], 1)])
            out["prefill"] = n_prompt / (time.perf_counter() - started)
        if n_decode:
            before = native.stats()["bytes_read"]
            started = time.perf_counter()
            for i in range(n_prompt, n_prompt + n_decode):
                native.step([(sequence, ids[i : i + 1], 1)])
            out["decode"] = n_decode / (time.perf_counter() - started)
            out["bytes"] = (native.stats()["bytes_read"] - before) / n_decode
    finally:
        native.free(sequence)
    return out


def _peak_memory() -> int | None:
    """The most bytes of memory that this process has held, where the system says."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(
    model: options.Model = None,
    n_prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=0, help="Tokens to prefill.")] = 512,
    n_decode: Annotated[int, typer.Option("-n", "--n-decode", min=0, help="Tokens to decode.")] = 128,
    repeats: Annotated[int, typer.Option("-r", "--repeats", min=1, help="Repeats; the median is told.")] = 5,
    threads: options.Threads = None,
    sparsity: options.SparsityMode = options.Sparsity.AUTO,
    sparse_threshold: options.Threshold = None,
    activation: options.ActivationName = None,
    kv_type: options.KvTypeName = options.KvType.F16,
    interleave: options.Interleave = None,
    device: options.Device = "auto",
    vram_budget: options.VramBudget = None,
    reset_gpu_index: options.ResetGpuIndex = False,
    disable_gpu_index: options.DisableGpuIndex = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure prefill and decode, the bytes a token reads, and the share of streaming read bandwidth reached.

    Example: powerinfer bench -m bamboo-7b.gguf -p 512 -n 64 --device cpu
    """
    if not n_prompt and not n_decode:
        raise typer.BadParameter("nothing to measure: give -p or -n above 0", param_hint="'-p' / '-n'")
    started = time.perf_counter()
    engine = options.load(
        model,
        threads=threads,
        ctx=n_prompt + n_decode + 16,
        sparsity=sparsity,
        sparse_threshold=sparse_threshold,
        activation=activation,
        kv_type=kv_type,
        interleave=interleave,
        device=device,
        vram_budget=vram_budget,
        reset_gpu_index=reset_gpu_index,
        disable_gpu_index=disable_gpu_index,
    )
    load_seconds = time.perf_counter() - started
    runs, bandwidths, peak_memory = [], [], None
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=repeats + 1)
        # The first run brings the file into memory, and doesn't count.
        _measure(engine, min(n_prompt, 16), min(n_decode, 2), 0)
        bar.advance(task)
        engine.reset_stats()
        for i in range(repeats):
            runs.append(_measure(engine, n_prompt, n_decode, i))
            # The streaming read takes memory of its own.
            peak_memory = peak_memory if i else _peak_memory()
            bandwidths.append(_engine.streaming_read(threads, repeats=1))
            bar.advance(task)
    result: dict[str, Any] = {
        "stats": engine.stats(),
        "load_seconds": load_seconds,
        "peak_memory_bytes": peak_memory,
    }
    for name in ("prefill", "decode"):
        if name in runs[0]:
            result[f"{name}_tokens_per_second"] = _summary([r[name] for r in runs])
    result["streaming_read_bytes_per_second"] = _summary(bandwidths)
    if n_decode:
        result["bytes_per_token"] = statistics.median(r["bytes"] for r in runs)
        shares = [r["bytes"] * r["decode"] / b for r, b in zip(runs, bandwidths, strict=True)]
        result["bandwidth_fraction"] = statistics.median(shares)
    if as_json:
        print(options.to_json(result))
        return
    _print(engine, result, n_prompt, n_decode)


def _print(engine: Engine, result: dict[str, Any], n_prompt: int, n_decode: int) -> None:
    console = Console(highlight=False)
    console.print(engine.summary(), markup=False, soft_wrap=True)
    table = Table("what", "median", "from", "to")
    for name, n in (("prefill", n_prompt), ("decode", n_decode)):
        speed = result.get(f"{name}_tokens_per_second")
        if speed:
            cells = [f"{speed[k]:.2f}" for k in ("median", "min", "max")]
            table.add_row(f"{name} {n}, tokens/s", *cells)
    read = result["streaming_read_bytes_per_second"]
    table.add_row("streaming read, GB/s", *(f"{read[k] / 1e9:.1f}" for k in ("median", "min", "max")))
    table.add_row("load, s", f"{result['load_seconds']:.2f}")
    if result["peak_memory_bytes"] is not None:
        table.add_row("peak memory", options.size(result["peak_memory_bytes"]))
    console.print(table)
    if "bytes_per_token" in result:
        density = result["stats"]["density"]
        where = " in the processor's memory" if result["stats"]["gpus"] else ""
        console.print(
            f"a token reads {options.size(result['bytes_per_token'])} of weights"
            f"{where} at density "
            f"{sum(density) / len(density):.3f}: {100 * result['bandwidth_fraction']:.0f} % of streaming read",
            soft_wrap=True,
        )
