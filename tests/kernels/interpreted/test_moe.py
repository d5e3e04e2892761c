"""Triton versions of routing, dispatch to experts and combination."""

import pytest
import torch

from puna.kernels import moe as module
from puna.kernels.moe import (
    combine,
    combine_reference,
    dispatch,
    dispatch_reference,
    sort_by_expert,
    top_k_routing,
    top_k_routing_reference,
)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("E", "k"), [(8, 2), (5, 1), (40, 6)])
def test_routing(within_budget, normal, E, k, normalize):
    ours, reference = (lambda z, f=f: f(z, k, normalize)[:2] for f in (top_k_routing, top_k_routing_reference))
    within_budget(ours, reference, (normal(7, E),), torch.float32)
    z = normal(7, E).detach().float()
    assert torch.equal(top_k_routing(z, k, normalize)[2], top_k_routing_reference(z, k, normalize)[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("k", [1, 3])
def test_to_the_experts_and_back(within_budget, normal, monkeypatch, dtype, k):
    monkeypatch.setattr(module, "BLOCK", 16)  # a row of 20 columns has two blocks, the second partial
    chosen = torch.rand(6, 4, generator=torch.Generator().manual_seed(k)).argsort(1)[:, :k]
    order, place, _ = sort_by_expert(chosen, 4)
    within_budget(lambda x: dispatch(x, order, place), lambda x: dispatch_reference(x, order), (normal(6, 20),), dtype)
    inputs = (normal(6 * k, 20), normal(6, k, seed=1))
    within_budget(lambda y, w: combine(y, w, order, place), lambda y, w: combine_reference(y, w, order), inputs, dtype)
