"""Decoding from pages with shared prefixes, Triton's version: against one sequence at a time in fp64."""

import pytest
import torch

from puna.kernels import paged_attention as module
from puna.kernels.paged_attention import DecodePlan, Run, paged_attention, paged_attention_reference

RUNS = [Run(0, 3, [4, 1, 7], 41), Run(3, 1, [2], 9), Run(0, 1, [0], 16), Run(1, 2, [3, 5], 17), Run(2, 1, [6], 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("H", "G", "K"), [(8, 1, 16), (4, 2, 24)])
def test_shared_and_own_runs(within_budget, normal, monkeypatch, dtype, H, G, K):
    monkeypatch.setattr(module, "SPLIT", 32)
    monkeypatch.setattr(module, "TOKENS", 16)
    plan = DecodePlan.from_runs(RUNS, 4, 16)
    inputs = [x.detach() for x in (normal(4, H, K), normal(8, 16, G, K, seed=1), normal(8, 16, G, K, seed=2))]
    within_budget(lambda q, k, v: paged_attention(q, k, v, plan), lambda q, k, v: paged_attention_reference(q, k, v, RUNS), inputs, dtype)
