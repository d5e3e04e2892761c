"""Batches by step: every example once per epoch, and rows within their limit."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.models.training import objectives as o
from puna.models.training import packing
from puna.models.training.packing import Sampler, pack, step_indices


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_each_epoch_visits_each_example_once(count: int, batch: int, seed: int):
    steps = 3 * count  # three epochs and part of a fourth
    seen = [i for step in range(1, -(-steps // batch) + 1) for i in step_indices(step, count, batch, seed)]
    for epoch in range(len(seen) // count):
        assert Counter(seen[epoch * count : (epoch + 1) * count]) == Counter(range(count))


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 9), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_visited_are_those_that_the_steps_draw(count: int, batch: int, steps: int, seed: int):
    sampler = Sampler(range(count), batch, list, length=lambda _: 1, micro_batch_tokens=99, seed=seed)
    assert sampler.visited_examples(steps) == sorted({i for step in range(1, steps + 1) for part in sampler(step) for i in part})


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 60))
@settings(max_examples=60, deadline=None)
def test_pack(lengths: list[int], micro_batch_tokens: int):
    rows = pack(lengths, micro_batch_tokens)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= micro_batch_tokens for row in rows)
    assert len(rows) <= 11 / 9 * math.ceil(sum(lengths) / micro_batch_tokens) * 2 + 1


def test_pack_refuses_what_fits_no_row():
    with pytest.raises(ValueError, match="example 1 has 9 tokens"):
        pack([3, 9], 8)


def test_sampler_gives_the_same_batch_for_a_step():
    some = [[i] * (i % 5 + 2) for i in range(13)]
    sampler = Sampler(some, 4, o.Targets.from_documents, length=len, micro_batch_tokens=8, seed=1)
    for step in (1, 5, 1000):
        first, again = sampler(step), sampler(step)
        assert [b.forest.tokens.tolist() for b in first] == [b.forest.tokens.tolist() for b in again]
        assert all(len(b) <= 8 for b in first)
    with pytest.raises(ValueError, match="no examples"):
        Sampler([], 4, len, length=len, micro_batch_tokens=8, seed=1)


def test_an_epoch_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffling at every step would take time that grows with the square of the number of examples."""
    drawn: list[object] = []
    new = np.random.default_rng
    packing.epoch_order.cache_clear()
    monkeypatch.setattr(packing.np.random, "default_rng", lambda seed: drawn.append(seed) or new(seed))
    for step in range(1, 51):
        step_indices(step, 100, 4, 7)
    assert drawn == [[7, 0], [7, 1]]
