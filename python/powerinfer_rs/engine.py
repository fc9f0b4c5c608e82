"""The engine: a model file, ready to make text."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _engine
from ._engine import ContextOverflowError, DeviceError, InvalidArgumentError
from .arguments import check_known, check_number, check_whole, stop_strings
from .completion import Completion, Run, StopStrings
from .gpus import Use, check_device, check_used, choose
from .models import resolve
from .sampling import Sampler, SamplingParams
from .speculation import PromptLookup
from .tokenizer import StreamDecoder, Tokenizer

_log = logging.getLogger("powerinfer_rs")


class Engine:
    """A model, ready to make text. Safe to use from several threads; Ctrl-C stops it within a token.

    Args:
        path: A GGUF file, PowerInfer's or an ordinary one, or any part of a split one; none for the demo model.
        threads: Threads to compute with; none for the physical cores this process may use.
        n_ctx: The most tokens a text can have, prompt included; none for what the model was trained for.
        sparsity: "predicted" computes the FFN neurons that the file's predictors call on, "exact" (ReLU models)
            leaves out what a ReLU zeroes, "dense" nothing; "auto" is the first of them that the file allows.
        sparse_threshold: The predictor score from which a neuron is computed; none for the file's.
        activation: "relu", "silu" or "gelu" where the file's own isn't right.
        kv_type: How keys and values are cached: "f16", "q8_0" or "f32". The first 256 positions are always float32.
        device: "cpu"; "cuda" for all GPUs, "cuda:0,1" for some; "auto" for GPUs where there are any, and for the
            processor, with a warning, where they fail.
        vram_budget: GB (2^30 bytes) of each GPU's memory to use, 0.5 for its driver included; a list has one for each.
            None for what is free, 0 for the processor alone.
        seed: What `generate` and `stream` draw with when they aren't given a seed; none for a fresh one each time.
        interleave: Whether weights are copied into large pages, with sixteen rows side by side where all are read: it
            is faster. False leaves the file mapped in place, None copies where that is known to take no more than half
            of the free memory. The text is the same.
        count_neurons: Count how often each FFN neuron fires, for `powerinfer_rs.workshop`.
        batch: The most tokens of a prompt that go through the model side by side, up to 512: fewer take less memory.
        feed_from: Tokens of a prompt side by side from which neurons in the processor's memory are brought to a GPU in
            pieces, in place of being run by the processor: 5 at least, 0 for never, none for seven for each bit of a
            weight.
        gpu_index: Which neurons live on GPUs: "auto" by the model's `.generated.gpuidx` where there is one that fits
            the budget, otherwise by the counts in the folder `activation` beside the model; "reset" without looking at
            that file; "off" by neither; or the path of such a file.
        progress: Called with layers loaded and layers in all.

    Raises:
        ModelNotFoundError: The file isn't there.
        ModelFormatError: The file is broken.
        UnsupportedModelError: The file is of an unknown kind.
        InvalidArgumentError: An argument can't be.
        DeviceError: The device can't be used.

    Examples:
        >>> engine = Engine()
        >>> engine.generate("The capital of France is", max_tokens=2, temperature=0).text
        ' Paris.'
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int | None = None,
        n_ctx: int | None = None,
        sparsity: str = "auto",
        sparse_threshold: float | None = None,
        activation: str | None = None,
        kv_type: str = "f16",
        device: str = "auto",
        vram_budget: float | Sequence[float] | None = None,
        seed: int | None = None,
        interleave: bool | None = None,
        count_neurons: bool = False,
        batch: int = 512,
        feed_from: int | None = None,
        gpu_index: str | os.PathLike[str] = "auto",
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        check_device(device, vram_budget)
        if not isinstance(gpu_index, (str, os.PathLike)):
            raise InvalidArgumentError(f"gpu_index: got {gpu_index!r}, expected auto, reset, off or a path")
        for name, value, most in (("threads", threads, 1024), ("n_ctx", n_ctx, 2**31 - 1), ("batch", batch, 512)):
            if value is not None:
                check_whole(name, value, 1, most)
        if feed_from is not None:
            check_whole("feed_from", feed_from, 0, 2**31 - 1)
        if seed is not None:
            check_whole("seed", seed, 0)
        if sparse_threshold is not None:
            check_number("sparse_threshold", sparse_threshold)
        for name, text in (("sparsity", sparsity), ("activation", activation), ("kv_type", kv_type)):
            if not isinstance(text, str) and (text is not None or name != "activation"):
                raise InvalidArgumentError(f"{name}: got {text!r}, expected a name")
        if interleave is not None and not isinstance(interleave, bool):
            raise InvalidArgumentError(f"interleave: got {interleave!r}, expected True, False or None")
        self._seed = seed
        model = resolve(path)

        def load(use: Use) -> _engine.Engine:
            return _engine.Engine(
                model,
                threads=threads,
                n_ctx=n_ctx,
                sparsity=sparsity,
                sparse_threshold=sparse_threshold,
                activation=activation,
                kv_type=kv_type,
                interleave=interleave,
                count_neurons=count_neurons,
                batch=batch,
                gpus=use.gpus,
                gpu_context=use.context,
                feed_from=feed_from,
                neuron_counts=use.neuron_counts,
                hot_neurons=use.hot_neurons,
                progress=progress,
            )

        try:
            use = choose(model, device, vram_budget, n_ctx=n_ctx, kv_type=kv_type, gpu_index=gpu_index)
            self._engine = load(use)
            check_used(use, self._engine.info(), device)
        except DeviceError as error:
            if device != "auto":
                raise
            _log.warning("running on the processor: %s", error)
            self._engine = load(Use())
        info = self._engine.info()
        if info["architecture"] == "falcon" and not info["has_predictors"] and activation is None:
            _log.warning(
                "%s: a falcon file without predictors runs with ReLU; for TII's own models give activation='gelu'",
                info["path"],
            )
        if info["n_ctx"] > info["n_ctx_train"]:
            _log.warning("n_ctx %s is more than the %s tokens the model was trained for", n_ctx, info["n_ctx_train"])
        if threads is not None and threads > (os.cpu_count() or threads):
            _log.warning(
                "threads %s is more than the %s processors there are: it will be slow", threads, os.cpu_count()
            )
        _log.info("%s", self.summary())

    def summary(self) -> str:
        """One line: what runs where, and how."""
        i = self._engine.info()
        converted = i["converted_bytes"] / 1e6
        gpus = "".join(f"{g['used'] / 1e6:.1f} MB on cuda:{g['number']} ({g['name']}), " for g in i["gpus"])
        return (
            f"{Path(i['path']).name}: {i['architecture']}, {gpus}{i['weight_bytes'] / 1e6:.1f} MB mapped on cpu"
            f"{f', {converted:.1f} MB rearranged' if converted else ''} "
            f"({i['instruction_set']}, threads: {i['threads']}), {i['sparsity']} FFN ({i['activation']}), "
            f"{i['kv_type']} cache of {i['n_ctx']} tokens"
        )

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:
        """The file's keys and values."""
        return self._engine.metadata()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises:
            UnsupportedModelError: The file has none, or one of an unknown kind.
        """
        return Tokenizer(self.metadata)

    @property
    def n_ctx(self) -> int:
        """The most tokens a text can have."""
        return self._engine.info()["n_ctx"]

    @property
    def n_vocab(self) -> int:
        """The number of logits."""
        return self._engine.info()["n_vocab"]

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: Any text.
            add_special: Add what the model wants at a text's beginning and end (BOS, EOS).
            parse_special: Turn the texts of control tokens into those tokens; off, text can't forge them.

        Returns:
            Token ids.

        Examples:
            >>> Engine().tokenize("The capital of France is")
            [504, 3575, 282, 4649, 314]
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"text: got {type(text).__name__}, expected str")
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Turn token ids into text; control tokens leave none.

        Args:
            ids: Token ids.

        Returns:
            The text.

        Raises:
            InvalidArgumentError: An id isn't in the vocabulary.
        """
        return self.tokenizer.decode(int(i) for i in self._ids(ids))

    def logits(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Run tokens through the model, in a fresh sequence.

        Args:
            ids: Token ids, a list or an integer array of shape (n,).

        Returns:
            float32 of shape (n, n_vocab): row i is what follows token i.

        Raises:
            InvalidArgumentError: An id isn't in the vocabulary.
            ContextOverflowError: There are more than `n_ctx`.
        """
        tokens = self._ids(ids)
        if not len(tokens):
            return np.empty((0, self.n_vocab), np.float32)
        sequence = self._engine.new_sequence()
        try:
            return self._engine.step([(sequence, tokens, len(tokens))])
        finally:
            self._engine.free(sequence)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        on_text: Callable[[str], object] | None = None,
        **more: Any,
    ) -> Completion:
        """Continue a prompt.

        Args:
            prompt: Text, or token ids.
            max_tokens: The most tokens to generate; -1 for as many as the context holds.
            temperature: Divides the logits; 0 is greedy.
            top_k: Keep the k likeliest tokens; 0 keeps all.
            top_p: Keep the fewest likeliest tokens that together reach this probability.
            min_p: Keep tokens at least this likely, relative to the likeliest.
            repeat_penalty: Against repetition; 1 is off.
            seed: Makes the text repeatable; none for the engine's seed.
            stop: A string, or several, before which the text ends.
            on_text: Called with each piece of text as it comes.
            **more: As for `stream`.

        Returns:
            The text and how it came about.

        Raises:
            ContextOverflowError: Prompt and text don't fit the context; its `partial` is the completion so far.
            InvalidArgumentError: An argument can't be.
            SamplingError: The model's logits are NaN.

        Examples:
            >>> c = Engine().generate("Once upon a time", max_tokens=8, seed=1)
            >>> len(c.tokens), c.finish_reason, c.text == str(c)
            (8, 'length', True)
        """
        check_known("generate", more)
        run = Run()
        pieces = self._stream(
            run,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
            stop=stop,
            **more,
        )
        for piece in pieces:
            if on_text is not None:
                on_text(piece)
        return run.completion()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        **more: Any,
    ) -> Iterator[str]:
        """Continue a prompt, piece by piece.

        Args:
            prompt: Text, or token ids.
            max_tokens: As for `generate`, and so the others up to `stop`.
            temperature: See there.
            top_k: See there.
            top_p: See there.
            min_p: See there.
            repeat_penalty: See there.
            seed: See there.
            stop: See there.
            **more: `typical_p` (1.0), `frequency_penalty` (0.0), `presence_penalty` (0.0), `penalty_last_n` (64),
                `logit_bias` ({}): see `SamplingParams`.
                `parse_special` (False): turn control tokens' texts in the prompt into those tokens.
                `ignore_eos` (False): go on after an end token.
                `overflow` ("error"): what to do when the context is full: "error", or "slide" to go on with the
                first `keep` tokens and the newer half of the others.
                `keep` (None): none for the whole prompt; at most half the context.
                `prompt_lookup` (0): the most tokens to guess from earlier text and check in one step; the text is the
                same, and comes faster where it repeats itself.

        Yields:
            Pieces of text; joined they are `generate`'s text.

        Raises:
            ContextOverflowError: Prompt and text don't fit the context; its `partial` is the completion so far.
            InvalidArgumentError: An argument can't be.
            SamplingError: The model's logits are NaN.

        Examples:
            >>> "".join(Engine().stream("The capital of France is", max_tokens=2, temperature=0))
            ' Paris.'
        """
        check_known("stream", more)
        return self._stream(
            Run(),
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
            stop=stop,
            **more,
        )

    def _stream(
        self,
        run: Run,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        penalty_last_n: int = 64,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        parse_special: bool = False,
        ignore_eos: bool = False,
        overflow: str = "error",
        keep: int | None = None,
        prompt_lookup: int = 0,
    ) -> Iterator[str]:
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_last_n=penalty_last_n,
            logit_bias=logit_bias or {},
        )
        sampler = Sampler(params, self._seed if seed is None else seed)
        lookup = PromptLookup(prompt_lookup)
        stops = StopStrings(stop_strings(stop))
        check_whole("max_tokens", max_tokens, -1)
        if keep is not None:
            check_whole("keep", keep, 0)
        if overflow not in ("error", "slide"):
            raise InvalidArgumentError(f"overflow: got {overflow!r}, expected error or slide")
        tokens = self._prompt_ids(prompt, parse_special)
        if overflow == "slide" and len(tokens) > self.n_ctx:
            _log.warning("the prompt's %s tokens don't fit n_ctx %s: its middle is dropped", len(tokens), self.n_ctx)
            tokens = self._slide(tokens, len(tokens) if keep is None else keep, room=0)
        kept: int | None = min(len(tokens) if keep is None else keep, self.n_ctx // 2)
        if overflow != "slide":
            kept = None
        return self._pieces(run, tokens, kept, max_tokens, sampler, lookup, stops, ignore_eos)

    def _pieces(
        self,
        run: Run,
        tokens: list[int],
        kept: int | None,
        max_tokens: int,
        sampler: Sampler,
        lookup: PromptLookup,
        stops: StopStrings,
        ignore_eos: bool,
    ) -> Iterator[str]:
        """The loop of `stream`; `kept` is none where a full context is an error."""
        decoder = StreamDecoder(self.tokenizer)
        end_ids = frozenset[int]() if ignore_eos else self.tokenizer.end_ids
        run.prompt_tokens = len(tokens)
        history = list(tokens)
        sequence = self._engine.new_sequence()
        stopped = False
        # Guesses that the model has seen after the last token, and its logits after each token not yet followed.
        draft: list[int] = []
        try:
            started = time.perf_counter()
            lookup.reset(tokens)
            rows = list(self._step(run, sequence, tokens, 1))
            held = len(tokens)
            while max_tokens < 0 or len(run.tokens) < max_tokens:
                token = sampler.sample(rows.pop(0), history)
                elapsed = time.perf_counter() - started
                if run.tokens:
                    run.generated_seconds += elapsed
                else:
                    run.prompt_seconds = elapsed
                guessed = bool(draft) and draft[0] == token
                run.accepted += guessed
                if token in end_ids:
                    run.finish_reason = "stop"
                    break
                run.tokens.append(token)
                history.append(token)
                lookup.push(token)
                text, stopped = stops.push(decoder.push(token))
                if text:
                    run.pieces.append(text)
                    yield text
                if stopped:
                    run.finish_reason = "stop"
                    break
                if guessed:
                    del draft[0]
                    started = time.perf_counter()
                    continue
                held -= len(draft)
                if max_tokens == len(run.tokens) or (max_tokens < 0 and kept is None and held == self.n_ctx):
                    break
                started = time.perf_counter()
                if draft:
                    self._engine.truncate(sequence, held)
                following = [token]
                if kept is not None and held == self.n_ctx:
                    history = self._slide(history, kept, room=1)
                    following, held = history, 0
                    self._engine.truncate(sequence, 0)
                    lookup.reset(history)
                left = max_tokens - len(run.tokens) if max_tokens >= 0 else self.n_ctx
                draft = lookup.draft(min(self.n_ctx - held - len(following), left - 1))
                run.drafted += len(draft)
                rows = list(self._step(run, sequence, following + draft, 1 + len(draft)))
                held += len(following) + len(draft)
            if not stopped:
                text, _ = stops.push(decoder.finish())
                text += stops.finish()
                if text:
                    run.pieces.append(text)
                    yield text
        finally:
            self._engine.free(sequence)

    def _step(self, run: Run, sequence: int, tokens: Sequence[int], n_logits: int) -> NDArray[np.float32]:
        try:
            return self._engine.step([(sequence, np.asarray(tokens, np.uint32), n_logits)])
        except ContextOverflowError as error:
            error.partial = run.completion()  # type: ignore[attr-defined]
            raise

    def _slide(self, tokens: list[int], kept: int, room: int) -> list[int]:
        """Tokens that leave `room` in the context: all where they fit, else the first `kept` and the newer half."""
        if len(tokens) + room <= self.n_ctx:
            return tokens
        kept = min(kept, self.n_ctx // 2)
        newer = max(1, (self.n_ctx - kept) // 2)
        return tokens[:kept] + tokens[-newer:]

    def _prompt_ids(self, prompt: str | Sequence[int], parse_special: bool) -> list[int]:
        if not isinstance(prompt, (str, list, tuple, np.ndarray)):
            raise InvalidArgumentError(f"prompt: got {type(prompt).__name__}, expected text or a list of token ids")
        if isinstance(prompt, str):
            tokens = self.tokenize(prompt, parse_special=parse_special)
        else:
            tokens = [int(i) for i in self._ids(prompt)]
        if tokens:
            return tokens
        start = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        if start is None:
            raise InvalidArgumentError("prompt: got no tokens, expected at least one")
        return [start]

    def _ids(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.uint32]:
        """Token ids as the native engine wants them, checked."""
        if not isinstance(ids, (list, tuple, range, np.ndarray)):
            raise InvalidArgumentError(f"ids: got {type(ids).__name__}, expected a list or integer array")
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError) as error:
            raise InvalidArgumentError(f"ids: {error}, expected whole numbers of shape (n,)") from None
        if array.size == 0:
            return np.empty(0, np.uint32)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            got = f"{array.dtype} of shape {array.shape}"
            raise InvalidArgumentError(f"ids: got {got}, expected whole numbers of shape (n,)")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self.n_vocab:
            bad = low if low < 0 else high
            raise InvalidArgumentError(f"ids: got {bad}, expected 0 to {self.n_vocab - 1}")
        return array.astype(np.uint32)

    def stats(self) -> dict[str, Any]:
        """What this engine is and has done.

        Returns:
            `device`, `instruction_set`, `threads`, `sparsity`, `sparse_threshold`, `activation`, `kv_type`, `n_ctx`,
            `architecture`, `path`, `interleaved`; `gpus`: of each its `number`, `name`, `budget` and bytes `used`, and
            the `plan` of what is there; `tokens` run so far; `bytes_read`: bytes of weights that the processor read
            for them;
            `density`: for each layer the share of FFN neurons selected for the average token; `active`: the share that
            contributed; `weight_bytes` mapped, `converted_bytes` of weights beside them; `kv_bytes` in use;
            `kv_bytes_per_token`.
        """
        return {**self._engine.info(), **self._engine.stats()}

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._engine.reset_stats()

    @property
    def native(self) -> _engine.Engine:
        """The Rust engine: sequences that fork, share, are cut back, saved and restored, in batches."""
        return self._engine

    def __enter__(self) -> Engine:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: memory goes when the last reference does."""

    def __repr__(self) -> str:
        """Describe the engine in one line."""
        if not hasattr(self, "_engine"):  # a debugger looks at one whose loading failed
            return "<powerinfer_rs.Engine, not loaded>"
        return f"<powerinfer_rs.Engine {self.summary()}>"
