"""Forest layouts, compared with results by hand and by brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.models.forest import Forest

documents = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5)


def test_pack_by_hand():
    forest = Forest.pack([[5, 6, 7], [8], torch.tensor([9, 10])])
    assert forest.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert forest.end.tolist() == [3, 3, 3, 4, 6, 6]
    assert forest.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert forest.parents.tolist() == [-1, 0, 1, -1, -1, 4]
    assert (forest.tokens.dtype, forest.end.dtype, forest.positions.dtype) == (
        torch.int64,
        torch.int32,
        torch.int64,
    )
    assert len(forest) == 6


def test_branch_by_hand():
    forest = Forest.branch([1, 2], [[3, 4], [5], [6, 7, 8]])
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert forest.end.tolist() == [8, 8, 4, 4, 5, 8, 8, 8]
    assert forest.positions.tolist() == [0, 1, 2, 3, 2, 2, 3, 4]
    assert forest.parents.tolist() == [-1, 0, 1, 2, 1, 1, 5, 6]


def test_branch_without_answers_is_the_prompt():
    forest = Forest.branch([1, 2], [])
    assert forest.end.tolist() == [2, 2]
    assert forest.positions.tolist() == [0, 1]


def test_concatenate_by_hand():
    forest = Forest.concatenate([Forest.branch([1], [[2], [3]]), Forest.pack([[4, 5]])])
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5]
    assert forest.end.tolist() == [3, 2, 3, 5, 5]
    assert forest.positions.tolist() == [0, 1, 1, 0, 1]
    assert forest.parents.tolist() == [-1, 0, 0, -1, 3]


@given(documents, documents)
@settings(max_examples=50, deadline=None)
def test_each_token_sees_its_own_path(prompts, answers):
    """Position and parent of each token follow from the set of tokens it sees."""
    forest = Forest.concatenate([Forest.branch(prompt, answers) for prompt in prompts])
    for query, row in enumerate(forest.mask.dense()):
        seen = row.nonzero()[:, 0].tolist()
        assert seen[-1] == query
        assert forest.positions[query] == len(seen) - 1
        assert forest.parents[query] == (seen[-2] if len(seen) > 1 else -1)


def test_nothing_is_laid_out_silently():
    with pytest.raises(ValueError, match="document 1 is empty"):
        Forest.pack([[1], []])
    with pytest.raises(ValueError, match="at least one document"):
        Forest.pack([])
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        Forest.branch([], [[1]])
    with pytest.raises(ValueError, match="answer 2 is empty"):
        Forest.branch([1], [[1], [2], []])
    with pytest.raises(ValueError, match="at least one forest"):
        Forest.concatenate([])
