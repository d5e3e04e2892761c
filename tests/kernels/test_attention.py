"""Attention under the forest mask, against the dense definition in fp64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.kernels import forest_mask as module
from puna.kernels.attention import ForestMask, attention, attention_reference

# A tree is (length of its first chain of tokens, its subtrees); a forest is a list of trees.
trees = st.recursive(
    st.tuples(st.integers(1, 9), st.just([])),
    lambda below: st.tuples(st.integers(1, 9), st.lists(below, max_size=4)),
    max_leaves=8,
)
forests = st.lists(trees, min_size=1, max_size=4)


def lay_out(forest):
    """Return the ends and, for each token, the set of tokens that it sees, by walking the trees."""
    ends, seen = [], []

    def walk(tree, path):
        length, below = tree
        first = len(ends)
        for _ in range(length):
            path = [*path, len(ends)]
            ends.append(0)
            seen.append(set(path))
        for child in below:
            walk(child, path)
        ends[first : first + length] = [len(ends)] * length

    for tree in forest:
        walk(tree, [])
    return torch.tensor(ends, dtype=torch.int32), seen


def tensors(T, H=4, G=2, K=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, heads, K, dtype=dtype, generator=generator, requires_grad=True) for heads in (H, G, G)]


@given(forests, st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_a_window_counts_tokens_of_the_path(forest, window):
    end, seen = lay_out(forest)
    mask = ForestMask.from_end(end).within(window)
    assert mask.depths.tolist() == [len(path) - 1 for path in seen]
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask.dense()] == [set(sorted(path)[-window:]) for path in seen]
    assert mask.within(None).within(window).window == window and mask.within(window) is mask


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1"):
        ForestMask.from_end(torch.tensor([1], dtype=torch.int32)).within(0)


@given(forests, st.integers(1, 12), st.integers(1, 12), st.sampled_from([None, 3]))
@settings(max_examples=50, deadline=None)
def test_blocks_to_visit_hold_every_visible_pair_once(forest, rows, columns, window):
    """In blocks without mask, all pairs are visible; the lists by keys agree with those by queries."""
    end, _ = lay_out(forest)
    mask = ForestMask.from_end(end).within(window)
    order_qk, counts_qk, order_kq, counts_kq = mask.blocks(rows, columns)
    dense = mask.dense()
    by_queries = [(q, int(k), i < counts_qk[q, 0]) for q in range(len(order_qk)) for i, k in enumerate(order_qk[q, : counts_qk[q, 1]])]
    by_keys = [(int(q), k, i < counts_kq[k, 0]) for k in range(len(order_kq)) for i, q in enumerate(order_kq[k, : counts_kq[k, 1]])]
    assert sorted(by_queries) == sorted(by_keys) and len(by_queries) == len({pair[:2] for pair in by_queries})
    for q, k, whole in by_queries:
        tile = dense[q * rows : (q + 1) * rows, k * columns : (k + 1) * columns]
        assert not whole or (bool(tile.all()) and tile.shape[1] == columns)
        dense[q * rows : (q + 1) * rows, k * columns : (k + 1) * columns] = False
    assert not bool(dense.any())


@given(forests)
@settings(max_examples=50, deadline=None)
def test_mask_is_who_sees_whom_on_the_trees(forest):
    end, seen = lay_out(forest)
    dense = ForestMask.from_end(end).dense()
    assert [set(row.nonzero()[:, 0].tolist()) for row in dense] == seen


@given(forests, st.integers(1, 12), st.sampled_from([None, 1, 4]))
@settings(max_examples=50, deadline=None)
def test_tiles_hold_each_visible_pair_once_and_no_unseen_key(forest, rows, window):
    end, seen = lay_out(forest)
    seen = [set(sorted(path)[-(window or len(path)) :]) for path in seen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_ROWS", rows)
        tiles = tuple(module.unpack_tiles(ForestMask.from_end(end).within(window).tile_layout))
    assert [row for tile in tiles for row in range(tile.rows.start, tile.rows.stop)] == list(range(len(end)))
    for tile in tiles:
        keys = torch.arange(len(end))[tile.keys].tolist()
        assert len(keys) == len(set(keys))
        queries = range(tile.rows.start, tile.rows.stop)
        assert set(keys) == set().union(*(seen[query] for query in queries))
        for offset, query in enumerate(queries):
            visible = set(keys)
            if tile.bias is not None:
                partial = keys[len(keys) - tile.bias.shape[1] :]
                visible -= {key for key, bias in zip(partial, tile.bias[offset].tolist(), strict=True) if bias < 0}
            assert visible == seen[query]


@given(forests, st.integers(1, 12), st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)]), st.sampled_from([None, 3]), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_values_and_gradients_equal_the_dense_reference(forest, rows, heads, window, width):
    end, _ = lay_out(forest)
    q, k, _ = tensors(len(end), *heads)
    v = tensors(len(end), *heads, K=width, seed=1)[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE_ROWS", rows)
        mask = ForestMask.from_end(end).within(window)
        ours = attention(q, k, v, mask)
        upstream = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    dense = attention_reference(q, k, v, mask)
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    for gradient, expected in zip(gradients, torch.autograd.grad(dense, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)


def test_reference_is_torch_attention_on_one_document():
    q, k, v = tensors(7)
    mask = ForestMask.from_end(torch.full((7,), 7, dtype=torch.int32))
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention_reference(q, k, v, mask).transpose(0, 1), theirs)


def test_gradcheck():
    end, _ = lay_out([(2, [(1, []), (2, [(1, [])])]), (2, [])])
    mask = ForestMask.from_end(end)
    inputs = tensors(len(end), 2, 1, 2)
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask), inputs)
    assert torch.autograd.gradcheck(lambda q, k, v: attention_reference(q, k, v, mask), inputs)


def test_fp32_error_is_that_of_torch():
    """|ours - fp64| is at most twice |dense fp32 - fp64|, on long documents with large scores."""
    mask = ForestMask.from_end(torch.tensor([300] * 300 + [500] * 200, dtype=torch.int32))
    q, k, v = (3 * x.detach() for x in tensors(500, 4, 2, 32))
    exact = attention_reference(q, k, v, mask)
    low = [x.float() for x in (q, k, v)]
    ours = (attention(*low, mask) - exact).abs().max()
    assert ours <= 2 * (attention_reference(*low, mask) - exact).abs().max() + 1e-6


def test_inputs_are_left_alone_and_may_be_strided():
    end, _ = lay_out([(5, [(2, []), (3, [])])])
    mask = ForestMask.from_end(end)
    q, k, v = (x.detach() for x in tensors(len(end)))
    wide = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)]
    copies = [x.clone() for x in wide]
    torch.testing.assert_close(attention(*wide, mask), attention_reference(q, k, v, mask))
    assert all(torch.equal(x, y) for x, y in zip(wide, copies, strict=True))


def test_long_prompts_are_attended_once_per_tile():
    """512 prompt tokens and 12 answers of 128: the number of computed pairs is close to the number of visible pairs."""
    end = torch.tensor([2048] * 512 + [512 + 128 * (i // 128 + 1) for i in range(1536)], dtype=torch.int32)
    mask = ForestMask.from_end(end)
    pairs = sum((t.rows.stop - t.rows.start) * len(torch.arange(2048)[t.keys]) for t in mask.tiles)
    assert pairs < 1.2 * int(mask.dense().sum())


@pytest.mark.parametrize("end", [[2, 3, 3], [1, 1], [0], [3, 3]])
def test_intervals_that_do_not_nest_are_refused(end):
    with pytest.raises(ValueError, match=r"end\[\d\] is \d"):
        ForestMask.from_end(torch.tensor(end, dtype=torch.int32))


def test_scale_is_one_over_the_square_root_of_the_width():
    """Two keys, scores 0 and ln 3 * sqrt(4) / sqrt(4): weights 1/4 and 3/4."""
    q = torch.tensor([[[0.0] * 4], [[1.0, 0, 0, 0]]], dtype=torch.float64)
    k = torch.tensor([[[0.0] * 4], [[2 * math.log(3.0), 0, 0, 0]]], dtype=torch.float64)
    v = torch.tensor([[[0.0] * 4], [[4.0] * 4]], dtype=torch.float64)
    mask = ForestMask.from_end(torch.tensor([2, 2], dtype=torch.int32))
    torch.testing.assert_close(attention(q, k, v, mask)[1, 0], torch.full((4,), 3.0, dtype=torch.float64))


def test_shapes_that_do_not_fit_are_refused():
    mask = ForestMask.from_end(torch.tensor([3, 3, 3], dtype=torch.int32))
    q, k, v = tensors(3)
    for bad in ((q[:2], k, v), (q[:, :3], k, v), (q, k[..., :2], v), (q, k, v[:, :1])):
        with pytest.raises(ValueError, match="do not fit"):
            attention(*bad, mask)


def test_operator_is_registered_as_torch_expects():
    end, _ = lay_out([(2, [(1, []), (2, [(1, [])])]), (2, [])])
    from puna.kernels.attention import _attention

    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_attention.dispatched, (*tensors(len(end)), ForestMask.from_end(end).tile_layout, 0), test_utils=checks)


def test_low_precision_is_computed_in_fp32(within_budget):
    mask = ForestMask.from_end(torch.tensor([40] * 30 + [40] * 10, dtype=torch.int32))
    ours, reference = (lambda q, k, v, f=f: f(q, k, v, mask) for f in (attention, attention_reference))
    within_budget(ours, reference, tensors(40), torch.bfloat16)


@pytest.mark.parametrize("window", [None, 3])
def test_a_mask_first_used_in_inference_mode_trains_later(window):
    mask = ForestMask.from_end(torch.tensor([6, 3, 3, 6, 6, 6, 8, 8], dtype=torch.int32)).within(window)
    q, k, v = (torch.randn(8, heads, 4, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    with torch.inference_mode():
        seen = attention(q, k, v, mask)
        mask.blocks(16, 16)
    q.requires_grad_()
    out = attention(q, k, v, mask)
    out.sum().backward()
    assert torch.equal(out.detach(), seen) and q.grad.isfinite().all()
    assert not any(part.is_inference() for part in mask.blocks(16, 16))
