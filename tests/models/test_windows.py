"""The sliding window on forests: each query sees the last tokens of its own path, by brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels.attention import ForestMask, attention, attention_reference

trees = st.recursive(
    st.tuples(st.integers(1, 40), st.just([])),
    lambda below: st.tuples(st.integers(1, 40), st.lists(below, max_size=3)),
    max_leaves=6,
)


def lay_out(forest):
    """Ends, and each token's path, by walking the trees."""
    ends, paths = [], []

    def walk(tree, path):
        first = len(ends)
        for _ in range(tree[0]):
            path = [*path, len(ends)]
            ends.append(0)
            paths.append(path)
        for child in tree[1]:
            walk(child, path)
        ends[first : first + tree[0]] = [len(ends)] * tree[0]

    for tree in forest:
        walk(tree, [])
    return torch.tensor(ends, dtype=torch.int32), paths


@given(st.lists(trees, min_size=1, max_size=3), st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_a_query_sees_the_last_tokens_of_its_path(forest, window):
    end, paths = lay_out(forest)
    mask = ForestMask.from_end(end).within(window)
    dense = mask.dense()
    assert [row.nonzero()[:, 0].tolist() for row in dense] == [path[-window:] for path in paths]
    assert mask.depths.tolist() == [len(path) - 1 for path in paths]
    seen = torch.zeros(len(end), len(end), dtype=torch.bool)
    for tile in mask.tiles:
        keys = torch.arange(len(end))[tile.keys]
        visible = torch.ones(tile.rows.stop - tile.rows.start, len(keys), dtype=torch.bool)
        if tile.bias is not None:
            visible[:, len(keys) - tile.bias.shape[1] :] = tile.bias == 0
        seen[tile.rows] = torch.zeros(len(visible), len(end), dtype=torch.bool).index_add_(1, keys, visible)
    assert torch.equal(seen, dense)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_values_and_gradients_equal_the_dense_reference(seed):
    end, _ = lay_out([(50, [(30, []), (90, [(5, []), (7, [])])]), (3, [])])
    mask = ForestMask.from_end(end).within([1, 33, 100][seed])
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(len(end), heads, 6, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    upstream = torch.randn(q.shape, dtype=torch.float64, generator=generator)
    for ours, expected in zip(
        *(
            [out := function(q, k, v, mask), *torch.autograd.grad(out, (q, k, v), upstream)]
            for function in (attention, attention_reference)
        ),
        strict=True,
    ):
        assert (ours - expected).abs().max() <= 1e-12


def test_old_keys_are_not_touched():
    """A long document under a short window costs what its windows cost."""
    mask = ForestMask.from_end(torch.full((4000,), 4000, dtype=torch.int32)).within(100)
    assert max(len(torch.arange(4000)[tile.keys]) for tile in mask.tiles) <= 100 + 64
