"""Prompt lookup: a draft is what followed before, and never changes a text."""

from __future__ import annotations

import pytest
from powerinfer_rs import ContextOverflowError, Engine, InvalidArgumentError
from powerinfer_rs.speculation import PromptLookup

LIST = "apples, pears, plums, apples, pears, plums, apples, pears, plums, apples,"


def lookup(tokens, n=8):
    made = PromptLookup(n)
    made.reset(tokens)
    return made


def test_a_draft_is_what_followed_the_longest_run():
    assert lookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]).draft(8) == [4, 9, 2, 3, 5, 1, 2, 3]
    assert lookup([1, 2, 3, 4, 9, 2, 3, 5, 7, 2, 3]).draft(2) == [5, 7]  # the latest
    assert lookup([1, 2, 3]).draft(8) == []
    assert lookup([]).draft(8) == []
    assert lookup([5, 5, 5], n=0).draft(8) == []
    assert lookup([5, 5, 5]).draft(0) == lookup([5, 5, 5]).draft(-1) == []


def test_tokens_come_one_by_one_or_all_at_once():
    tokens = [1, 2, 1, 2, 3, 1, 2, 3, 3, 1]
    made = PromptLookup(4)
    for token in tokens:
        made.push(token)
    assert made.draft(4) == lookup(tokens, 4).draft(4)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
@pytest.mark.parametrize("n", [1, 5, 16])
def test_the_text_is_the_same(demo, options, n):
    plain = demo.generate(LIST, max_tokens=40, **options)
    drafted = demo.generate(LIST, max_tokens=40, prompt_lookup=n, **options)
    assert drafted.tokens == plain.tokens
    assert (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason)
    assert 0 < drafted.timings.accepted <= drafted.timings.drafted
    assert plain.timings.drafted == 0


def test_sparse_models_too(tiny):
    engine = Engine(tiny("llama-q4_0"))
    plain = engine.generate([5, 6, 7, 5, 6, 7, 5, 6], max_tokens=60, temperature=0.7, seed=1, ignore_eos=True)
    drafted = engine.generate(
        [5, 6, 7, 5, 6, 7, 5, 6], max_tokens=60, temperature=0.7, seed=1, ignore_eos=True, prompt_lookup=6
    )
    assert drafted.tokens == plain.tokens
    assert drafted.timings.drafted > 0


def test_a_draft_keeps_inside_context_and_length(demo, tiny):
    assert len(demo.generate(LIST, max_tokens=3, temperature=0, prompt_lookup=16).tokens) == 3
    engine = Engine(tiny("llama-q4_0"), n_ctx=32)
    prompt = [5, 6, 7] * 8
    options = {"temperature": 0, "ignore_eos": True}
    for more in ({"max_tokens": -1}, {"max_tokens": 50, "overflow": "slide", "keep": 4}):
        plain = engine.generate(prompt, **options, **more)
        drafted = engine.generate(prompt, **options, **more, prompt_lookup=7)
        assert drafted.tokens == plain.tokens
    with pytest.raises(ContextOverflowError) as raised:
        engine.generate(prompt, max_tokens=50, prompt_lookup=7, **options)
    assert len(raised.value.partial.tokens) == 9


@pytest.mark.parametrize("n", [-1, 65, 1.5, "4", None])
def test_how_many_is_a_whole_number(tiny, n):
    with pytest.raises(InvalidArgumentError, match="prompt_lookup"):
        Engine(tiny("llama-q4_0")).generate([5], max_tokens=1, prompt_lookup=n)
