"""`powerinfer generate`: text from a prompt, as it comes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from ..completion import Completion
from ..sampling import SamplingParams
from ..speculation import MOST
from . import options


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if (prompt is None) == (file is None):
        raise typer.BadParameter("give one of -p TEXT and -f FILE; -f - reads standard input", param_hint="'-p' / '-f'")
    if prompt is not None:
        return prompt
    return options.read_text(file or "")


def generate(
    model: options.Model = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="The text to continue.")] = None,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file; - is standard input."),
    ] = None,
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", min=-1, help="The most tokens to generate; -1 for no limit.")
    ] = 128,
    threads: options.Threads = None,
    ctx: options.Context = None,
    temp: Annotated[float, typer.Option("--temp", min=0, help="Temperature; 0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, help="Keep the likeliest up to this sum.")] = 0.95,
    min_p: Annotated[
        float,
        typer.Option("--min-p", min=0, max=1, help="Keep tokens this likely, relative to the likeliest."),
    ] = 0.05,
    repeat_penalty: Annotated[float, typer.Option("--repeat-penalty", help="Against repetition; 1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option("-s", "--seed", min=0, help="Makes the text repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")
    ] = None,
    special: Annotated[
        bool, typer.Option("--special", help="Turn control tokens' texts in the prompt into those tokens.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    slide: Annotated[
        bool, typer.Option("--slide", help="Go on when the context is full, dropping old tokens.")
    ] = False,
    prompt_lookup: Annotated[
        int,
        typer.Option(
            "--prompt-lookup", min=0, max=MOST, help="Guess up to so many tokens from earlier text; 0 is off."
        ),
    ] = 0,
    no_echo: Annotated[bool, typer.Option("--no-echo", help="Don't print the prompt.")] = False,
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
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No lines about model and timings.")] = False,
    debug: options.Debug = False,
) -> None:
    """Continue a prompt; the text goes to standard output, all else to standard error.

    Example: powerinfer generate -m bamboo-7b.gguf -p "Once upon a time" -n 64
    """
    text = _read_prompt(prompt, file)
    # What can't be is said before anything is loaded.
    SamplingParams(temperature=temp, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty)
    engine = options.load(
        model,
        threads=threads,
        ctx=ctx,
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
    notes = Console(stderr=True, quiet=quiet or as_json, highlight=False, soft_wrap=True)
    notes.print(engine.summary(), style="dim", markup=False)
    on_text = None
    if not as_json:
        on_text = _Echo("" if no_echo else text)
    try:
        completion = engine.generate(
            text,
            max_tokens=n_predict,
            temperature=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
            stop=stop,
            parse_special=special,
            ignore_eos=ignore_eos,
            overflow="slide" if slide else "error",
            prompt_lookup=prompt_lookup,
            on_text=on_text,
        )
    except BaseException as error:
        if on_text is not None and on_text.wrote:
            print(flush=True)
        if isinstance(error, KeyboardInterrupt):
            notes.print("interrupted", style="dim")
        partial = getattr(error, "partial", None)
        if as_json and isinstance(partial, Completion):
            print(options.to_json({**_report(partial, engine.stats()), "error": str(error)}))
        raise
    if as_json:
        print(options.to_json(_report(completion, engine.stats())))
        return
    if on_text is not None and not on_text.wrote:
        on_text("")
    print(flush=True)
    t = completion.timings
    end = f"ended by {completion.finish_reason}" + (f"; {t.accepted} of {t.drafted} guesses right" if t.drafted else "")
    notes.print(
        f"prompt {t.prompt_tokens} tokens, {t.prompt_tokens_per_second:.1f} tokens/s; "
        f"text {t.generated_tokens} tokens, {t.tokens_per_second:.1f} tokens/s; {end}",
        style="dim",
        markup=False,
    )


class _Echo:
    """Writes the prompt before the first piece of text, and each piece as it comes."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self.wrote = False

    def __call__(self, piece: str) -> None:
        sys.stdout.write(self._prompt + piece)
        sys.stdout.flush()
        self._prompt = ""
        self.wrote = True


def _report(completion: Completion, stats: dict[str, object]) -> dict[str, object]:
    timings = asdict(completion.timings)
    timings["prompt_tokens_per_second"] = completion.timings.prompt_tokens_per_second
    timings["tokens_per_second"] = completion.timings.tokens_per_second
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "timings": timings,
        "stats": stats,
    }
