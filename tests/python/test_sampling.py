"""Sampling against straightforward definitions."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from powerinfer_rs import InvalidArgumentError, Sampler, SamplingError, SamplingParams

ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def support(logits, n=3000, **params):
    """The tokens that come up, and how often."""
    sampler = Sampler(SamplingParams(**{**ALL, **params}), seed=1)
    draws = [sampler.sample(logits) for _ in range(n)]
    return {int(i): draws.count(i) / n for i in set(draws)}


def test_greedy_takes_the_lowest_of_equals():
    logits = np.array([1, 5, 5, 2], np.float32)
    assert Sampler(SamplingParams(temperature=0)).sample(logits) == 1


def test_draws_follow_the_probabilities():
    p = np.array([0.5, 0.3, 0.2])
    seen = support(np.log(p).astype(np.float32))
    assert all(seen[i] == pytest.approx(p[i], abs=0.04) for i in range(3))
    hot = np.sqrt(p) / np.sqrt(p).sum()
    seen = support(np.log(p).astype(np.float32), temperature=2.0)
    assert all(seen[i] == pytest.approx(hot[i], abs=0.04) for i in range(3))


def test_each_cut_keeps_what_it_should():
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05])).astype(np.float32)
    assert set(support(logits, top_k=2)) == {0, 1}
    assert set(support(logits, top_p=0.7)) == {0, 1}
    assert set(support(logits, top_p=0.71)) == {0, 1, 2}
    assert set(support(logits, top_p=0.0)) == {0}
    assert set(support(logits, min_p=0.3)) == {0, 1, 2}
    assert set(support(logits, min_p=1.0)) == {0}
    # The expected surprise is 1.39; those of 0.3 and 0.4 are nearest.
    assert set(support(logits, typical_p=0.25)) == {1}
    assert set(support(logits, typical_p=0.4)) == {0, 1}


def test_cuts_follow_each_other():
    """Top-p counts what top-k has left, and min-p what top-p has."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    # Of the best two the first has 4/7.
    assert set(support(logits, top_k=2, top_p=0.55)) == {0}
    assert set(support(logits, top_k=3, top_p=0.6, min_p=0.8)) == {0}


def test_penalties():
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    greedy = lambda recent, **p: Sampler(SamplingParams(temperature=0, **p)).sample(logits, recent)  # noqa: E731
    assert greedy([0]) == 0
    assert greedy([0], repeat_penalty=1.2) == 1
    assert greedy([0], presence_penalty=0.2) == 1
    assert greedy([0, 1, 1], frequency_penalty=0.2) == 0
    assert greedy([0, 5 % 4], repeat_penalty=1.2, penalty_last_n=1) == 0
    assert greedy([0, 1], repeat_penalty=1.2, penalty_last_n=-1) == 0
    assert greedy([], logit_bias={3: 10.0}) == 3
    assert greedy([], logit_bias={0: -np.inf}) == 1
    assert logits.tolist() == [pytest.approx(v) for v in (2.0, 1.9, -1.0, -1.1)]


@given(
    logits=hnp.arrays(np.float32, st.integers(1, 3000), elements=st.floats(-30, 30, width=32)),
    top_k=st.integers(0, 60),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
def test_any_logits_give_a_token_that_the_cuts_allow(logits, top_k, top_p, min_p):
    token = Sampler(SamplingParams(1.0, top_k, top_p, min_p), seed=0).sample(logits)
    better = int((logits > logits[token]).sum())
    assert top_k == 0 or better < top_k
    p = np.exp(logits.astype(np.float64) - logits.max())
    assert min_p == 0 or p[token] >= min_p * 0.999
    kept = np.sort(p)[::-1][: top_k or None]
    assert kept[:better].sum() <= top_p * kept.sum() * 1.0001 + 1e-9


def test_broken_logits_are_an_error():
    for bad in ([np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]):
        for temperature in (0.0, 1.0):
            with pytest.raises(SamplingError, match="logits"):
                Sampler(SamplingParams(temperature=temperature)).sample(np.array(bad, np.float32))
    for shape in ((0,), (2, 3)):
        with pytest.raises(SamplingError, match="shape"):
            Sampler(SamplingParams()).sample(np.zeros(shape, np.float32))
    one = Sampler(SamplingParams(**ALL), seed=0)
    assert one.sample(np.array([-np.inf, 0.0], np.float32)) == 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repeat_penalty": 0},
        {"frequency_penalty": float("inf")},
        {"logit_bias": {1: float("inf")}},
        {"penalty_last_n": -2},
    ],
)
def test_bad_parameters_are_refused(params):
    with pytest.raises(InvalidArgumentError, match=next(iter(params))):
        SamplingParams(**params)


def test_seeds_repeat():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    draw = lambda seed: [s.sample(logits) for s in [Sampler(SamplingParams(), seed)] for _ in range(20)]  # noqa: E731
    assert draw(5) == draw(5) != draw(6)


def test_it_is_fast():
    logits = (3 * np.random.default_rng(0).standard_normal(50_000)).astype(np.float32)
    sampler = Sampler(SamplingParams(), seed=0)
    times = []
    for _ in range(50):
        started = time.perf_counter()
        sampler.sample(logits)
        times.append(time.perf_counter() - started)
    # The promise is 0.3 ms; a busy machine gets ten times as long.
    assert np.median(times) < 3e-3
