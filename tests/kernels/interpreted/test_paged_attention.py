"""Ragged attention over pages, Triton's version: against one query at a time in fp64."""

import pytest
import torch

from puna.kernels import paged_attention as module
from puna.kernels.paged_attention import PAGE, PagedPlan, paged_attention, paged_attention_reference


def integers(*rows):
    return torch.tensor(rows, dtype=torch.int32)


# Sequences 0 to 2 share two pages, 3 is a chunk of a prompt, 4 stands alone at its first token.
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
