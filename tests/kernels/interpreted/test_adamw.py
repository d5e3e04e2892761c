"""AdamW's Triton version, which finds its tensors through a table of addresses, compared with the fp64 definition."""

import pytest
import torch

from puna.kernels import adamw as module
from puna.kernels.adamw import adamw_, adamw_reference, clipping_factor, gradient_norm, gradient_norm_reference


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float16)])
@pytest.mark.parametrize("clip", [None, 0.7])
def test_two_steps(monkeypatch, kinds, clip):
    monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(module, "BLOCK", 32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (0,), (3, 4), (130,), (1,)]
    low = [torch.randn(s, generator=generator).to(kinds[0]) for s in shapes]
    low[3] = torch.cat([low[3], low[3]])[1:131]  # starts at an address that is not a multiple of 16 bytes
    exact = [p.double() for p in low]
    moments = [[torch.zeros(s) for s in shapes] for _ in range(2)]
    exact_moments = [[m.double() for m in part] for part in moments]
    for step in (1, 2):
        gradients = [torch.randn(s, generator=generator).to(kinds[1]) for s in shapes]
        wide = [g.double() for g in gradients]
        norm, expected = gradient_norm(gradients), gradient_norm_reference(wide)
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
        factors = [None if clip is None else clipping_factor(x, clip) for x in (norm, expected)]
        adamw_(low, gradients, *moments, step=step, lr=0.02, eps=1e-6, weight_decay=0.1, factor=factors[0])
        adamw_reference(exact, wide, *exact_moments, factors[1], step, 0.02, 0.9, 0.95, 1e-6, 0.1)
    for mine, other in zip(low, exact, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=4 * torch.finfo(kinds[0]).eps, atol=4 * torch.finfo(kinds[0]).eps)


def test_views_with_gaps_are_refused():
    x = torch.zeros(4, 4)[:, :2]
    with pytest.raises(ValueError, match="must be contiguous"):
        gradient_norm([x])
    with pytest.raises(ValueError, match="must be contiguous"):
        adamw_([x], [x], [x], [x], step=1, lr=0.1)
