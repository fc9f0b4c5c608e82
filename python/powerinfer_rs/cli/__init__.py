"""The command `powerinfer`.

Exit codes: 0, 1 for a failure told in one line, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import NoReturn

import typer

from .._engine import PowerInferError
from . import bench, generate, inspect, options, quantize, split, tokenize

app = typer.Typer(
    name="powerinfer",
    help="Run ReLU-sparse and ordinary GGUF language models fast on ordinary machines.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("tokenize")(tokenize.tokenize)
app.command("bench")(bench.bench)
app.command("split")(split.split)
app.command("quantize")(quantize.quantize)


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=options.show_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line; failures are one line unless `--debug` asks for the traceback."""
    # Whoever reads our output may go: end quietly then, as other commands do.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # What a terminal can't show is no reason to fail.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (PowerInferError, OSError, UnicodeDecodeError) as error:
        if options.debug:
            raise
        told = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            told = f"{error.filename}: {error.strerror}"
        print(f"powerinfer: error: {told}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
