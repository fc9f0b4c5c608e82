"""`powerinfer quantize`: a model file in another type."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ..models import resolve
from ..workshop import quantize as run
from . import options


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A GGUF file, PowerInfer's or an ordinary one.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    type: Annotated[
        str,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="q4_0 q4_1 q5_0 q5_1 q8_0 f16 bf16 f32 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k.",
        ),
    ],
    predictor_type: Annotated[
        str | None, typer.Option("--predictor-type", metavar="TYPE", help="For predictors, where it isn't TYPE.")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="llama.cpp's importance matrix: .dat or .gguf.")
    ] = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a model file with its matrices in another type.

    Example: powerinfer quantize bamboo-7b-f16.gguf bamboo-7b-q4_0.gguf --type q4_0
    """
    with options.progress("quantizing") as progress:
        done = run(
            resolve(source),
            output,
            type,
            predictor_type=predictor_type,
            imatrix=imatrix,
            threads=threads,
            progress=progress,
        )
    if as_json:
        print(options.to_json(dataclasses.asdict(done)))
        return
    for text in done.notices[:8]:
        options.notice(text)
    if len(done.notices) > 8:
        options.notice(f"and {len(done.notices) - 8} more")
    kinds = ", ".join(f"{n} {kind}" for kind, n in done.types.items())
    print(f"{options.size(done.bytes_before)} -> {options.size(done.bytes_after)}: {done.path} ({kinds})")
