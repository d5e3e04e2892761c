"""Triton version of ragged attention over pages, compared with one query at a time in fp64."""

from collections import Counter

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from puna.kernels import paged_attention as module
from puna.kernels import paged_attention_triton
from puna.kernels.paged_attention import PAGE, PagedPlan, paged_attention, paged_attention_reference


def integers(*rows):
    return torch.tensor(rows, dtype=torch.int32)


# Sequences 0 to 2 share two pages, 3 is a chunk of a prompt, 4 has only its first token.
PLAN = PagedPlan(
    integers([4, 1, 7], [4, 1, 0], [4, 1, 3], [2, 5, 0], [6, 0, 0]),
    integers(0, 1, 2, 2, *[3] * 8, 4).view(-1),
    integers(40, 32, 45, 46, *range(9, 17), 0).view(-1),
)


@pytest.mark.parametrize("window", [None, 18])
@pytest.mark.parametrize(("H", "G", "K", "V", "dtype"), [(8, 1, 16, 16, torch.float16), (4, 2, 24, 40, torch.float32)])
def test_shared_own_and_chunked_pages(within_budget, normal, monkeypatch, dtype, H, G, K, V, window):
    monkeypatch.setattr(module, "SPLIT", 32)
    monkeypatch.setattr(module, "TILE", 4)
    N = len(PLAN.sequence)
    shapes = ((N, H, K), (8, PAGE, G, K), (8, PAGE, G, V))
    plan = PagedPlan(PLAN.tables, PLAN.sequence, PLAN.position)
    inputs = [normal(*shape, seed=seed).detach() for seed, shape in enumerate(shapes)]
    within_budget(
        lambda q, k, v: paged_attention(q, k, v, plan, window), lambda q, k, v: paged_attention_reference(q, k, v, plan, window), inputs, dtype
    )


@pytest.mark.parametrize(("H", "K", "V", "dtype"), [(8, 40, 32, torch.float16), (6, 26, 20, torch.float32)])
def test_values_that_are_a_part_of_the_keys(within_budget, normal, monkeypatch, dtype, H, K, V):
    """As with latents: all queries share one key head, the scale is given, and each number is read once."""
    monkeypatch.setattr(module, "SPLIT", 32)
    monkeypatch.setattr(module, "TILE", 4)
    plan = PagedPlan(PLAN.tables, PLAN.sequence, PLAN.position)
    inputs = [normal(*shape, seed=seed).detach() for seed, shape in enumerate(((len(PLAN.sequence), H, K), (8, PAGE, 1, K)))]
    within_budget(
        lambda q, k: paged_attention(q, k, k[..., :V], plan, scale=0.3),
        lambda q, k: paged_attention_reference(q * (0.3 * K**0.5), k, k[..., :V], plan), inputs, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("shared", [0, 3])
def test_programs_multiply_only_what_their_item_has(monkeypatch, normal, shared):
    """Sixteen answers with one query each, 8 heads per key head: the grid has 8 programs per item, for the 128 rows of a shared run of
    pages. Each program multiplies 16 rows of that run; for an answer's own pages, one program multiplies and the other 7 do nothing."""
    monkeypatch.setattr(paged_attention_triton, "TOKENS", 16)
    products, dot = Counter(), InterpreterBuilder.create_dot

    def counted(builder, *given):
        products[builder.grid_idx] += 1
        return dot(builder, *given)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    N, H, own = 16, 8, 2
    tables = torch.tensor([[*range(shared), *(shared + own * n + i for i in range(own))] for n in range(N)], dtype=torch.int32)
    position = torch.full((N,), (shared + own) * PAGE - 1, dtype=torch.int32)
    plan = PagedPlan(tables, torch.arange(N, dtype=torch.int32), position)
    pages = (shared + N * own, PAGE, 1, 16)
    q, k, v = (normal(*shape, seed=seed).detach().float() for seed, shape in enumerate(((N, H, 16), pages, pages)))
    torch.testing.assert_close(paged_attention(q, k, v, plan), paged_attention_reference(q, k, v, plan), rtol=1e-5, atol=1e-5)
    turns = [count // 2 for count in products.values()]  # scores, and sums of values
    assert sorted(turns) == sorted([shared] * (8 if shared else 0) + [own] * N)
    assert all(block == 0 for item, _, block in products if item >= (shared > 0))
