"""Ragged attention over pages, compared with one query at a time and with the forest's own attention; exact passes, bit by bit."""

import pytest
import torch

from puna.kernels.attention import ForestMask, attention, attention_reference
from puna.kernels.exact import exact_passes
from puna.kernels.kv_append import kv_append_
from puna.kernels.paged_attention import PAGE, PagedPlan, new_pages, paged_attention, paged_attention_reference

CPU = torch.device("cpu")


def integers(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def pages_of(k_PSGK, v_PSGV):
    """Return the same numbers in the layout of `new_pages`."""
    made = new_pages(len(k_PSGK), k_PSGK.shape[2], k_PSGK.shape[3], v_PSGV.shape[3], k_PSGK.dtype)
    for pages, given in zip(made, (k_PSGK, v_PSGV), strict=True):
        pages.copy_(given)
    return made


# Sequences 0 to 2 share two pages, 3 is a chunk of a prompt, 4 has only its first token.
PLAN = PagedPlan(
    integers([4, 1, 7], [4, 1, 0], [4, 1, 3], [2, 5, 0], [6, 0, 0]),
    integers(0, 1, 2, 2, *[3] * 20, 4)[:].view(-1),
    integers(40, 32, 45, 46, *range(9, 29), 0).view(-1),
)


@pytest.mark.parametrize("window", [None, 1, 18])
@pytest.mark.parametrize(("H", "G", "K", "V"), [(4, 2, 6, 6), (8, 4, 32, 32), (9, 3, 20, 36)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shared_own_and_chunked_pages(within_budget, dtype, H, G, K, V, window):
    generator = torch.Generator().manual_seed(0)
    N = len(PLAN.sequence)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((N, H, K), (8, PAGE, G, K), (8, PAGE, G, V))]
    within_budget(
        lambda q, k, v: paged_attention(q, *pages_of(k, v), PLAN, window),
        lambda q, k, v: paged_attention_reference(q, k, v, PLAN, window),
        inputs,
        dtype,
    )


def forest(seed=0):
    """Return a forest of a prompt with answers, one of which branches again, and another document."""
    end = integers(*[95] * 21, *[40] * 19, *[95] * 10, *[70] * 20, *[95] * 25, *[130] * 35).view(-1)
    generator = torch.Generator().manual_seed(seed)
    return ForestMask.from_end(end), [torch.randn(len(end), heads, 24, generator=generator) for heads in (6, 3, 3)]


@pytest.mark.parametrize("window", [None, 7, 40])
def test_exact_attention_is_attention_and_has_its_gradients(window):
    mask, inputs = forest()
    inputs = [x.requires_grad_() for x in inputs]
    with exact_passes(torch.float32, CPU):
        ours = attention(*inputs, mask.within(window))
    expected = attention_reference(*inputs, mask.within(window))
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_query_has_the_same_bits_in_a_forest_alone_and_in_other_pages(window, threads):
    """Every token of the forest, computed in one exact pass; and each path alone, with pages in any order, in chunks."""
    mask, (q, k, v) = forest()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with exact_passes(torch.float32, CPU):
        whole = attention(q, k, v, mask.within(window))
    torch.set_num_threads(before)
    seen = mask.dense()
    shuffle = torch.Generator().manual_seed(2)
    for last in (39, 69, 94, 129):  # the leaves
        path = torch.nonzero(seen[last])[:, 0]
        pages = new_pages(9, 3, 24, 24, torch.float32)
        for x in pages:
            x.normal_(generator=shuffle)  # numbers that no query sees may be anything finite
        table = torch.randperm(9, generator=shuffle)[: -(-len(path) // PAGE)]
        depth = torch.arange(len(path))
        kv_append_(*pages, k[path], v[path], table[depth // PAGE] * PAGE + depth % PAGE)
        for first, stop in ((0, 1), (1, 14), (14, len(path) - 1), (len(path) - 1, len(path))):
            plan = PagedPlan(table[None].int(), torch.zeros(stop - first, dtype=torch.int32), torch.arange(first, stop, dtype=torch.int32))
            assert torch.equal(paged_attention(q[path[first:stop]], *pages, plan, window), whole[path[first:stop]])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="int32 tensors on CPU"):
        PagedPlan(torch.zeros(1, 1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="positions lie in 0 to 15"):
        PagedPlan(integers([0]), integers(0).view(-1), integers(16).view(-1))
    plan = PagedPlan(integers([0]), integers(0).view(-1), integers(3).view(-1))
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(torch.zeros(2, 2, 4), *new_pages(1, 1, 4, 4, torch.float32), plan)
    with pytest.raises(ValueError, match="exact passes need fp32 on a CPU"), exact_passes(torch.float64, CPU):
        pass
