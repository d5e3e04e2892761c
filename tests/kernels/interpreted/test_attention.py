"""Attention by blocks under the forest mask: the Triton versions against the dense definition in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels import attention_triton as module
from puna.kernels.attention import ForestMask, attention, attention_reference
from puna.kernels.configurations import Configuration

PACKED = [9] * 9 + [30] * 21 + [40] * 10
BRANCHES = [60] * 20 + [32] * 12 + [50] * 18 + [60] * 10  # a prompt of 20 with answers of 12, 18 and 10
NESTED = [50] * 18 + [40] * 4 + [30] * 8 + [40] * 10 + [50] * 10 + [66] * 16


@pytest.fixture(autouse=True, params=["pointers", "descriptors"])
def small_blocks(request, monkeypatch):
    """Use blocks of 16 queries and 16 keys (32 keys for their gradients), so that short rows have many blocks; with and without
    descriptors."""
    how = request.param == "descriptors"
    sizes = {
        "attention_forward": Configuration(16, 16, 4, 1, descriptors=how),
        "attention_query_gradient": Configuration(32, 16, 4, 1, descriptors=how),
        "attention_key_gradient": Configuration(16, 32, 4, 1, descriptors=how),
    }
    monkeypatch.setattr(module, "tile_config", lambda kernel, q, V, window: sizes[kernel])


def draw(normal, T, H, G, K, V):
    return normal(T, H, K), normal(T, G, K, seed=1), normal(T, G, V, seed=2)


@pytest.mark.parametrize(
    ("end", "H", "G", "K", "V", "dtype"),
    [(PACKED, 2, 1, 16, 16, torch.float16), (BRANCHES, 1, 1, 24, 8, torch.float32), (NESTED, 2, 1, 16, 16, torch.float16)],
    ids=["packed", "branches", "nested"],
)
def test_values_and_gradients(within_budget, normal, end, H, G, K, V, dtype):
    mask = ForestMask.from_end(torch.tensor(end, dtype=torch.int32))
    ours, reference = (lambda q, k, v, f=f: f(q, k, v, mask) for f in (attention, attention_reference))
    within_budget(ours, reference, draw(normal, len(end), H, G, K, V), dtype)


@pytest.mark.parametrize("window", [1, 23])
def test_sliding_window_counts_tokens_of_the_path(within_budget, normal, window):
    mask = ForestMask.from_end(torch.tensor(BRANCHES, dtype=torch.int32)).within(window)
    ours, reference = (lambda q, k, v, f=f: f(q, k, v, mask) for f in (attention, attention_reference))
    within_budget(ours, reference, draw(normal, 60, 2, 2, 16, 16), torch.float32, ulps=16)


def test_heads_may_be_slices_of_one_product(within_budget, normal):
    mask = ForestMask.from_end(torch.tensor(PACKED, dtype=torch.int32))

    def split(attend):
        def run(x):
            q, k, v = x.view(40, 4, 16).split([2, 1, 1], 1)
            return attend(q, k, v, mask)

        return run

    within_budget(split(attention), split(attention_reference), (normal(40, 64),), torch.float32)


trees = st.recursive(
    st.tuples(st.integers(1, 20), st.just([])),
    lambda below: st.tuples(st.integers(1, 20), st.lists(below, max_size=3)),
    max_leaves=5,
)


def ends(forest, first=0):
    out = []
    for length, below in forest:
        inner = ends(below, first + len(out) + length)
        out += [first + len(out) + length + len(inner)] * length + inner
    return out


@given(st.lists(trees, min_size=1, max_size=3), st.sampled_from([None, 1, 7, 30]))
@settings(max_examples=6, deadline=None, database=None, derandomize=True)
def test_any_forest(forest, window):
    end = torch.tensor(ends(forest), dtype=torch.int32)[:90]
    end = end.clamp_max(len(end))
    mask = ForestMask.from_end(end).within(window)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(len(end), 1, 16, generator=generator, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(len(end), 1, 16, generator=generator)
    ours, dense = attention(*inputs, mask), attention_reference(*inputs, mask)
    torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-5)
    pairs = (torch.autograd.grad(out, inputs, upstream) for out in (ours, dense))
    for mine, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
