"""`powerinfer split`: choose the neurons that live on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .._engine import InvalidArgumentError
from ..gpus import check_replaceable, gpu_index_path, shape
from ..models import resolve
from ..workshop import Split, load_counts, profile
from ..workshop import split as make_split
from ..workshop.splits import check_budgets
from . import options

_PARTS = ("overhead", "attention", "cache", "predictors", "head", "neurons")


def _show(plan: Split, out: Path, n_layers: int) -> None:
    console = Console(highlight=False)
    table = Table("MiB", *(f"GPU {i}" for i in range(len(plan.devices))), title="Plan", title_justify="left")
    for part in _PARTS:
        table.add_row(part, *(f"{dict(device['bytes'])[part] / 2**20:.1f}" for device in plan.devices))  # type: ignore[operator]
    sums = [sum(dict(device["bytes"]).values()) for device in plan.devices]  # type: ignore[arg-type]
    table.add_row("all", *(f"{n / 2**20:.1f}" for n in sums), style="bold")
    table.add_row("budget", *(f"{n / 2**20:.1f}" for n in plan.budgets))
    console.print(table)
    for i, device in enumerate(plan.devices):
        first, end = device["layers"]
        if not device["n_attention"]:
            console.print(f"GPU {i}: nothing; it would have a layer from {device['least'] / 2**20:.1f} MiB on")
            continue
        n_hot = sum(len(hot) for hot in device["hot"])
        share = 100 * n_hot / max(1, plan.n_ff * (end - first))
        console.print(
            f"GPU {i}: layers {first} to {end - 1}: attention of {device['n_attention']}, predictors of "
            f"{device['n_predictors']}{', the head' if device['head'] else ''}; {share:.1f} % of the neurons, which "
            f"make {100 * device['coverage']:.1f} % of activations"
        )
    console.print(f"{sum(len(hot) for hot in plan.hot)} hot neurons of {plan.n_ff * n_layers} written to {out}")


def split(
    model: Annotated[Path, typer.Option("-m", "--model", metavar="FILE", help="A GGUF file of a ReLU model.")],
    vram_budget: Annotated[
        list[float],
        typer.Option(
            "--vram-budget",
            min=0,
            metavar="GB",
            help="Memory of the GPU, 0.5 for the driver included; once for each of several.",
        ),
    ],
    activations: Annotated[
        Path | None,
        typer.Option(
            "--activations",
            metavar="PATH",
            help="Counts: a folder of activation_N.pt, or an .npz. If left out the model runs a little to count.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--file",
            metavar="TEXT",
            help="What it runs over, - for standard input; a text of its own if left out.",
        ),
    ] = None,
    n_tokens: Annotated[int, typer.Option("-n", "--n-tokens", min=1, help="The most tokens of it.")] = 512,
    ctx: options.Context = None,
    kv_type: options.KvTypeName = options.KvType.F16,
    threads: options.Threads = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="The .gpuidx; FILE.generated.gpuidx if left out."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Choose which neurons live on a GPU of so much memory, and write them as PowerInfer's .gpuidx.

    Example: powerinfer split -m bamboo-7b.gguf --vram-budget 8
    """
    path = resolve(model)
    n_layers, n_ff, _ = shape(path)
    out = output or gpu_index_path(path)
    # What can't be is said before a model runs.
    check_budgets(vram_budget)
    check_replaceable(out)
    if text is not None and activations is not None:
        raise typer.BadParameter("give one of --activations and -f", param_hint="'-f'")
    words = options.read_text(str(text)) if text is not None else None
    if activations is not None:
        counts = load_counts(activations, n_layers, n_ff)
    else:
        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("counting activations", total=n_tokens)
            counts = profile(
                path,
                text=words,
                max_tokens=n_tokens,
                threads=threads,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    plan = make_split(path, counts, vram_budget, n_ctx=ctx, kv_type=kv_type.value)
    if not any(device["n_attention"] for device in plan.devices):
        least = max(device["least"] for device in plan.devices)
        raise InvalidArgumentError(
            f"--vram-budget: got {', '.join(f'{b:g}' for b in vram_budget)}, expected {least / 2**30:.3f} GB at least: "
            f"the driver takes 0.5, and one layer of {path.name} with its cache and buffers the rest"
        )
    plan.write(out)
    if as_json:
        print(options.to_json({"path": out, "budgets": plan.budgets, "devices": plan.devices}))
    else:
        _show(plan, out, n_layers)
