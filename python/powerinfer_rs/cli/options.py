"""Options that several commands share, and how an engine is made of them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..engine import Engine

#: Whether a failure shows its traceback.
debug = False


def _set_debug(value: bool) -> None:
    global debug
    debug = debug or value


def show_version(value: bool) -> None:
    """Print the version and leave."""
    if value:
        from .. import __version__

        print(f"powerinfer-rs {__version__}")
        raise typer.Exit


class Sparsity(str, Enum):
    """How much of the FFN is computed."""

    AUTO = "auto"
    PREDICTED = "predicted"
    EXACT = "exact"
    DENSE = "dense"


class KvType(str, Enum):
    """How keys and values are cached."""

    F16 = "f16"
    Q8_0 = "q8_0"
    F32 = "f32"


class Activation(str, Enum):
    """The FFN's activation."""

    RELU = "relu"
    SILU = "silu"
    GELU = "gelu"


Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks.")]
Model = Annotated[
    Path | None,
    typer.Option("-m", "--model", metavar="FILE", help="A GGUF file; the demo model if left out."),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, max=1024, help="Threads; the physical cores if left out."),
]
Context = Annotated[
    int | None,
    typer.Option("-c", "--ctx", min=1, help="Context in tokens; what the model was trained for if left out."),
]
SparsityMode = Annotated[Sparsity, typer.Option("--sparsity", help="How much of the FFN is computed.")]
Threshold = Annotated[
    float | None, typer.Option("--sparse-threshold", help="Predictor score from which a neuron is computed.")
]
ActivationName = Annotated[
    Activation | None,
    typer.Option("--activation", help="The FFN's activation, where the file's isn't right."),
]
KvTypeName = Annotated[KvType, typer.Option("--kv-type", help="How keys and values are cached.")]
Interleave = Annotated[
    bool | None,
    typer.Option(
        "--interleave/--no-interleave",
        help="Copy matrices with rows side by side, for speed; or leave the file mapped. By free memory if left out.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="NAME", help="cpu, cuda, cuda:0,1; auto takes GPUs where there are any that work."
    ),
]
VramBudget = Annotated[
    list[float] | None,
    typer.Option(
        "--vram-budget",
        min=0,
        metavar="GB",
        help="GPU memory to use (GB of 2^30 bytes, 0.5 for the driver included): once for all GPUs, or for each. "
        "What is free if left out, 0 for none.",
    ),
]
ResetGpuIndex = Annotated[
    bool, typer.Option("--reset-gpu-index", help="Choose neurons for the GPU anew, not by FILE.generated.gpuidx.")
]
DisableGpuIndex = Annotated[
    bool, typer.Option("--disable-gpu-index", help="Choose neurons for the GPU without any file of them.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], object]]:
    """A progress bar on a terminal, and what moves it: called with how much is done and how much there is."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def notice(text: str) -> None:
    """Tell something beside the result, on standard error."""
    print(f"powerinfer: {text}", file=sys.stderr)


def to_json(value: object) -> str:
    """One line of JSON; arrays become lists, paths text."""

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, np.ndarray) else str(value)

    return json.dumps(value, default=plain, ensure_ascii=False)


def read_text(file: str) -> str:
    """A file's text, or standard input's for `-`; an editor's last newline is no part of it."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not UTF-8 text: {error}", param_hint="'-f'") from None


def size(n: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} GB"


def load(
    model: Path | None,
    *,
    threads: int | None = None,
    ctx: int | None = None,
    sparsity: Sparsity = Sparsity.AUTO,
    sparse_threshold: float | None = None,
    activation: Activation | None = None,
    kv_type: KvType = KvType.F16,
    interleave: bool | None = None,
    device: str = "auto",
    vram_budget: list[float] | None = None,
    reset_gpu_index: bool = False,
    disable_gpu_index: bool = False,
) -> Engine:
    """Load a model, with a progress bar on a terminal."""
    if reset_gpu_index and disable_gpu_index:
        raise typer.BadParameter("give one of --reset-gpu-index and --disable-gpu-index")
    bar = Progress(
        TextColumn("loading"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("loading", total=None)
        return Engine(
            model,
            threads=threads,
            n_ctx=ctx,
            sparsity=sparsity.value,
            sparse_threshold=sparse_threshold,
            activation=activation and activation.value,
            kv_type=kv_type.value,
            interleave=interleave,
            device=device,
            vram_budget=vram_budget or None,
            gpu_index="off" if disable_gpu_index else "reset" if reset_gpu_index else "auto",
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
