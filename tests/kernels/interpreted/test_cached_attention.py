"""Decoding against a cache, Triton's version: slices of a longer cache, pieces that nobody looks at, grouped heads."""

import pytest
import torch

from puna.kernels import cached_attention as module
from puna.kernels.cached_attention import cached_attention, cached_attention_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("H", "G", "K"), [(4, 2, 16), (3, 3, 24), (20, 1, 16)])
def test_slices_of_a_cache(within_budget, normal, monkeypatch, H, G, K, dtype):
    monkeypatch.setattr(module, "PIECE", 32)
    monkeypatch.setattr(module, "COLUMNS", 16)
    bias = torch.zeros(3, 70, dtype=torch.float64)
    bias[1, :45] = -torch.inf  # the whole first piece, and some of the next
    bias[2, 1:] = -torch.inf
    inputs = [x.detach() for x in (normal(3, H, K), normal(3, G, 90, K, seed=1), normal(3, G, 90, K, seed=2), bias)]
    ours, reference = (
        lambda q, k, v, b, f=f: f(q, k[:, :, 7:77], v[:, :, 7:77], b) for f in (cached_attention, cached_attention_reference)
    )
    within_budget(ours, reference, inputs, dtype)
