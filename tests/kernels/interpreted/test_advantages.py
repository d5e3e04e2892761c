"""Advantages by a scan from each answer's end, Triton's version."""

import pytest
import torch

from puna.kernels import advantages as module
from puna.kernels.advantages import advantages, advantages_reference


@pytest.mark.parametrize("lengths", [[3, 1, 0, 40], [16, 17, 33], [1]])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.5, 0.0)])
def test_the_definition(monkeypatch, lengths, gamma, lam):
    monkeypatch.setattr(module, "BLOCK", 16)
    generator = torch.Generator().manual_seed(1)
    *tokens, scores = (torch.randn(n, generator=generator) for n in (sum(lengths),) * 3 + (len(lengths),))
    ours = advantages(*tokens, scores, torch.tensor(lengths), 0.1, gamma, lam)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    expected = advantages_reference(*(x.double() for x in (*tokens, scores)), offsets, 0.1, gamma, lam)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)
