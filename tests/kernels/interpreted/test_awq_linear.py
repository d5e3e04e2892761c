"""4-bit weights, Triton's versions: unpacked inside the product, and written out before it."""

import pytest
import torch

from puna.kernels import awq_linear as module
from puna.kernels.awq_linear import awq_linear, awq_linear_reference, pack_awq


@pytest.mark.parametrize("few", [64, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("T", "D", "N", "G"), [(5, 48, 40, 3), (17, 160, 64, 2)])
def test_values_and_gradients(within_budget, normal, monkeypatch, T, D, N, G, dtype, few):
    monkeypatch.setattr(module, "FEW", few)
    monkeypatch.setattr(module, "DEPTH", 32)
    monkeypatch.setattr(module, "SPLITS", 2)
    generator = torch.Generator().manual_seed(0)
    levels, zeros = (torch.randint(0, 16, (rows, N), generator=generator) for rows in (D, G))
    scales = 0.1 + torch.rand(G, N, generator=generator, dtype=torch.float64)
    within_budget(awq_linear, awq_linear_reference, (normal(T, D), pack_awq(levels), pack_awq(zeros), scales), dtype)
