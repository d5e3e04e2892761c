"""Joins of documents with their mixture, and samples by hash, in constant memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.stages.training import corpus
from puna.storage import PunaError


def test_a_mixture_of_other_documents(documents, mixture) -> None:
    run = SimpleNamespace(map=map)
    corpus.check_mixture(run, documents(["a", "b"]), mixture([(0, "x", "train", 1), (1, "x", "train", 1)]))
    rows = [(i, "x", "train", 1) for i in (0, 2, 3)]
    with pytest.raises(PunaError, match=f"names 2 documents that documents/.* does not have, for example {2:032x}; give"):
        corpus.check_mixture(run, documents(["a", "b"]), mixture(rows))
    with pytest.raises(PunaError, match=f"lacks 1 documents of documents/.*, for example {1:032x}; give"):
        corpus.check_mixture(run, documents(["a", "b"]), mixture(rows[:1]))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60), cut=st.integers(1, 60), most=st.integers(1, 400), held=st.integers(0, 5))
def test_the_sample_does_not_depend_on_the_parts(sizes: list[int], cut: int, most: int, held: int) -> None:
    rows = [(corpus.rank("seed", i), str(i), size, None) for i, size in enumerate(sizes)]
    kept, size = [], 0
    for row in sorted(rows):
        size += row[2]
        if kept and size > most:
            break
        kept.append(row)
    parts = [rows[i : i + cut] for i in range(0, len(rows), cut)]
    pruned = [corpus.candidates(part, most) for part in parts]
    assert corpus.smallest(parts, most) == corpus.smallest(pruned, most) == corpus.smallest(pruned, most, held) == kept


def test_nothing_to_sample() -> None:
    assert corpus.smallest([], 10) == [] == corpus.smallest([[], []], 10)
